"""Named plans and plan files on small networks: the cut that each layer gets, and what is refused and how."""

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.capturing import capture
from shoal.errors import PlanError
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.graph import LayerGraph
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.planning import resolve
from shoal.transport import Transport
from shoal.transport.memory import run_ranks


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3))
        self.classifier = nn.Sequential(nn.Linear(4 * 6 * 6, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return result


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.bn1(self.conv1(x)))
        if self.training:
            y = y * torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype).bernoulli_(0.5)
        y += x
        result: Tensor = self.fc(self.drop(torch.flatten(self.pool(y), 1)))
        return result


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(1, 2, 1)
        self.right = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(self.conv(x).sort(1).values)
        return result


NETS: Mapping[str, tuple[nn.Module, tuple[int, ...]]] = {
    "lenet": (LeNet(), (4, 1, 16, 16)),
    "residual": (Residual(), (4, 1, 8, 8)),
    "branches": (Branches(), (4, 1, 8, 8)),
    "volume": (nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.MaxPool3d(2)), (4, 1, 6, 8, 8)),
    "sound": (nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AvgPool1d(2)), (4, 1, 18)),
    "twice": (Twice(), (4, 1, 8, 8)),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def graph_of(net: str) -> LayerGraph:
    model, shape = NETS[net]
    return capture(model, torch.zeros(shape))


@cache
def captured(net: str) -> Captured:
    model, shape = NETS[net]
    return capture_modes(model, shape)


def cuts_of(plan: str | Plan, net: str, ranks: int) -> dict[str, str]:
    return {name: str(cut) for name, cut in resolve(plan, graph_of(net), ranks).cuts.items()}


def lines(ranks: int, **layers: str) -> Plan:
    named = {name.replace("__", ".*"): cut for name, cut in layers.items()}
    return Plan(name="mine", ranks=ranks, layers=tuple((name, Cut.parse(cut)) for name, cut in named.items()))


# Named plans


def test_data_cuts_every_layer_by_sample() -> None:
    assert set(cuts_of("data", "lenet", 4).values()) == {"n4"}
    assert set(cuts_of("data", "volume", 2).values()) == {"n2"}
    assert set(cuts_of("data", "lenet", 1).values()) == {"1"}


def test_model_cuts_every_layer_by_channel() -> None:
    assert cuts_of("model", "lenet", 3) == {
        "features.0": "c3", "features.1": "c3", "features.2": "c3", "features.3": "c3", "flatten": "c3",
        "classifier.0": "c3", "classifier.1": "c3", "classifier.2": "c3",
    }  # fmt: skip


def test_owt_cuts_by_sample_and_from_the_first_linear_layer_by_channel() -> None:
    assert cuts_of("owt", "lenet", 3) == {
        "features.0": "n3", "features.1": "n3", "features.2": "n3", "features.3": "n3", "flatten": "n3",
        "classifier.0": "c3", "classifier.1": "c3", "classifier.2": "c3",
    }  # fmt: skip
    assert set(cuts_of("owt", "branches", 2).values()) == {"n2"}, "without a linear layer it is data"


def test_spatial_cuts_height_and_width_and_samples_where_there_is_no_space() -> None:
    assert cuts_of("spatial", "lenet", 4) == {
        "features.0": "h2w2", "features.1": "h2w2", "features.2": "h2w2", "features.3": "h2w2", "flatten": "n4",
        "classifier.0": "n4", "classifier.1": "n4", "classifier.2": "n4",
    }  # fmt: skip
    assert set(cuts_of("spatial", "volume", 2).values()) == {"h2"}
    assert set(cuts_of("spatial", "sound", 3).values()) == {"w3"}
    assert cuts_of("spatial", "residual", 6)["conv1"] == "h3w2", "as square a grid as the ranks allow"


def test_a_hybrid_cuts_by_sample_and_channel() -> None:
    cuts = cuts_of("2x2", "lenet", 4)
    assert set(cuts.values()) == {"n2c2"}
    assert cuts_of("1x3", "lenet", 3) == cuts_of("model", "lenet", 3)
    assert cuts_of("3x1", "lenet", 3) == cuts_of("data", "lenet", 3)


def test_a_residual_network_and_branches() -> None:
    assert cuts_of("model", "residual", 2) == dict.fromkeys(
        ["stem", "conv1", "bn1", "relu", "mul", "add", "pool", "flatten", "drop", "fc"], "c2"
    ) | {"empty": "1", "bernoulli": "1"}
    assert cuts_of("model", "branches", 2) == {"left": "c2", "right.0": "c2", "right.1": "c2", "cat": "c2"}


def test_a_layer_too_small_takes_the_largest_cut_that_fits() -> None:
    resolved = resolve("model", graph_of("lenet"), 5)
    assert {name: str(cut) for name, cut in resolved.smaller.items()} == {
        "features.3": "c4",
        "flatten": "c4",
        "classifier.2": "c3",
    }
    assert str(resolved.cuts["classifier.0"]) == "c5"
    assert {str(cut) for cut in resolve("data", graph_of("lenet"), 6).smaller.values()} == {"n4"}
    assert str(resolve("spatial", graph_of("lenet"), 64).smaller["features.3"]) == "h6w6"
    assert cuts_of("spatial", "residual", 4)["pool"] == "h2w2", "a mean over space is cut as what it reads"
    assert cuts_of("2x4", "lenet", 8)["classifier.2"] == "n2c3"


def test_smaller_cuts_and_whole_layers_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    lenet, twice = captured("lenet"), captured("twice")
    with caplog.at_level(logging.WARNING, "shoal"):
        run_ranks(5, lambda transport: lay(lenet, "model", transport, seed=0, bucket_bytes=1 << 16))
    assert [record.message for record in caplog.records if record.name == "shoal"] == [
        "plan 'model': 3 of 8 layers are too small for it and take the largest cut that fits "
        "(features.3 c4, flatten c4, classifier.2 c3)"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shoal"):
        run_ranks(2, lambda transport: lay(twice, "data", transport, seed=0, bucket_bytes=1 << 16))
    assert [record.message for record in caplog.records if record.name == "shoal"] == [
        "no rule for sort: 1 layers run whole on every rank"
    ]


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ("2x3", 4, r"plan '2x3' needs 6 ranks; there are 4.\nChoose R and G with R x G = 4."),
        ("dta", 2, r"there is no plan 'dta'.\nDid you mean 'data'\? Known: data, model, owt, spatial"),
        ("plans/none", 2, r"plan 'plans/none' cannot be read"),
        ("none.json", 2, r"plan 'none.json' cannot be read"),
    ],
)
def test_names_that_are_refused(plan: str, ranks: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(plan, graph_of("lenet"), ranks)


# Plan files


def test_the_later_line_wins() -> None:
    plan = Plan(
        name="mine",
        ranks=4,
        layers=(("*", Cut.parse("n4")), ("features.*", Cut.parse("h2w2")), ("features.3", Cut.parse("c4"))),
    )
    cuts = cuts_of(plan, "lenet", 4)
    assert cuts["features.0"] == cuts["features.2"] == "h2w2"
    assert cuts["features.3"] == "c4"
    assert cuts["flatten"] == cuts["classifier.2"] == "n4"
    last = Plan(name="mine", ranks=4, layers=(*plan.layers, ("*", Cut.parse("n4"))))
    assert set(cuts_of(last, "lenet", 4).values()) == {"n4"}
    assert [pattern for pattern, _ in last.layers] == ["features.*", "features.3", "*"]


def test_a_layer_that_no_line_names_follows_its_producer() -> None:
    assert cuts_of(lines(4, features__="h2w2", classifier__="c3"), "lenet", 4)["flatten"] == "1"
    cuts = cuts_of(lines(2, conv1="h2", fc="k2"), "residual", 2)
    assert cuts["stem"] == "n2", "nobody produces the input, so it is cut as the samples come"
    assert cuts["bn1"] == cuts["relu"] == cuts["add"] == "h2"
    assert cuts["fc"] == "k2"
    after = cuts_of(Plan(name="mine", ranks=2, layers=(("classifier.0", Cut.parse("k2")),)), "lenet", 2)
    assert after["classifier.1"] == "c2", "after a sum over cut channels every rank has some channels"


def test_lines_for_a_loss_are_left_out_where_there_is_none() -> None:
    """As in the plans that `shoal plan` and training write, for `shoal verify` and a loop of one's own."""
    written = Plan(name="mine", ranks=2, layers=(("*", Cut.parse("n2")), ("loss.cross_entropy_loss", Cut.parse("c2"))))
    assert set(cuts_of(written, "lenet", 2).values()) == {"n2"}


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        (
            lines(4, classifier__="h2"),
            4,
            r"layer 'classifier.0' \(aten.linear.default, output \(4, 12\)\) cannot be cut h2.\n"
            r"Cuts that fit it: n up to 4, c up to 12, k up to 144.",
        ),
        (lines(8, features__="n8"), 8, r"'features.0' .* cannot be cut n8.\nCuts that fit it: n up to 4, "),
        (
            lines(4, clasifier__="c4"),
            4,
            r"names 'clasifier.\*', which matches no layer.\nDid you mean 'classifier.\d'\?",
        ),
        (
            lines(2, features__="n2"),
            4,
            r"plan 'mine' is for 2 ranks; there are 4.\nStart 2 ranks, or make a plan for 4.",
        ),
    ],
)
def test_lines_that_are_refused(plan: Plan, ranks: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(plan, graph_of("lenet"), ranks)


def test_a_layer_without_a_rule_is_cut_by_no_line_that_names_it() -> None:
    assert cuts_of(Plan(name="mine", ranks=2, layers=(("*", Cut.parse("n2")),)), "twice", 2)["sort"] == "1"
    with pytest.raises(PlanError, match=r"'sort' .* cannot be cut n2.\nCuts that fit it: 1 only."):
        resolve(Plan(name="mine", ranks=2, layers=(("sort", Cut.parse("n2")),)), graph_of("twice"), 2)


def test_shared_weights_cannot_be_cut_in_two_ways() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(torch.relu(self.fc(x)))
            return result

    plan = Plan(name="mine", ranks=2, layers=(("fc", Cut.parse("c2")), ("fc.linear", Cut.parse("k2"))))
    shared = capture_modes(Shared(), (4, 4))
    with pytest.raises(PlanError, match=r"layers 'fc' and 'fc.linear' share 'fc.weight' .*\nGive both layers the same"):
        run_ranks(2, lambda transport: lay(shared, plan, transport, seed=0, bucket_bytes=1))


@pytest.mark.parametrize(
    ("net", "plan", "ranks"), [("residual", "2x2", 4), ("residual", "spatial", 3), ("lenet", "owt", 2)]
)
@pytest.mark.parametrize("with_loss", [False, True])
def test_a_plan_as_it_was_laid_can_be_saved_and_laid_again(
    tmp_path: Path, net: str, plan: str, ranks: int, with_loss: bool
) -> None:
    model, shape = NETS[net]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(shape[0]) % 3
    whole = capture_modes(model, shape, F.cross_entropy if with_loss else None)

    def step(transport: Transport, plan: Any) -> tuple[Plan, list[Tensor]]:
        laid = lay(whole, plan, transport, io="whole", seed=0, bucket_bytes=1 << 16)
        out = laid(x, y) if with_loss else laid(x)
        out.sum().backward()
        grads = [parameter.grad for parameter in laid.parameters() if parameter.grad is not None]
        return laid.plan, [out.detach(), laid.eval()(x).detach(), *grads]

    first = run_ranks(ranks, lambda transport: step(transport, plan))
    path = tmp_path / "plan.json"
    first[0][0].save(path)
    again = run_ranks(ranks, lambda transport: step(transport, str(path)))
    assert again[0][0] == first[0][0] == Plan.load(path)
    for (_, one), (_, other) in zip(first, again, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
