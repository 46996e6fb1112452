"""Training on windows of a large image: each rank reads the tiles of its own part, and no others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal

pytest.importorskip("tifffile", reason="tifffile is not installed")

TILE = 256 * 256


def test_each_rank_reads_its_own_tiles(tmp_path: Path) -> None:
    from benchmarks.large_image.bench import counted_windows, small_net
    from benchmarks.large_image.slide import make

    make(tmp_path, 1536)
    data: Callable[[], object] = lambda: counted_windows(tmp_path, (1, 512, 512), tmp_path)  # noqa: E731
    out = tmp_path / "run"
    result = shoal.train(model=small_net, data=data, batch=1, epochs=2, lr=0.02, workers=2, plan="spatial", out=out)
    assert result.steps == 2 * 8  # of nine windows one is to test with
    for rank in range(2):
        read = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        # Of a window, image and mask have four tiles each, of which a rank has two; one window is read whole, to see
        # whether it fits the network; a spot of one tile in each of the eight windows to train on tells the mean.
        assert read == {"to measure": 8 * TILE, "in windows": (2 * 9 * 4 + 8) * TILE}


def test_a_run_on_windows_can_be_tested_again(tmp_path: Path) -> None:
    from benchmarks.large_image.slide import make
    from shoal.config import EvaluateConfig
    from shoal.using.testing import start

    make(tmp_path, 256)
    out = tmp_path / "run"
    result = shoal.train(
        model="unet",
        model_options={"width": 2, "depth": 1},
        data=f"windows:{tmp_path}",
        input=(1, 64, 64),
        classes=2,
        batch=4,
        epochs=1,
        out=out,
    )
    tested = start(out, EvaluateConfig())
    assert (tested.accuracy, tested.iou) == (result.test_accuracy, result.test_iou)
