"""A checkpoint that was saved under one plan goes on under any other, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunOnRanks
from tests.training import jobs

NETS: dict[str, dict[str, Any]] = {
    "two layers": {"optimizer": "adam", "ema": 0.9},
    "resnet18": {"model": f"{jobs.__file__}:large_net", "model_options": {"name": "resnet18"}, "input": (3, 16, 16)},
    "unet": {
        "model": f"{jobs.__file__}:large_net",
        "model_options": {"name": "unet"},
        "data": "synthetic:segment",
        "input": (3, 16, 16),
    },
}


@pytest.mark.parametrize(
    ("name", "ranks", "plans"),
    [
        ("two layers", 4, {1: ["data"], 4: ["data", "model", "spatial", "2x2"]}),
        pytest.param("resnet18", 2, {1: ["data"], 2: ["data", "model", "spatial"]}, marks=pytest.mark.thorough),
        pytest.param("resnet18", 4, {4: ["data", "model", "spatial"]}, marks=pytest.mark.thorough),
        pytest.param("resnet18", 4, {4: ["data", "model", "2x2"]}, marks=pytest.mark.thorough),
        pytest.param("resnet18", 4, {1: ["data"], 4: ["spatial", "2x2"]}, marks=pytest.mark.thorough),
        pytest.param("unet", 2, {1: ["data"], 2: ["data", "model", "spatial"]}, marks=pytest.mark.thorough),
        pytest.param("unet", 4, {1: ["data"], 4: ["data", "model", "spatial", "2x2"]}, marks=pytest.mark.thorough),
    ],
)
def test_every_plan_goes_on_from_every_other(
    name: str, ranks: int, plans: dict[int, list[str]], tmp_path: Path, on_ranks: RunOnRanks
) -> None:
    (found, *_) = on_ranks(ranks, jobs.saved_under_one_plan_goes_on_under_another, tmp_path, plans, NETS[name])
    assert len(found) == sum(map(len, plans.values())) ** 2
    for pair, (same, apart) in found.items():
        assert same, pair
        assert apart < 1e-9, pair
