"""A data set with the normalisation and the class numbers that a network was trained with."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import DataSet, Task
from shoal.errors import DataError
from shoal.inference import Preparation


class AsTrained:
    """`data` as a network reads it that was trained on other data: its normalisation, and its numbers of classes.

    Classes are told apart by name; one that the network does not know is a `DataError`. So are values of another kind:
    bytes and other numbers cannot stand for each other.
    """

    def __init__(self, data: DataSet, name: str, *, class_names: tuple[str, ...], preparation: Preparation) -> None:
        own = data.preparation
        if own.values != preparation.values:
            raise DataError(
                f"{name!r} holds {_kind(own)}, but the network was trained on {_kind(preparation)}.",
                "Store it with values as those in training.",
            )
        if unknown := [label for label in data.class_names if label not in class_names]:
            raise DataError(
                f"{name!r} has the class {unknown[0]!r}, which the network does not know.",
                f"It knows {', '.join(class_names)}. Rename or remove that class.",
            )
        self._data = data
        self._labels = torch.tensor([class_names.index(label) for label in data.class_names])
        column = (-1, *[1] * (len(data.shape) - 1))
        mean, std, new_mean, new_std = (
            torch.tensor(values, dtype=torch.float64).view(column)
            for values in (own.mean, own.std, preparation.mean, preparation.std)
        )
        self._scale, self._shift = (std / new_std).float(), ((mean - new_mean) / new_std).float()
        self.shape = data.shape
        self.classes, self.class_names = len(class_names), class_names
        self.task: Task = data.task
        self.prefetch = data.prefetch
        self.preparation = preparation

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`."""
        x, y = self._data.batch(indices)
        return x.mul_(self._scale).add_(self._shift), self._labels[y]


def as_trained(data: DataSet, name: str, *, class_names: tuple[str, ...], preparation: Preparation) -> DataSet:
    """`data` itself where it is as the network was trained, else `AsTrained`."""
    own = data.preparation
    same = (own.values, own.mean, own.std) == (preparation.values, preparation.mean, preparation.std)
    if same and data.class_names == class_names:
        return data
    return AsTrained(data, name, class_names=class_names, preparation=preparation)


def _kind(preparation: Preparation) -> str:
    return {
        "bytes": "bytes of 0 to 255",
        "numbers": "numbers other than bytes",
        "own": "samples that code of your own prepared",
    }[preparation.values]
