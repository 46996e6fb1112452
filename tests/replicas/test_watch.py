"""Who is suspected to hang: a replica that keeps others waiting, and not those that wait for it."""

import math

import pytest

from shoal.replicas.watch import Watch

HEARTBEAT, TIMEOUT = 1.0, 100.0


def two_that_train(asked: dict[int, float]) -> Watch:
    """Two replicas of which steps of a millisecond are known, and when each asked last."""
    watch = Watch(heartbeat=HEARTBEAT, timeout=TIMEOUT, waits=False)
    watch.look(0.0, {}, set(), {})
    for replica in asked:
        watch.happened("joined", replica, 0.0)
        watch.hear(replica, 0.0)
        watch.note(replica, 0.001)
    for replica, when in asked.items():
        watch.hear(replica, when)
    return watch


def first_suspect(watch: Watch, waiting: set[int], until: float) -> tuple[int, float] | None:
    """Look four times in a heartbeat, as the conductor does."""
    now = 0.0
    while now < until:
        now += HEARTBEAT / 4
        suspect, _ = watch.look(now, {}, waiting, {})
        if suspect is not None:
            return suspect, now
    return None


@pytest.mark.parametrize("asked", [{0: 0.1, 1: 0.2}, {0: 0.2, 1: 0.1}], ids=["asked first", "asked last"])
def test_the_replica_that_hangs_is_suspected_whoever_asked_first(asked: dict[int, float]) -> None:
    """Replica 0 waits in a round for replica 1: that it may have been silent for longer says nothing."""
    assert first_suspect(two_that_train(asked), {0}, 10.0) == (1, 1.25)


def test_a_replica_that_says_that_it_waits_has_the_whole_timeout() -> None:
    assert first_suspect(two_that_train({0: 0.1}), {0}, TIMEOUT) is None
    assert first_suspect(two_that_train({0: 0.1}), {0}, TIMEOUT + 1) == (0, TIMEOUT + 0.25)


def test_a_replica_of_which_no_step_is_known_has_the_whole_timeout() -> None:
    watch = two_that_train({0: 0.1})
    watch.happened("joined", 1, 0.0)
    watch.hear(1, 0.2)
    assert first_suspect(watch, {0}, TIMEOUT + 1) == (1, TIMEOUT + 0.25)


@pytest.mark.parametrize(("waiting", "longer"), [(set(), {0: math.inf}), ({0}, {})], ids=["of files", "for others"])
def test_time_in_which_a_replica_is_not_waited_for_does_not_count(waiting: set[int], longer: dict[int, float]) -> None:
    watch = two_that_train({0: 0.0})
    for quarter in range(20):
        assert watch.look(quarter / 4, {}, waiting, longer) == (None, [])
    assert watch.look(5.0, {}, set(), {}) == (None, [])
    assert watch.look(5.75, {}, set(), {}) == (None, [])
    assert watch.look(6.25, {}, set(), {}) == (0, [])


@pytest.mark.parametrize("at_once", [1, 5])
def test_a_host_that_became_slow_is_suspected_once_and_not_in_every_step(at_once: int) -> None:
    watch = two_that_train({0: 0.0, 1: 0.0})
    watch.order(1, at_once)
    now, suspicions = 0.0, 0
    for _ in range(10):  # steps of replica 1 take 1.5 heartbeats from here on
        for _ in range(6 * at_once):
            now += HEARTBEAT / 4
            watch.hear(0, now)
            suspect, _ = watch.look(now, {}, set(), {})
            if suspect is not None:
                suspicions += 1
                watch.happened("frozen", suspect, now)
        if watch.hear(1, now):
            watch.happened("back", 1, now)
        watch.note(1, 1.5 * HEARTBEAT)
    assert suspicions == 1


def test_a_replica_that_was_frozen_has_no_longer_time_after_it() -> None:
    watch = two_that_train({0: 0.0, 1: 0.0})
    watch.happened("frozen", 1, 0.0)
    watch.happened("back", 1, 0.0)
    watch.note(1, 10.0)
    watch.hear(0, 0.5)
    assert first_suspect(watch, set(), 10.0) == (1, 1.25)
