"""Images of a data set at another size, made batch by batch."""

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import DataSet, Task
from shoal.errors import DataError


class Resized:
    """`data` with its images brought to `shape`: bilinear, anti-aliased when shrinking; grey repeats to RGB.

    Only images to classify can be resized; anything else is refused with `DataError`.
    Costs one interpolation of each batch, for 256 grey images from 28x28 to 32x32 about 1 ms.
    """

    task: Task = "classify"

    def __init__(self, data: DataSet, shape: tuple[int, ...]) -> None:
        if why := _obstacle(data, shape):
            raise DataError(
                f"samples of the shape {data.shape} cannot be brought to {shape}: {why}.",
                f"Leave the shape out to take the data's own ({','.join(map(str, data.shape))}), "
                "or choose another data set.",
            )
        self._data = data
        self.shape = shape
        self.classes = data.classes
        self.class_names = data.class_names
        self.preparation = data.preparation
        self.prefetch = data.prefetch

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`."""
        x, y = self._data.batch(indices)
        return resized(x, self.shape), y


def resized(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A batch of images brought to (channels, height, width): see `Resized`."""
    channels, *size = shape
    if list(x.shape[2:]) != size:
        shrinks = size[0] < x.shape[2] or size[1] < x.shape[3]
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=shrinks)
    return x if x.shape[1] == channels else x.repeat(1, channels, 1, 1)


def _obstacle(data: DataSet, shape: tuple[int, ...]) -> str | None:
    if data.task != "classify":
        return "its labels belong to single pixels"
    if len(data.shape) != 3 or len(shape) != 3:
        return "only images, channels,height,width, can be resized"
    if min(shape) < 1:
        return "every extent must be at least 1"
    if shape[0] != data.shape[0] and (data.shape[0], shape[0]) != (1, 3):
        return f"{data.shape[0]} channels cannot become {shape[0]}"
    return None
