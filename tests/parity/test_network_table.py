"""The comparison behind docs/networks.md: what is exact, refused and a defect. Needs none of the other packages."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from scripts.network_case import RANDOM, Answer, run_case
from scripts.network_list import NETWORKS, Network
from scripts.network_table import Cell, judged, key_of, render
from tests.parity.conftest import RunOnRanks


class Small(nn.Module):
    """A convolution, batch norm and a classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.out = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        y: Tensor = self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y


class Shifted(Small):
    """One device has another bias than what is captured, by what no network should look at."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores, shifted."""
        return super().forward(x) + (0 if isinstance(x, FakeTensor) else 1)


class Deciding(Small):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores of one of two."""
        return super().forward(x if x.sum() > 0 else -x)


def network(kind: type[nn.Module]) -> Network:
    return Network(kind.__name__, f"{__name__}:{kind.__name__}", 13)


@pytest.mark.parametrize("plan", ["data", "model", "spatial", RANDOM])
def test_exact(on_ranks: RunOnRanks, plan: str) -> None:
    cell = judged(on_ranks(2, run_case, network(Small), plan))
    assert cell.outcome == "exact"
    assert cell.difference < 1e-12


def test_another_number_is_a_defect(on_ranks: RunOnRanks) -> None:
    cell = judged(on_ranks(2, run_case, network(Shifted), "data"))
    assert cell.outcome == "defect"
    assert cell.text.startswith(("output differs by", "evaluated output differs by"))


def test_a_refusal_is_told(on_ranks: RunOnRanks) -> None:
    cell = judged(on_ranks(2, run_case, network(Deciding), "data"))
    assert cell.outcome == "refused"
    assert cell.text.startswith("CaptureError: the network Deciding cannot be captured")


def test_ranks_that_disagree_are_a_defect() -> None:
    assert judged([Answer("exact"), Answer("refused", text="PlanError: no")]).outcome == "defect"
    assert judged([Answer("refused", text="gone", peer=True)] * 2).outcome == "defect"
    told = judged([Answer("refused", text="gone", peer=True), Answer("refused", text="PlanError: no")])
    assert (told.outcome, told.text) == ("refused", "PlanError: no")


def test_networks_have_names_of_their_own() -> None:
    keys = [key_of(network, "data") for network in NETWORKS]
    assert len(set(keys)) == len(keys)
    assert len({network.family for network in NETWORKS}) >= 40


def test_the_file_counts_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.network_table.version", lambda name: f"1 of {name}")
    first, second = NETWORKS[:2]
    text = render({
        key_of(first, "data"): Cell("exact", 2e-15),
        key_of(first, "model"): Cell("refused", text="PlanError: no"),
        key_of(second, "data"): Cell("defect", text="hung"),
    })  # fmt: skip
    assert "2 families, 2 networks, 3 cells: 1 exact, 1 refused, 1 defects" in text
    assert "| 2e-15 | refused (1) |" in text
    assert "| DEFECT (2) |" in text
    assert text.endswith("1. PlanError: no\n2. hung\n")
