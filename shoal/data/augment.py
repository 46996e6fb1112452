"""Random changes to training samples: a pure function of (seed, epoch, sample).

Keeps     a sample is changed in the same way whatever the batch size, the rank or the plan: its draws are its
          own row of a table that seed and epoch determine. Each kind of change has its own columns, so adding
          one leaves the draws of the others as they were.
Costs     the table: 64 bytes for each sample, drawn once an epoch (2 ms for 60,000). Each change: one or two
          passes over the batch (256 RGB images of 32x32: a flip or a shift 1 ms).
Labels    move with their pixels when segmenting; where a shift uncovers pixels their label is 0. Whether a
          mirrored sample still has its class (a digit may not) is for the user to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.draws import Purpose, below, words
from shoal.errors import ConfigError, suggestion

Word = Literal["flip", "vflip", "shift", "crop"]

# The columns of a sample's row; shift and crop own one for each of up to three spatial dimensions.
COLUMN: dict[Word, int] = {"flip": 0, "vflip": 1, "shift": 2, "crop": 5}
COLUMNS = 8
TAKES_NUMBER = ("shift", "crop")


@dataclass(frozen=True)
class Change:
    """One word of a specification: `shift:4` is Change("shift", 4)."""

    word: Word
    amount: int = 0


class Augment:
    """A list of changes, applied in order to a batch and its labels."""

    def __init__(self, changes: tuple[Change, ...], *, seed: int = 0) -> None:
        self.changes = changes
        self.seed = seed
        self._cached: tuple[int, NDArray[np.uint64]] | None = None

    @classmethod
    def parse(cls, spec: str, *, seed: int = 0) -> Self | None:
        """Read a list such as "flip,vflip,shift:4,crop:256"; None for "" and "none".

        flip     mirror left and right, for half of the samples
        vflip    mirror up and down, for half of the samples
        shift:K  move by up to K pixels along each dimension, filling with the mean
        crop:S   a window of S pixels along each dimension, anywhere in the sample

        Anything else, or a word given twice, is refused with `ConfigError`.
        """
        if spec.strip() in ("", "none"):
            return None
        changes = tuple(_change(part.strip(), spec) for part in spec.split(","))
        given = [change.word for change in changes]
        if twice := [word for word in given if given.count(word) > 1]:
            raise ConfigError(f"the augmentation {spec!r} has {twice[0]} twice.", f"Give {twice[0]} once.")
        return cls(changes, seed=seed)

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A sample's shape after the changes; `ConfigError` where one does not fit the sample."""
        for change in self.changes:
            smallest = min(shape[1:])
            if change.word == "vflip" and len(shape) < 3:
                raise ConfigError(f"vflip needs a height, but samples have the shape {shape}.", "Leave vflip out.")
            if change.word == "crop":
                if change.amount > smallest:
                    raise ConfigError(
                        f"crop:{change.amount} is larger than samples of the shape {shape}.",
                        f"Give crop a size of at most {smallest}.",
                    )
                shape = (shape[0], *[change.amount] * (len(shape) - 1))
            if change.word == "shift" and change.amount >= smallest:
                raise ConfigError(
                    f"shift:{change.amount} can move samples of the shape {shape} out of sight.",
                    f"Give shift less than {smallest} pixels.",
                )
        return shape

    def __call__(self, x: Tensor, y: Tensor, *, indices: NDArray[np.int64], epoch: int) -> tuple[Tensor, Tensor]:
        """Change a batch (b, C, *spatial) of the samples `indices`; labels move if they belong to pixels."""
        self.out_shape(tuple(x.shape[1:]))
        draws = self._draws(epoch, int(indices.max()) + 1)[indices]
        if y.dim() == 1:
            return self._apply(x, draws), y
        return self._apply(x, draws), self._apply(y.unsqueeze(1), draws).squeeze(1)

    def _apply(self, x: Tensor, draws: NDArray[np.uint64]) -> Tensor:
        for change in self.changes:
            own = draws[:, COLUMN[change.word] :]
            if change.word == "flip":
                x = _mirror(x, own, dim=-1)
            elif change.word == "vflip":
                x = _mirror(x, own, dim=-2)
            elif change.word == "shift":
                size = x.shape[2:]
                x = _window(F.pad(x, [change.amount] * 2 * len(size)), own, size)
            else:
                x = _window(x, own, [change.amount] * (x.dim() - 2))
        return x

    def _draws(self, epoch: int, samples: int) -> NDArray[np.uint64]:
        """At least `samples` rows of the epoch's table; a longer table begins with every shorter one."""
        cached = self._cached  # one read: a loader's thread may replace it meanwhile
        if cached is None or cached[0] != epoch or len(cached[1]) < samples:
            rows = 1 << (samples - 1).bit_length()
            table = words(rows * COLUMNS, seed=self.seed, epoch=epoch, purpose=Purpose.AUGMENT)
            cached = epoch, table.reshape(rows, COLUMNS)
            self._cached = cached
        return cached[1]


def _mirror(x: Tensor, draws: NDArray[np.uint64], *, dim: int) -> Tensor:
    """Mirror about half of the samples along `dim`."""
    chosen = torch.from_numpy(below(draws[:, 0], 2)).bool()
    return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), x.flip(dim), x)


def _window(x: Tensor, draws: NDArray[np.uint64], size: Sequence[int]) -> Tensor:
    """A window of `size` at a random place of each sample; all places are equally likely."""
    starts = [below(draws[:, dim], x.shape[2 + dim] - extent + 1) for dim, extent in enumerate(size)]
    # numpy, because its slices cost a tenth of torch's, and copying rows beats gathering single pixels.
    source = x.numpy()
    windows = np.empty((*x.shape[:2], *size), source.dtype)
    for window, sample, corner in zip(windows, source, np.stack(starts, 1).tolist(), strict=True):
        window[...] = sample[:, *(slice(at, at + extent) for at, extent in zip(corner, size, strict=True))]
    return torch.from_numpy(windows)


def _change(part: str, spec: str) -> Change:
    name, colon, number = part.partition(":")
    word = next((word for word in COLUMN if word == name), None)
    if word is None:
        raise ConfigError(f"the augmentation {spec!r} has the unknown word {name!r}.", suggestion(name, COLUMN))
    if word not in TAKES_NUMBER:
        if colon:
            raise ConfigError(f"the augmentation {word} takes no number, but {part!r} gives one.", f"Write {word}.")
        return Change(word)
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ConfigError(
            f"the augmentation {part!r} gives {word} no number of pixels.",
            f"Write {word}:PIXELS, for example {word}:4.",
        )
    return Change(word, int(number))


parse_augment = Augment.parse
