"""A mean of what replicas sent last in shared memory, beside the same on a server, whatever happens to replicas."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchanges import parse_exchange
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.exchanging.servers.consensus import Consensus
from shoal.exchanging.servers.server import Terms
from shoal.exchanging.servers.shard import Push, Shard, empty_shard
from shoal.exchanging.servers.shared_consensus import SharedConsensus
from shoal.exchanging.servers.shared_memory import SharedFolder
from shoal.exchanging.servers.slices import cut_over
from shoal.transport.links import JSON, connect

pytestmark = pytest.mark.timeout(120)
POLICY = Terms((), (), "consensus").policy()
SIZES = {"weight": 5, "bias": 2}
KINDS = {"weight": torch.float64, "bias": torch.float32}


def values(seed: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=drawn, dtype=KINDS[name]) for name, size in SIZES.items()]


def view_of(folder: SharedFolder, number: int) -> Shard:
    """A replica's."""
    (shard,) = folder.consensus(0, cut_over(SIZES, 1), KINDS, POLICY, number)
    return shard


class Members(RuleBasedStateMachine):
    """Replicas that come, push, freeze, wake and go; a server and shared memory hear the same."""

    @initialize()
    def begin(self) -> None:
        self.folder = SharedFolder.create()
        self.register = self.folder.register()
        self.views: dict[int, Shard] = {}
        self.active: set[int] = set()
        self.away: set[int] = set()
        self.come = 0
        first = values(0)
        self.server = empty_shard(list(SIZES.values()), list(KINDS.values()), POLICY, threading.Lock())
        self.server.begin(first)
        self.consensus = Consensus(self.server, least=1)
        self.comes()
        self.views[0].begin(first)

    def teardown(self) -> None:
        for view in self.views.values():
            view.close()
        self.folder.remove()

    @rule()
    def comes(self) -> None:
        self.active.add(self.come)
        self.tell()
        self.views[self.come] = view_of(self.folder, self.come)
        self.come += 1

    @precondition(lambda self: self.active)
    @rule(data=st.data(), seed=st.integers(1, 1000))
    def pushes(self, data: st.DataObject, seed: int) -> None:
        who = data.draw(st.sampled_from(sorted(self.active)))
        self.consensus.add(Push(values(seed), self.server.version, 1.0), who)
        into = [torch.empty(size, dtype=KINDS[name]) for name, size in SIZES.items()]
        outcome = self.views[who].push_and_fetch(Push(values(seed), 0, 1.0), into)
        assert (outcome.applied, outcome.staleness, outcome.version) == (True, 0, self.server.version)
        for mine, theirs in zip(into, self.server.weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6 if mine.dtype == torch.float32 else 1e-12, atol=1e-7)

    @precondition(lambda self: len(self.active) > 1)
    @rule(data=st.data(), for_good=st.booleans())
    def stops(self, data: st.DataObject, for_good: bool) -> None:
        who = data.draw(st.sampled_from(sorted(self.active)))
        self.active.remove(who)
        if not for_good:
            self.away.add(who)
        self.tell()

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def wakes(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.away)))
        self.away.remove(who)
        self.active.add(who)
        self.tell()

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def one_that_is_away_changes_nothing(self, data: st.DataObject) -> None:
        """It pushes before anybody has seen that it is back."""
        who = data.draw(st.sampled_from(sorted(self.away)))
        before = self.views[who].snapshot().weights
        self.views[who].push_and_fetch(Push(values(1), 0, 1.0), None)
        for now, then in zip(self.views[who].snapshot().weights, before, strict=True):
            assert torch.equal(now, then)

    def tell(self) -> None:
        self.consensus.members(frozenset(self.active))
        self.register.tell(self.active, self.away)
        assert len(list(self.folder.path.glob("*.mark*"))) <= self.come


TestMembers = Members.TestCase


@contextmanager
def folder_of_a_run() -> Iterator[tuple[SharedFolder, Coordinator]]:
    folder = SharedFolder.create()
    coordinator = Coordinator(heartbeat=30.0, replicas=2, shared=folder, registers=True)
    try:
        yield folder, coordinator
    finally:
        coordinator.close()
        folder.remove()


def test_the_coordinator_says_who_takes_part_and_a_place_is_taken_again() -> None:
    with folder_of_a_run() as (folder, coordinator):
        register = folder.register()
        assert register.entries() == {}
        hello: dict[str, JSON] = {"as": "replica", "replica": None, "pids": [1]}
        links = []
        for _ in range(2):
            links.append(connect(coordinator.address, coordinator.token, hello, name="the place"))
            links[-1].receive()
        first = dict(register.entries())
        assert sorted(entry.place for entry in first.values()) == [0, 1]
        gone, stays = sorted(first)
        coordinator.suspect(stays, hangs=True)
        assert set(register.entries()) == {gone}
        coordinator.suspect(stays, hangs=False)
        assert register.entries()[stays].place == first[stays].place
        assert register.entries()[stays].mark != first[stays].mark
        coordinator.drop(gone)
        links.append(connect(coordinator.address, coordinator.token, hello, name="the place"))
        links[-1].receive()
        now = register.entries()
        new = max(now)
        assert set(now) == {stays, new}
        assert now[new].place == first[gone].place
        assert now[new].mark not in {entry.mark for entry in first.values()}
        for link in links:
            link.close()


def test_waiting_for_others_needs_a_server() -> None:
    for told in ({"least": 2}, {"delay": 3}):
        with pytest.raises(ConfigError, match="where nobody waits"):
            parse_exchange("admm", {"servers": "direct", **told})
        assert parse_exchange("admm", told).holding(2, one_host=True, weight_bytes=8).place == "processes"
    assert parse_exchange("admm", {}).holding(2, one_host=True, weight_bytes=8) == ("direct", 0)
    assert parse_exchange("admm", {}).holding(2, one_host=False, weight_bytes=8) == ("processes", 1)


def test_a_view_has_what_a_shard_has() -> None:
    folder = SharedFolder.create()
    try:
        view = view_of(folder, 0)
        assert isinstance(view, SharedConsensus)
        assert not view.ready
        view.begin(values(3))
        for mine, given in zip(view.snapshot().weights, values(3), strict=True):
            assert torch.equal(mine, given)
        view.close()
    finally:
        folder.remove()
