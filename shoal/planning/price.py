"""What a plan costs: its step as a list of tasks, played by the simulator once, without noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shoal.graph import LayerGraph
from shoal.lowering.boundary import even_shares, step_program
from shoal.lowering.factors import factorable
from shoal.lowering.owners import TO_OWNERS, cut_homes
from shoal.lowering.placement import sharers
from shoal.lowering.program import Compute
from shoal.lowering.step_traffic import GRADIENTS
from shoal.lowering.tasks import Kernel, Moved, StepOptions, Task, Tasks, step_tasks
from shoal.moves import Layout
from shoal.partition import Cut, volume
from shoal.plan import Plan
from shoal.planning.costs import CostModel
from shoal.planning.factors import chosen_factors
from shoal.planning.stages import FEW_RANKS
from shoal.planning.step_memory import Memory, step_memories
from shoal.simulating.durations import Durations, sent_bytes
from shoal.simulating.play import Played, play
from shoal.simulating.simulate import trace_of
from shoal.timeline import Trace


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
    """Sent by all ranks in one step; the gradients' share by what the layer's parameters have of them."""
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
    factors: tuple[str, ...] = ()
    """Layers for whose gradients ranks send each other factors."""
    recompute: bool = False
    """Whether activations are computed a second time in backward, and not kept."""
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """What every rank does when, where that was asked for."""

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(memory.total for memory in self.memory)

    def plan(self, name: str) -> Plan:
        """What was priced, to be laid."""
        return Plan(
            name=name,
            ranks=self.ranks,
            layers=tuple(self.cuts.items()),
            factors=self.factors,
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class PlayedPlan:
    """A plan that was played through: how long its step takes. All else that it costs is worked out when asked for."""

    model: CostModel
    cuts: Mapping[str, Cut]
    tasks: Tasks
    durations: Durations
    played: Played

    @cached_property
    def seconds(self) -> float:
        """Of one step."""
        return self.played.seconds

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """By rank; of many ranks, those of one class hold what its first does."""
        tasks, few = self.tasks, self.tasks.ranks <= FEW_RANKS
        ranks = range(tasks.ranks) if few else self.played.first_ranks.tolist()
        held = step_memories(
            tasks.program,
            ranks,
            tasks.options.itemsize,
            optimizer_slots=self.model.optimizer_slots,
            homes=tasks.homes,
            recompute=self.recompute,
        )
        return tuple(held) if few else tuple(held[number] for number in self.played.classes)

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(memory.total for memory in self.memory)

    @property
    def ranks(self) -> int:
        """How many the plan is for."""
        return self.model.ranks

    @property
    def recompute(self) -> bool:
        """Whether activations are computed a second time in backward."""
        return self.tasks.options.recompute

    def price(self, name: str, *, trace: bool = False) -> Price:
        """All of it; `trace`: keep what was played."""
        tasks, durations, played = self.tasks, self.durations, self.played
        sent = sent_bytes(tasks.tasks, durations)
        kernels = [isinstance(task.work, Kernel) for task in tasks.tasks]
        last = len(tasks.tasks) - 1
        computes = [task.resource == "compute" and task.label != TO_OWNERS for task in tasks.tasks[:last]]
        backward = float(np.nanmax(played.ends[:last][computes]))
        return Price(
            name=name,
            cuts=dict(self.cuts),
            ranks=self.model.ranks,
            seconds=self.seconds,
            compute=float(np.sum(durations.computed[kernels], axis=0).max()),
            update=float(durations.computed[last].max()),
            exposed=max(0.0, float(np.nanmax(played.starts[last])) - backward),
            layers=tuple(_rows(self.model, self.cuts, tasks, durations, sent).values()),
            memory=self.memory,
            bytes=sum(sent),
            factors=tuple(
                tasks.users[weight] for weight in reversed(tasks.trainable) if weight in tasks.options.factors
            ),
            recompute=self.recompute,
            trace=trace_of(played, f"plan {name}") if trace else None,
        )


def play_plan(model: CostModel, cuts: Mapping[str, Cut], *, recompute: bool | None = None) -> PlayedPlan:
    """Play a plan through. A cut that does not fit is a `PlanError`.

    `recompute`: whether activations are computed again, as the model says unless given.
    """
    tasks = tasks_of(model, cuts, recompute=recompute)
    durations = Durations(tasks, model.speeds, model.kernels, model.adding)
    return PlayedPlan(model, cuts, tasks, durations, play(durations))


def price(
    model: CostModel, cuts: Mapping[str, Cut], name: str, *, recompute: bool | None = None, trace: bool = False
) -> Price:
    """Play a plan through, as `play_plan` does, and price it. `trace`: keep what was played."""
    return play_plan(model, cuts, recompute=recompute).price(name, trace=trace)


def tasks_of(model: CostModel, cuts: Mapping[str, Cut], *, recompute: bool | None = None) -> Tasks:
    """One step of a model's network under these cuts; `recompute`: as `price` has it."""
    graph = model.graph
    shares = even_shares(graph.batch, model.ranks)
    program = step_program(graph, cuts, model.boundary, shares, losses=model.losses)
    homes = program.states
    if model.optimizer_state == "cut":
        homes = cut_homes(homes, {name for name in homes if graph.states[name].differentiable})
    factors = chosen_factors(factorable(program, homes), model.factors, model.ways)
    options = StepOptions(
        _item_sizes(graph, model.itemsize),
        model.bucket_bytes,
        model.local_statistics,
        recompute=bool(model.recompute) if recompute is None else recompute,
        factors=frozenset(factors),
        optimizer_state=model.optimizer_state,
    )
    return step_tasks(program, options)


def _rows(
    model: CostModel, cuts: Mapping[str, Cut], tasks: Tasks, durations: Durations, sent_by_task: Sequence[int]
) -> dict[str, LayerPrice]:
    graph, computed = tasks.program.graph, durations.computed.max(axis=1).tolist()
    rows = {layer.name: LayerPrice(layer.name, layer.op, cuts.get(layer.name, Cut())) for layer in graph.layers}
    for task, sent, seconds in zip(tasks.tasks, sent_by_task, computed, strict=True):
        if task.label == GRADIENTS:
            _divide(task, sent, tasks, durations, rows)
        elif isinstance(task.work, Moved) and task.states:
            row = rows[tasks.users[task.states[0]]]
            row.bytes += sent
            row.gradients += durations.move_seconds(task.work)
        elif task.label in rows:
            row = rows[task.label]
            row.bytes += sent
            if task.kind == "move":
                assert isinstance(task.work, Moved)
                row.transfers += durations.move_seconds(task.work)
            elif task.kind == "copy":
                row.transfers += seconds
            elif task.kind == "sum":
                row.sums += durations.sum_seconds(task)
            else:
                row.compute += seconds
    for name, layer in tasks.users.items():
        read, kept = _state_elements(tasks.program.states[name]), _state_elements(tasks.homes[name])
        rows[layer].memory += (read + kept * (1 + model.optimizer_slots)) * tasks.options.itemsize[name]
    for instruction in tasks.program.instructions:
        if isinstance(instruction, Compute):
            name = instruction.placed.layer.name
            rows[name].memory += int(durations.volumes(instruction.placed).max()) * tasks.options.itemsize[name]
    return rows


def _divide(task: Task, sent: int, tasks: Tasks, durations: Durations, rows: Mapping[str, LayerPrice]) -> None:
    """A bucket's seconds and bytes by what each parameter has of it."""
    seconds = durations.sum_seconds(task)
    sizes = {
        name: sum(
            volume(box) * tasks.options.itemsize[name] * (len(ranks) - 1)
            for box, ranks in sharers(tasks.homes[name]).items()
        )
        for name in task.states
    }
    everything = max(sum(sizes.values()), 1)
    for name, size in sizes.items():
        row = rows[tasks.users[name]]
        row.gradients += seconds * size / everything
        row.bytes += round(sent * size / everything)


def _state_elements(layout: Layout) -> int:
    """Of the first box."""
    return next((volume(box) for box in layout if box is not None), 0)


def _item_sizes(graph: LayerGraph, itemsize: int) -> dict[str, int]:
    """Bytes of one element of every value and state; floats have the type that the network trains in."""
    specs = {**graph.specs, **graph.states}
    return {name: itemsize if spec.differentiable else 8 for name, spec in specs.items()}
