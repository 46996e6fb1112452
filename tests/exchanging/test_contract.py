"""What every exchange keeps, on real links and shared memory: see the first lines of each exchange's file."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.exchanging.together import Side, at_once, batch, meeting, network, sgd

pytestmark = pytest.mark.timeout(120)

ALONE = [
    ("allreduce", 0, {}),
    ("backup", 1, {"backups": 0}),
    ("downpour", 0, {}),
    ("downpour", 0, {"shards": 3}),
    ("downpour", 1, {}),
    ("downpour", 3, {}),
    ("downpour", 0, {"n_sync": 3}),
    ("downpour", 2, {"n_sync": 3}),
    ("downpour", 0, {"n_push": 2, "n_fetch": 4, "rule": "add"}),
    ("dasgd", 0, {"sparse": "none", "decay": "none", "momentum_at": "server", "n_sync": 1}),
    ("dasgd", 2, {"sparse": "none", "decay": "exponential", "momentum_at": "server", "n_sync": 1}),
]


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
        one = side(0, momentum=momentum)
        for number in range(7):
            assert one.step(*batch(number)) is not False
        one.exchange.settle()
        assert torch.equal(one.weights(), plain(7, momentum))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("name", "servers"), [("allreduce", 0), ("backup", 1), ("backup", 2)])
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
            one = side(replica, kind=kind)
            for number in range(5):
                assert one.step(*batch(replicas * number + replica, kind=kind))
            return one.weights()

        for found in at_once([partial(train, replica) for replica in range(replicas)]):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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
        assert [one.exchange.tally.staleness for one in (first, second, third)] == [{0: 1, 2: 1}, {1: 1}, {2: 1}]
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
        for one, gradient in ((first, 0.0), (second, 0.0), (third, 1.0)):
            for _ in range(period):
                one.push(gradient)
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
        for one in (first, second, first, second):
            one.push(1.0)
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
        one = side(0)
        for number in range(6):
            one.step(*batch(number))
        assert torch.equal(one.weights(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(
    ("downpour", "momentum_at"),
    [({"n_sync": 1}, "server"), ({"n_sync": 3}, "worker"), ({"n_sync": 3, "rule": "sgd"}, "server")],
)
def test_all_switches_off_is_downpour_to_the_bit(servers: int, downpour: dict[str, Any], momentum_at: str) -> None:
    found = []
    off: dict[str, Any] = {"sparse": "none", "decay": "none", "momentum_at": momentum_at, "n_sync": downpour["n_sync"]}
    for name, options in (("downpour", downpour), ("dasgd", off)):
        with meeting(name, 2, servers=servers, **options) as (side, _):
            pair = sides(side, 2)
            for number in range(19):
                pair[number % 3 % 2].step(*batch(number))
            pair[0].exchange.settle()
            found.append(pair[0].weights())
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"rule": "sgd", "n_push": 1, "n_fetch": 2}, {"rule": "sgd", "n_sync": 3}, {}])
def test_what_servers_remember_is_saved_and_given_back(options: dict[str, Any]) -> None:
    kept = "server_momentum" if options else "momentum_buffer"
    with meeting("downpour", 1, **options) as (side, _):
        one = side(0)
        for number in range(6):
            one.step(*batch(number))
        one.exchange.settle()
        saved = deepcopy({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()})
        momenta = [one.optimizer.state[p][kept].clone() for p in one.model.parameters()]
        assert any(momentum.any() for momentum in momenta)
        for number in range(6, 12):
            one.step(*batch(number))
        one.exchange.settle()
        expected = one.weights()
    with meeting("downpour", 1, **options) as (side, _):
        one = side(0, loaded=saved)
        for number in range(6, 12):
            one.step(*batch(number))
        one.exchange.settle()
        assert torch.equal(one.weights(), expected)


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
            pair[0].exchange._settle()  # type: ignore[attr-defined]
        pair[1].exchange.settle()
        assert torch.equal(pair[0].weights(), pair[1].weights())


def test_sparse_pushes_send_few_bytes_and_lose_nothing() -> None:
    with meeting("dasgd", 1, servers=1, sparse="topk", density=0.01, decay="none", n_sync=1) as (side, _):
        one = side(0, momentum=0.0, weight_decay=0.0)
        begun = one.weights()
        size = sum(p.numel() for p in one.model.parameters())
        torch.manual_seed(0)
        total = torch.zeros(size)
        for _ in range(400):
            flat = torch.randn(size)
            total += flat
            parts = torch.split(flat, [p.numel() for p in one.model.parameters()])
            for parameter, part in zip(one.model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
            one.exchange.step(1.0)
        tally = one.exchange.tally
        assert tally.sent_bytes < 400 * 4 * size / 5
        kept = torch.cat([left for remainder in one.exchange._remainders for left in remainder.left])  # type: ignore[attr-defined]
        one.exchange.settle()
        sent = total - kept  # with one server its slices are the whole tensors, in order
        torch.testing.assert_close(begun - one.weights(), sent, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("servers", [0, 2])
def test_sparse_changes_of_several_steps_lose_nothing(servers: int) -> None:
    with meeting("dasgd", 1, servers=servers, sparse="topk", density=0.02, decay="none", n_sync=3) as (side, _):
        one = side(0, weight_decay=0.0)
        begun, moved = one.weights(), torch.zeros_like(one.weights())
        for number in range(12):
            before = one.weights()
            x, y = batch(number)
            one.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(F.cross_entropy(one.model(x), y))
            own = torch.cat([p.grad.reshape(-1) for p in one.model.parameters() if p.grad is not None])
            one.exchange.step(0.1)
            if number % 3 < 2:
                moved += one.weights() - before
            else:  # the last of three: what the optimizer did is known from its momentum
                momenta = [one.optimizer.state[p]["momentum_buffer"].reshape(-1) for p in one.model.parameters()]
                moved -= 0.1 * torch.cat(momenta)
            assert torch.isfinite(own).all()
        remainders = one.exchange._remainders  # type: ignore[attr-defined]
        kept = _by_parameter(one, [left for remainder in remainders for left in remainder.left])
        one.exchange.settle()
        torch.testing.assert_close(one.weights() - begun, moved - kept, rtol=1e-4, atol=1e-5)


def _by_parameter(one: Side, lefts: list[torch.Tensor]) -> torch.Tensor:
    """Slices of shards follow the order of parameters, so their remainders do too."""
    found = torch.cat(lefts)
    assert found.numel() == one.weights().numel()
    return found


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
            one = side(0)
            for number in range(4):
                one.step(*batch(number))
            late = side(5, seed=9)
            assert torch.equal(late.weights(), one.weights())
            assert late.step(*batch(4))
            assert coordinator.active() == [0, 5]


def test_a_silent_replica_is_frozen_and_comes_back() -> None:
    with meeting("downpour", 1, heartbeat=0.3) as (side, coordinator):
        one = side(0)
        assert one.seat._living is not None
        link, pulse = one.seat._living
        pulse.stop()
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: not coordinator.active(), timeout=5)
        link.send({})
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.active() == [0], timeout=5)
        assert [event.what for event in coordinator.events] == ["joined", "frozen", "back"]
