"""Gradients that make one update together."""

import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.exchanging.membership.tickets import Tickets
from shoal.exchanging.servers.rounds import Rounds
from shoal.exchanging.servers.rules import make_rule
from shoal.exchanging.servers.shard import Policy, Push, Shard, empty_shard


def one_shard() -> Shard:
    policy = Policy(make_rule("sgd", momentum=0.0, weight_decay=0.0))
    return empty_shard([8], [torch.float64], policy, threading.Lock())


def gradient(replica: int, version: int = 0, rate: float = 1.0) -> Push:
    """Its place among eight is the replica's, so that a sum tells who is in it."""
    values = torch.zeros(8, dtype=torch.float64)
    values[replica] = 1.0
    return Push([values], version, rate)


@pytest.mark.parametrize("rates", [(0.5, 0.25), (0.25, 0.5)])
def test_the_rate_of_an_update_does_not_depend_on_who_came_last(rates: tuple[float, float]) -> None:
    shard = one_shard()
    rounds = Rounds(shard, 2)
    for replica, rate in enumerate(rates):
        assert rounds.add(gradient(replica, rate=rate), replica).applied
    assert shard.version == 1
    assert shard.weights[0].tolist() == [-0.25, -0.25, *[0.0] * 6]


def test_an_update_waits_until_it_is_said_whose_gradients_make_it() -> None:
    shard = one_shard()
    rounds = Rounds(shard, None)
    rounds.add(gradient(1), 1)
    assert shard.version == 0
    rounds.made_by({0: frozenset({0, 1})})
    assert shard.version == 0
    rounds.add(gradient(0), 0)
    assert shard.version == 1


def test_an_update_whose_makers_are_all_lost_changes_nothing() -> None:
    shard = one_shard()
    Rounds(shard, None).made_by({0: frozenset()})
    assert shard.version == 1
    assert not shard.weights[0].any()


class Run:
    """Replicas, tickets and two shards, one event at a time: what the network delivers, it delivers in any order."""

    def __init__(self, replicas: int, wanted: int, draws: random.Random) -> None:
        self.draws = draws
        self.tickets = Tickets(wanted, replicas)
        self.alive = set(range(replicas))
        self.resting: set[int] = set()
        self.shards = [one_shard(), one_shard()]
        self.rounds = [Rounds(shard, None) for shard in self.shards]
        self.told: list[list[dict[int, frozenset[int]]]] = [[], []]
        """What each server has still to hear."""
        self.has = dict.fromkeys(range(replicas), 0)
        """The version that each replica has."""
        self.pushing: dict[int, list[int]] = {}
        """The shards to which a replica that has a ticket has still to push."""
        self.refused: list[tuple[int, int]] = []
        self.tell()

    def tell(self) -> None:
        self.tickets.members(self.alive, self.resting)
        for news in self.told:
            news.append(dict(self.tickets.makers()))

    def events(self) -> list[tuple[str, int]]:
        idle = [replica for replica in self.alive if replica not in self.pushing]
        oldest = min(shard.version for shard in self.shards)
        return [
            *(("hear", server) for server, news in enumerate(self.told) if news),
            *(("push", replica) for replica in self.pushing if self.pushing[replica] and replica in self.alive),
            *(("fetch", replica) for replica in self.alive if self.has[replica] < oldest),
            *(("ask", replica) for replica in idle if self.has[replica] == self.tickets.version),
        ]

    def happen(self, what: str, which: int) -> None:
        match what:
            case "hear":
                self.rounds[which].made_by(self.told[which].pop(0))
            case "push":
                shard = self.pushing[which].pop(self.draws.randrange(len(self.pushing[which])))
                if not self.rounds[shard].add(gradient(which, self.has[which]), which).applied:
                    self.refused.append((which, shard))
            case "fetch":
                self.has[which] = min(shard.version for shard in self.shards)
                self.pushing.pop(which, None)
            case "ask":
                before = self.tickets.version
                assert self.tickets.ask(which, self.has[which])
                self.pushing[which] = [0, 1]
                if self.tickets.version != before:
                    self.tell()
            case "lose":
                self.alive.discard(which)
                self.tell()
            case "rest":
                self.resting ^= {which}
                self.tell()


@given(seed=st.integers(0, 1 << 20), replicas=st.integers(1, 5), backups=st.integers(0, 2))
def test_no_replica_that_has_a_ticket_is_left_out_and_no_update_waits_for_one_that_is_lost(
    seed: int, replicas: int, backups: int
) -> None:
    """Whoever is lost, or rests and pushes what it has left, between any two messages."""
    draws = random.Random(seed)
    run = Run(replicas, max(1, replicas - backups), draws)
    for _ in range(200):
        spare = sorted(run.alive)[1:]
        if spare and draws.random() < 0.03:
            run.happen("lose", draws.choice(spare))
        elif spare and draws.random() < 0.05:
            run.happen("rest", draws.choice(spare))
        events = run.events()
        assert events  # somebody can always go on
        run.happen(*draws.choice(events))
    assert run.refused == []
    assert abs(run.shards[0].version - run.shards[1].version) <= 1
