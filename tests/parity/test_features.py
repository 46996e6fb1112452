"""What a training loop uses beyond one plain step, on real processes, against one device."""

from pathlib import Path

import pytest
import torch

from shoal.partition import Cut
from shoal.plan import Plan
from tests.conftest import RunOnRanks
from tests.parity import features

PLANS = ["data", "model", "2x2", "spatial"]


@pytest.mark.parametrize("plan", ["data", "owt", "model", "spatial"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.1, True)])
def test_loss_on_cut_scores(on_ranks: RunOnRanks, plan: str, smoothing: float, weighted: bool) -> None:
    on_ranks(2, features.loss_on_cut_scores, plan, smoothing, weighted)


def test_scores_are_never_gathered_for_the_loss(on_ranks: RunOnRanks) -> None:
    """Under owt the loss itself sends two numbers per sample and the targets, whatever the number of classes."""
    few, many = (on_ranks(2, features.bytes_of_loss, classes) for classes in (6, 600))
    assert few == many


@pytest.mark.parametrize("plan", PLANS)
def test_gradient_accumulation(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(4, features.accumulation, plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(on_ranks: RunOnRanks, plan: str, norm_type: float) -> None:
    on_ranks(4, features.clipping, plan, norm_type)


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_layers(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(4, features.freezing, plan)


SAMPLES_ON_NEIGHBOURS = Plan(name="c2n2", ranks=4, layers=(("*", Cut.parse("c2n2")),))
"""Ranks 0 and 1 hold the same channels; a single sample leaves ranks 1 and 3 without a part."""


@pytest.mark.parametrize("plan", [*PLANS, pytest.param(SAMPLES_ON_NEIGHBOURS, id="c2n2")])
def test_other_batch_sizes_and_evaluation(on_ranks: RunOnRanks, plan: str | Plan) -> None:
    on_ranks(4, features.other_batches, plan)


def test_a_plan_that_is_searched_here(on_ranks: RunOnRanks, tmp_path: Path) -> None:
    on_ranks(2, features.searched, str(tmp_path / "cache"))
    assert {path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()} == {"timings", "plan", "race"}


@pytest.mark.parametrize(("plan", "other"), [("data", "model"), ("model", "spatial"), ("2x2", "data")])
def test_state_under_another_plan(on_ranks: RunOnRanks, plan: str, other: str) -> None:
    on_ranks(4, features.states, plan, other)


@pytest.mark.parametrize("plan", ["data"])
def test_local_batch_norm_is_ddps(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(2, features.local_batch_norm, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_autocast(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(4, features.autocast, plan)


def test_dropout_does_not_depend_on_the_plan(on_ranks: RunOnRanks) -> None:
    expected = on_ranks(1, features.dropout, "data")[0]
    assert not torch.equal(expected[0], expected[1])  # another mask in each step
    for plan in PLANS:
        for outputs in on_ranks(4, features.dropout, plan):
            torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-12)


def test_refusals_leave_the_ranks_usable(on_ranks: RunOnRanks) -> None:
    by_rank = on_ranks(2, features.refusals)
    for messages in by_rank:
        assert "inputs of [(2, 3, 11, 9)] against [(2, 2, 11, 9)]" in messages[0]
        for message, word in zip(messages[1:], ["target", "'conv1.weight'", "'3x5'", "'half'", "twice"], strict=True):
            assert word in message


@pytest.mark.parametrize("plan", PLANS)
def test_copies_of_a_shard_stay_equal(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(4, features.copies_stay_equal, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_unused_results_and_shared_inputs(on_ranks: RunOnRanks, plan: str) -> None:
    on_ranks(2 if plan != "2x2" else 4, features.two_heads, plan)


@pytest.mark.parametrize("plan", ["data", "model"])
def test_a_network_laid_anew_before_backward_is_refused(on_ranks: RunOnRanks, plan: str) -> None:
    for message in on_ranks(2, features.laid_anew_before_backward, plan):
        assert "was laid over the ranks anew between this forward pass and its backward pass" in message
