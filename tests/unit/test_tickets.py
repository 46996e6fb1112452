"""Backup workers: who counts in a round, and that no round waits for a replica that is gone."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.exchanging.membership.tickets import Tickets


def test_the_first_n_of_a_version_count() -> None:
    tickets = Tickets(2)
    tickets.members({0, 1, 2})
    assert [tickets.ask(replica, 0) for replica in (2, 0, 1)] == [True, True, False]
    assert tickets.version == 1
    assert not tickets.ask(1, 0)
    assert tickets.ask(1, 1)


def test_nothing_begins_before_all_wanted_are_there() -> None:
    tickets = Tickets(2)
    tickets.members({0})
    assert tickets.ask(0, 0)
    assert tickets.version == 0
    tickets.members({0, 1})
    assert tickets.ask(1, 0)
    assert tickets.version == 1


def test_a_replica_that_never_comes_is_not_waited_for() -> None:
    tickets = Tickets(2)
    tickets.members({0})
    tickets.ask(0, 0)
    tickets.begin_anyway()
    assert tickets.version == 1


def test_a_ticket_of_a_lost_replica_is_no_longer_needed() -> None:
    tickets = Tickets(2)
    tickets.members({0, 1, 2})
    tickets.ask(0, 0)
    tickets.ask(1, 0)
    assert tickets.makers() == {0: {0, 1}}
    tickets.members({0, 2})
    assert tickets.makers() == {0: {0}}
    tickets.members({0, 1, 2})  # it was only frozen
    assert tickets.makers() == {0: {0, 1}}


def test_a_resting_replica_that_pushes_what_it_has_left_takes_nobodys_place_and_is_not_awaited_when_lost() -> None:
    tickets = Tickets(9, 3)
    tickets.members({0, 1, 2})
    tickets.members({0, 1, 2}, resting={2})
    assert [tickets.ask(replica, 0) for replica in (2, 0)] == [True, True]
    assert tickets.version == 0
    tickets.members({0, 1})
    assert tickets.version == 0
    assert tickets.ask(1, 0)
    assert tickets.makers() == {0: {0, 1}}


@given(seed=st.integers(0, 10_000), wanted=st.integers(1, 4), replicas=st.integers(1, 5))
def test_rounds_go_on_as_long_as_one_replica_is_left(seed: int, wanted: int, replicas: int) -> None:
    wanted = min(wanted, replicas)
    draws = random.Random(seed)
    tickets = Tickets(wanted)
    active = set(range(replicas))
    tickets.members(active)
    for _ in range(60):
        if draws.random() < 0.1 and len(active) > 1:
            active = active - {draws.choice(sorted(active))}
            tickets.members(active)
        version = tickets.version
        granted = [replica for replica in draws.sample(sorted(active), len(active)) if tickets.ask(replica, version)]
        assert tickets.version == version + 1
        assert len(granted) <= wanted
        assert tickets.makers() == {version: set(granted)}
