"""One split of a data set, read by index, and the kind of it that lives in memory."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.inference import Preparation, numbered

Task = Literal["classify", "segment"]

CHUNK = 4_000_000  # values that `Norm.of` widens to float64 at a time: 32 MB


class DataSet(Protocol):
    """One split, with random access by index. Reading is a pure function of the indices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, channels first."""
        ...

    @property
    def classes(self) -> int:
        """Labels are 0 .. classes - 1."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """What people call each class, in the order of their labels; no two alike. `numbered` where nobody said."""
        ...

    @property
    def task(self) -> Task:
        """Whether a label belongs to a sample or to each of its pixels."""
        ...

    @property
    def prefetch(self) -> bool:
        """Whether a batch takes long enough to read that reading ahead in a thread pays."""
        ...

    @property
    def preparation(self) -> Preparation:
        """How raw samples became those of `batch`, apart from a size that `shape` tells: predictions do the same."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Normalised float32 samples (b, *shape) and int64 labels (b,), or (b, *spatial) for "segment".

        Both are the caller's own: writing to them does not reach the data set.
        """
        ...


@dataclass(frozen=True)
class Splits:
    """A data set's training and test part."""

    name: str
    """What `load` takes to give the same again."""
    train: DataSet
    test: DataSet
    origin: str
    """Where it was found, for people."""


@dataclass(frozen=True)
class Norm:
    """Per-channel mean and standard deviation, in the unit of the stored values (0-255 for uint8)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, x: NDArray[Any]) -> Self:
        """Measure (N, C, *spatial) values in one pass. A constant channel gets std 1: it becomes zero."""
        axes = (0, *range(2, x.ndim))
        total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        step = max(1, CHUNK // max(1, int(np.prod(x.shape[1:]))))
        for start in range(0, len(x), step):
            part = x[start : start + step].astype(np.float64)
            total += part.sum(axes)
            squares += np.square(part, out=part).sum(axes)
        count = x.size / x.shape[1]
        mean = total / count
        variance = squares / count - mean**2
        constant = variance <= 1e-12 * mean**2  # what rounding leaves of a variance of zero
        std = np.sqrt(np.where(constant, 1.0, variance))
        return cls(tuple(mean.tolist()), tuple(std.tolist()))

    def after(self, values: Literal["bytes", "numbers"], shape: tuple[int, ...]) -> Preparation:
        """That raw samples of this kind and shape are normalised like this."""
        return Preparation(values=values, shape=shape, mean=self.mean, std=self.std)

    def apply_(self, x: Tensor) -> Tensor:
        """Normalise a float32 batch (b, C, *spatial) in place, and return it."""
        mean, scale = _columns(self, x.dim() - 2)
        return x.sub_(mean).mul_(scale)


@lru_cache
def _columns(norm: Norm, spatial: int) -> tuple[Tensor, Tensor]:
    """Mean and 1 / std, shaped to meet a batch's channels. Kept: making them is a tenth of a small batch."""
    column = (-1, *[1] * spatial)
    return torch.tensor(norm.mean).view(column), torch.tensor(norm.std).reciprocal_().view(column)


class ArrayData:
    """A split in memory. Samples stay as stored (uint8 or float32); only the batch is converted.

    Costs, per batch: one gather of the stored bytes and three passes over the float32 batch (0.11 ms for
    256 grey images of 28x28 on one core).

    `x` is (N, C, *spatial); `y` holds integers, (N,) to classify or (N, *spatial) to segment. Without a
    `norm` it is measured from `x`: give the training split's to the test split. Classes without names are numbered.
    """

    prefetch = False

    def __init__(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        *,
        classes: int,
        norm: Norm | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"{len(x)} samples but {len(y)} labels")
        if x.dtype != np.uint8:
            x = x.astype(np.float32, copy=False)
        self.norm = norm or Norm.of(x)
        self.shape: tuple[int, ...] = x.shape[1:]
        self.classes = classes
        self.class_names = class_names or numbered(classes)
        self.preparation = self.norm.after("bytes" if x.dtype == np.uint8 else "numbers", self.shape)
        self.task: Task = "classify" if y.ndim == 1 else "segment"
        self._x = torch.from_numpy(_own(x))
        self._y = torch.from_numpy(_own(y if y.dtype == np.uint8 else y.astype(np.int64, copy=False)))

    def __len__(self) -> int:
        return len(self._y)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`."""
        rows = torch.from_numpy(indices)
        # index_select copies whole rows, 20 times as fast here as indexing; its result is our own to change.
        x = self._x.index_select(0, rows).float()
        return self.norm.apply_(x), self._y.index_select(0, rows).long()

    def window(self, indices: NDArray[np.int64], x: tuple[slice, ...], y: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """See `Windowed.window`: pixels outside are not copied."""
        rows = torch.from_numpy(indices)
        samples = self._x[:, :, *x].index_select(0, rows).float()
        return self.norm.apply_(samples), self._y[:, *y].index_select(0, rows).long()


def every_fifth(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """A mask of test samples: the fifth, tenth, ... sample of each class.

    >>> every_fifth(np.array([0, 0, 0, 0, 0, 1, 1])).astype(int).tolist()
    [0, 0, 0, 0, 1, 0, 0]
    """
    test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return test


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself where torch can share it, else a contiguous and writable copy."""
    shareable = array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative
    return array if shareable else np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
