"""Train on windows of one large image on two ranks, each of which reads its own half of every window.

    python -m benchmarks.large_image.slide /tmp/slide
    python -m benchmarks.large_image.bench /tmp/slide [--window 1024] [--workers 2] [--plan spatial] [--epochs 1]

Prints what every rank read of the image and its mask, and the largest resident size of its process.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

import shoal
from shoal.data.rasters import TiffRaster
from shoal.data.windows import WindowData, load_windows
from shoal.units import show_bytes


class Counted:
    """Windows that note, in a file for each rank, how many bytes were read for them."""

    def __init__(self, data: WindowData, note: Callable[[], None]) -> None:
        self._data, self._note = data, note

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is sent to a rank
            raise AttributeError(name)
        return getattr(self._data, name)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        read = self._data.batch(indices)
        self._note()
        return read

    def window(self, indices: NDArray[np.int64], x: tuple[slice, ...], y: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        read = self._data.window(indices, x, y)
        self._note()
        return read


def counted_windows(folder: Path, shape: tuple[int, ...], notes: Path) -> tuple[Counted, Counted]:
    """The windows of a slide, opened by the rank that calls it."""
    splits = load_windows(folder, shape=shape, classes=2)
    parts = [part for part in (splits.train, splits.test) if isinstance(part, WindowData)]
    rasters = [raster for pair in parts[0].pairs for raster in pair if isinstance(raster, TiffRaster)]
    before = sum(raster.bytes_read for raster in rasters)  # to measure mean and deviation

    def note() -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        read = sum(raster.bytes_read for raster in rasters)
        (notes / f"rank-{rank}.json").write_text(json.dumps({"to measure": before, "in windows": read - before}))

    return Counted(parts[0], note), Counted(parts[1], note)


def small_net() -> nn.Module:
    """Fully convolutional: half the resolution inside, all of it at the end."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 2, stride=2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plan", default="spatial")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    notes = Path(tempfile.mkdtemp())
    shape = (1, args.window, args.window)
    result = shoal.train(
        model=small_net,
        data=lambda: counted_windows(args.folder, shape, notes),
        batch=1,
        epochs=args.epochs,
        lr=0.02,
        workers=args.workers,
        plan=args.plan,
        out=notes / "run",
    )
    print(f"{result.steps} steps, {result.step_seconds_median:.3f} s each; test IoU {result.test_iou:.3f}")
    for rank, peak in enumerate(result.peak_memory_bytes):
        read = json.loads((notes / f"rank-{rank}.json").read_text())
        told = ", ".join(f"{show_bytes(count)} read {what}" for what, count in read.items())
        print(f"rank {rank}: {told}; largest resident size {show_bytes(peak)}")


if __name__ == "__main__":
    main()
