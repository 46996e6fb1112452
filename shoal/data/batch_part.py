"""What one rank reads of a batch: some of its samples, or a window of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import DataSet

Batch = tuple[Tensor, Tensor]
Change = Callable[[Tensor, Tensor, NDArray[np.int64]], Batch]
"""(samples, labels, their indices) -> the same, changed at random; as large as the samples are."""
Window = tuple[slice, ...]


@runtime_checkable
class Windowed(Protocol):
    """A data set that can leave unread what lies outside a window."""

    def window(self, indices: NDArray[np.int64], x: Window, y: Window) -> Batch:
        """As `DataSet.batch`, but only these rows and columns of samples, and these of labels."""
        ...


@runtime_checkable
class Changing(Protocol):
    """A data set whose samples are not the same in every epoch."""

    def batch_in(self, epoch: int, indices: NDArray[np.int64]) -> Batch:
        """As `DataSet.batch`, in this epoch: a pure function of both."""
        ...


def read_batch(data: DataSet, epoch: int, indices: NDArray[np.int64]) -> Batch:
    """Whole samples, as they are in this epoch."""
    return data.batch_in(epoch, indices) if isinstance(data, Changing) else data.batch(indices)


@dataclass(frozen=True)
class BatchPart:
    """A box of the samples (sample, channel, space) and one of the labels (sample, and space to segment).

    Costs what it reads: samples outside both boxes are not touched, pixels outside the window neither where the data
    set is `Windowed` and no sample is changed at random.
    """

    x: Window
    y: Window

    def read(self, data: DataSet, indices: NDArray[np.int64], change: Change | None = None, epoch: int = 0) -> Batch:
        """This part of the batch of the samples `indices`, as they are in this epoch."""
        rows = [box[0] for box in (self.x, self.y) if box[0].stop > box[0].start]
        first = min((span.start for span in rows), default=0)
        # A part without samples still has a shape, which one sample tells.
        chosen = indices[first : max((span.stop for span in rows), default=1)]
        if change is None and isinstance(data, Windowed):
            x, y = data.window(chosen, self.x[2:], self.y[1:])
            x = x[:, self.x[1]]
        else:
            x, y = read_batch(data, epoch, chosen)
            if change is not None:
                x, y = change(x, y, chosen)
            x, y = x[:, *self.x[1:]], y[:, *self.y[1:]]
        return _rows(x, self.x[0], first), _rows(y, self.y[0], first)


def _rows(tensor: Tensor, rows: slice, first: int) -> Tensor:
    empty = rows.stop <= rows.start
    return tensor[slice(0, 0) if empty else slice(rows.start - first, rows.stop - first)].contiguous()
