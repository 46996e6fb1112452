"""Exchanges whose replicas keep weights of their own: what their papers say stays the same, stays the same."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.exchanging.compression import Codec, make_codec
from shoal.exchanging.compression.codecs import CodecName
from shoal.exchanging.gossip import Gossip
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.consensus import Consensus
from shoal.exchanging.servers.server import Terms
from shoal.exchanging.servers.shard import Push, empty_shard
from tests.exchanging.together import Side, at_once, batch, meeting, network, sgd

pytestmark = pytest.mark.timeout(120)

KEEPS_OWN: list[tuple[str, int, dict[str, Any]]] = [
    ("easgd", 0, {"period": 1}),
    ("easgd", 2, {"period": 1}),
    ("admm", 1, {"period": 1}),
    ("admm", 0, {"period": 1}),
    ("gossip", 0, {"period": 1, "mode": "push"}),
    ("gossip", 0, {"period": 1, "mode": "pair"}),
    ("local", 1, {"period": 100}),
    ("local", 0, {"average": "once"}),
]


def sides(side: Callable[..., Side], count: int, **options: Any) -> list[Side]:
    return [side(number, kind=torch.float64, **options) for number in range(count)]


def acquainted(pair: list[Side]) -> list[Side]:
    """Until every replica has been told of the others."""
    for replica in pair:
        assert isinstance(replica.exchange, Gossip)
        while len(replica.exchange._peers.there()) < len(pair) - 1:
            time.sleep(0.001)
    return pair


def drained(pair: list[Side]) -> None:
    """Until nothing is on its way."""
    for replica in pair:
        replica.exchange.flush()


def share_of(side: Side) -> float:
    """With what arrived and is not mixed in yet."""
    assert isinstance(side.exchange, Gossip)
    return side.exchange.weights_now()[1]


@pytest.mark.parametrize(("name", "servers", "options"), KEEPS_OWN)
def test_common_weights_are_shown_and_own_ones_kept(name: str, servers: int, options: dict[str, Any]) -> None:
    with meeting(name, 2, servers=servers, **options) as (side, _):
        pair = sides(side, 2)
        if isinstance(pair[0].exchange, Gossip):
            acquainted(pair)
        for number in range(3):
            for replica in pair:
                replica.step(*batch(2 * number + replica.number, kind=torch.float64))
        if name == "gossip":
            drained(pair)
            pair[0].push(1.0)  # mixes in what arrived, and goes on from there
            drained(pair)
        pair[0].exchange.own_state()  # mixes in what arrived
        own = pair[0].weights()
        with pair[0].exchange.showing():
            common = pair[0].weights()
            assert not torch.equal(common, own)
        assert torch.equal(pair[0].weights(), own)
        pair[0].exchange.settle()
        torch.testing.assert_close(pair[0].weights(), common)


@pytest.mark.parametrize("servers", [0, 2])
def test_an_elastic_exchange_conserves_the_sum(servers: int) -> None:
    with meeting("easgd", 3, servers=servers, period=1, moving_rate=0.6) as (side, _):
        trio = sides(side, 3, momentum=0.0, weight_decay=0.0)
        centre = trio[0].weights()
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            replica = trio[int(torch.randint(3, (1,), generator=generator))]
            before, at_centre = replica.weights(), centre
            replica.push(1.0, rate=0.1)
            with replica.exchange.showing():
                centre = replica.weights()
            torch.testing.assert_close(replica.weights() + centre, before - 0.1 + at_centre, rtol=0, atol=1e-13)
            torch.testing.assert_close(centre - at_centre, 0.2 * (before - 0.1 - at_centre), rtol=0, atol=1e-13)


def test_elastic_averaging_is_stable_where_its_paper_says() -> None:
    """On x**2 / 2, replicas taking turns: stable for 0 <= a <= (4 - 2 r) / (4 - r), at rate r; far beyond it is not."""

    def ends_at(rate: float, moving: float) -> float:
        shard = empty_shard([1], [torch.float64], Terms((), (), "elastic").policy(), threading.Lock())
        shard.begin([torch.tensor([0.7], dtype=torch.float64)])
        own = [torch.tensor([value], dtype=torch.float64) for value in (1.0, -0.5)]
        for _ in range(500):
            for weight in own:
                weight.sub_(rate * weight)
                change = [weight.clone()]
                shard.push_and_fetch(Push(change, shard.version, moving), change)
                weight.sub_(change[0])
        return float(torch.stack([*own, shard.weights[0]]).abs().max())

    for rate in (0.1, 0.5, 1.0, 1.5):
        edge = (4 - 2 * rate) / (4 - rate)
        assert ends_at(rate, 0.9 * edge) < 1e-3
        assert not ends_at(rate, 2.5) < 1e3  # it may have grown beyond all numbers


def test_weights_averaged_once_are_the_mean_of_what_each_reached() -> None:
    with meeting("local", 3, average="once") as (side, _):
        trio = sides(side, 3)
        reached = []
        for replica in trio:
            alone = network(torch.float64)
            optimizer = sgd(alone)
            for number in range(4):
                x, y = batch(10 * replica.number + number, kind=torch.float64)
                assert replica.step(x, y) is True
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(alone(x), y))
                optimizer.param_groups[0]["lr"] = 0.1
                optimizer.step()
            reached.append(torch.cat([p.detach().reshape(-1) for p in alone.parameters()]))
            assert torch.equal(replica.weights(), reached[-1])
        acquainted(trio)
        with trio[1].exchange.showing():
            torch.testing.assert_close(trio[1].weights(), torch.stack(reached).mean(0))


def test_local_sgd_takes_the_mean_every_period() -> None:
    with meeting("local", 2, servers=2, period=2) as (side, _):
        pair = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = pair[0].weights()

        def train(replica: Side) -> list[bool | None]:
            return [replica.push(1.0 + replica.number, rate=1.0) for _ in range(4)]

        assert at_once([partial(train, replica) for replica in pair]) == [[None, True, None, True]] * 2
        for replica in pair:
            torch.testing.assert_close(replica.weights(), begun - 6.0)


def test_local_sgd_with_period_one_is_the_step_by_the_mean_gradient() -> None:
    with meeting("local", 2, servers=1, period=1) as (side, _), meeting("allreduce", 2) as (plain, _):
        steps = partial(at_once)

        def train(make: Callable[..., Side], number: int) -> Tensor:
            replica = make(number, kind=torch.float64, momentum=0.0)
            for step in range(4):
                replica.step(*batch(2 * step + number, kind=torch.float64))
            return replica.weights()

        local = steps([partial(train, side, number) for number in range(2)])
        exact = steps([partial(train, plain, number) for number in range(2)])
        torch.testing.assert_close(local[0], exact[0])
        assert torch.equal(local[0], local[1])


def test_an_outer_optimizer_is_nesterovs() -> None:
    """Against torch's own, whose gradient is the way from the mean to the common weights."""
    with meeting("local", 2, servers=1, period=1, outer_lr=0.7, outer_momentum=0.9) as (side, _):
        pair = sides(side, 2, momentum=0.0, weight_decay=0.0)
        expected = nn.Parameter(pair[0].weights())
        outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
        for step in range(4):
            at_once([partial(replica.push, 1.0 + step * replica.number, rate=0.5) for replica in pair])
            expected.grad = torch.full_like(expected, 0.5 * (1.0 + 1.0 + step) / 2)
            outer.step()
            torch.testing.assert_close(pair[0].weights(), expected.detach())
            assert torch.equal(pair[0].weights(), pair[1].weights())


def test_a_replica_that_is_lost_is_not_part_of_the_mean() -> None:
    with meeting("local", 2, servers=1, period=2, heartbeat=1.0) as (side, coordinator):
        pair = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = pair[0].weights()
        at_once([partial(replica.push, 1.0, rate=1.0) for replica in pair])
        threading.Timer(0.3, coordinator.drop, [1]).start()
        assert pair[0].push(1.0, rate=1.0)  # waits for the other until it is lost
        assert coordinator.active() == [0]
        torch.testing.assert_close(pair[0].weights(), begun - 2.0)


# Gossip


class Wire:
    """Carries messages between sides when told to, in any order, or loses their receivers."""

    def __init__(self, sizes: int, members: int, codec: Codec | None = None) -> None:
        self.sides = [self._side(number, sizes, members, codec) for number in range(members)]
        self.under_way: list[tuple[int, int, list[Tensor], float]] = []
        self.dead: set[int] = set()

    def _side(self, number: int, size: int, members: int, codec: Codec | None) -> Gossip:
        weight = nn.Parameter(torch.linspace(number, number + 0.3, size, dtype=torch.float64))
        replica = Replica({"w": weight}, torch.optim.SGD([weight], lr=1.0))
        peers: Any = _NoPeers()
        return Gossip(replica, peers, random.Random(number), share=1 / members, codec=codec)

    def living(self) -> list[Gossip]:
        return [side for number, side in enumerate(self.sides) if number not in self.dead]

    def step(self, number: int, gradient: float) -> None:
        side = self.sides[number]
        side.replica.parameters["w"].grad = torch.full_like(side.replica.parameters["w"], gradient)
        assert side.step(1.0)

    def send(self, sender: int, receiver: int) -> None:
        weights, share, _ = self.sides[sender]._taken_to_send()
        self.under_way.append((sender, receiver, weights, share))

    def deliver(self, which: int) -> None:
        sender, receiver, weights, share = self.under_way.pop(which)
        to = sender if receiver in self.dead else receiver
        self.sides[to]._put_in_inbox(weights, share)

    def total(self) -> tuple[float, float]:
        """All shares, and the sum of weights by shares, wherever they are."""
        shares, values = 0.0, 0.0
        for side in self.living():
            own, share = side.weights_now()
            shares, values = shares + share, values + share * float(own[0].mean())
        for _, _, weights, share in self.under_way:
            shares, values = shares + share, values + share * float(weights[0].mean())
        return shares, values


class _NoPeers:
    replica = 0
    sent_bytes = received_bytes = 0
    errors: tuple[Exception, ...] = ()

    def there(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


@settings(max_examples=60, deadline=None)
@given(data=st.data(), compress=st.sampled_from(["none", "bf16", "int8"]))
def test_shares_sum_to_one_and_their_mean_moves_by_gradients_only(data: st.DataObject, compress: Any) -> None:
    wire = Wire(3, 4, None if compress == "none" else make_codec(compress))
    try:
        expected, lost = wire.total()[1], 0.0
        for _ in range(data.draw(st.integers(1, 40))):
            alive = [number for number in range(4) if number not in wire.dead]
            what = data.draw(st.sampled_from(["step", "send", "deliver", "die"]))
            number = data.draw(st.sampled_from(alive))
            if what == "step":
                wire.step(number, 0.5)
                share = wire.sides[number].share  # all of what was in its inbox is mixed in now
                before = wire.total()[1]
                wire.step(number, 1.0)
                assert wire.total()[1] == pytest.approx(before - share)
                expected = wire.total()[1]
            elif what == "send":
                wire.send(number, data.draw(st.integers(0, 3)))
            elif what == "deliver" and wire.under_way:
                which = data.draw(st.integers(0, len(wire.under_way) - 1))
                sender, receiver, _, _ = wire.under_way[which]
                if receiver not in wire.dead or sender not in wire.dead:
                    wire.deliver(which)
            elif what == "die" and len(alive) > 1:
                own, share = wire.sides[number].weights_now()
                expected -= share * float(own[0].mean())
                lost += share
                wire.dead.add(number)
                orphans = [m for m in wire.under_way if m[0] in wire.dead and m[1] in wire.dead]
                for message in orphans:  # nobody is left who could have it
                    wire.under_way.remove(message)
                    lost += message[3]
                    expected -= message[3] * float(message[2][0].mean())
            shares, values = wire.total()
            assert shares + lost == pytest.approx(1.0)
            assert values == pytest.approx(expected)
    finally:
        for side in wire.sides:
            side.close()


@pytest.mark.parametrize(
    ("mode", "compress"),
    [("push", "none"), ("pair", "none"), ("push", "bf16"), ("push", "int8")]
    + [("pair", name) for name in get_args(CodecName)],
)
def test_gossip_over_links_keeps_the_mean(mode: str, compress: str) -> None:
    with meeting("gossip", 3, mode=mode, period=1, compress=compress) as (side, _):
        trio = acquainted(sides(side, 3, momentum=0.0, weight_decay=0.0))
        begun = trio[0].weights()

        def train(replica: Side) -> None:
            for _ in range(30):
                replica.push(1.0, rate=0.01)  # all the same, so that the mean by any shares moves alike
                replica.exchange.flush()

        at_once([partial(train, replica) for replica in trio])
        assert sum(replica.exchange.tally.updates for replica in trio) == 90
        assert sum(replica.exchange.tally.sent_bytes for replica in trio) > 0
        if mode == "push" or compress == "none":  # else of two that ask each other at once one is refused
            assert not any(replica.exchange.tally.dropped for replica in trio)
        with trio[2].exchange.showing():
            moved = begun - trio[2].weights()
        torch.testing.assert_close(moved, moved[0].expand_as(moved))
        if mode == "pair":  # by shares each step counts as much as its replica's share then
            torch.testing.assert_close(moved, torch.full_like(moved, 0.3))
        assert sum(map(share_of, trio)) == pytest.approx(1.0)


def test_what_was_on_its_way_to_a_dead_replica_comes_back() -> None:
    with meeting("gossip", 2, mode="push", period=1, heartbeat=1.0) as (side, _):
        pair = acquainted(sides(side, 2, momentum=0.0, weight_decay=0.0))
        pair[0].push(1.0)
        drained(pair)
        assert (share_of(pair[0]), share_of(pair[1])) == (0.25, 0.75)
        pair[1].exchange._peers._door.close()  # type: ignore[attr-defined]
        pair[0].push(1.0)
        drained(pair)
        assert pair[0].exchange.tally.dropped == 1
        assert (share_of(pair[0]), share_of(pair[1])) == (0.25, 0.75)


def test_a_replica_that_comes_late_gets_half_of_anothers_share() -> None:
    with meeting("gossip", 1, mode="push", period=1) as (side, _):
        first = side(0, kind=torch.float64)
        first.push(1.0)
        late = side(1, kind=torch.float64, seed=5)
        torch.testing.assert_close(late.weights(), first.weights())
        assert (share_of(late), share_of(first)) == (0.5, 0.5)
        late.exchange.hand_over()
        assert (share_of(late), share_of(first)) == (0.0, 1.0)


# ADMM


def test_admm_reaches_the_solution_of_least_squares() -> None:
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randn(20, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    wanted = [torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3)]
    solution = torch.linalg.lstsq(torch.cat(tables), torch.cat(wanted)[:, None]).solution[:, 0]
    shard = empty_shard([4], [torch.float64], Terms((), (), "consensus").policy(), threading.Lock())
    shard.begin([torch.zeros(4, dtype=torch.float64)])
    consensus = Consensus(shard, least=1)
    consensus.members(frozenset(range(3)))
    rho = 5.0
    duals = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
    for turn in range(600):
        number = int(torch.randint(3, (1,), generator=generator)) if turn > 3 else turn % 3
        table, dual = tables[number], duals[number]
        common = shard.weights[0]
        left = table.T @ table + rho * torch.eye(4, dtype=torch.float64)
        own = torch.linalg.solve(left, table.T @ wanted[number] - dual + rho * common)
        dual.add_(own - common, alpha=rho)
        consensus.add(Push([own + dual / rho], shard.version, 1.0), number)
    torch.testing.assert_close(shard.weights[0], solution, rtol=1e-5, atol=1e-6)


def consensus_of(least: int, delay: int, members: int) -> tuple[Consensus, Any]:
    shard = empty_shard([1], [torch.float64], Terms((), (), "consensus").policy(), threading.Lock())
    shard.begin([torch.zeros(1, dtype=torch.float64)])
    consensus = Consensus(shard, least=least, delay=delay)
    consensus.members(frozenset(range(members)))
    return consensus, shard


def push_value(value: float) -> Push:
    return Push([torch.tensor([value], dtype=torch.float64)], 0, 1.0)


def test_the_common_solution_is_renewed_when_enough_have_sent() -> None:
    consensus, shard = consensus_of(least=2, delay=0, members=3)
    consensus.add(push_value(3.0), 0)
    assert shard.version == 0
    consensus.add(push_value(6.0), 1)
    assert shard.version == 1
    assert float(shard.weights[0]) == 3.0  # the third stands where the weights stood
    consensus.members(frozenset({0}))
    consensus.add(push_value(4.0), 0)
    assert float(shard.weights[0]) == 4.0  # of those that are gone nothing stays


def test_nobody_is_more_renewals_behind_than_the_delay() -> None:
    consensus, shard = consensus_of(least=1, delay=2, members=2)
    consensus.add(push_value(1.0), 1)
    consensus.add(push_value(1.0), 0)
    assert shard.version == 2
    consensus.add(push_value(1.0), 0)
    assert shard.version == 2, "replica 1 is two renewals behind"
    consensus.add(push_value(5.0), 1)
    assert shard.version == 3
    consensus.add(push_value(1.0), 0)
    consensus.add(push_value(1.0), 0)
    assert shard.version == 4
    consensus.members(frozenset({0, 1}), resting=frozenset({1}))
    assert shard.version == 5, "one that rests is not waited for"


@pytest.mark.parametrize("servers", [0, 1])
def test_softsync_steps_by_the_mean_of_several_gradients(servers: int) -> None:
    with meeting("softsync", 2, servers=servers) as (side, _):
        pair = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = pair[0].weights()
        assert pair[0].push(1.0)
        torch.testing.assert_close(pair[0].weights(), begun)  # it waits for a second gradient
        assert pair[1].push(3.0)
        torch.testing.assert_close(pair[1].weights(), begun - 2.0)
        pair[0].push(1.0)  # one update old: counts whole
        pair[1].push(1.0)
        pair[1].push(1.0)
        pair[1].push(1.0)
        pair[0].push(0.0)
        pair[0].exchange.settle()
        assert pair[0].exchange.tally.staleness == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("servers", [0, 1])
def test_softsync_divides_a_gradient_by_its_staleness(servers: int) -> None:
    with meeting("softsync", 2, n=2, servers=servers) as (side, _):  # an update for every gradient
        late, busy = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = late.weights()
        for _ in range(3):
            busy.push(0.0)
        late.push(1.0)
        assert late.exchange.tally.staleness == {3: 1}
        torch.testing.assert_close(late.weights(), begun - 1 / 3)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(("dual_limit", "common", "own"), [(1e6, 0.3, 0.2), (0.0, 0.2, 0.2)])
def test_admm_steps_by_its_multipliers_and_the_distance_to_the_common_solution(
    dual_limit: float, common: float, own: float, servers: int
) -> None:
    """One replica, gradient 1, rate 0.1, rho 0.5, two steps by hand, as distances from where it began.

    With multipliers: own 0.1, dual -0.05, sent 0.1 + 0.05 / 0.5 = 0.2; then a gradient of 1 - 0.05 + 0.5 * 0.1 = 1, own
    0.2, dual -0.05 + 0.5 * 0 = -0.05, sent 0.3. Without them what is sent are the own weights.
    """
    with meeting("admm", 1, servers=servers, rho=0.5, period=1, dual_limit=dual_limit) as (side, _):
        (replica,) = sides(side, 1, momentum=0.0, weight_decay=0.0)
        begun = replica.weights()
        for _ in range(2):
            replica.push(1.0, rate=0.1)
        torch.testing.assert_close(replica.weights(), begun - own)
        with replica.exchange.showing():
            torch.testing.assert_close(replica.weights(), begun - common)
        torch.testing.assert_close(replica.weights(), begun - own)


def test_hogwild_adds_every_update_where_none_meets_another_and_takes_no_turns() -> None:
    with meeting("hogwild", 2) as (side, _):
        pair = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = pair[0].weights()
        for _ in range(3):
            for replica in pair:
                replica.push(1.0, rate=0.01)
        torch.testing.assert_close(pair[1].weights(), begun - 0.06)

        def push_often(replica: Side) -> None:
            for _ in range(50):
                replica.push(1.0, rate=0.01)

        at_once([partial(push_often, replica) for replica in pair])
        for replica in pair:
            replica.exchange.settle()
        moved = begun - pair[0].weights()
        assert torch.equal(pair[0].weights(), pair[1].weights())
        assert moved.max() <= 1.06 + 1e-4, "no update counts twice"
        assert moved.min() > 0.06 + 1e-4, "of updates that meet, one stays"


@pytest.mark.parametrize(
    "options", [{"mode": "push", "period": 1}, {"mode": "pair", "period": 1}, {"probability": 0}], ids=str
)
def test_all_that_settle_have_the_same_weights(options: dict[str, Any]) -> None:
    with meeting("gossip", 3, **options) as (side, _):
        trio = acquainted(sides(side, 3))
        for number in range(4):
            for replica in trio:
                replica.step(*batch(3 * number + replica.number, kind=torch.float64))
        drained(trio)
        at_once([replica.exchange.settle for replica in trio])
        assert torch.equal(trio[0].weights(), trio[1].weights())
        assert torch.equal(trio[0].weights(), trio[2].weights())
