"""`shoal.verify`: sound plans pass, a broken rule fails with its layer named, what cannot be compared is refused."""

import pytest
import torch

import shoal
from shoal import zoo
from tests.conftest import RunOnRanks
from tests.parity import verify_cases as cases

PLANS = ["data", "model", "owt", "spatial"]
SOME = {("lenet5", "data"), ("alexnet", "owt"), ("acoustic", "model"), ("unet", "spatial"), ("lenet5", "2x2")}


@pytest.mark.parametrize("plan", PLANS)
def test_a_sound_plan_passes(on_ranks: RunOnRanks, plan: str) -> None:
    first, second = on_ranks(2, cases.verdict, plan)
    assert first == second  # one verdict for all ranks
    assert first.passed, first.culprit
    assert first.culprit is None
    assert first.worst < 1e-12
    rows = {row.layer: row for row in first.rows}
    for layer in ("conv1", "bn1", "conv2", "side", "fc"):
        row = rows[layer]
        assert None not in (row.output, row.output_gradient, row.parameter_gradient, row.after_steps), row
    assert rows["bn1"].buffers is not None
    assert rows["unused.weight"].after_steps == 0.0
    assert {"drop", "drop2d"} <= rows.keys()
    assert None not in (first.output, first.loss, first.input_gradient, first.evaluation)


def test_with_the_loss_laid_over_the_ranks_too(on_ranks: RunOnRanks) -> None:
    verdict = on_ranks(2, cases.verdict, "owt", loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1))[0]
    assert verdict.passed, verdict.culprit
    assert verdict.output is None


def test_with_activations_computed_twice(on_ranks: RunOnRanks) -> None:
    verdict = on_ranks(2, cases.verdict, "spatial", recompute=True)[0]
    assert verdict.passed, verdict.culprit


def test_single_precision_has_its_own_tolerance(on_ranks: RunOnRanks) -> None:
    verdict = on_ranks(2, cases.verdict, "spatial", dtype=torch.float32)[0]
    assert verdict.passed, verdict.culprit
    assert verdict.worst > 1e-9


@pytest.mark.parametrize("plan", [*PLANS, "2x2"])
@pytest.mark.parametrize("net", zoo.names())
def test_the_zoo(on_ranks: RunOnRanks, net: str, plan: str, thorough: bool) -> None:
    """What `shoal verify --model NET --plan PLAN` does, at the sizes that it chooses."""
    if not thorough and (net, plan) not in SOME:
        pytest.skip("the parity suite has much of this; all of it with --thorough")
    verdict = on_ranks(4 if plan == "2x2" else 2, cases.of_command, model=net, plan=plan)[0]
    assert verdict.passed, verdict.culprit
    assert verdict.worst < 1e-9


@pytest.mark.parametrize(
    ("breakage", "layer", "plan", "fault"),
    [
        ("shifted_halo", "conv3", "spatial", "output"),
        ("sum_left_out", "bn1", "data", "output"),
        ("sum_left_out", "bn2", "spatial", "output"),
        ("wrong_parameter_gradient", "conv2", "model", "parameter gradient"),
        ("wrong_input_gradient", "conv1", "spatial", "input gradient"),  # of the network's own input
        ("wrong_input_gradient", "conv2", "data", "input gradient"),  # its input has three readers
        ("wrong_input_gradient", "side", "spatial", "input gradient"),  # the same value's second reader
        ("wrong_input_gradient", "conv3", "model", "input gradient"),
        ("wrong_product", "fc", "owt", "input gradient"),
        ("wrong_statistics", "bn2", "data", "buffers"),
        ("wrong_evaluation", "bn1", "spatial", "evaluation"),
        ("second_step_forgotten", "conv1", "data", "steps"),
        ("wrong_capture", "conv2", "data", "capture"),
        ("wrong_capture_of_evaluation", "fc", "spatial", "capture"),
    ],
)
def test_a_broken_rule_is_named(on_ranks: RunOnRanks, breakage: str, layer: str, plan: str, fault: str) -> None:
    verdict = on_ranks(2, cases.broken, breakage, layer, plan)[0]
    assert not verdict.passed
    assert verdict.culprit is not None
    assert (verdict.culprit.layers, verdict.culprit.fault) == ((layer,), fault)
    assert f"layer '{layer}'" in str(verdict.culprit)


def test_one_of_the_layers_that_share_a_wrong_gradient(on_ranks: RunOnRanks) -> None:
    verdict = on_ranks(2, cases.broken, "wrong_parameter_gradient", "tied", "data")[0]
    assert verdict.culprit.layers == ("side", "tied")
    assert verdict.culprit.fault == "parameter gradient"


def test_statistics_of_its_own_share_are_not_one_devices(on_ranks: RunOnRanks) -> None:
    verdict = on_ranks(2, cases.verdict, "data", batch_norm="local")[0]
    assert verdict.culprit.layers == ("bn1",)
    assert verdict.culprit.mixes_samples
    assert on_ranks(2, cases.verdict, "model", batch_norm="local")[0].passed


def test_processes_of_its_own() -> None:
    """Without a process group `workers` are started for it; what cannot travel to them is refused."""
    net = cases.network()
    verdict = shoal.verify(net, cases.SHAPE, "model", workers=2, steps=1)
    assert (verdict.passed, verdict.workers, verdict.model) == (True, 2, "Net")
    with pytest.raises(shoal.errors.ConfigError, match="other processes"):
        shoal.verify(net, cases.SHAPE, workers=2, loss=lambda scores, y: scores.sum() * y.sum())


def test_refusals_leave_the_ranks_usable(on_ranks: RunOnRanks) -> None:
    words = ["'3x5'", "float16", "(4, 2, 13, 11)", "tuple", "random", "finite", "workers=3", "rank 1", "steps=0"]
    for messages in on_ranks(2, cases.refusals):
        for message, word in zip(messages, words, strict=True):
            assert word in message
