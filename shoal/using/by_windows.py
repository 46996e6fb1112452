"""The mask of an image, window by window: for images that are too large for memory, and for a device's memory.

Windows   of the size in training, side by side; the last of each row, and the last row of them, are moved back to end
          with the image, so that every pixel lies in one. Where two overlap the later one's pixels stand. The network
          sees nothing around a window, as in training and in its tests.
Reading   of TIFF and OME-Zarr the tiles of a window, when it is its turn; other images are read whole, once.
Costs     memory for a batch of windows and its scores; of the mask a byte for each pixel, eight beyond 256 classes.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from shoal.data.pixels import in_threads, real_values
from shoal.data.rasters import ENDINGS, open_raster
from shoal.errors import DataError
from shoal.using.transform import Sample, Transform, name_of

Read = Callable[[slice, slice], Tensor]
"""Rows and columns of an image, prepared: (C, rows, columns)."""


def mask_by_windows(
    transform: Transform,
    sample: Sample,
    scores: Callable[[Tensor], Tensor],
    *,
    batch: int,
    on_windows: Callable[[int, int], None],
) -> Tensor:
    """The class of each pixel. `scores` is the network, for batches of windows; `on_windows` hears how many are done,
    and of how many. A `DataError` for an image that is smaller than a window, or has other channels.
    """
    _, high, wide = transform.inference.input
    size, read = _opened(transform, sample)
    if size[0] < high or size[1] < wide:
        raise DataError(
            f"{name_of(sample)} is {size[0]}x{size[1]}, smaller than a window as in training, {high}x{wide}.",
            "Choose --size own to leave it as it is, or --size training to have it resized.",
        )
    places = [(top, left) for top in starts(size[0], high) for left in starts(size[1], wide)]
    mask = torch.zeros(size, dtype=torch.uint8 if len(transform.inference.classes) <= 256 else torch.int64)
    for done in range(0, len(places), batch):
        chosen = places[done : done + batch]
        windows = in_threads(lambda at: read(slice(at[0], at[0] + high), slice(at[1], at[1] + wide)), chosen)
        for (top, left), found in zip(chosen, scores(torch.stack(windows)).argmax(1).cpu(), strict=True):
            mask[top : top + high, left : left + wide] = found
        on_windows(done + len(chosen), len(places))
    return mask


def starts(size: int, window: int) -> list[int]:
    """Where windows begin so that they cover `size` pixels.

    >>> starts(10, 4), starts(8, 4), starts(4, 4)
    ([0, 4, 6], [0, 4], [0])
    """
    return [*range(0, size - window, window), size - window]


def _opened(transform: Transform, sample: Sample) -> tuple[tuple[int, int], Read]:
    """Height and width of an image, and how to read a window of it."""
    if isinstance(sample, str | PathLike) and Path(sample).name.lower().endswith(ENDINGS):
        path = Path(sample)
        if not path.exists():
            raise DataError(f"there is no file {path}.", "Check its name.")
        raster, channels = open_raster(path), transform.inference.input[0]
        if raster.shape[0] != channels:
            raise DataError(
                f"{path} has {raster.shape[0]} channels, but the network was trained on {channels}.",
                "Give images with the channels of training.",
            )
        read = lambda rows, columns: transform.prepared(real_values(raster.read(rows, columns), path), str(path))  # noqa: E731
        return raster.shape[1:], read
    whole = transform(sample, size="own")
    return (whole.shape[1], whole.shape[2]), lambda rows, columns: whole[:, rows, columns]
