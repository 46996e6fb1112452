"""`downpour` with `overlap`: servers are spoken to while the next steps are computed, and nothing is lost by it."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.exchanging.servers.beside import Beside
from shoal.exchanging.servers.shared_memory import FileLock, SharedFolder
from shoal.transport.links import LinkLost
from tests.exchanging.together import Side, batch, meeting, network, sgd

pytestmark = pytest.mark.timeout(120)


def one_update_behind(steps: int) -> torch.Tensor:
    """SGD whose gradients are computed on weights that lack the last update."""
    served, own = network(), network()
    optimizer = sgd(served)
    for number in range(steps):
        before = [p.detach().clone() for p in served.parameters()]
        own.zero_grad(set_to_none=True)
        x, y = batch(number)
        torch.autograd.backward(F.cross_entropy(own(x), y))
        for given, p in zip(own.parameters(), served.parameters(), strict=True):
            p.grad = given.grad
        optimizer.step()
        with torch.no_grad():
            for given, kept in zip(own.parameters(), before, strict=True):
                given.copy_(kept)
    return torch.cat([p.detach().reshape(-1) for p in served.parameters()])


@pytest.mark.parametrize(("servers", "options"), [(0, {"shards": 3}), (2, {})])
def test_one_replica_is_sgd_one_update_behind_to_the_bit(servers: int, options: dict[str, Any]) -> None:
    with meeting("downpour", 1, servers=servers, overlap=True, **options) as (side, _):
        replica = side(0)
        told = [replica.step(*batch(number)) for number in range(7)]
        assert told == [None, *[True] * 6]  # of the step before
        tally = replica.exchange.take_tally()
        assert (tally.steps, tally.updates, tally.staleness) == (6, 6, Counter({0: 1, 1: 5}))
        assert replica.exchange.flush()
        assert replica.exchange.take_tally().steps == 1
        assert replica.exchange.flush() is None
        replica.exchange.settle()
        assert torch.equal(replica.weights(), one_update_behind(7))


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("options", [{"n_sync": 3}, {"n_push": 2, "n_fetch": 3, "rule": "add"}, {"n_fetch": 2}])
def test_all_that_replicas_did_is_in_the_common_weights_once(servers: int, options: dict[str, Any]) -> None:
    """Every step moves every weight by one, at each of two replicas that push and fetch as they please."""
    plain: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "kind": torch.float64}
    with meeting("downpour", 2, servers=servers, overlap=True, **options) as (side, _):
        pair = [side(number, **plain) for number in range(2)]
        begun = pair[0].weights()
        for number in range(20):
            pair[number % 3 % 2].push(-1.0)
        counted = sum(_counted(replica) for replica in pair)
        assert counted == 20
        for replica in pair:
            replica.exchange.settle()
            assert torch.allclose(replica.weights(), begun + 20)


def _counted(replica: Side) -> int:
    replica.exchange.flush()
    return replica.exchange.take_tally().steps


def test_a_step_does_not_wait_for_servers_and_the_next_exchange_does() -> None:
    with meeting("downpour", 1, overlap=True, n_sync=2, shards=1) as (side, _):
        replica = side(0)
        folder = SharedFolder(replica.seat.meeting.shared) if replica.seat.meeting.shared else None
        assert folder is not None
        lock = FileLock(folder.path / "0-0.lock")
        with lock:  # no shard answers
            assert [replica.step(*batch(number)) for number in range(3)] == [None] * 3  # the second step pushed
            told: list[bool | None] = []
            waits = threading.Thread(target=lambda: told.append(replica.step(*batch(3))), daemon=True)
            waits.start()
            waits.join(0.5)
            assert waits.is_alive()
        waits.join(60)
        assert told == [True]
        lock.close()


def test_what_fails_beside_compute_is_raised_in_the_next_step() -> None:
    with meeting("downpour", 1, servers=1, overlap=True) as (side, _):
        replica = side(0)
        replica.step(*batch(0))
        replica.exchange.flush()
        replica.exchange._shards[0].close()  # type: ignore[attr-defined]
        replica.step(*batch(1))
        with pytest.raises(LinkLost, match="closed here"):
            replica.step(*batch(2))


def test_a_thread_beside_gives_back_results_and_errors_and_ends() -> None:
    beside: Beside[int] = Beside("shoal-beside")
    beside.begin(lambda: 5)
    assert beside.end() == 5
    assert beside.done
    beside.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        beside.end()
    beside.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-beside"]
