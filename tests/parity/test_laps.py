"""Linear layers in laps, on real processes: Krizhevsky's schemes (b) and (c) beside (a) and one device."""

from pathlib import Path

import pytest

from tests.conftest import RunOnRanks
from tests.parity import lap_cases

SCHEMES = ["owt", "owt:b", "owt:c"]


@pytest.mark.parametrize("plan", SCHEMES)
@pytest.mark.parametrize(
    ("net", "ranks", "samples"),
    [
        *(("like alexnet", ranks, samples) for ranks, samples in [(2, 4), (2, 5), (4, 16), (4, 11), (4, 3)]),
        *((net, ranks, samples) for net in ("lenet5", "two paths") for ranks, samples in [(2, 5), (4, 11)]),
    ],
)
def test_a_step_is_one_devices(on_ranks: RunOnRanks, net: str, plan: str, ranks: int, samples: int) -> None:
    """Dropout's masks, uneven laps, fewer samples than ranks, three optimizer steps."""
    on_ranks(ranks, lap_cases.compare_laps, net, samples, plan)


@pytest.mark.parametrize("plan", ["owt:b", "owt:c"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"weighted": True}, id="weights of classes, ignored samples, smoothing"),
        pytest.param({"shares": (6, 1, 0, 3)}, id="unequal shares"),
        pytest.param({"io": "whole"}, id="whole"),
        pytest.param({"io": "whole", "weighted": True}, id="whole and weighted"),
        pytest.param({"recompute": True}, id="recompute"),
        pytest.param({"state": "cut"}, id="optimizer's state cut"),
    ],
)
def test_a_step_is_one_devices_however_it_is_asked_for(
    on_ranks: RunOnRanks, plan: str, options: dict[str, object]
) -> None:
    on_ranks(4, lap_cases.compare_laps, "like alexnet", 10, plan, **options)


@pytest.mark.parametrize("scheme", ["b", "c"])
@pytest.mark.parametrize(
    ("ranks", "samples", "optimizer", "weighted", "slower"),
    [
        (2, 6, "sgd", False, False),
        (2, 5, "adamw", False, True),
        (4, 11, "sgd", True, True),
        (4, 16, "adamw", True, False),
        (4, 3, "sgd", False, True),
    ],
)
def test_weights_that_step_after_every_lap(
    on_ranks: RunOnRanks, scheme: str, ranks: int, samples: int, optimizer: str, weighted: bool, slower: bool
) -> None:
    on_ranks(ranks, lap_cases.two_batch_sizes, scheme, samples, optimizer, weighted, slower)


@pytest.mark.parametrize("plan", ["owt:b", "owt:c"])
def test_a_script_around_laps(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(4, lap_cases.around, plan)


@pytest.mark.parametrize("which", ["0", "4 6", "0 4", "0 6"])
def test_frozen_layers(on_ranks: RunOnRanks, which: str) -> None:
    on_ranks(2, lap_cases.frozen, "owt:c", which)


def test_hooks_see_each_gradient(on_ranks: RunOnRanks) -> None:
    on_ranks(2, lap_cases.hooks_see_each_gradient)


def test_autocast(on_ranks: RunOnRanks) -> None:
    on_ranks(2, lap_cases.autocast, "owt:b")


def test_a_plan_file_keeps_laps(on_ranks: RunOnRanks, tmp_path: Path) -> None:
    on_ranks(2, lap_cases.as_a_file, str(tmp_path / "plan.json"))


def test_refusals_are_the_same_on_all_ranks(on_ranks: RunOnRanks) -> None:
    one, other = on_ranks(2, lap_cases.refusals)
    assert one == other
    multiplied, no_laps, nobody_steps, kept, no_loss = one
    assert "rank 0 multiplies its loss by 1 before backward, and rank 1 by 2" in multiplied
    assert "under plan 'owt:c' all weights step once a step" in no_laps
    assert "rank 1 has not said what steps the linear layers' weights" in nobody_steps
    assert "inside no_sync" in kept
    assert "the loss must be a part of the network" in no_loss
