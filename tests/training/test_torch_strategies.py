"""torch's own strategies train the same job: one device's steps where they promise that, and go on bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest

from shoal.config import TrainConfig
from shoal.errors import CheckpointError, ConfigError
from shoal.training import checkpoint
from tests.conftest import RunOnRanks
from tests.training import jobs
from tests.training.test_options import KINDS

SHORT = {"epochs": 1, "batch": 128}
"""Sixteen steps: post-local SGD leaves the common steps after the first."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_take_one_devices_steps(strategy: str, on_ranks: RunOnRanks) -> None:
    kinds: list[dict[str, Any]] = copy.deepcopy(KINDS)
    for kind in kinds if strategy == "fsdp2" else ():
        kind.pop("ema", None)
    found = on_ranks(2, jobs.beside_one_device, strategy, kinds)[0]
    for kind, (losses, states) in zip(kinds, found, strict=True):
        assert losses < 1e-9, kind
        assert states < 1e-9, kind


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "post-local-sgd"])
def test_a_run_goes_on_bit_for_bit(strategy: str, tmp_path: Path, on_ranks: RunOnRanks) -> None:
    kind = {"optimizer": "adam", "clip": 0.1, **SHORT, "model_options": {"dropout": 0.5}}
    assert on_ranks(2, jobs.goes_on, strategy, tmp_path / "checkpoint.pt", kind) == [True] * 2


def test_workers_of_post_local_sgd_differ_between_means_and_their_mean_is_tested(on_ranks: RunOnRanks) -> None:
    (own, others, mean, tested), _ = on_ranks(2, jobs.post_local, SHORT)
    assert own != others
    assert mean == pytest.approx((own + others) / 2, rel=1e-12)
    assert tested == mean


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 2}, "without replicas and exchange"),
        ({"exchange": "local"}, "without replicas and exchange"),
        ({"batch_norm": "exact"}, "batch_norm = 'exact' is not what ddp does"),
        ({"recompute": True}, "recompute = True does not go with ddp"),
        ({"batch": 7}, "batch = 7 is not divided evenly by the 2 workers of ddp"),
        ({"plan": "fsdp2", "ema": 0.9}, "ema = 0.9 does not go with fsdp2"),
        ({"plan": "post-local-sgd", "amp": "fp16"}, "amp = 'fp16' does not go with post-local-sgd"),
    ],
)
def test_what_they_do_not_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"plan": "ddp", "workers": 2, **settings})


def test_weights_of_each_worker_fit_no_other_plan() -> None:
    before = jobs.settings(plan="post-local-sgd", workers=2).model_dump(mode="json")
    with pytest.raises(CheckpointError, match="made with plan = 'post-local-sgd', now it is 'ddp'"):
        checkpoint._check_settings(before, jobs.settings(plan="ddp", workers=2))
