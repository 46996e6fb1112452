"""The order in which training samples are visited: a pure function of seed and epoch. No torch.

Note: the position is the whole state.
    Nothing about the order depends on batches already read, on the number of ranks, on the plan or on the
    machine. To stop in the middle of an epoch, save a `Position`; to go on, ask for the batches from there.
    That is why there is no stateful loader to save.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shoal.data.draws import Purpose, words
from shoal.errors import CheckpointError, DataError


class BatchOrder:
    """Which samples form the global batch of each step.

    Every epoch is a fresh shuffle of all samples. The incomplete batch at its end is dropped, and the next
    epoch's shuffle gives those samples another chance; or, with `keep_last`, it is a smaller batch. Costs one sort
    of `samples` words per epoch (9 ms for 60,000), kept until another epoch is asked for.
    """

    def __init__(self, *, samples: int, batch: int, seed: int = 0, keep_last: bool = False) -> None:
        if batch < 1:
            raise DataError(f"a batch of {batch} samples is empty.", "Give a batch of at least 1 (--batch).")
        if batch > samples and not keep_last:
            raise DataError(
                f"a batch of {batch} samples is larger than the data set, which has {samples}.",
                f"Give a batch of at most {samples} (--batch), or a larger data set (--data).",
            )
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.keep_last = keep_last
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch, at least 1."""
        return -(-self.samples // self.batch) if self.keep_last else self.samples // self.batch

    def size(self, step: int) -> int:
        """Samples of the batch of a step: fewer where it is the last of an epoch and kept.

        >>> order = BatchOrder(samples=10, batch=4, keep_last=True)
        >>> [order.size(step) for step in range(order.steps_per_epoch)]
        [4, 4, 2]
        """
        return min(self.batch, self.samples - step * self.batch)

    @property
    def sizes(self) -> set[int]:
        """All sizes that batches have: one, or two."""
        return {self.size(0), self.size(self.steps_per_epoch - 1)}

    def indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Sample indices of the GLOBAL batch, so any rank can take its share whatever the plan."""
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"no step {step} in epoch {epoch}: an epoch has {self.steps_per_epoch} steps")
        start = step * self.batch
        # A copy: a caller that sorts its batch must not reorder the epoch.
        return self._permutation(epoch)[start : start + self.batch].copy()

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        cached = self._cached  # one read: a loader's thread may replace it meanwhile
        if cached is None or cached[0] != epoch:
            keys = words(self.samples, seed=self.seed, epoch=epoch, purpose=Purpose.ORDER)
            cached = epoch, np.argsort(keys, kind="stable").astype(np.int64, copy=False)
            self._cached = cached
        return cached[1]


@dataclass(frozen=True, order=True)
class Position:
    """The next step to take: `step` steps of `epoch` are done. See note: the position is the whole state."""

    epoch: int = 0
    step: int = 0

    def advance(self, steps_per_epoch: int) -> Self:
        """The position after one more step.

        >>> Position(epoch=0, step=8).advance(10), Position(epoch=0, step=9).advance(10)
        (Position(epoch=0, step=9), Position(epoch=1, step=0))
        """
        if self.step + 1 < steps_per_epoch:
            return type(self)(self.epoch, self.step + 1)
        return type(self)(self.epoch + 1, 0)

    def to_dict(self) -> dict[str, int]:
        """For a checkpoint; `from_dict` reads it back."""
        return {"epoch": self.epoch, "step": self.step}

    @classmethod
    def from_dict(cls, saved: Mapping[str, object]) -> Self:
        """Read what `to_dict` wrote; anything else is refused with the value it met."""
        epoch, step = saved.get("epoch"), saved.get("step")
        if not (isinstance(epoch, int) and isinstance(step, int) and epoch >= 0 and step >= 0):
            raise CheckpointError(
                f"the checkpoint's position in the data is {dict(saved)!r}, not an epoch and a step.",
                "Resume from another checkpoint of the run.",
            )
        return cls(epoch, step)
