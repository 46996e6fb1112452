"""How a step's linear layers are divided into laps: which samples, what is sent, what is refused. Integers only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import zoo
from shoal.errors import PlanError
from shoal.execution.laying import capture_modes
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.lowering.laps import LappedStep, Scheme, lap_samples, lapped_step
from shoal.lowering.program import Fetch, Program
from shoal.partition import Cut, Span
from shoal.plan import Plan
from shoal.planning import resolve
from shoal.planning.step_memory import lapped_memories, step_memories

SCHEMES = get_args(Scheme)


def held_by(shares: Sequence[int]) -> list[Span]:
    return [Span(sum(shares[:rank]), sum(shares[: rank + 1])) for rank in range(len(shares))]


@given(st.sampled_from(SCHEMES), st.integers(1, 9), st.integers(1, 70))
def test_every_sample_is_in_one_lap(scheme: Scheme, ranks: int, batch: int) -> None:
    held = held_by(even_shares(batch, ranks))
    laps = lap_samples(held, scheme)
    seen = [sample for lap in laps for span in lap for sample in range(span.start, span.stop)]
    assert sorted(seen) == list(range(batch))
    assert all(span & own == span for lap in laps for span, own in zip(lap, held, strict=True) if len(span))


@given(st.integers(1, 9), st.integers(1, 70))
def test_one_sends_in_each_lap_of_b(ranks: int, batch: int) -> None:
    laps = lap_samples(held_by(even_shares(batch, ranks)), "b")
    assert [[rank for rank, span in enumerate(lap) if len(span)] for lap in laps] == [[r] for r in range(len(laps))]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
def test_all_send_alike_in_each_lap_of_c(shares: list[int]) -> None:
    """Also of unequal shares, a rank's laps, and all laps, differ by one sample at most."""
    laps = lap_samples(held_by(shares), "c")
    sizes = [sum(map(len, lap)) for lap in laps]
    assert max(sizes) - min(sizes) <= 1
    assert len(laps) == min(len(shares), sum(shares))
    if len(laps) == len(shares):
        for of_rank in zip(*laps, strict=True):
            assert max(map(len, of_rank)) - min(map(len, of_rank)) <= 1


def stepped(
    model: nn.Module, batch: int, ranks: int, scheme: Scheme, *, loss: Any = F.cross_entropy, **options: Any
) -> LappedStep:
    shape = options.pop("shape", (3, 64, 64))
    captured = capture_modes(model, torch.zeros(batch, *shape), loss, options.pop("target", None))
    graph = captured.graphs[True]
    return lapped_step(
        graph,
        resolve("owt", graph, ranks).cuts,
        Boundary(options.pop("io", "share"), ranks),
        options.pop("shares", even_shares(batch, ranks)),
        scheme,
        losses=captured.tail is not None and captured.tail.mean,
        steps=options.pop("steps", False),
        learning=[name for name, state in captured.states.items() if state.requires_grad],
    )


def feature_moves(program: Program, features: Sequence[str]) -> list[tuple[int, int, int]]:
    """(from, to, elements) of what other ranks send of the features."""
    return [
        (move.src, move.dst, move.elements)
        for fetch in program.instructions
        if isinstance(fetch, Fetch) and fetch.value in features
        for move in fetch.moves
        if move.src != move.dst
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_features_are_sent_as_often_as_the_paper_says(scheme: Scheme, ranks: int) -> None:
    """Each worker sends B/K x F numbers to the K-1 others, in (b) in one lap, in (c) 1/K of them in each."""
    batch, width = 16, 256 * 6 * 6
    with torch.device("meta"):
        model = zoo.build("alexnet", input=(3, 64, 64), classes=10)
    step = stepped(model, batch, ranks, scheme)
    assert len(step.laps) == ranks
    total = [0] * ranks
    for number, lap in enumerate(step.laps):
        moves = feature_moves(lap.program, step.features)
        senders = {src for src, _, _ in moves}
        assert senders == ({number} if scheme == "b" else set(range(ranks)))
        assert {elements for _, _, elements in moves} == {batch // ranks * width // (1 if scheme == "b" else ranks)}
        for src, _, elements in moves:
            total[src] += elements
        (fetch,) = [f for f in lap.program.instructions if isinstance(f, Fetch) and f.value in step.features]
        assert all(tile is not None and tile.shape == (batch // ranks, width) for tile in fetch.tiles)
    assert total == [batch // ranks * width * (ranks - 1)] * ranks
    assert not feature_moves(step.front, step.features)


class Net(nn.Module):
    """Some layers, two linear ones, and something between them."""

    def __init__(self, between: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.conv, self.fc1, self.between, self.fc2 = nn.Conv2d(3, 4, 3), nn.Linear(16, 8), between, nn.Linear(8, 5)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.conv(x), 2).flatten(1)
        if self.tied:
            x = x + self.fc1.bias.sum()
        result: Tensor = self.fc2(self.between(self.fc1(x)))
        return result


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


MIXING = {
    "batch norm": (nn.BatchNorm1d(8), "a sample's result depends on the others"),
    "softmax over samples": (Called(lambda x: x.softmax(0)), "samples meet"),
    "mean over samples": (
        Called(lambda x: x - x.mean(0, keepdim=True)),
        "rows of its result|other samples|samples meet",
    ),
    "sorted samples": (Called(lambda x: x.sort(0).values), "nothing is known"),
    "as many as samples": (Called(lambda x: x / x.shape[0]), "depends on the number of samples"),
    "mixed by a view": (Called(lambda x: x.reshape(8, -1).relu().reshape(-1, 8)), "rows"),
    "turned": (Called(lambda x: (x @ x.t()) @ x), "other samples|nothing is known|cut by sample|rows"),
}


@pytest.mark.parametrize("case", MIXING)
def test_a_layer_in_which_samples_meet_is_refused_by_name(case: str) -> None:
    between, why = MIXING[case]
    with pytest.raises(PlanError, match=rf"layer 'between.*cannot run in laps: .*({why})"):
        stepped(Net(between), 6, 2, "b", shape=(3, 9, 9))


@pytest.mark.parametrize(
    "between", [nn.Dropout(), nn.LayerNorm(8), nn.Softmax(1), nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid())]
)
def test_layers_of_each_sample_alone_run_in_laps(between: nn.Module) -> None:
    step = stepped(Net(between), 6, 2, "c", shape=(3, 9, 9))
    assert [len(lap.samples) for lap in step.laps] == [3, 3]


def test_what_has_no_end_of_its_own_is_refused() -> None:
    with pytest.raises(PlanError, match="the loss must be a part of the network"):
        stepped(Net(nn.ReLU()), 6, 2, "b", shape=(3, 9, 9), loss=None)
    with pytest.raises(PlanError, match="the loss must be a part of the network"):
        stepped(Net(nn.ReLU()), 6, 2, "b", shape=(3, 9, 9), loss=lambda scores, y: scores.square().mean() + 0 * y.sum())
    with pytest.raises(PlanError, match="io='tile'"):
        stepped(Net(nn.ReLU()), 6, 2, "b", shape=(3, 9, 9), io="tile")
    with pytest.raises(PlanError, match="no linear layer"):
        stepped(nn.Sequential(nn.Conv2d(3, 5, 9), nn.Flatten()), 6, 2, "b", shape=(3, 9, 9))


def test_a_parameter_of_front_and_linear_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'fc1\.bias'"):
        stepped(Net(nn.ReLU(), tied=True), 6, 2, "b", shape=(3, 9, 9))


def test_weights_that_several_ranks_hold_do_not_step_in_laps() -> None:
    model = Net(nn.ReLU())
    nn.utils.parametrizations.weight_norm(model.fc1)
    stepped(model, 6, 2, "b", shape=(3, 9, 9))
    with pytest.raises(PlanError, match=r"several ranks hold the same part of 'fc1\.parametrizations"):
        stepped(model, 6, 2, "b", shape=(3, 9, 9), steps=True)


def test_a_plan_file_says_how_laps_run(tmp_path: Path) -> None:
    plan = Plan(name="mine", ranks=2, layers=(("*", Cut.parse("n2")),), laps="c1")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text(plan.to_json().replace('"c1"', '"d"'))
    with pytest.raises(PlanError, match="does not have the fields of a plan"):
        Plan.load(tmp_path / "plan.json")


def test_memory_of_laps_is_less_by_the_features_that_are_not_there() -> None:
    """Nobody keeps those of all ranks for backward; what a lap handles is no more than a layer does without laps."""
    net = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), nn.Flatten(), nn.Linear(9216, 64), nn.Linear(64, 5))
    ranks, batch = 8, 64
    step = stepped(net, batch, ranks, "c", shape=(3, 48, 48))
    graph = capture_modes(net, torch.zeros(batch, 3, 48, 48), F.cross_entropy).graphs[True]
    shares = even_shares(batch, ranks)
    program = step_program(graph, resolve("owt", graph, ranks).cuts, Boundary("share", ranks), shares, losses=True)
    itemsize = dict.fromkeys([*graph.specs, *graph.states], 4)
    every = batch * 9216 * 4
    for whole, laps in zip(
        step_memories(program, range(ranks), itemsize),
        lapped_memories(program, step, range(ranks), itemsize),
        strict=True,
    ):
        assert whole.parameters == laps.parameters
        assert whole.kept - laps.kept >= every
        assert laps.working <= whole.working
