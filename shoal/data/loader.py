"""Batches of a data set, in the order of training or in plain order, read ahead where reading is slow.

Threads   data in memory is read in a plain loop. Data that asks for `prefetch` is read by one background
          thread, at most two batches ahead. The thread ends when the iteration does: at its end, when the
          generator is closed, and when a batch fails; a failure is raised where its batch would have come.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.augment import Augment
from shoal.data.batch_part import Batch, BatchPart, read_batch
from shoal.data.dataset import DataSet
from shoal.data.order import BatchOrder

AHEAD = 2

Item = TypeVar("Item")


class Loader:
    """The training batches of `data` in `order`, changed by `augment`. No state: see the note in order.py.

    With `parts`, only that part of each batch, by the size of the batch: a sample is changed in the same way whoever
    reads it.
    """

    def __init__(
        self,
        data: DataSet,
        order: BatchOrder,
        augment: Augment | None = None,
        parts: Mapping[int, BatchPart] | None = None,
    ) -> None:
        if len(data) != order.samples:
            raise ValueError(f"the order is for {order.samples} samples, but the data set has {len(data)}")
        self.data = data
        self.order = order
        self.augment = augment
        self.parts = parts

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """Batches of one epoch, from step `start` to its end. Close it to stop early."""

        def read(step: int) -> Batch:
            return self.batch(epoch, step)

        return _read_all(read, range(start, self.order.steps_per_epoch), ahead=self.data.prefetch)

    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of one step, or the part of it, read here and now."""
        indices = self.order.indices(epoch, step)
        augment = self.augment
        if self.parts is not None:
            change = None if augment is None else lambda x, y, chosen: augment(x, y, indices=chosen, epoch=epoch)
            return self.parts[len(indices)].read(self.data, indices, change, epoch)
        x, y = read_batch(self.data, epoch, indices)
        return (x, y) if augment is None else augment(x, y, indices=indices, epoch=epoch)


def sequential_batches(
    data: DataSet, batch: int, part: Callable[[int], BatchPart] | None = None
) -> Generator[Batch, None, None]:
    """Every sample once, in order, for evaluation. The last batch may be smaller.

    With `part`, only that part of each batch: a function of the number of samples in it.
    """
    samples = first_indices(len(data))
    groups = [samples[start : start + batch] for start in range(0, len(data), batch)]
    if part is None:
        return _read_all(data.batch, groups, ahead=data.prefetch)
    parts = {size: part(size) for size in {len(group) for group in groups}}
    return _read_all(lambda group: parts[len(group)].read(data, group), groups, ahead=data.prefetch)


def first_indices(count: int) -> NDArray[np.int64]:
    """The indices 0 .. count - 1, as `DataSet.batch` takes them."""
    return np.arange(count, dtype=np.int64)


def _read_all(read: Callable[[Item], Batch], items: Iterable[Item], *, ahead: bool) -> Generator[Batch, None, None]:
    if not ahead:
        yield from map(read, items)
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-read")
    waiting: deque[Future[Batch]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
