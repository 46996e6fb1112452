"""What a plan costs, played through in time: each rank's clock, with gradients summed behind backward.

The list of instructions is walked once forward and once back, as the engine walks it. Every rank has a clock; a layer
waits for its tiles, a sum for its ranks. Sums of gradients run in the background, one after the other, and slow down
what computes meanwhile by the link's `contention`. The result is the step that the slowest rank takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.cluster import Cluster
from shoal.graph import LayerGraph
from shoal.lowering.boundary import even_shares, step_program
from shoal.lowering.placement import Placed, sharers
from shoal.lowering.program import Compute, Fetch, Program, Settle, first_uses
from shoal.lowering.step_traffic import GRADIENTS, Bucket, fill_buckets, step_traffic
from shoal.moves import Move
from shoal.operators.base import Part
from shoal.partition import Cut, volume
from shoal.planning.costs import CostModel, CostTables
from shoal.planning.step_memory import Memory, step_memory
from shoal.planning.transfers import Floats, sum_seconds


@dataclass
class LayerPrice:
    """One layer of a plan, in seconds of its busiest rank."""

    name: str
    op: str
    cut: Cut
    compute: float = 0.0
    transfers: float = 0.0
    """Bringing its input and taking the gradients back."""
    sums: float = 0.0
    """Within the layer, such as batch norm's statistics."""
    gradients: float = 0.0
    """Of its parameters, most of it behind backward."""
    bytes: int = 0
    """Sent by all ranks in one step; the gradients' share by what the layer's parameters have of them. 0 where a plan
    is for too many ranks to be played through."""
    memory: int = 0
    """On the busiest rank: parameters with gradients and optimizer state, and the output."""

    @property
    def communication(self) -> float:
        """All that is not computing."""
        return self.transfers + self.sums + self.gradients


@dataclass(frozen=True)
class Price:
    """What one step costs under a plan."""

    name: str
    cuts: Mapping[str, Cut]
    ranks: int
    seconds: float
    compute: float
    """Of the busiest rank."""
    update: float
    exposed: float
    """Seconds of the gradients' sums that backward does not hide."""
    layers: tuple[LayerPrice, ...]
    memory: tuple[Memory, ...]
    """By rank."""
    bytes: int
    """Sent by all ranks."""
    timeline: tuple[tuple[str, int, str, float, float], ...] = field(default=(), repr=False)
    """(kind, rank, layer, start, end) of everything that takes time."""

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(memory.total for memory in self.memory)


def price(model: CostModel, cuts: Mapping[str, Cut], name: str) -> Price:
    """Play a plan through. A cut that does not fit is a `PlanError`."""
    graph, ranks = model.graph, model.ranks
    shares = even_shares(graph.batch, ranks)
    program = step_program(graph, cuts, model.boundary, shares, losses=model.losses)
    return _Player(model, program, name, dict(cuts)).play()


def table_price(model: CostModel, tables: CostTables, cuts: Mapping[str, Cut], name: str) -> Price:
    """A plan's price by the tables alone, for more ranks than can be played through: a serial sum, without bytes."""
    choice, _ = tables.choice_of(cuts)
    rows: dict[str, LayerPrice] = {}
    total = model.speeds.step_overhead
    parameters = kept = update = 0.0
    for stage, cost, chosen in zip(tables.stages, tables.costs, choice, strict=True):
        row = rows[stage.name] = LayerPrice(stage.name, stage.ops[0].layer.op, stage.choices[chosen][0])
        row.compute, row.sums = float(cost.compute[chosen]), float(cost.sums[chosen])
        row.gradients, row.memory = float(cost.gradients[chosen]), int(cost.memory[chosen])
        update += float(cost.update[chosen])
        parameters += float(cost.memory[chosen])
        total += row.compute + row.sums + row.gradients + float(cost.update[chosen])
    for edge in tables.edges:
        place = tuple(choice[v] for v in edge.variables)
        rows[tables.stages[edge.readers[0]].name].transfers += float(edge.seconds[place])
        kept += float(edge.memory[place])
        total += float(edge.seconds[place])
    return Price(
        name=name,
        cuts=dict(cuts),
        ranks=model.ranks,
        seconds=total,
        compute=sum(row.compute for row in rows.values()),
        update=update,
        exposed=sum(row.gradients for row in rows.values()),
        layers=tuple(rows.values()),
        memory=(Memory(int(parameters), int(kept), 0),),
        bytes=0,
    )


class _Player:
    def __init__(self, model: CostModel, program: Program, name: str, cuts: dict[str, Cut]) -> None:
        self.model, self.program, self.name, self.cuts = model, program, name, cuts
        self.cluster: Cluster = model.speeds.cluster
        self.flowing = model.flowing()
        self.uses = first_uses(program)
        """For every state that learns the layer whose backward finishes it."""
        self.clock: Floats = np.zeros(program.ranks)
        self.busy = 0.0
        """Until when the background channel is."""
        self.busy_from = 0.0
        self.compute: Floats = np.zeros(program.ranks)
        self.rows = {
            layer.name: LayerPrice(layer.name, layer.op, cuts.get(layer.name, Cut())) for layer in program.graph.layers
        }
        self.events: list[tuple[str, int, str, float, float]] = []
        self.itemsize = _item_sizes(program.graph, model.itemsize)

    def play(self) -> Price:
        program = self.program
        arrivals: dict[int, Floats] = {}
        for instruction in program.instructions:
            match instruction:
                case Fetch() as fetch:
                    arrivals[fetch.key] = self._move(
                        fetch.moves, fetch.value, fetch.label, fetch.identity, backward=False
                    )
                case Compute(placed=placed, sources=sources):
                    for key in sources.values():
                        self.clock = np.maximum(self.clock, arrivals[key])
                    self._layer(placed, backward=False)
                case Settle() as settle:
                    settled = self._move(settle.moves, settle.value, settle.label, False, backward=False)
                    self.clock = np.maximum(self.clock, settled)
        buckets = self._buckets()
        waiting = [set(bucket.names) for bucket in buckets]
        owner = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
        finished: dict[str, list[str]] = {}
        for state, layer in self.uses.items():
            finished.setdefault(layer, []).append(state)
        for instruction in reversed(program.instructions):
            match instruction:
                case Fetch() as fetch if fetch.value in self.flowing:
                    returned = self._move(fetch.moves, fetch.value, fetch.label, fetch.identity, backward=True)
                    self.clock = np.maximum(self.clock, returned)
                case Settle() as settle if settle.value in self.flowing:
                    returned = self._move(settle.moves, settle.value, settle.label, False, backward=True)
                    self.clock = np.maximum(self.clock, returned)
                case Compute(placed=placed):
                    name = placed.layer.name
                    if name in self.flowing:
                        self._layer(placed, backward=True)
                    for state in finished.get(name, ()):
                        index = owner.get(state)
                        if index is None:
                            continue
                        waiting[index].discard(state)
                        if not waiting[index]:
                            self._begin_sum(buckets[index], name)
                case _:
                    pass
        backward_ends = float(self.clock.max())
        exposed = max(0.0, self.busy - backward_ends)
        update = self._update_seconds()
        seconds = backward_ends + exposed + update + self.model.speeds.step_overhead
        traffic = self._traffic()
        memory = tuple(
            step_memory(program, rank, self.itemsize, optimizer_slots=self.model.optimizer_slots)
            for rank in range(program.ranks)
        )
        self._note_memory()
        return Price(
            name=self.name,
            cuts=self.cuts,
            ranks=program.ranks,
            seconds=seconds,
            compute=float(self.compute.max()),
            update=update,
            exposed=exposed,
            layers=tuple(self.rows.values()),
            memory=memory,
            bytes=traffic,
            timeline=tuple(self.events),
        )

    # Single instructions

    def _move(self, moves: Sequence[Move], value: str, label: str, identity: bool, *, backward: bool) -> Floats:
        """When each rank has what it wants; the copies that moving means are paid at once."""
        if identity or not moves:
            return self.clock
        size = self.itemsize[value]
        ranks = self.program.ranks
        received = np.zeros((len(self.cluster.levels), ranks))
        sent = np.zeros_like(received)
        starts = self.clock.copy()
        copied = np.zeros(ranks)
        for move in moves:
            src, dst = (move.dst, move.src) if backward else (move.src, move.dst)
            amount = volume(move.box) * size
            copied[dst] += amount
            if src == dst:
                continue
            over = self.cluster.level_of(src, dst)
            received[over, dst] += amount
            sent[over, src] += amount
            starts[dst] = max(starts[dst], self.clock[src])
        duration = np.zeros(ranks)
        for index, level in enumerate(self.cluster.levels):
            crossing = np.maximum(received[index], sent[index])
            if level.shared and index:
                group = self.cluster.levels[index - 1].size
                for first in range(0, ranks, group):
                    crossing[first : first + group] = max(
                        received[index, first : first + group].sum(), sent[index, first : first + group].sum()
                    )
            duration += np.where(crossing > 0, level.meeting + crossing / level.bandwidth, 0.0)
        copying = copied * self.model.speeds.copy_per_byte
        arrival = starts + duration + copying
        row = self.rows.get(label)
        if row is not None:
            row.transfers += float((duration + copying).max())
        for rank in np.flatnonzero(duration + copying):
            self.events.append(("move", int(rank), label, float(starts[rank]), float(arrival[rank])))
        return arrival

    def _layer(self, placed: Placed, *, backward: bool) -> None:
        name = placed.layer.name
        row = self.rows[name]
        first = next((part for part in placed.parts if part is not None), None)
        if first is None:
            return
        time = self.model.kernel(placed.op, first, placed.cut, self.flowing)
        largest = max(volume(placed.writes[0] or ()), 1)
        seconds = (time.backward if backward else time.forward) + self.model.speeds.layer_overhead / 2
        longest = 0.0
        for rank, box in enumerate(placed.writes):
            if box is None:
                continue
            start = self.clock[rank]
            mine = seconds * max(volume(box), 1) / largest
            slowed = self._contention() * max(0.0, min(start + mine, self.busy) - max(start, self.busy_from))
            self.clock[rank] = start + mine + slowed
            self.compute[rank] += mine
            longest = max(longest, mine)
            self.events.append(
                ("backward" if backward else "forward", rank, name, float(start), float(self.clock[rank]))
            )
        row.compute += longest
        self._sums(placed, first, row, backward=backward)

    def _contention(self) -> float:
        return max((level.contention for level in self.cluster.levels), default=0.0)

    def _sums(self, placed: Placed, part: Part, row: LayerPrice, *, backward: bool) -> None:
        if not placed.copies and not placed.cut.degrees:
            return
        parts = dict(placed.cut.degrees)
        for summed in placed.rule.sums(
            placed.op,
            part,
            placed.cut_letters,
            parts,
            local=self.model.local_statistics,
        ):
            if not (summed.backward if backward else summed.forward):
                continue
            longest = 0.0
            for rank, mine in enumerate(placed.parts):
                group = () if mine is None else placed.group(rank, summed.over)
                if len(group) > 1 and group[0] == rank:
                    seconds = self.model.small_sum(summed.elements * self.model.itemsize, group, placed.cut)
                    start = max(self.clock[other] for other in group)
                    self.clock[list(group)] = start + seconds
                    longest = max(longest, seconds)
                    self.events.append(("sum", rank, row.name, float(start), float(start + seconds)))
            row.sums += longest

    # Gradients

    def _buckets(self) -> list[Bucket]:
        """Of rank 0, which takes part in the most; others hold the same in the same order."""
        shards = []
        for name in reversed(self.uses):
            spec, layout = self.program.graph.states[name], self.program.states[name]
            box = next((box for box in layout if box is not None), None)
            if box is None or not spec.differentiable or name in self.program.changed:
                continue
            shards.append((name, sharers(layout)[box], spec.dtype, volume(box) * self.itemsize[name]))
        return fill_buckets(shards, self.model.bucket_bytes)

    def _begin_sum(self, bucket: Bucket, layer: str) -> None:
        parts = max(1, self.program.ranks // len(bucket.ranks))
        seconds = sum_seconds(bucket.bytes, bucket.ranks, self.cluster, groups_per_host=parts)
        ready = max(self.clock[rank] for rank in bucket.ranks)
        start = max(ready, self.busy)
        if start > self.busy:
            self.busy_from = start
        self.busy = start + seconds
        self.events.append(("gradients", bucket.ranks[0], layer, float(start), float(self.busy)))
        for state in bucket.names:
            share = self._state_bytes(state) / max(bucket.bytes, 1)
            self.rows[self.uses[state]].gradients += seconds * share

    def _state_bytes(self, name: str) -> int:
        box = next((box for box in self.program.states[name] if box is not None), None)
        return 0 if box is None else volume(box) * self.itemsize[name]

    def _update_seconds(self) -> float:
        per_rank = np.zeros(self.program.ranks)
        for name, layout in self.program.states.items():
            spec = self.program.graph.states[name]
            if not spec.differentiable or name in self.program.changed:
                continue
            for rank, box in enumerate(layout):
                per_rank[rank] += 0 if box is None else volume(box) * self.itemsize[name]
        return float(per_rank.max()) * self.model.speeds.update_per_byte

    # Bytes

    def _traffic(self) -> int:
        graph = self.program.graph
        trainable = [
            name
            for name in reversed(self.uses)
            if graph.states[name].differentiable and name not in self.program.changed
        ]
        total = 0
        gradients = 0
        for rank in range(self.program.ranks):
            sent = step_traffic(
                self.program,
                rank,
                trainable=trainable,
                homes=self.program.states,
                itemsize=self.itemsize,
                dtypes={name: spec.dtype for name, spec in graph.states.items()},
                bucket_bytes=self.model.bucket_bytes,
                local_statistics=self.model.local_statistics,
            )
            for label, payload in sent.items():
                total += payload.bytes
                if label == GRADIENTS:
                    gradients += payload.bytes
                elif label in self.rows:
                    self.rows[label].bytes += payload.bytes
        shared = {
            name: sum(
                volume(box) * self.itemsize[name] * (len(ranks) - 1)
                for box, ranks in sharers(self.program.states[name]).items()
            )
            for name in trainable
        }
        everything = sum(shared.values())
        for name, amount in shared.items():
            if everything:
                self.rows[self.uses[name]].bytes += round(gradients * amount / everything)
        return total

    def _note_memory(self) -> None:
        for name, layer in self.uses.items():
            self.rows[layer].memory += self._state_bytes(name) * (2 + self.model.optimizer_slots)
        for instruction in self.program.instructions:
            if isinstance(instruction, Compute):
                sizes = [volume(box) for box in instruction.placed.writes if box is not None]
                name = instruction.placed.layer.name
                self.rows[name].memory += max(sizes, default=0) * self.itemsize[name]


def _item_sizes(graph: LayerGraph, itemsize: int) -> dict[str, int]:
    """Bytes of one element of every value and state; floats have the type that the network trains in."""
    specs = {**graph.specs, **graph.states}
    return {name: itemsize if spec.differentiable else 8 for name, spec in specs.items()}
