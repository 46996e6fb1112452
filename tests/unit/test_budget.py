"""One budget of batches for all replicas: each counts once, whatever happens to them."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.replicas.budget import LockstepBudget, SharedBudget


@given(total=st.integers(1, 30), replicas=st.integers(1, 4), seed=st.integers(0, 10_000), warm=st.integers(0, 10))
def test_every_batch_counts_once_whoever_is_lost(total: int, replicas: int, seed: int, warm: int) -> None:
    draws = random.Random(seed)
    budget = SharedBudget(total, warm=min(warm, total))
    held: dict[int, list[int]] = {number: [] for number in range(replicas)}
    counted: list[int] = []
    for _ in range(10_000):
        if budget.finished:
            break
        replica = draws.randrange(replicas)
        event = draws.random()
        if event < 0.5:
            number = budget.take(replica)
            if number is not None:
                held[replica].append(number)
        elif event < 0.95 and held[replica]:
            number, applied = held[replica].pop(0), draws.random() < 0.8
            budget.done(replica, number, applied=applied)
            counted += [number] * applied
        elif event >= 0.95:
            budget.lose(replica)
            held[replica] = []
    assert sorted(counted) == list(range(total))
    assert budget.counted == total
    assert budget.repeated == []


def test_a_replica_that_was_thought_gone_is_not_counted_twice() -> None:
    budget = SharedBudget(2)
    assert budget.take(0) == 0
    budget.lose(0)
    assert budget.take(1) == 0
    budget.done(0, 0, applied=True)
    assert (budget.counted, budget.repeated) == (0, [0])
    budget.done(1, 0, applied=True)
    assert budget.counted == 1


def test_warm_start_is_for_one_replica_until_it_is_counted() -> None:
    budget = SharedBudget(5, warm=2)
    assert [budget.take(1), budget.take(0), budget.take(1)] == [0, None, 1]
    budget.done(1, 0, applied=True)
    assert budget.take(0) is None
    budget.done(1, 1, applied=True)
    assert budget.take(0) == 2


def test_warm_start_passes_on_when_its_replica_is_lost() -> None:
    budget = SharedBudget(5, warm=2)
    assert budget.take(1) == 0
    budget.lose(1)
    assert budget.take(0) == 0


def test_going_on_begins_with_what_was_left() -> None:
    budget = SharedBudget(6)
    taken = [budget.take(0) for _ in range(4)]
    assert taken == [0, 1, 2, 3]
    for number in (0, 3):
        budget.done(0, number, applied=True)
    again = SharedBudget(6, start=budget.counted + len(budget.left()), again=budget.left())
    assert again.counted == 2
    assert [again.take(0) for _ in range(5)] == [1, 2, 4, 5, None]
    shorter = SharedBudget(2, start=budget.counted + len(budget.left()), again=budget.left())
    assert [shorter.take(0), shorter.take(0)] == [1, None]  # nothing beyond the end of a run that was made shorter


def test_in_lockstep_every_replica_gets_every_batch() -> None:
    budget = LockstepBudget(2, 2)
    assert [budget.take(0), budget.take(0), budget.take(0), budget.take(1)] == [0, 1, None, 0]
    budget.done(0, 0, applied=True)
    assert budget.counted == 0
    budget.done(1, 0, applied=True)
    assert (budget.counted, budget.finished) == (1, False)
