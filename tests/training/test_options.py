"""Optimizers and what else is done around a step: the same numbers under every plan as on one device."""

from pathlib import Path

import pytest

from tests.conftest import RunOnRanks
from tests.training import jobs

PLANS = ["data", "model", "spatial", "2x2"]
KINDS = [
    {"optimizer": "adam", "optimizer_options": {"amsgrad": True}},
    {"optimizer": "adamw", "optimizer_options": {"betas": [0.8, 0.9]}},
    {"optimizer": "rmsprop", "momentum": 0.5, "optimizer_options": {"centered": True}},
    {"optimizer": "adagrad", "weight_decay": 0.01, "optimizer_options": {"initial_accumulator_value": 0.1}},
    {"optimizer": "sgd", "optimizer_options": {"nesterov": True}},
]


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_take_one_devices_steps(plan: str, on_ranks: RunOnRanks) -> None:
    for kind, (losses, states) in zip(KINDS, on_ranks(4, jobs.beside_one_device, plan, KINDS)[0], strict=True):
        assert losses < 1e-9, kind
        assert states < 1e-9, kind


def test_a_run_with_adam_goes_on_bit_for_bit(tmp_path: Path, on_ranks: RunOnRanks) -> None:
    kind = {"optimizer": "adam"}
    assert on_ranks(4, jobs.goes_on, "2x2", tmp_path / "checkpoint.pt", kind) == [True] * 4
