"""The order of samples is a pure function of seed and epoch, so a position is the whole state."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.data import BatchOrder, Position
from shoal.errors import CheckpointError, ConfigError, DataError

sizes = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
seeds = st.integers(0, 2**64 - 1)


def walk(order: BatchOrder, position: Position, steps: int) -> Iterator[NDArray[np.int64]]:
    for _ in range(steps):
        yield order.indices(position.epoch, position.step)
        position = position.advance(order.steps_per_epoch)


@given(sizes, seeds, st.integers(0, 40))
def test_restoring_at_any_position_continues_with_the_same_batches(size: tuple[int, int], seed: int, stop: int) -> None:
    samples, batch = size
    whole = list(walk(BatchOrder(samples=samples, batch=batch, seed=seed), Position(), stop + 5))
    position = Position()
    for _ in range(stop):
        position = position.advance(samples // batch)
    restored = Position.from_dict(position.to_dict())
    rest = list(walk(BatchOrder(samples=samples, batch=batch, seed=seed), restored, 5))
    assert [b.tolist() for b in rest] == [b.tolist() for b in whole[stop:]]


@given(sizes, seeds, st.integers(0, 3))
def test_an_epoch_visits_each_sample_at_most_once(size: tuple[int, int], seed: int, epoch: int) -> None:
    samples, batch = size
    order = BatchOrder(samples=samples, batch=batch, seed=seed)
    seen = np.concatenate([order.indices(epoch, step) for step in range(order.steps_per_epoch)])
    assert len(seen) == samples // batch * batch == len(np.unique(seen))
    assert seen.min() >= 0
    assert seen.max() < samples


@given(seeds, st.sampled_from([1, 7, 50]))
def test_batch_size_and_history_do_not_change_the_order(seed: int, batch: int) -> None:
    order = BatchOrder(samples=100, batch=batch, seed=seed)
    order.indices(5, 0)  # another epoch was asked for before
    joined = np.concatenate([order.indices(2, step) for step in range(order.steps_per_epoch)])
    whole = BatchOrder(samples=100, batch=100, seed=seed).indices(2, 0)
    assert joined.tolist() == whole[: len(joined)].tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [
        BatchOrder(samples=50, batch=50, seed=seed).indices(epoch, 0).tolist()
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
    ]
    assert len({tuple(order) for order in orders}) == 9


def test_the_order_is_the_same_on_every_machine() -> None:
    """Frozen here: a change would silently reorder every resumed run."""
    assert BatchOrder(samples=8, batch=8, seed=3).indices(1, 0).tolist() == [7, 3, 5, 6, 4, 0, 2, 1]


def test_a_caller_that_changes_its_batch_does_not_change_the_epoch() -> None:
    order = BatchOrder(samples=10, batch=5, seed=0)
    first = order.indices(0, 0)
    kept = first.tolist()
    first.sort()
    assert order.indices(0, 0).tolist() == kept


def test_batches_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(DataError, match=r"batch of 64 .* has 10\.\n.*at most 10"):
        BatchOrder(samples=10, batch=64)
    with pytest.raises(DataError, match="batch of 0"):
        BatchOrder(samples=10, batch=0)
    with pytest.raises(ConfigError, match="seed -1"):
        BatchOrder(samples=10, batch=5, seed=-1).indices(0, 0)
    with pytest.raises(IndexError, match="no step 2 in epoch 0"):
        BatchOrder(samples=10, batch=5).indices(0, 2)


def test_position_crosses_the_end_of_an_epoch() -> None:
    assert Position(0, 1).advance(3) == Position(0, 2)
    assert Position(0, 2).advance(3) == Position(1, 0)
    assert Position(4, 0).advance(1) == Position(5, 0)


@pytest.mark.parametrize("saved", [{}, {"epoch": 1}, {"epoch": -1, "step": 0}, {"epoch": "1", "step": 0}])
def test_a_damaged_position_is_refused(saved: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="position"):
        Position.from_dict(saved)
