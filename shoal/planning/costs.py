"""The cost model as tables: what each choice of a stage costs by itself, and each pair of choices that meet.

A step costs the sum over stages of

    compute    forward and backward of the largest part, and what each layer costs beyond its kernels
    sums       batch norm's statistics and other sums within a layer; partial results
    gradients  the sum of its parameters' gradients, of which a part hides behind backward (`exposed`)
    update     the optimizer on this rank's parameters

and over values of the time to bring each to its readers and the gradients back. A transfer that several readers share
is counted once. Where that would make a table too large, readers are priced apart, which bounds the cost from above.
This is what the search minimises, exactly; `shoal.planning.price` then plays the found plan through in time, with
overlap.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from shoal.graph import LayerGraph, State
from shoal.lowering.boundary import Boundary, even_shares, samples, tiles
from shoal.lowering.factors import Factors, over_rows
from shoal.lowering.owners import LEAST_ELEMENTS, OptimizerState
from shoal.lowering.placement import signature
from shoal.lowering.step_traffic import SUMMED_BYTES
from shoal.operators.base import Need, Op, Part
from shoal.operators.registry import WHOLE, answers, axes_of, facts_of, learning, rule_for
from shoal.partition import Cut, Span, cut, volume
from shoal.plan import FactorsOption
from shoal.planning.assumed import Assumed, one_by_one_seconds, paired_one_by_one_seconds, server_seconds
from shoal.planning.boxes import Boxes, layouts_boxes, needed_boxes, owned_boxes, padding_boxes, tile_boxes
from shoal.planning.cost_tables import Factor
from shoal.planning.factors import LEAST_BYTES, Ways
from shoal.planning.stages import Stage
from shoal.planning.step_memory import kept_values
from shoal.planning.transfers import Floats, paired_seconds, transfer_seconds
from shoal.simulating.collectives import Shape, Sums, gather_phases, is_card, phase_seconds, unit_size
from shoal.simulating.durations import kernel_of_all_rows
from shoal.simulating.speeds import KernelTime, Speeds, part_key

SHARED_ENTRIES = 1_000_000
"""The largest table in which transfers that several readers share are counted once."""
EXPOSED = (1.0, 0.5, 0.2, 0.0)
"""Shares of the gradients' sums that backward may fail to hide."""


@dataclass(frozen=True)
class StageCost:
    """Of every choice of one stage, in seconds or bytes."""

    compute: Floats
    sums: Floats
    gradients: Floats
    update: Floats
    least: Floats
    """Kernels, the optimizer, and sums within layers as if no other group summed: what no overlap can hide."""
    memory: Floats
    """Bytes on the rank with the largest part: parameters with their gradients and optimizer state, and what the stage
    keeps for backward."""
    kept: Floats
    """What of them the stage keeps for backward."""
    again: Floats
    """Seconds of a second forward pass, with the sums within it."""


@dataclass(frozen=True)
class Grouping:
    """How a group of ranks lies in a cluster, and how many like it, by level, sum at once behind one card."""

    shape: Shape
    sharing: tuple[int, ...]


@dataclass(frozen=True)
class PartWork:
    """Rank 0's part of a layer under a cut, in seconds and bytes, but for what the order of its letters changes."""

    compute: float
    update: float
    memory: float
    kept: float
    """Of `memory`, what lives until backward."""
    again: float
    """Of `compute`, the forward pass."""
    sums: tuple[tuple[int, int, str], ...]
    """(passes, bytes, the letters that it joins) of every sum within the layer."""
    settled: tuple[int, float, str]
    """The same of partial results."""
    shards: tuple[tuple[float, str | None], ...]
    """(bytes of its shard, the letters in which ranks that hold the same one differ; None: all ranks), by parameter."""
    factors: tuple[float, float] | None
    """Where the first shard's gradient could come from factors: the bytes that rank 0 sends to each of the others, and
    what multiplying the rows of all ranks takes beyond its own."""


@dataclass(frozen=True)
class Edge:
    """A value and the stages that read it."""

    value: str
    source: int | None
    """The stage that makes it; None for an input."""
    readers: tuple[int, ...]
    seconds: Floats
    """By the choice of the source (where there is one) and of every reader."""
    memory: Floats
    """Bytes of tiles that are not what the rank owns."""
    passes: int = 1
    """In so many the value, or its gradient, travels."""

    @property
    def variables(self) -> tuple[int, ...]:
        """The stages whose choices it depends on, in the order of its tables' axes."""
        return self.readers if self.source is None else (self.source, *self.readers)


@dataclass(frozen=True)
class CostTables:
    """Everything that the search minimises over."""

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    forbidden: tuple[Factor, ...]
    """Pairs of choices that cannot be: layers that share a parameter must need the same parts of it."""

    def factors(self, exposed: float, *, recompute: bool = False) -> list[Factor]:
        """The sum to be minimised, when this part of the gradients' sums is not hidden behind backward.

        `recompute`: with all of the forward pass a second time, which is a segment too much.
        """
        factors = [
            Factor((index,), cost.compute + cost.sums + cost.update + exposed * cost.gradients + recompute * cost.again)
            for index, cost in enumerate(self.costs)
        ]
        factors += [Factor(edge.variables, edge.seconds * (1 + recompute / edge.passes)) for edge in self.edges]
        return [*factors, *self.forbidden]

    def least_factors(self) -> list[Factor]:
        """What rank 0, which has the largest part of everything, does at least: it cannot hide this behind itself."""
        factors = [Factor((index,), cost.least) for index, cost in enumerate(self.costs)]
        return [*factors, *self.forbidden]

    def cost(self, choice: Sequence[int], exposed: float, *, recompute: bool = False) -> float:
        """The sum of one choice."""
        factors = self.factors(exposed, recompute=recompute)
        return sum(float(factor.costs[tuple(choice[v] for v in factor.variables)]) for factor in factors)

    def weights(self, kept: float = 1.0) -> list[Factor]:
        """Bytes per rank, an upper bound: the largest part of every stage, wherever it is.

        `kept`: the share that recomputing leaves of what lives until backward.
        """
        weights = [Factor((index,), cost.memory - (1 - kept) * cost.kept) for index, cost in enumerate(self.costs)]
        return [*weights, *(Factor(edge.variables, kept * edge.memory) for edge in self.edges)]

    def cuts(self, choice: Sequence[int]) -> dict[str, Cut]:
        """The cut of every layer under one choice per stage."""
        cuts: dict[str, Cut] = {}
        for stage, chosen in zip(self.stages, choice, strict=True):
            cuts.update(stage.cuts(chosen))
        return cuts

    def choice_of(self, cuts: Mapping[str, Cut]) -> tuple[list[int], set[int]]:
        """The choice of every stage that gives its layers these cuts, and the stages that have no such choice."""
        choice, foreign = [], set()
        for index, stage in enumerate(self.stages):
            mine = tuple(cuts[op.layer.name] for op in stage.ops)
            if mine not in stage.choices:
                foreign.add(index)
            choice.append(stage.choices.index(mine) if mine in stage.choices else 0)
        return choice, foreign


@dataclass
class CostModel:
    """Prices the stages of one network on one cluster."""

    graph: LayerGraph
    ranks: int
    speeds: Speeds
    boundary: Boundary
    itemsize: int = 4
    optimizer_slots: int = 1
    """Tensors that the optimizer keeps per parameter: 1 for momentum."""
    optimizer_state: OptimizerState = "whole"
    local_statistics: bool = False
    bucket_bytes: int = 1 << 20
    losses: bool = False
    """Whether the network ends in one loss per sample, which stays where it is computed."""
    factors: FactorsOption = "auto"
    """For which linear layers ranks send each other factors, not sums of gradients."""
    recompute: bool | None = None
    """Whether activations are computed a second time in backward; None: where a limit of memory asks for it."""
    assumed: Assumed = field(default_factory=Assumed)
    """Of the tables alone: a plan that is played sends as the engine does."""
    kernels: dict[object, KernelTime] = field(default_factory=dict)
    """What `speeds` said, by layer, part and cut."""
    _transfers: dict[object, tuple[Floats, Floats]] = field(default_factory=dict)
    _stage_costs: dict[object, StageCost] = field(default_factory=dict)
    _groupings: dict[object, Grouping] = field(default_factory=dict)
    _parts: dict[object, dict[object, PartWork]] = field(default_factory=dict)
    """By what makes layers alike, and then by the degrees of the cut; `_rows` too."""
    _rows: dict[object, dict[object, tuple[float, ...]]] = field(default_factory=dict)
    _kinds: dict[str, int] = field(default_factory=dict)

    def tables(self, stages: Sequence[Stage]) -> CostTables:
        """The tables of all stages. Pure; some seconds where there are thousands of pairs."""
        flowing = self.flowing()
        costs = tuple(self._stage_cost(stage, flowing) for stage in stages)
        return CostTables(tuple(stages), costs, tuple(self._edges(stages, flowing)), tuple(self._forbidden(stages)))

    def least_seconds(self, stages: Sequence[Stage]) -> float:
        """No step over these stages takes less: what rank 0 does at least, stage by stage. Costs no pairs."""
        flowing = self.flowing()
        least = sum(float(self._stage_cost(stage, flowing).least.min()) for stage in stages)
        return least + self.speeds.step_overhead

    @property
    def per_host(self) -> int | None:
        """Ranks of a host, where there are several hosts."""
        levels = self.speeds.cluster.levels
        return levels[0].size if len(levels) > 1 else None

    @cached_property
    def adding(self) -> Sums:
        """How ranks add something up."""
        return Sums(self.speeds.cluster)

    @cached_property
    def _kept(self) -> frozenset[str]:
        return kept_values(self.graph)

    def flowing(self) -> frozenset[str]:
        """Values through which gradients flow in training, all parameters learning."""
        return flowing_values(self.graph)

    def kernel(self, op: Op, part: Part, chosen: Cut, flowing: frozenset[str]) -> KernelTime:
        """One part of a layer, from measurement or data sheet."""
        letters = frozenset(letter for letter, _ in chosen.degrees)
        input_grad = any(read in flowing for read in op.layer.reads)
        backward = op.layer.name in flowing
        rule = rule_for(op)
        key = part_key(op, part, letters)
        if key not in self.kernels:
            seconds = self.speeds.kernel(op, rule, part, letters, input_grad=input_grad)
            self.kernels[key] = seconds if backward else KernelTime(seconds.forward)
        return self.kernels[key]

    # One stage

    def _stage_cost(self, stage: Stage, flowing: frozenset[str]) -> StageCost:
        flows = tuple((op.layer.name in flowing, *(read in flowing for read in op.layer.reads)) for op in stage.ops)
        key = (stage.signatures, flows, tuple(map(self._may_factor, stage.ops)))
        if key not in self._stage_costs:
            self._stage_costs[key] = self._choice_costs(stage, flowing)
        return self._stage_costs[key]

    def _choice_costs(self, stage: Stage, flowing: frozenset[str]) -> StageCost:
        totals = np.zeros((len(stage.choices), 8))
        for position, op in enumerate(stage.ops):
            rows, alike = [], self._alike(op, flowing)
            known = self._rows.setdefault(alike, {})
            for choice in stage.choices:
                degrees = choice[position].degrees
                if degrees not in known:
                    known[degrees] = self._row(op, choice[position], flowing, alike)
                rows.append(known[degrees])
            totals += np.array(rows, dtype=np.float64)
        costs = StageCost(*np.ascontiguousarray(totals.T))
        for position in range(1, len(stage.ops)):
            moved = self._within(stage, position, flowing)
            costs.sums[:] += moved
            costs.again[:] += moved / (1 + (stage.ops[position - 1].layer.name in flowing))
        return costs

    def _row(self, op: Op, chosen: Cut, flowing: frozenset[str], alike: object) -> tuple[float, ...]:
        """What a layer under a cut adds to each field of its stage's `StageCost`; `alike`: as `_alike` has it."""
        part = self._part_work(op, chosen, flowing, alike)
        gradients, product = self._gradients(part, chosen)
        return (
            part.compute + product,
            self._sums_of(part, chosen),
            gradients,
            part.update,
            part.compute + part.update + self._least_sums(part, chosen),
            part.memory,
            part.kept,
            part.again + self._sums_again(part, chosen),
        )

    def _part_work(self, op: Op, chosen: Cut, flowing: frozenset[str], alike: object) -> "PartWork":
        """What rank 0 does of a layer, whatever the order of the cut's letters; once for layers that are alike."""
        known, degrees = self._parts.setdefault(alike, {}), frozenset(chosen.degrees)
        if degrees not in known:
            known[degrees] = self._find_part_work(op, chosen, flowing)
        return known[degrees]

    def _alike(self, op: Op, flowing: frozenset[str]) -> tuple[object, ...]:
        """The same for layers that cost the same under the same cuts."""
        name = op.layer.name
        return self._kind(op), name in flowing, name in self._kept, *(read in flowing for read in op.layer.reads)

    def _kind(self, op: Op) -> int:
        """The same number for layers that take the same time under the same cuts."""
        if "kind" not in op.worked_out:
            learns = [
                (argument, self.graph.states[ref.name].differentiable)
                for argument, ref in op.layer.tensors
                if isinstance(ref, State)
            ]
            op.worked_out["kind"] = f"{signature(op)} {learns} {self._may_factor(op)}"
        return self._kinds.setdefault(op.worked_out["kind"], len(self._kinds))

    def _find_part_work(self, op: Op, chosen: Cut, flowing: frozenset[str]) -> "PartWork":
        part, rule, parts = first_part(op, chosen), rule_for(op), dict(chosen.degrees)
        letters, flows = frozenset(parts), op.layer.name in flowing
        needs, written = answers(op, rule, part)
        layer_sums, settled, summed = [], 0.0, ""
        if rule is not WHOLE and parts:
            for layer_sum in rule.sums(op, part, letters, parts, local=self.local_statistics):
                passes = layer_sum.forward + (layer_sum.backward and flows)
                layer_sums.append((passes, layer_sum.elements * max(self.itemsize, SUMMED_BYTES), layer_sum.over))
            summed = "".join([axis.letter for axis in axes_of(op) if axis.summed and axis.letter in letters])
            settled = float(written * self.itemsize) if summed else 0.0
        shards, kernel = self._shards(op, needs, chosen), self.kernel(op, part, chosen, flowing)
        kept = self._kept_bytes(op, written, flowing)
        held, stepped = sum(size for size, _ in shards), sum(self._stepped(size, chosen, by) for size, by in shards)
        return PartWork(
            compute=kernel.total + self.speeds.layer_overhead,
            update=stepped * self.speeds.update_per_byte,
            memory=held + stepped * (1 + self.optimizer_slots) + kept,
            kept=kept,
            again=kernel.forward + self.speeds.layer_overhead / 2,
            sums=tuple(layer_sums),
            settled=((1 + flows) * bool(summed), settled, summed),
            shards=tuple(shards),
            factors=self._factor_work(op, part, chosen, flowing),
        )

    def _stepped(self, size: float, chosen: Cut, alike: str | None) -> float:
        """Bytes of a parameter that rank 0 steps over: what it holds, or its rows of that."""
        if self.optimizer_state == "whole" or size < LEAST_ELEMENTS * self.itemsize:
            return size
        return size / self._held_by(chosen, alike).shape.ranks

    def _may_factor(self, op: Op) -> bool:
        """Whether ranks could send each other factors for the gradient of the layer's weight, and are allowed to."""
        if self.factors == "never" or self.assumed.servers or not rule_for(op).outer_product:
            return False
        weight, wanted = op["weight"], isinstance(self.factors, str) or op.layer.name in self.factors
        return wanted and isinstance(weight, State) and self._uses[weight.name] == 1

    @cached_property
    def _uses(self) -> Counter[str]:
        """How often every state is used."""
        return Counter(ref.name for layer in self.graph.layers for _, ref in layer.tensors if isinstance(ref, State))

    def _factor_work(self, op: Op, part: Part, chosen: Cut, flowing: frozenset[str]) -> tuple[float, float] | None:
        over = over_rows(op, chosen) if self._may_factor(op) else frozenset()
        if not over or op.layer.name not in flowing or not self.graph.states[op["weight"].name].differentiable:
            return None
        needs = rule_for(op).needs(op, part)
        (outputs, inputs), rows = map(len, needs["weight"].box), volume(needs["input"].box[:-1])

        def kernel(part: Part, letters: frozenset[str]) -> KernelTime:
            degrees = tuple((letter, degree) for letter, degree in chosen.degrees if letter in letters)
            return self.kernel(op, part, Cut(degrees), flowing)

        whole = kernel_of_all_rows(kernel, op, part, frozenset(dict(chosen.degrees)), over)
        longer = max(0.0, whole.to_weights - self.kernel(op, part, chosen, flowing).to_weights)
        return float(rows * (outputs + inputs) * self.itemsize), longer

    def _gradients(self, part: "PartWork", chosen: Cut) -> tuple[float, float]:
        """Seconds until a layer's gradients are those of all ranks, and of multiplying the rows of others for that."""
        seconds = product = 0.0
        for number, (size, alike) in enumerate(part.shards):
            both = self._both_ways(part, chosen) if not number else None
            if both is not None and (self.factors != "auto" or both.factors_pay):
                seconds, product = seconds + both.gathered, both.product
            else:
                seconds += self.gradient_sum(size, self._held_by(chosen, alike))
        return seconds, product

    def _both_ways(self, part: "PartWork", chosen: Cut) -> Ways | None:
        """To the gradient of a linear layer's weight; None where it is summed in any case."""
        if part.factors is None or (self.factors == "auto" and part.shards[0][0] < LEAST_BYTES):
            return None
        size, alike = part.shards[0]
        group = self._held_by(chosen, alike)
        if group.shape.ranks < 2:
            return None
        sent, product = part.factors
        phases = gather_phases(sent, group.shape, self.speeds.cluster)
        gathered = phase_seconds(phases, group.sharing, self.speeds.cluster)
        return Ways(self.gradient_sum(size, group), gathered, product)

    def ways(self, factors: Factors) -> Ways | None:
        """Both ways to a weight's gradient under the cut that its layer has; None where it is summed in any case."""
        placed = factors.placed
        flowing = self.flowing()
        return self._both_ways(
            self._part_work(placed.op, placed.cut, flowing, self._alike(placed.op, flowing)), placed.cut
        )

    def _sums_of(self, part: "PartWork", chosen: Cut) -> float:
        """Seconds of what crosses between the parts of one layer while it runs, both passes, and of partial results."""
        seconds = 0.0
        for passes, size, over in part.sums:
            group = self.grouping(chosen, over)
            seconds += passes * self.adding.seconds(size, group.shape, group.sharing, in_layer=True)
        times, partial, summed = part.settled
        return seconds + (times * self._settling(partial, chosen, summed) if times else 0.0)

    def _sums_again(self, part: "PartWork", chosen: Cut) -> float:
        """The same of one forward pass, taken as a layer's share of both passes."""
        passes = max((times for times, _, _ in part.sums), default=part.settled[0])
        return self._sums_of(part, chosen) / max(passes, 1)

    def _least_sums(self, part: "PartWork", chosen: Cut) -> float:
        """Seconds of sums within a layer that rank 0 waits for, its group alone on the links."""
        seconds, alone = 0.0, (1,) * len(self.speeds.cluster.levels)
        for passes, size, over in part.sums:
            seconds += passes * self.adding.seconds(size, self.grouping(chosen, over).shape, alone, in_layer=True)
        return seconds

    def _held_by(self, chosen: Cut, alike: str | None) -> "Grouping":
        """The ranks that hold the same shard: those that differ in the letters `alike`; None: all ranks."""
        if alike is not None:
            return self.grouping(chosen, alike)
        return Grouping(self.adding.shape(range(self.ranks)), (1,) * len(self.speeds.cluster.levels))

    def _settling(self, size: float, chosen: Cut, summed: str) -> float:
        """Seconds in which partial results are added up: each rank's box is divided among its group."""
        group, cluster = self.grouping(chosen, summed), self.speeds.cluster
        seconds, near = 0.0, 1
        for index, (level, joined) in enumerate(zip(cluster.levels, group.shape.counts, strict=True)):
            crossing = (joined - 1) * near * size / group.shape.ranks
            near *= joined
            if is_card(cluster, index):
                crossing *= min(unit_size(cluster, index), chosen.parts)
            if crossing:
                seconds = max(seconds, level.meeting + crossing / level.bandwidth)
        return seconds + size * self.speeds.copy_per_byte

    def grouping(self, chosen: Cut, over: str) -> "Grouping":
        """How parts that differ in the letters `over` only lie in the cluster: rank 0's group, which is like all."""
        key = (chosen.degrees, "".join(sorted(over)))
        if key not in self._groupings:
            cluster = self.speeds.cluster
            shape = self.adding.shape(ranks_over(chosen, over))
            kept = [letter for letter, _ in chosen.degrees if letter not in over]
            sharing = []
            for index, joined in enumerate(shape.counts):
                behind = min(unit_size(cluster, index), chosen.parts)
                seats = {tuple(number[letter] for letter in kept) for number in _seats(chosen, behind)}
                sharing.append(len(seats) if joined > 1 else 1)
            self._groupings[key] = Grouping(shape, tuple(sharing))
        return self._groupings[key]

    def gradient_sum(self, size: float, group: "Grouping") -> float:
        """Seconds of the sum of a gradient; a small one is summed in a bucket with others, and pays its part of it."""
        if self.assumed.servers:
            return server_seconds(size, group.shape, self.speeds.cluster)
        bucket = max(size, float(self.bucket_bytes))
        return self.adding.seconds(bucket, group.shape, group.sharing, in_layer=False) * size / bucket if size else 0.0

    def _shards(self, op: Op, needs: Mapping[str, Need], chosen: Cut) -> list[tuple[float, str | None]]:
        """As `PartWork` has them."""
        rule = rule_for(op)
        shards: list[tuple[float, str | None]] = []
        updates = facts_of(op.layer.op).updates(op.layer)
        for argument, reference in op.layer.tensors:
            if not isinstance(reference, State) or argument in updates:
                continue
            need = needs.get(argument)
            if need is None or not self.graph.states[reference.name].differentiable:
                continue
            alike = "".join(letter for letter, _ in chosen.degrees if letter not in cutting(op, argument))
            shards.append((float(volume(need.box) * self.itemsize), None if rule is WHOLE else alike))
        return shards

    def _kept_bytes(self, op: Op, elements: int, flowing: frozenset[str]) -> float:
        """Bytes of a layer's output that live until backward, of what the rank with the largest part writes."""
        if op.layer.name not in flowing:
            return 0.0
        kept = elements * self.itemsize if op.layer.name in self._kept else 0
        return float(kept + elements * facts_of(op.layer.op).index_bytes)

    def _within(self, stage: Stage, position: int, flowing: frozenset[str]) -> Floats:
        """By choice, the move to a layer of a stage from the one before, where partial results were divided."""
        seconds = np.zeros(len(stage.choices))
        moving = [i for i, choice in enumerate(stage.choices) if choice[position] != choice[position - 1]]
        if moving:
            before, after = stage.ops[position - 1], stage.ops[position]
            argument = next(arg for arg, ref in after.layer.tensors if ref.name == before.layer.name)
            have = owned_boxes(before, [stage.choices[i][position - 1] for i in moving], self.ranks)
            need = needed_boxes(after, argument, [stage.choices[i][position] for i in moving], self.ranks)
            seconds[moving] = self._paired(have, need, 1 + (before.layer.name in flowing))[0]
        return seconds

    def _paired(self, have: Boxes, need: Boxes, passes: int) -> tuple[Floats, Floats]:
        """As `_transfer`, of each cut to the one that stands beside it."""
        way = paired_one_by_one_seconds if self.assumed.one_by_one else paired_seconds
        seconds = passes * way(have, need, self.itemsize, self.speeds.cluster)
        tile = need.volumes[:, 0].astype(np.float64) * self.itemsize
        same = (have.starts[:, 0] == need.starts[:, 0]) & (have.stops[:, 0] == need.stops[:, 0])
        memory = np.where(same.all(axis=1) | have.everywhere, 0.0, tile)
        return seconds + passes * memory * self.speeds.copy_per_byte, memory

    # Between stages

    def _edges(self, stages: Sequence[Stage], flowing: frozenset[str]) -> list[Edge]:
        maker = {op.layer.name: index for index, stage in enumerate(stages) for op in stage.ops}
        readers: dict[str, list[tuple[int, str]]] = {}
        for index, stage in enumerate(stages):
            for argument, value in stage.reads:
                readers.setdefault(value, []).append((index, argument))
        edges = []
        for value, places in readers.items():
            if value in maker:
                edges += self._edges_of(value, maker[value], places, stages, flowing)
            elif value in self.graph.inputs and self.boundary.io == "share":
                spec = self.graph.inputs[value]
                have = layouts_boxes([samples(spec.shape, even_shares(self.graph.batch, self.ranks))])
                for index, argument in places:
                    seconds, memory = self._transfer(have, self._needs(stages[index], argument), 1)
                    edges.append(Edge(value, None, (index,), seconds[0], memory[0]))
        return [*edges, *self._boundary_edges(stages, flowing)]

    def _boundary_edges(self, stages: Sequence[Stage], flowing: frozenset[str]) -> list[Edge]:
        """What the first layer reads beyond the tile that its rank passes, and what the result's layout asks for."""
        edges = []
        value, spec = next(iter(self.graph.inputs.items()))
        reader = next((index for index, stage in enumerate(stages) if value in dict(stage.reads).values()), None)
        if self.boundary.io == "tile" and reader is not None:
            argument = next(argument for argument, read in stages[reader].reads if read == value)
            cuts = [choice[0] for choice in stages[reader].choices]
            have = tile_boxes(spec.shape, cuts, self.ranks, channels="k")
            need = needed_boxes(stages[reader].ops[0], argument, cuts, self.ranks)
            edges.append(Edge(value, None, (reader,), *self._paired(have, need, 1)))
        if self.losses and self.boundary.io == "tile":
            return edges
        shares = even_shares(self.graph.batch, self.ranks)
        for index, stage in enumerate(stages):
            for output in set(self.graph.outputs) & {stage.output}:
                cuts = [choice[-1] for choice in stage.choices]
                shape = self.graph.specs[output].shape
                tiled = tiles(shape, cuts[0], self.ranks)
                wanted = self.boundary.output(self.graph, output, shares, tiled)
                need = tile_boxes(shape, cuts, self.ranks) if wanted is tiled else layouts_boxes([wanted] * len(cuts))
                have = owned_boxes(stage.ops[-1], cuts, self.ranks)
                passes = 1 + (output in flowing)
                edges.append(Edge(output, None, (index,), *self._paired(have, need, passes), passes))
        return edges

    def _edges_of(
        self,
        value: str,
        source: int,
        places: Sequence[tuple[int, str]],
        stages: Sequence[Stage],
        flowing: frozenset[str],
    ) -> list[Edge]:
        maker = stages[source]
        position = next(i for i, op in enumerate(maker.ops) if op.layer.name == value)
        passes = 1 + (value in flowing)
        priced = [(index, *self._moved((maker, position), stages[index], arg, passes)) for index, arg in places]
        indices = [index for index, _, _ in priced]
        entries = len(maker.choices) * prod(len(stages[index].choices) for index in set(indices))
        if len(places) > 1 and len(set(indices)) == len(indices) and entries <= SHARED_ENTRIES:
            needs = [self._needs(stages[index], argument) for index, argument in places]
            pads = [self._pads(stages[index], argument) for index, argument in places]
            seconds, memory = _shared(priced, needs, pads)
            return [Edge(value, source, tuple(indices), seconds, memory, passes)]
        return [
            Edge(value, source, (index,), seconds, memory, passes)
            for index, seconds, memory in priced
            if index != source
        ]

    def _needs(self, stage: Stage, argument: str) -> Boxes:
        return needed_boxes(stage.ops[0], argument, [choice[0] for choice in stage.choices], self.ranks)

    def _pads(self, stage: Stage, argument: str) -> tuple[Boxes | None, float]:
        """The padding around its tiles, and what it is filled with."""
        op = stage.ops[0]
        need = rule_for(op).needs(op, first_part(op, Cut())).get(argument)
        pads = padding_boxes(op, argument, [choice[0] for choice in stage.choices], self.ranks)
        return pads, 0.0 if need is None else need.fill

    def _moved(self, made: tuple[Stage, int], reader: Stage, argument: str, passes: int) -> tuple[Floats, Floats]:
        """Between the output of one of a stage's layers and a stage that reads it, by both choices."""
        maker, position = made
        key = (maker.signatures[position], reader.signatures[0], argument, passes)
        if key not in self._transfers:
            have = owned_boxes(maker.ops[position], [choice[position] for choice in maker.choices], self.ranks)
            self._transfers[key] = self._transfer(have, self._needs(reader, argument), passes)
        return self._transfers[key]

    def _transfer(self, have: Boxes, need: Boxes, passes: int) -> tuple[Floats, Floats]:
        """(seconds of all passes, bytes of tiles on the first rank that are not what it owns), by both cuts."""
        way = one_by_one_seconds if self.assumed.one_by_one else transfer_seconds
        seconds = passes * way(have, need, self.itemsize, self.speeds.cluster)
        tile = need.volumes[:, 0].astype(np.float64) * self.itemsize
        same = _alike(have, need, ranks=1)
        memory = np.where(same | have.everywhere, 0.0, tile[None, :])
        return seconds + passes * memory * self.speeds.copy_per_byte, memory

    def _forbidden(self, stages: Sequence[Stage]) -> list[Factor]:
        users: dict[str, list[tuple[int, int, str]]] = {}
        for index, stage in enumerate(stages):
            for position, op in enumerate(stage.ops):
                for argument, reference in op.layer.tensors:
                    if isinstance(reference, State):
                        users.setdefault(reference.name, []).append((index, position, argument))
        factors = []
        for places in users.values():
            for (a, i, first), (b, j, second) in product(places[:1], places[1:]):
                if a == b:
                    continue
                first_boxes = needed_boxes(stages[a].ops[i], first, [c[i] for c in stages[a].choices], self.ranks)
                second_boxes = needed_boxes(stages[b].ops[j], second, [c[j] for c in stages[b].choices], self.ranks)
                factors.append(Factor((a, b), np.where(_alike(first_boxes, second_boxes), 0.0, np.inf)))
        return factors


def _shared(
    priced: Sequence[tuple[int, Floats, Floats]],
    needs: Sequence[Boxes],
    pads: Sequence[tuple[Boxes | None, float]],
) -> tuple[Floats, Floats]:
    """One table over the source and all readers, in which readers that need the same tiles pay once."""
    count = len(priced)
    seconds: Floats = np.zeros((1,) * (count + 1))
    memory: Floats = np.zeros((1,) * (count + 1))
    for number, (_, table, held) in enumerate(priced):
        shape = [table.shape[0]] + [table.shape[1] if other == number else 1 for other in range(count)]
        first = np.ones((1,) * count, dtype=bool)
        for earlier in range(number):
            a, b = needs[earlier], needs[number]
            if a.starts.shape[2] != b.starts.shape[2]:
                continue
            alike = _alike(a, b) & _padded_alike(pads[earlier], pads[number], (len(a.starts), len(b.starts)))
            place = [alike.shape[0] if o == earlier else alike.shape[1] if o == number else 1 for o in range(count)]
            first = first & ~alike.reshape(place)
        seconds = seconds + table.reshape(shape) * first[None]
        memory = memory + held.reshape(shape) * first[None]
    return seconds, memory


def _alike(a: Boxes, b: Boxes, ranks: int | None = None) -> NDArray[np.bool_]:
    """(cuts of a, cuts of b): whether all ranks have the same boxes; `ranks`: the first of them."""
    known: dict[bytes, int] = {}
    numbers = []
    for boxes in (a, b):
        edges = np.concatenate([boxes.starts[:, :ranks], boxes.stops[:, :ranks]], axis=2)
        rows = np.ascontiguousarray(edges).reshape(len(edges), -1)
        numbers.append(np.array([known.setdefault(row.tobytes(), len(known)) for row in rows]))
    alike: NDArray[np.bool_] = numbers[0][:, None] == numbers[1][None]
    return alike


def _padded_alike(
    a: tuple[Boxes | None, float], b: tuple[Boxes | None, float], shape: tuple[int, int]
) -> NDArray[np.bool_]:
    """(cuts of a, cuts of b): whether all ranks have the same padding, filled with the same."""
    padded: list[NDArray[np.bool_]] = [
        np.zeros(length, dtype=bool)
        if pads is None
        else np.any(pads.starts, axis=(1, 2)) | np.any(pads.stops, axis=(1, 2))
        for (pads, _), length in zip((a, b), shape, strict=True)
    ]
    both: NDArray[np.bool_] = ~(padded[0][:, None] | padded[1][None])
    if a[0] is None or b[0] is None or a[1] != b[1]:
        return both
    return both | _alike(a[0], b[0])


def flowing_values(graph: LayerGraph) -> frozenset[str]:
    """Values through which gradients flow in training, all parameters learning."""
    need: set[str] = set()
    learns = learning(graph)
    for layer in graph.layers:
        if layer.name in learns and any(isinstance(ref, State) or ref.name in need for _, ref in layer.tensors):
            need.add(layer.name)
    return frozenset(need)


def first_part(op: Op, chosen: Cut) -> Part:
    """The part of rank 0, which no other part exceeds."""
    rule = rule_for(op)
    if rule is WHOLE:
        return {}
    degrees = dict(chosen.degrees)
    return {axis.letter: cut(axis.size, degrees.get(axis.letter, 1), grain=axis.grain)[0] for axis in axes_of(op)}


def cutting(op: Op, argument: str) -> frozenset[str]:
    """The letters along which a cut of the layer cuts this argument too."""
    known: dict[str, frozenset[str]] = op.worked_out.setdefault("cutting", {})
    if argument not in known:
        rule = rule_for(op)
        whole = {axis.letter: Span(0, axis.size) for axis in rule.axes(op)}
        box = rule.needs(op, whole)[argument].box
        letters = set()
        for axis in rule.axes(op):
            if axis.size >= 2 * axis.grain:
                last = rule.needs(op, {**whole, axis.letter: Span(axis.size - axis.grain, axis.size)}).get(argument)
                if last is None or last.box != box:
                    letters.add(axis.letter)
        known[argument] = frozenset(letters)
    return known[argument]


def _seats(chosen: Cut, ranks: int) -> list[dict[str, int]]:
    """For the first `ranks` ranks the number of their part along each letter."""
    seats = []
    for rank in range(ranks):
        seat, stride = {}, chosen.parts
        for letter, degree in chosen.degrees:
            stride //= degree
            seat[letter] = rank // stride % degree
        seats.append(seat)
    return seats


def ranks_over(chosen: Cut, over: str) -> tuple[int, ...]:
    """The ranks whose parts differ from rank 0's in the letters `over` only, rank 0 included."""
    strides, stride = {}, chosen.parts
    for letter, degree in chosen.degrees:
        stride //= degree
        strides[letter] = (stride, degree)
    ranks = [0]
    for letter in over:
        if letter in strides:
            step, degree = strides[letter]
            ranks = [rank + step * index for rank in ranks for index in range(degree)]
    return tuple(sorted(ranks))
