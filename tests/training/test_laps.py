"""The trainer under plans whose linear layers run in laps."""

from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.training.job import load_whole
from tests.cli.conftest import Shoal
from tests.cli.conftest import shoal_here as shoal_here
from tests.cli.conftest import tiny as tiny
from tests.cli.test_refusals import refused
from tests.conftest import RunOnRanks
from tests.training import jobs

KINDS: list[dict[str, Any]] = [
    {"optimizer": "adam", "clip": 0.1, "accumulate": 2, "ema": 0.9},
    {"optimizer": "sgd", "optimizer_options": {"nesterov": True}, "clip": 0.05},
]


@pytest.mark.parametrize("plan", ["owt:b", "owt:c cut"])
def test_ranks_take_one_devices_steps(plan: str, on_ranks: RunOnRanks) -> None:
    for kind, (losses, states) in zip(KINDS, on_ranks(2, jobs.beside_one_device, plan, KINDS)[0], strict=True):
        assert losses < 1e-9, kind
        assert states < 1e-9, kind


@pytest.mark.parametrize("plan", ["owt:b1", "owt:c1"])
def test_linear_weights_step_after_every_lap_at_a_part_of_the_rate(plan: str, on_ranks: RunOnRanks) -> None:
    for losses, states in on_ranks(2, jobs.beside_two_batch_sizes, plan):
        assert losses < 1e-9
        assert states < 1e-9


REFUSED = [
    ({"clip": 0.5}, "clip = 0.5 does not go with plan 'owt:c1'"),
    ({"accumulate": 2}, "accumulate = 2 does not go with plan 'owt:c1'"),
    ({"replicas": 2, "workers": 4, "exchange": "downpour"}, "replicas = 2 does not go with plan 'owt:c1'"),
    ({"amp": "fp16", "plan": "owt:b"}, "amp = 'fp16' scales the loss after plan 'owt:b'"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=["clip", "accumulate", "replicas", "fp16"])
def test_settings_that_laps_cannot_honour(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_whole(jobs.settings(**{"plan": "owt:c1", "workers": 2, **more}))


def test_settings_are_refused_on_the_command_line(shoal_here: Shoal, tiny: str) -> None:
    net = ["--data", tiny, "--model", "lenet5", "--batch", "8", "--workers", "2", "--out", "out"]
    assert (
        "use owt:b, whose weights step once"
        in refused(shoal_here, "train", *net, "--plan", "owt:b1", "--clip", "1").lower()
    )
    assert "there is no plan 'owt:d'" in refused(shoal_here, "train", *net, "--plan", "owt:d")


def test_what_the_cost_model_does_not_know_is_refused(shoal_here: Shoal) -> None:
    net = ["--model", "lenet5", "--batch", "16", "--cluster", "titan-4"]
    assert "which the cost model does not price" in refused(shoal_here, "simulate", "owt:b", *net)


def test_what_one_device_does_not_do_is_not_verified(shoal_here: Shoal) -> None:
    said = refused(shoal_here, "verify", "--model", "lenet5", "--plan", "owt:c1", "--workers", "1")
    assert "do not train as one device does" in said
