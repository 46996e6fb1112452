"""The list of tasks beside what the engine really does, rank by rank, and beside what a step sends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.execution.engine import Engine
from shoal.execution.laying import capture_modes, lay
from shoal.lowering import owners
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.lowering.factors import factorable
from shoal.lowering.owners import OptimizerState
from shoal.lowering.program import Compute, Program
from shoal.lowering.step_traffic import step_traffic
from shoal.lowering.tasks import COMPUTES, Gathered, Kernel, Moved, StepOptions, Summed, Task, Tasks, step_tasks
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.planning.resolve import resolve
from shoal.simulating.flows import elements_between
from shoal.transport import Transport
from shoal.transport.memory import MemoryTransport, run_ranks
from tests.unit.test_costs import NETS, captured

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKET = 1 << 10
Event = tuple[object, ...]


class Watch:
    """What every rank's engine did, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: dict[int, list[Event]] = {}
        self.program: Program | None = None
        self._patch(monkeypatch, Engine, "forward", self._forward)
        self._patch(monkeypatch, Engine, "_compute", self._compute)
        self._patch(monkeypatch, Engine, "_compute_back", self._compute_back)
        self._patch(monkeypatch, MemoryTransport, "begin_moves", self._begin_moves)
        self._patch(monkeypatch, MemoryTransport, "_reduce", self._reduce)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, watched: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: watched(original, *args, **named))

    def note(self, rank: int, *event: object) -> None:
        self.events.setdefault(rank, []).append(event)

    def _forward(self, original: Callable[..., Any], engine: Engine, program: Program, *args: Any, **named: Any) -> Any:
        self.program = program
        return original(engine, program, *args, **named)

    def _compute(self, original: Callable[..., Any], engine: Engine, index: int, *args: Any, **named: Any) -> Any:
        part = args[2].route.parts.get(index)
        if part is not None:
            self.note(engine.transport.rank, "forward", part.name)
        return original(engine, index, *args, **named)

    def _compute_back(
        self, original: Callable[..., Any], engine: Engine, index: int, compute: Compute, back: Any, tape: Any
    ) -> Any:
        rank = engine.transport.rank
        if index in tape.records:
            self.note(rank, "backward", compute.label)
        finish = original(engine, index, compute, back, tape)
        if finish is None:
            return None

        def then() -> None:
            self.note(rank, "parameters", compute.label)
            finish()

        return then

    def _begin_moves(
        self, original: Callable[..., Any], transport: Transport, sends: Any, receives: Any, tag: int, **named: Any
    ) -> Any:
        sent = sum(tensor.numel() for _, tensor in sends)
        self.note(transport.rank, "move", transport.label, sent, sum(buffer.numel() for _, buffer in receives))
        return original(transport, sends, receives, tag, **named)

    def _reduce(
        self, original: Callable[..., Any], transport: Transport, tensor: Tensor, ranks: Any, label: str, join: Any
    ) -> Any:
        self.note(transport.rank, "sum", label, tensor.nbytes, ranks)
        return original(transport, tensor, ranks, label, join)


def seen(events: list[Event]) -> list[Event]:
    """Without gradients of parameters that were left for later, and then nothing came between."""
    pairs = zip([(), *events], events, strict=False)
    return [event for before, event in pairs if event[0] != "parameters" or before != ("backward", event[1])]


def expected(tasks: Tasks, rank: int, *, recompute: bool) -> list[Event]:
    """What the engine of one rank should do, from the list."""
    program = tasks.program
    pieces = program.segments if recompute else (range(len(program.instructions)),)
    _, goes_on = program.links_within(pieces)
    inside = {program.instructions[index].label for index in goes_on}
    events: list[Event] = []
    before: Task | None = None
    for task in tasks.tasks:
        if rank in task.ranks:
            match task.work:
                case Moved() if task.kind == "move":
                    pairs = elements_between(task.work, slice(None))
                    pairs[range(len(pairs)), range(len(pairs))] = 0
                    pairs = pairs.T if task.work.back else pairs
                    if pairs[rank].any() or pairs[:, rank].any():
                        events.append(("move", task.label, int(pairs[:, rank].sum()), int(pairs[rank].sum())))
                case Summed(groups=groups, bytes=sizes):
                    group, size = next((g, s) for g, s in zip(groups, sizes, strict=True) if rank in g)
                    events.append(("sum", task.label, size, group))
                case Gathered(groups=groups, by_rank=sizes):
                    others = set(next(group for group in groups if rank in group)) - {rank}
                    layer = tasks.users[task.states[0]]
                    received = sum(sizes[other] for other in others)
                    events.append(("move", layer, len(others) * sizes[rank] // 4, received // 4))
                case Kernel(over=over) if over:  # the product of all factors, which the engine is not watched at
                    pass
                case Kernel() if task.kind == "forward":
                    events.append(("forward", task.label))
                case Kernel() if task.label not in inside:  # of a chain the engine is told of the last layer only
                    at_once = before is not None and before.label == task.label and before.kind == "input gradient"
                    if task.kind == "weight gradient" and task.work.of > 1:
                        if not at_once:
                            events.append(("parameters", task.label))
                    else:
                        events.append(("backward", task.label))
                case _:
                    pass
        before = task
    return events


PLANS: dict[str, str | dict[str, str]] = {
    "data": "data",
    "model": "model",
    "spatial": "spatial",
    "hybrid": "2x2",
    "partial sums": {"*": "n4", "*conv2*": "k4", "fc*": "k2"},
    "few ranks": {"*": "n4", "*conv1*": "h2", "fc*": "c3"},
    "factors": "data",
    "factors of halves": {"*": "n4", "fc*": "n2c2"},
}


def plan_of(lines: str | dict[str, str]) -> str | Plan:
    if isinstance(lines, str):
        return lines
    return Plan(name="mine", ranks=4, layers=tuple((name, Cut.parse(cut)) for name, cut in lines.items()))


FEW = {("residual", plan, False) for plan in PLANS} | {("residual", "spatial", True), ("inception", "hybrid", False)}
CASES = [(net, plan, recompute) for net in ("residual", "inception") for plan in PLANS for recompute in (False, True)]


@pytest.mark.parametrize(
    ("net", "plan", "recompute"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.thorough) for case in CASES],
)
def test_the_engine_does_what_the_list_says(
    net: str, plan: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = NETS[net]
    torch.manual_seed(0)
    whole = capture_modes(make(), shape, F.cross_entropy)
    x, y = torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64)
    lines = PLANS[plan]
    if net == "inception" and isinstance(lines, dict):
        lines = {pattern.replace("conv2", "other").replace("conv1", "wide"): cut for pattern, cut in lines.items()}
    watch = Watch(monkeypatch)

    def step(transport: Transport) -> None:
        laid = lay(
            whole,
            plan_of(lines),
            transport,
            io="whole",
            seed=0,
            bucket_bytes=BUCKET,
            recompute=recompute,
            factors="always" if "factors" in plan else "never",
        )
        watch.events[transport.rank] = []  # laying tells other ranks of this and that
        laid(x, y).sum().backward()

    run_ranks(4, step)
    assert watch.program is not None
    tasks = tasks_of(watch.program, recompute=recompute, factors="factors" in plan)
    assert any(isinstance(task.work, Gathered) for task in tasks.tasks) == ("factors" in plan)
    for rank in range(4):
        assert seen(watch.events[rank]) == expected(tasks, rank, recompute=recompute), f"rank {rank}"
    kinds = {event[0] for event in seen(watch.events[0])}
    assert {"forward", "backward"} <= kinds
    if plan in ("spatial", "model"):
        assert {"move", "parameters"} <= kinds, "moves go while parameters' gradients are found"


def residual_program(plan: str | Plan) -> Program:
    graph = captured("residual").graphs[True]
    cuts = resolve(plan, graph, 4).cuts
    return step_program(graph, cuts, Boundary("tile", 4), even_shares(graph.batch, 4), losses=True)


def tasks_of(
    program: Program, *, recompute: bool = False, factors: bool = False, optimizer_state: OptimizerState = "whole"
) -> Tasks:
    sizes = {
        name: 4 if spec.differentiable else 8
        for name, spec in [*program.graph.specs.items(), *program.graph.states.items()]
    }
    factored = frozenset(factorable(program, program.states) if factors else ())
    options = StepOptions(sizes, BUCKET, recompute=recompute, factors=factored, optimizer_state=optimizer_state)
    return step_tasks(program, options)


@pytest.mark.parametrize("state", ["whole", "cut"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_bytes_of_the_tasks_are_the_traffic_of_all_ranks(
    plan: str, recompute: bool, state: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LEAST_ELEMENTS", 100)
    program = residual_program(plan_of(PLANS[plan]))
    graph = program.graph
    tasks = tasks_of(program, recompute=recompute, factors="factors" in plan, optimizer_state=state)
    total = 0
    for task in tasks.tasks:
        if isinstance(task.work, Moved) and task.kind == "move":
            pairs = elements_between(task.work, slice(None))
            total += int(pairs.sum() - pairs.trace()) * task.work.itemsize
        elif isinstance(task.work, Summed):
            sizes = zip(task.work.groups, task.work.bytes, strict=True)
            total += sum(2 * (len(group) - 1) * size for group, size in sizes)
        elif isinstance(task.work, Gathered):
            total += sum((len(group) - 1) * task.work.by_rank[rank] for group in task.work.groups for rank in group)
    again = range(program.segments[-1].start) if recompute else range(0)
    sent = [
        step_traffic(
            program,
            rank,
            trainable=tasks.trainable,
            homes=tasks.homes,
            uses=program.states,
            itemsize=tasks.options.itemsize,
            dtypes={name: spec.dtype for name, spec in graph.states.items()},
            bucket_bytes=BUCKET,
            again=again,
            factors=factorable(program, tasks.homes) if "factors" in plan else {},
        )
        for rank in range(4)
    ]
    assert total == sum(payload.bytes for by_label in sent for payload in by_label.values())


def test_a_task_names_what_it_waits_for_among_those_before_it() -> None:
    tasks = tasks_of(residual_program("spatial")).tasks
    for index, task in enumerate(tasks):
        assert all(other < index and tasks[other].resource == "network" for other in task.after)
        assert (task.kind in COMPUTES) == (task.resource == "compute")
    sums = tuple(index for index, task in enumerate(tasks) if task.label == "gradients")
    assert tasks[-1].kind == "update"
    assert tasks[-1].after == sums
    assert len(sums) > 1
