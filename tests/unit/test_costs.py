"""The planner's tables and search beside slow sums over the program, and beside every combination there is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.capturing import capture
from shoal.cluster import Cluster
from shoal.errors import PlanError
from shoal.execution.laying import Captured, capture_modes
from shoal.finding.auto import cost_model, gives_losses
from shoal.graph import LayerGraph
from shoal.lowering.boundary import even_shares, step_program
from shoal.lowering.placement import sharers
from shoal.lowering.program import Compute, Fetch, Program, Settle, first_uses
from shoal.lowering.step_traffic import step_traffic
from shoal.operators.base import Op, Part, Rule
from shoal.partition import Cut, volume
from shoal.planning.costs import EXPOSED, CostModel, CostTables
from shoal.planning.elimination import minimise, reduce_by_two_rules
from shoal.planning.find import complete, find
from shoal.planning.price import price
from shoal.planning.resolve import resolve
from shoal.planning.stages import Stage, stages_of
from shoal.simulating.collectives import layer_sum_phases, phase_seconds, shape_of, sharing_of, sum_phases
from shoal.simulating.speeds import KernelTime
from shoal.zoo.by_name import build
from tests.unit.test_transfers import cluster_of, reference

pytestmark = pytest.mark.usefixtures("one_thread")

ITEM = 4
BUCKET = 1 << 20


@dataclass(frozen=True)
class Simple:
    """Speeds that a person can add up."""

    cluster: Cluster
    layer_overhead: float = 1e-6
    step_overhead: float = 1e-5
    update_per_byte: float = 1e-9
    copy_per_byte: float = 1e-10

    def kernel(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime:  # noqa: ARG002
        """A microsecond for each element that is written, twice that in backward."""
        seconds = volume(rule.writes(op, part)) * 1e-6
        return KernelTime(seconds, seconds, seconds) if input_grad else KernelTime(seconds, seconds)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


class Inception(nn.Module):
    """Three branches that read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one, self.other = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)
        self.third = nn.Conv2d(4, 4, 1)
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.wide = nn.Conv2d(4, 2, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        wide, pooled = self.wide(F.relu(self.other(x))), self.third(self.pool(x))
        x = torch.cat([F.relu(self.one(x)), F.relu(wide), F.relu(pooled)], 1)
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


class Chain(nn.Sequential):
    """Few enough stages for every combination."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 6))


class Bypass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        result: Tensor = (self.bn(self.conv(x)) + x).mean((2, 3))
        return result


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet5": (lambda: build("lenet5"), (8, 1, 28, 28)),
    "residual": (Residual, (4, 3, 8, 8)),
    "inception": (Inception, (4, 3, 8, 8)),
    "unet": (lambda: build("unet", input=(1, 16, 16), classes=2, options={"width": 2, "depth": 2}), (4, 1, 16, 16)),
    "chain": (Chain, (4, 3, 8, 8)),
    "bypass": (Bypass, (4, 3, 8, 8)),
}
SMALL = ["chain", "bypass"]
PLAIN = settings(max_examples=6, derandomize=True, phases=[Phase.generate])


@cache
def captured(net: str) -> Captured:
    make, shape = NETS[net]
    torch.manual_seed(0)
    return capture_modes(make(), shape, F.cross_entropy)


@cache
def model_of(net: str, ranks: int, io: str = "tile", levels: tuple[int, ...] = ()) -> CostModel:
    speeds = Simple(cluster_of(*(levels or (ranks,))))
    return cost_model(captured(net), speeds, ranks, io="share" if io == "share" else "tile")


@cache
def tables_of(
    net: str, ranks: int, io: str = "tile", levels: tuple[int, ...] = (), letters: str = "nckdhw"
) -> CostTables:
    model = model_of(net, ranks, io, levels)
    return model.tables(stages_of(model.graph, ranks, letters=letters))


def table_cost(tables: CostTables, choice: tuple[int, ...], exposed: float) -> float:
    return sum(float(factor.costs[tuple(choice[v] for v in factor.variables)]) for factor in tables.factors(exposed))


def program_of(model: CostModel, cuts: dict[str, Cut], net: str) -> Program:
    shares = even_shares(model.graph.batch, model.ranks)
    losses = gives_losses(captured(net))
    return step_program(model.graph, complete(cuts, model.graph), model.boundary, shares, losses=losses)


# The tables are what the program says


def slow_cost(program: Program, cluster: Cluster, speeds: Simple, *, inputs: bool) -> float:
    """One step as a plain sum over instructions; what the caller passes counts where `inputs` says so."""
    graph = program.graph
    flowing = program.needing_grad(frozenset(graph.states), frozenset())
    total = 0.0
    for one in program.instructions:
        match one:
            case Fetch() if one.identity or (one.value in list(graph.inputs)[1:] and not inputs):
                pass
            case Fetch():
                total += fetch_seconds(program, one, cluster, speeds, passes=1 + (one.value in flowing))
            case Compute():
                total += compute_seconds(one, cluster, speeds, flowing)
            case Settle():
                seconds = reference(one.partial, program.layouts[one.value], cluster)
                box = one.partial[0]
                seconds += 0.0 if box is None else volume(box) * ITEM * speeds.copy_per_byte
                total += (1 + (one.value in flowing)) * seconds
    for name in first_uses(program):
        box = program.states[name][0]
        if box is not None and graph.states[name].differentiable and name not in program.changed:
            size, holders = volume(box) * ITEM, sharers(program.states[name])
            bucket, sharing = max(size, BUCKET), sharing_of(holders.values(), cluster)
            phases = sum_phases(bucket, shape_of(holders[box], cluster), sharing, cluster)
            total += phase_seconds(phases, sharing, cluster) * size / bucket + size * speeds.update_per_byte
    return total


def fetch_seconds(program: Program, one: Fetch, cluster: Cluster, speeds: Simple, *, passes: int) -> float:
    have = program.layouts[one.value]
    if one.value in program.copies:
        return 0.0
    boxes = tuple(None if tile is None else tile.box for tile in one.tiles)
    seconds = reference(have, boxes, cluster)
    if boxes[0] is not None and boxes[0] != have[0]:
        seconds += volume(boxes[0]) * ITEM * speeds.copy_per_byte
    return passes * seconds


def compute_seconds(one: Compute, cluster: Cluster, speeds: Simple, flowing: frozenset[str]) -> float:
    placed = one.placed
    name, part = placed.layer.name, placed.parts[0]
    if part is None or not placed.layer.reads:
        return 0.0
    input_grad = any(read in flowing for read in placed.layer.reads)
    time = speeds.kernel(placed.op, placed.rule, part, placed.cut_letters, input_grad=input_grad)
    total = time.forward + (time.backward if name in flowing else 0.0) + speeds.layer_overhead
    for summed in placed.rule.sums(placed.op, part, placed.cut_letters, dict(placed.cut.degrees), local=False):
        sharing = sharing_of({group for group in placed.groups(summed.over) if group is not None}, cluster)
        passes = summed.forward + (summed.backward and name in flowing)
        shape = shape_of(placed.group(0, summed.over), cluster)
        phases = layer_sum_phases(summed.elements * ITEM, shape, sharing, cluster)
        total += passes * phase_seconds(phases, sharing, cluster)
    return total


def check_tables(net: str, ranks: int, io: str, letters: str, data: st.DataObject) -> None:
    model, tables = model_of(net, ranks, io), tables_of(net, ranks, io, letters=letters)
    choice = tuple(data.draw(st.integers(0, len(stage.choices) - 1), stage.name) for stage in tables.stages)
    program = program_of(model, tables.cuts(choice), net)
    speeds = model.speeds
    assert isinstance(speeds, Simple)
    slow = slow_cost(program, speeds.cluster, speeds, inputs=io == "share")
    cuts = {name: str(cut) for name, cut in tables.cuts(choice).items()}
    uneven = 1e-3 if ranks > 2 else 1e-9  # the tables divide partial results evenly
    assert table_cost(tables, choice, 1.0) == pytest.approx(slow, rel=uneven), cuts


@pytest.mark.parametrize("io", ["tile", "share"])
@pytest.mark.parametrize("net", NETS)
@given(data=st.data())
@PLAIN
def test_a_choice_costs_what_its_program_does_on_two_ranks(net: str, io: str, data: st.DataObject) -> None:
    check_tables(net, 2, io, "nckdhw", data)


@pytest.mark.parametrize("net", ["lenet5", "residual", "inception"])
@given(data=st.data())
@PLAIN
def test_a_choice_costs_what_its_program_does_on_four_ranks(net: str, data: st.DataObject) -> None:
    check_tables(net, 4, "tile", "nchw", data)


# The search


def cheapest(tables: CostTables, exposed: float) -> float:
    """The least of every combination, all at once."""
    sizes = [len(stage.choices) for stage in tables.stages]
    assert prod(sizes) < 10**7
    total = np.zeros(sizes)
    for factor in tables.factors(exposed):
        order = sorted(range(len(factor.variables)), key=lambda i: factor.variables[i])
        costs = factor.costs.transpose(order)
        present = {factor.variables[i]: costs.shape[place] for place, i in enumerate(order)}
        total = total + costs.reshape([present.get(v, 1) for v in range(len(sizes))])
    return float(total.min())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("net", SMALL)
def test_the_search_finds_the_least_of_every_combination(net: str, ranks: int) -> None:
    model, tables = model_of(net, ranks), tables_of(net, ranks)
    found = find(model)
    costs = {exposed: cheapest(tables, exposed) for exposed in EXPOSED}
    assert found.bound <= min(one.seconds for one in (*found.candidates, *found.fixed))
    for exposed, wanted in costs.items():
        of_candidates = [table_cost(tables, choice_of(tables, one.cuts), exposed) for one in found.candidates]
        assert min(of_candidates) == pytest.approx(wanted, rel=1e-12)


def choice_of(tables: CostTables, cuts: object) -> tuple[int, ...]:
    """The choice of every stage that gives its layers these cuts."""
    assert isinstance(cuts, dict)
    return tuple(stage.choices.index(tuple(cuts[op.layer.name] for op in stage.ops)) for stage in tables.stages)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("net", NETS)
def test_no_fixed_strategy_is_better(net: str, ranks: int) -> None:
    model, tables = model_of(net, ranks), tables_of(net, ranks)
    sizes = [len(stage.choices) for stage in tables.stages]
    for exposed in EXPOSED:
        best = minimise(sizes, tables.factors(exposed))
        assert table_cost(tables, best.choice, exposed) == pytest.approx(best.cost)
        for name in ("data", "model", "owt", "spatial"):
            choice = choice_of(tables, dict(resolve(name, model.graph, ranks).cuts))
            assert best.cost <= table_cost(tables, choice, exposed) * (1 + 1e-12), name
    found = find(model)
    assert all(found.price.seconds <= fixed.seconds for fixed in found.fixed)
    assert len(found.fixed) >= 4


# What is played through


@pytest.mark.parametrize("plan", ["data", "model", "owt", "spatial"])
@pytest.mark.parametrize("net", NETS)
def test_bytes_of_a_price_are_the_traffic_of_all_ranks(net: str, plan: str) -> None:
    model = model_of(net, 4)
    cuts = dict(resolve(plan, model.graph, 4).cuts)
    program = program_of(model, cuts, net)
    graph = program.graph
    trainable = [
        n for n in reversed(first_uses(program)) if graph.states[n].differentiable and n not in program.changed
    ]
    total = 0
    for rank in range(4):
        sent = step_traffic(
            program,
            rank,
            trainable=trainable,
            homes=program.states,
            itemsize={n: 4 if s.differentiable else 8 for n, s in {**graph.specs, **graph.states}.items()},
            dtypes={n: s.dtype for n, s in graph.states.items()},
            bucket_bytes=model.bucket_bytes,
        )
        total += sum(one.bytes for one in sent.values())
    priced = price(model, cuts, plan)
    assert priced.bytes == total
    assert priced.name == plan
    assert 0 < priced.compute <= sum(row.compute for row in priced.layers) * (1 + 1e-9)


# What the user asks for


def test_pins_are_obeyed() -> None:
    model = model_of("lenet5", 4)
    linear = [layer.name for layer in model.graph.layers if ".linear." in layer.op]
    convolutions = [layer.name for layer in model.graph.layers if ".conv2d." in layer.op]
    pins = {linear[0]: Cut.parse("c2"), convolutions[1]: Cut.parse("n2h2"), linear[-1]: Cut()}
    found = find(model, pins=pins)
    assert {name: found.price.cuts[name] for name in pins} == pins
    assert found.fixed == ()
    assert found.why[linear[0]] is None  # it has no other
    assert found.why[linear[1]] is not None
    free = find(model)
    assert free.bound <= found.bound


def test_a_pattern_pins_all_that_match_and_a_later_one_wins() -> None:
    model = model_of("lenet5", 2)
    linear = [layer.name for layer in model.graph.layers if ".linear." in layer.op]
    found = find(model, pins={"*": Cut.parse("n2"), linear[1]: Cut.parse("c2")})
    assert {name: str(cut) for name, cut in found.price.cuts.items() if cut != Cut.parse("n2")} == {linear[1]: "c2"}


def test_a_pin_that_matches_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"pin 'nothing\.\*' matches no layer"):
        find(model_of("chain", 2), pins={"nothing.*": Cut.parse("n2")})


@pytest.mark.parametrize("net", ["lenet5", "residual"])
def test_a_memory_limit_is_kept(net: str) -> None:
    model = model_of(net, 4)
    free = find(model)
    least = min(one.peak for one in (*free.fixed, *free.candidates))
    for limit in (free.price.peak, (free.price.peak + least) // 2, least):
        assert find(model, memory=limit).price.peak <= limit


def test_an_impossible_memory_is_refused_with_sizes() -> None:
    with pytest.raises(PlanError) as caught:
        find(model_of("chain", 2), memory=1000)
    message = str(caught.value)
    assert "2 ranks" in message
    assert "1,000 bytes" in message
    assert "smallest found needs" in message
    with pytest.raises(PlanError, match="at most 1,000 bytes"):  # also where no fixed strategy stands beside it
        find(model_of("chain", 2), memory=1000, pins={"*": Cut.parse("n2")})


# The paper's claim


@cache
def zoo_graph(net: str) -> LayerGraph:
    pixels = {"inception_v3": 96, "alexnet": 96}.get(net, 64)
    return capture(build(net, input=(3, pixels, pixels)), torch.zeros(2, 3, pixels, pixels))


def between(stages: tuple[Stage, ...]) -> set[tuple[int, int]]:
    maker = {op.layer.name: index for index, stage in enumerate(stages) for op in stage.ops}
    return {(maker[value], index) for index, stage in enumerate(stages) for _, value in stage.reads if value in maker}


@pytest.mark.parametrize("net", ["alexnet", "vgg16", "inception_v3", "resnet18", "resnet50"])
def test_stages_of_the_papers_networks_reduce_to_two(net: str) -> None:
    stages = stages_of(zoo_graph(net), 2)
    assert reduce_by_two_rules(len(stages), between(stages)) == 2
