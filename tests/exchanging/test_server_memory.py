"""What a server keeps: the weights, what its rule remembers, and a few copies, however many replicas there are."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from shoal.exchanging.servers import server as servers
from shoal.exchanging.servers.server import MOST_BUFFERS, RemoteShard, Server, Terms
from shoal.exchanging.servers.shard import Push
from shoal.exchanging.servers.sparse import Mirror
from shoal.transport.links.link import _packed
from tests.exchanging.test_coordinator import until
from tests.exchanging.together import at_once, meeting

pytestmark = pytest.mark.timeout(120)
SIZE = 2_000_000
TERMS = Terms(sizes=[SIZE], dtypes=["float32"], rule="sgd", momentum=0.9)
MANY = 24


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server()
    yield opened
    opened.close()
    assert opened.errors == []


def reach(server: Server) -> RemoteShard:
    return RemoteShard(server.address, server.token, "0", TERMS, replica=0, name="the server", timeout=60.0)


def test_many_replicas_at_once_share_few_copies(server: Server) -> None:
    with ExitStack() as stack:
        shards = [reach(server) for _ in range(MANY)]
        for shard in shards:
            stack.callback(shard.close)
        first = torch.zeros(SIZE)
        at_once([partial(shard.begin, [first], [[first]]) for shard in shards])
        held = server._held["0"]
        made: list[int] = []

        def work(shard: RemoteShard) -> None:
            into = torch.empty(SIZE)
            for _ in range(3):
                shard.ask(Push([torch.ones(SIZE)], 0, 0.0), fetch=True)
                shard.answer([into])
                made.append(held.buffers.made)

        at_once([partial(work, shard) for shard in shards])
        assert held.shard.version == 3 * MANY
        assert 0 < max(made) <= MOST_BUFFERS
        assert until(lambda: held.whole.made == 0)


def test_replicas_that_take_everything_at_once_share_one_copy(server: Server) -> None:
    with ExitStack() as stack:
        shards = [reach(server) for _ in range(MANY)]
        for shard in shards:
            stack.callback(shard.close)
        shards[0].begin([torch.ones(SIZE)], [[torch.full((SIZE,), 2.0)]])
        held = server._held["0"]
        made: list[int] = []

        def take(shard: RemoteShard) -> None:
            taken = shard.snapshot()
            made.append(held.whole.made)
            assert (taken.version, float(taken.weights[0].mean()), float(taken.state[0][0].mean())) == (0, 1.0, 2.0)

        at_once([partial(take, shard) for shard in shards])
        assert max(made) <= 1
        assert until(lambda: held.whole.made == 0)  # the last one has its copy before the server has let go of it


def test_replicas_that_freeze_in_the_middle_of_a_push_hold_up_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STALL_SECONDS", 0.1)
    with ExitStack() as stack:
        shards = [reach(server) for _ in range(MOST_BUFFERS + 2)]
        for shard in shards:
            stack.callback(shard.close)
        shards[0].begin([torch.zeros(SIZE)], [])
        head: dict[str, Any] = {"op": "speak", "sparse": None, "at_least": 0, "fetch": False}
        head |= {"kind": "gradient", "base": 0, "rate": 1.0, "certain": False}
        frozen = shards[2:]
        for shard in frozen:
            shard._link._socket.sendall(_packed(head, [4 * SIZE]) + bytes(1000))  # and not a byte more
        held = server._held["0"]
        assert until(lambda: held.buffers.made >= MOST_BUFFERS)
        for shard in shards[:2]:
            shard.ask(Push([torch.ones(SIZE)], 0, 1.0), fetch=False)
            assert shard.answer(None).applied
        assert held.shard.version == 2
        for shard in frozen:
            shard.close()
        deadline = time.monotonic() + 30
        while held.buffers.made > MOST_BUFFERS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held.buffers.made <= MOST_BUFFERS
        assert held.shard.version == 2


@pytest.mark.parametrize(("back", "copies"), [(1.0, 0), (0.1, 1)])
def test_dasgd_keeps_what_each_replica_has_only_where_changes_are_sent_back(
    back: float, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Mirror] = []

    def kept(*args: Any) -> Mirror:
        made.append(Mirror(*args))
        return made[-1]

    monkeypatch.setattr(servers, "Mirror", kept)
    with meeting("dasgd", 1, servers=1, density_back=back, n_sync=1) as (side, _):
        replica = side(0)
        replica.push(1.0)
        replica.push(1.0)
    assert bool(made) == bool(copies)
