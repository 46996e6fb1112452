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
    ("name", "plans"),
    [
        ("two layers", {1: ["data"], 2: ["data cut"], 4: ["data", "model", "spatial", "2x2 cut"]}),
        *(
            pytest.param(
                name,
                {1: ["data"], 2: ["data", "model", "spatial"], 4: ["data", "model", "spatial", "2x2"]},
                marks=[pytest.mark.thorough, pytest.mark.timeout(1800)],
            )
            for name in ("resnet18", "unet")
        ),
    ],
)
def test_every_plan_goes_on_from_every_other(
    name: str, plans: dict[int, list[str]], tmp_path: Path, on_ranks: RunOnRanks
) -> None:
    laid = [(workers, plan) for workers, named in plans.items() for plan in named]
    paths = [tmp_path / f"{workers} {plan}" for workers, plan in laid]
    for (workers, plan), path in zip(laid, paths, strict=True):
        path.mkdir()
        on_ranks(workers, jobs.saved_after_two_steps, path, plan, NETS[name])
    for workers, plan in laid:
        found = []
        for first in range(0, len(paths), 3):  # not all at once: a case on ranks has a time-out
            found += on_ranks(workers, jobs.goes_on_from_each, paths[first : first + 3], plan, NETS[name])[0]
        for before, (same, apart) in zip(laid, found, strict=True):
            assert same, (before, (workers, plan))
            assert apart < 1e-9, (before, (workers, plan))
