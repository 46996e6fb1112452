"""What every exchange keeps, on real links and shared memory: see the first lines of each exchange's file."""

import threading
import time
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.exchanges import EXCHANGES
from shoal.exchanging.downpour import Downpour
from tests.exchanging.together import Side, at_once, batch, meeting, network, sgd

pytestmark = pytest.mark.timeout(120)

ALONE = [
    ("allreduce", 0, {}),
    ("backup", 1, {"backups": 0}),
    ("sync", 1, {}),
    ("sync", 3, {}),
    ("downpour", 0, {}),
    ("downpour", 0, {"shards": 3}),
    ("downpour", 1, {}),
    ("downpour", 3, {}),
    ("downpour", 0, {"n_sync": 3}),
    ("downpour", 2, {"n_sync": 3}),
    ("downpour", 0, {"n_push": 2, "n_fetch": 4, "rule": "add"}),
    ("dasgd", 0, {"sparse": "none", "decay": "none", "momentum_at": "server", "n_sync": 1}),
    ("softsync", 0, {}),
    ("softsync", 2, {}),
    ("hogwild", 0, {}),
    ("local", 1, {}),
    ("local", 2, {"period": 3}),
    ("local", 0, {"average": "once"}),
    ("gossip", 0, {"mode": "push"}),
    ("gossip", 0, {"mode": "pair", "period": 1}),
    ("dasgd", 2, {"sparse": "none", "decay": "exponential", "momentum_at": "server", "n_sync": 1}),
]


OWN_TESTS = {"easgd": "until_it_pushes", "admm": "test_averaging.py"}
"""Exchanges of which one replica alone is not plain SGD, by what they promise, and what is tested instead."""


def test_every_exchange_is_under_this_contract() -> None:
    assert {name for name, *_ in ALONE} | OWN_TESTS.keys() == EXCHANGES.keys()


def plain(steps: int, momentum: float = 0.9, weight_decay: float = 0.01) -> torch.Tensor:
    model = network()
    optimizer = sgd(model, momentum, weight_decay)
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        x, y = batch(number)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(("name", "servers", "options"), ALONE)
def test_one_replica_is_plain_sgd_to_the_bit(
    name: str, servers: int, options: dict[str, object], momentum: float
) -> None:
    with meeting(name, 1, servers=servers, **options) as (side, _):
        replica = side(0, momentum=momentum)
        for number in range(7):
            assert replica.step(*batch(number)) is not False
        replica.exchange.flush()
        replica.exchange.settle()
        assert torch.equal(replica.weights(), plain(7, momentum))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("servers", [0, 2])
def test_until_it_pushes_a_replica_of_easgd_is_plain_sgd_to_the_bit(servers: int, momentum: float) -> None:
    """Its own weights; the centre, which `settle` gives, stays where it began."""
    with meeting("easgd", 1, servers=servers, period=8) as (side, _):
        replica = side(0, momentum=momentum)
        begun = replica.weights()
        for number in range(7):
            assert replica.step(*batch(number)) is not False
        assert torch.equal(replica.weights(), plain(7, momentum))
        replica.exchange.settle()
        assert torch.equal(replica.weights(), begun)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    ("name", "servers"), [("allreduce", 0), ("backup", 1), ("backup", 2), ("sync", 1), ("sync", 3)]
)
def test_replicas_in_step_are_one_with_a_larger_batch(name: str, servers: int, replicas: int) -> None:
    kind = torch.float64
    model = network(kind)
    optimizer = sgd(model)
    for number in range(5):
        optimizer.zero_grad()
        parts = [batch(replicas * number + replica, kind=kind) for replica in range(replicas)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    options = {"backups": 0} if name == "backup" else {}
    with meeting(name, replicas, servers=servers, **options) as (side, _):

        def train(replica: int) -> torch.Tensor:
            trained = side(replica, kind=kind)
            for number in range(5):
                assert trained.step(*batch(replicas * number + replica, kind=kind))
            return trained.weights()

        for weights in at_once([partial(train, replica) for replica in range(replicas)]):
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def sides(side: object, count: int, **options: object) -> list[Side]:
    return [side(number, **options) for number in range(count)]  # type: ignore[operator]


@pytest.mark.parametrize("servers", [0, 2])
def test_staleness_is_the_updates_in_between(servers: int) -> None:
    with meeting("downpour", 3, servers=servers) as (side, _):
        first, second, third = sides(side, 3, momentum=0.0, weight_decay=0.0)
        begun = first.weights()
        assert first.push(1.0)
        assert second.push(1.0)
        assert third.push(1.0)
        assert first.push(1.0)
        assert [replica.exchange.tally.staleness for replica in (first, second, third)] == [
            {0: 1, 2: 1},
            {1: 1},
            {2: 1},
        ]
        first.exchange.settle()
        torch.testing.assert_close(first.weights(), begun - 4.0)


@pytest.mark.parametrize("servers", [0, 2])
def test_a_gradient_beyond_the_bound_is_dropped_and_not_applied(servers: int) -> None:
    with meeting("downpour", 2, servers=servers, max_staleness=0) as (side, _):
        first, second = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = first.weights()
        assert first.push(1.0)
        assert not second.push(float("nan"))
        assert second.exchange.tally.dropped == 1
        torch.testing.assert_close(second.weights(), begun - 1.0)
        assert second.push(1.0)
        torch.testing.assert_close(second.weights(), begun - 2.0)


def push_often(side: Side) -> None:
    for _ in range(60):
        side.push(1.0)


@pytest.mark.parametrize(("servers", "options"), [(0, {"shards": 5}), (3, {})])
def test_a_push_is_applied_by_all_shards_or_by_none(servers: int, options: dict[str, int]) -> None:
    with meeting("downpour", 3, servers=servers, max_staleness=1, **options) as (side, _):
        pair = sides(side, 3, kind=torch.float64, momentum=0.0, weight_decay=0.0)
        begun = pair[0].weights()
        at_once([partial(push_often, replica) for replica in pair])
        applied = sum(replica.exchange.tally.updates for replica in pair)
        assert sum(replica.exchange.tally.dropped for replica in pair) == 180 - applied > 0, "nothing came too late"
        pair[0].exchange.settle()
        torch.testing.assert_close(pair[0].weights(), begun - applied)


@pytest.mark.parametrize(("servers", "options"), [(0, {"shards": 5}), (3, {})])
def test_what_is_saved_is_of_one_moment(servers: int, options: dict[str, int]) -> None:
    """With momentum 1 and gradients of 1, after k updates momentum is k, and weights went k (k + 1) / 2."""
    with meeting("downpour", 2, servers=servers, **options) as (side, _):
        pusher, saver = sides(side, 2, kind=torch.float64, momentum=1.0, weight_decay=0.0)
        begun, over = saver.weights(), threading.Event()

        def push() -> None:
            while not over.is_set():
                pusher.push(1.0)

        def save() -> None:
            try:
                while pusher.exchange.tally.updates < 60:
                    time.sleep(0.001)
                    saver.exchange.settle()
                    momentum = torch.cat(saver.exchange.replica.remembered("momentum_buffer"))
                    torch.testing.assert_close(begun - saver.weights(), momentum * (momentum + 1) / 2)
            finally:
                over.set()

        at_once([push, save])


@pytest.mark.parametrize(("decay", "factor"), [("none", 1.0), ("exponential", 0.5**2), ("inverse", 1 / 2)])
@pytest.mark.parametrize("sparse", ["none", "topk"])
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("momentum_at", ["worker", "server"])
def test_a_stale_gradient_is_weakened(
    decay: str, factor: float, sparse: str, servers: int, period: int, momentum_at: str
) -> None:
    options = {"decay": decay, "decay_base": 0.5, "sparse": sparse, "density": 1.0, "n_sync": period}
    with meeting("dasgd", 3, servers=servers, momentum_at=momentum_at, **options) as (side, _):
        first, second, third = sides(side, 3, momentum=0.0, weight_decay=0.0)
        begun = third.weights()
        for replica, gradient in ((first, 0.0), (second, 0.0), (third, 1.0)):
            for _ in range(period):
                replica.push(gradient)
        torch.testing.assert_close(third.weights(), begun - period * factor)


def test_what_a_replica_has_not_pushed_stays_on_top_of_what_it_fetches() -> None:
    with meeting("downpour", 2, n_push=2, n_fetch=1, rule="add") as (side, _):
        first, second = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = first.weights()
        second.push(1.0)
        second.push(1.0)  # pushed: -2
        first.push(1.0)  # fetched: -2, own: -1
        torch.testing.assert_close(first.weights(), begun - 3.0)
        first.push(1.0)  # pushed: -4
        second.exchange.settle()
        torch.testing.assert_close(second.weights(), begun - 4.0)


def test_pushed_changes_add_up() -> None:
    with meeting("downpour", 2, n_sync=2) as (side, _):
        first, second = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = first.weights()
        for replica in (first, second, first, second):
            replica.push(1.0)
        first.exchange.settle()
        torch.testing.assert_close(first.weights(), begun - 4.0)
        assert second.exchange.tally.staleness == {1: 1}


@pytest.mark.parametrize(("servers", "shards"), [(0, 1), (0, 4), (1, None), (3, None)])
def test_adagrad_over_shards_is_adagrad(servers: int, shards: int | None) -> None:
    model = network()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    for number in range(6):
        optimizer.zero_grad()
        x, y = batch(number)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    options = {} if shards is None else {"shards": shards}
    with meeting("downpour", 1, servers=servers, rule="adagrad", **options) as (side, _):
        replica = side(0)
        for number in range(6):
            replica.step(*batch(number))
        assert torch.equal(replica.weights(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(
    ("downpour", "momentum_at"),
    [({"n_sync": 1}, "server"), ({"n_sync": 3}, "worker"), ({"n_sync": 3, "rule": "sgd"}, "server")],
)
def test_all_switches_off_is_downpour_to_the_bit(servers: int, downpour: dict[str, Any], momentum_at: str) -> None:
    reached = []
    off: dict[str, Any] = {"sparse": "none", "decay": "none", "momentum_at": momentum_at, "n_sync": downpour["n_sync"]}
    for name, options in (("downpour", downpour), ("dasgd", off)):
        with meeting(name, 2, servers=servers, **options) as (side, _):
            pair = sides(side, 2)
            for number in range(19):
                pair[number % 3 % 2].step(*batch(number))
            pair[0].exchange.settle()
            reached.append(pair[0].weights())
    assert torch.equal(*reached)


@pytest.mark.parametrize("servers", [0, 2])
def test_the_preset_of_the_paper_is_its_options(servers: int) -> None:
    reached = []
    for options in ({"preset": "paper"}, {"sparse": "threshold", "momentum_at": "server", "n_sync": 1}):
        with meeting("dasgd", 2, servers=servers, threshold=0.01, **options) as (side, _):
            pair = sides(side, 2)
            applied = [pair[number % 3 % 2].step(*batch(number)) for number in range(9)]
            assert applied == [True] * 9  # every step is pushed
            pair[0].exchange.settle()
            reached.append(pair[0].weights())
    assert torch.equal(*reached)


@pytest.mark.parametrize("options", [{"rule": "sgd", "n_push": 1, "n_fetch": 2}, {"rule": "sgd", "n_sync": 3}, {}])
def test_what_servers_remember_is_saved_and_given_back(options: dict[str, Any]) -> None:
    kept = "server_momentum" if options else "momentum_buffer"
    with meeting("downpour", 1, **options) as (side, _):
        replica = side(0)
        for number in range(6):
            replica.step(*batch(number))
        replica.exchange.settle()
        saved = deepcopy({"model": replica.model.state_dict(), "optimizer": replica.optimizer.state_dict()})
        momenta = [replica.optimizer.state[p][kept].clone() for p in replica.model.parameters()]
        assert any(momentum.any() for momentum in momenta)
        for number in range(6, 12):
            replica.step(*batch(number))
        replica.exchange.settle()
        expected = replica.weights()
    with meeting("downpour", 1, **options) as (side, _):
        replica = side(0, loaded=saved)
        for number in range(6, 12):
            replica.step(*batch(number))
        replica.exchange.settle()
        assert torch.equal(replica.weights(), expected)


def fetch_changes(side: Side) -> None:
    """As between two steps: a sparse fetch, where `settle` takes all weights."""
    exchange = side.exchange
    assert isinstance(exchange, Downpour)
    if exchange._local:
        exchange._push_and_fetch_own(None, push=False, fetch=True)
    else:
        exchange._push_and_fetch(None, None, into=exchange.replica.weights)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("momentum_at", ["worker", "server"])
@pytest.mark.parametrize("sparse", ["sampled", "topk", "threshold"])
def test_sparse_replicas_over_links_hold_what_the_server_thinks_they_hold(
    sparse: str, momentum_at: str, period: int
) -> None:
    options = {"sparse": sparse, "density": 0.05, "momentum_at": momentum_at, "threshold": 1e-3, "n_sync": period}
    with meeting("dasgd", 2, servers=2, **options) as (side, _):
        pair = sides(side, 2)
        for number in range(12):
            pair[number % 2].step(*batch(number))
        apart = torch.linalg.vector_norm(pair[0].weights() - pair[1].weights())
        assert 0 < apart < torch.linalg.vector_norm(pair[0].weights())
        for _ in range(60):  # without new gradients the small changes come through, too
            fetch_changes(pair[0])
        pair[1].exchange.settle()
        assert torch.equal(pair[0].weights(), pair[1].weights())


def test_sparse_pushes_send_few_bytes_and_lose_nothing() -> None:
    with meeting("dasgd", 1, servers=1, sparse="topk", density=0.01, decay="none", n_sync=1) as (side, _):
        replica = side(0, momentum=0.0, weight_decay=0.0)
        begun = replica.weights()
        size = sum(p.numel() for p in replica.model.parameters())
        torch.manual_seed(0)
        total = torch.zeros(size)
        for _ in range(400):
            flat = torch.randn(size)
            total += flat
            parts = torch.split(flat, [p.numel() for p in replica.model.parameters()])
            for parameter, part in zip(replica.model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
            replica.exchange.step(1.0)
        tally = replica.exchange.tally
        assert tally.sent_bytes < 400 * 4 * size / 5
        kept = torch.cat([left for remainder in replica.exchange._remainders for left in remainder.left])  # type: ignore[attr-defined]
        replica.exchange.settle()
        sent = total - kept  # with one server its slices are the whole tensors, in order
        torch.testing.assert_close(begun - replica.weights(), sent, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("servers", [0, 2])
def test_sparse_changes_of_several_steps_lose_nothing(servers: int) -> None:
    with meeting("dasgd", 1, servers=servers, sparse="topk", density=0.02, decay="none", n_sync=3) as (side, _):
        replica = side(0, weight_decay=0.0)
        begun, moved = replica.weights(), torch.zeros_like(replica.weights())
        for number in range(12):
            before = replica.weights()
            x, y = batch(number)
            replica.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(F.cross_entropy(replica.model(x), y))
            own = torch.cat([p.grad.reshape(-1) for p in replica.model.parameters() if p.grad is not None])
            replica.exchange.step(0.1)
            if number % 3 < 2:
                moved += replica.weights() - before
            else:  # the last of three: what the optimizer did is known from its momentum
                momenta = [
                    replica.optimizer.state[p]["momentum_buffer"].reshape(-1) for p in replica.model.parameters()
                ]
                moved -= 0.1 * torch.cat(momenta)
            assert torch.isfinite(own).all()
        remainders = replica.exchange._remainders  # type: ignore[attr-defined]
        kept = _by_parameter(replica, [left for remainder in remainders for left in remainder.left])
        replica.exchange.settle()
        torch.testing.assert_close(replica.weights() - begun, moved - kept, rtol=1e-4, atol=1e-5)


def _by_parameter(replica: Side, lefts: list[torch.Tensor]) -> torch.Tensor:
    """Slices of shards follow the order of parameters, so their remainders do too."""
    remainders = torch.cat(lefts)
    assert remainders.numel() == replica.weights().numel()
    return remainders


def test_a_late_gradient_is_never_applied() -> None:
    with meeting("backup", 3, servers=1, backups=1) as (side, _):
        ready = [side(number, momentum=0.0, weight_decay=0.0) for number in range(3)]
        begun = ready[0].weights()
        assert at_once([lambda: ready[0].push(1.0), lambda: ready[1].push(3.0)]) == [True, True]
        assert not ready[2].push(float("nan"))
        assert ready[2].exchange.tally.dropped == 1
        torch.testing.assert_close(ready[2].weights(), begun - 2.0)
        assert at_once([lambda: ready[2].push(1.0), lambda: ready[1].push(1.0)]) == [True, True]
        torch.testing.assert_close(ready[2].weights(), begun - 3.0)


def test_a_lost_replica_is_not_waited_for() -> None:
    with meeting("backup", 3, servers=1, backups=0) as (side, coordinator):
        ready = [side(number, momentum=0.0, weight_decay=0.0) for number in range(3)]
        begun = ready[0].weights()

        def lose() -> bool:
            coordinator.drop(2)
            return True

        assert all(at_once([lambda: ready[0].push(1.0), lambda: ready[1].push(3.0), lose]))
        torch.testing.assert_close(ready[0].weights(), begun - 2.0)
        assert coordinator.active() == [0, 1]


def test_a_round_of_which_all_gradients_are_lost_is_skipped() -> None:
    with meeting("backup", 2, servers=1, backups=1) as (side, coordinator):
        first, second = sides(side, 2, momentum=0.0, weight_decay=0.0)
        begun = second.weights()
        assert first.seat.ask({"ask": "ticket", "version": 0}).head["counts"]  # and then its gradient never comes
        (dropped,) = at_once([lambda: second.push(float("nan")), lambda: coordinator.drop(0)], 20)[:1]
        assert dropped is False
        assert second.push(1.0)
        torch.testing.assert_close(second.weights(), begun - 1.0)


def test_a_late_replica_begins_with_the_common_weights() -> None:
    for servers in (0, 2):
        with meeting("downpour", 1, servers=servers) as (side, coordinator):
            replica = side(0)
            for number in range(4):
                replica.step(*batch(number))
            late = side(5, seed=9)
            assert torch.equal(late.weights(), replica.weights())
            assert late.step(*batch(4))
            assert coordinator.active() == [0, 5]


def test_a_silent_replica_is_frozen_and_comes_back() -> None:
    with meeting("downpour", 1, heartbeat=0.3) as (side, coordinator):
        replica = side(0)
        assert replica.seat._living is not None
        link, pulse = replica.seat._living
        link.send({"ask": "pulse"})  # the first, after which silence counts
        pulse.stop()
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: not coordinator.active(), timeout=5)
        link.send({"ask": "pulse"})
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.active() == [0], timeout=5)
        assert [event.what for event in coordinator.events] == ["joined", "frozen", "back"]
