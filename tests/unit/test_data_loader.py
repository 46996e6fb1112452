"""Batches come in order, are read ahead only where asked, and no thread outlives the iteration."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from shoal.data import ArrayData, Augment, BatchOrder, BatchPart, DataSet, Loader, Task, sequential_batches
from shoal.errors import DataError
from shoal.inference import Preparation


class Slow:
    """Sample i is the number i; sample `bad` cannot be read. Remembers the threads that read."""

    shape = (1, 1, 1)
    classes = 2
    class_names = ("0", "1")
    preparation = Preparation.own((1, 1, 1))
    task: Task = "classify"
    prefetch = True

    def __init__(self, samples: int, bad: int | None = None) -> None:
        self.samples = samples
        self.bad = bad
        self.readers: list[str] = []

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        self.readers.append(threading.current_thread().name)
        if self.bad in indices.tolist():
            raise DataError("sample is bad.", "Replace it.")
        return torch.from_numpy(indices).float().view(-1, 1, 1, 1), torch.from_numpy(indices)


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")]


def in_memory(samples: int) -> ArrayData:
    x = np.arange(samples, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(4, 2).repeat(4, 3)
    return ArrayData(x, np.arange(samples), classes=samples)


def labels(batches: list[tuple[Tensor, Tensor]]) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


@given(st.integers(1, 50), st.integers(0, 60))
def test_any_start_gives_the_rest_of_the_epoch(batch: int, start: int) -> None:
    order = BatchOrder(samples=50, batch=batch, seed=1)
    augment = Augment.parse("flip,shift:1", seed=1)
    whole = list(Loader(in_memory(50), order, augment).epoch(3))
    rest = list(Loader(in_memory(50), order, augment).epoch(3, start=start))
    assert labels(rest) == labels(whole[start:])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(rest, whole[start:], strict=True))


def test_data_in_memory_starts_no_thread() -> None:
    batches = Loader(in_memory(20), BatchOrder(samples=20, batch=4)).epoch(0)
    next(batches)
    assert not reading_threads()
    assert len(list(batches)) == 4


def test_reading_ahead_gives_the_same_batches_and_ends_its_thread() -> None:
    order = BatchOrder(samples=23, batch=4, seed=2)
    data = Slow(23)
    read = list(Loader(data, order).epoch(1))
    assert labels(read) == [order.indices(1, step).tolist() for step in range(5)]
    assert all(name.startswith("shoal-read") for name in data.readers)
    assert not reading_threads()


def test_closing_early_leaves_no_thread_and_reads_little_ahead() -> None:
    data = Slow(1000)
    batches = Loader(data, BatchOrder(samples=1000, batch=10)).epoch(0)
    next(batches)
    batches.close()
    assert not reading_threads()
    assert len(data.readers) <= 3


def test_dropping_the_iterator_leaves_no_thread() -> None:
    for _ in Loader(Slow(100), BatchOrder(samples=100, batch=10)).epoch(0):
        break
    assert not reading_threads()


def test_a_failure_is_raised_where_its_batch_would_have_come() -> None:
    order = BatchOrder(samples=40, batch=10, seed=0)
    data = Slow(40, bad=int(order.indices(0, 2)[3]))
    batches = Loader(data, order).epoch(0)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(DataError, match="sample is bad"):
        next(batches)
    assert not reading_threads()


@pytest.mark.parametrize("data", [in_memory(23), Slow(23)], ids=["memory", "slow"])
def test_sequential_batches_give_every_sample_once_in_order(data: DataSet) -> None:
    read = labels(list(sequential_batches(data, 10)))
    assert [len(part) for part in read] == [10, 10, 3]
    assert [label for part in read for label in part] == list(range(23))


def test_an_order_for_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order is for 10 samples, but the data set has 20"):
        Loader(in_memory(20), BatchOrder(samples=10, batch=2))


def segments(samples: int) -> ArrayData:
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (samples, 2, 6, 7), dtype=np.uint8)
    return ArrayData(x, draws.integers(0, 3, (samples, 6, 7)), classes=3)


@pytest.mark.parametrize("augment", [None, Augment.parse("flip,shift:2", seed=5)])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((slice(1, 3), slice(0, 2), slice(0, 6), slice(0, 7)), (slice(1, 3), slice(0, 6), slice(0, 7))),
        ((slice(0, 4), slice(0, 2), slice(3, 6), slice(2, 7)), (slice(0, 4), slice(3, 6), slice(2, 7))),
        ((slice(0, 4), slice(1, 2), slice(0, 3), slice(0, 7)), (slice(2, 3), slice(0, 6), slice(4, 7))),
        ((slice(0, 0), slice(0, 2), slice(0, 6), slice(0, 7)), (slice(0, 0), slice(0, 6), slice(0, 7))),
        ((slice(0, 0), slice(0, 2), slice(0, 6), slice(0, 7)), (slice(3, 4), slice(0, 6), slice(0, 7))),
    ],
)
def test_a_part_is_that_box_of_the_whole_batch(
    augment: Augment | None, x: tuple[slice, ...], y: tuple[slice, ...]
) -> None:
    order = BatchOrder(samples=11, batch=4, seed=3)
    whole = Loader(segments(11), order, augment)
    part = Loader(segments(11), order, augment, dict.fromkeys(order.sizes, BatchPart(x, y)))
    for (all_x, all_y), (own_x, own_y) in zip(whole.epoch(2), part.epoch(2), strict=True):
        assert torch.equal(own_x, all_x[x])
        assert torch.equal(own_y, all_y[y])


def test_parts_of_sequential_batches_follow_their_size() -> None:
    def second_half(size: int) -> BatchPart:
        rows = slice((size + 1) // 2, size)
        return BatchPart((rows, slice(0, 1), slice(0, 1), slice(0, 1)), (rows,))

    assert labels(list(sequential_batches(in_memory(7), 4, second_half))) == [[2, 3], [6]]
    assert labels(list(sequential_batches(Slow(7), 4, second_half))) == [[2, 3], [6]]
