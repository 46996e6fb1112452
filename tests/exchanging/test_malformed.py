"""Peers that know the token and talk nonsense: each loses its own link, the run goes on."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal.exchanging.compression import make_codec
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.exchanging.servers.server import Server
from shoal.transport.links import Link, LinkLost, LinkRefused, connect, fields

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    opened = Coordinator(heartbeat=30.0, replicas=2, servers=1, wanted=2)
    yield opened
    opened.close()
    assert opened.failure is None


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server()
    yield opened
    opened.close()
    assert opened.errors == []


def meet(place: Coordinator | Server, hello: dict[str, Any]) -> Link:
    link = connect(place.address, place.token, hello, name="the place")
    link.timeout = 20
    return link


def is_ended(link: Link) -> bool:
    with link:
        while True:
            try:
                link.receive()
            except LinkLost:
                return True


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


REPLICA = {"as": "replica", "replica": 0, "pids": [1]}
SERVER = {"as": "server", "number": 0, "address": ["127.0.0.1", 4711], "token": "x"}


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"as": "king"},
        {"as": ["replica"]},
        {"as": "replica"},
        {**REPLICA, "replica": "0"},
        {**REPLICA, "replica": -1},
        {**REPLICA, "replica": 1 << 80},
        {**REPLICA, "pids": [0]},
        {**REPLICA, "pids": {"1": 2}},
        {"as": "pulse", "replica": 7, "rank": 0},
        {"as": "pulse", "replica": 0, "rank": None},
        {"as": "server"},
        {**SERVER, "number": 1},
        {**SERVER, "number": True},
        {**SERVER, "address": ["127.0.0.1"]},
        {**SERVER, "address": ["127.0.0.1", 1 << 20]},
        {**SERVER, "token": 5},
    ],
    ids=str,
)
def test_a_hello_is_checked(coordinator: Coordinator, hello: dict[str, Any]) -> None:
    assert is_ended(meet(coordinator, hello))
    assert coordinator.members == {}
    with meet(coordinator, REPLICA) as link:
        assert link.receive().head["replica"] == 0


@pytest.mark.parametrize(
    "ask",
    [
        {},
        {"ask": 5},
        {"ask": "nobody knows"},
        {"ask": "ticket", "version": "new"},
        {"ask": "serve", "number": 3, "address": ["127.0.0.1", 1], "token": "x"},
    ],
    ids=str,
)
def test_a_replica_that_asks_nonsense_is_lost_alone(coordinator: Coordinator, ask: dict[str, Any]) -> None:
    with meet(coordinator, {**REPLICA, "replica": 1}) as sane:
        sane.receive()
        wrong = meet(coordinator, REPLICA)
        wrong.receive()
        wrong.send(ask)
        assert is_ended(wrong)
        assert until(lambda: coordinator.active() == [1])
        sane.send({"ask": "ticket", "version": 0})
        assert "counts" in sane.receive().head


def test_a_second_server_of_one_number_is_refused(coordinator: Coordinator) -> None:
    with meet(coordinator, SERVER) as first:
        assert first.receive().head == {"heartbeat": 30.0, "timeout": 120.0}
        assert until(lambda: bool(coordinator._servers))
        assert is_ended(meet(coordinator, {**SERVER, "token": "mine"}))
        with meet(coordinator, REPLICA) as replica:
            replica.receive()
            replica.send({"ask": "servers"})
            assert replica.receive().head == {"servers": [[["127.0.0.1", 4711], "x"]]}


TERMS = {"sizes": [3], "dtypes": ["float32"], "rule": "sgd"}


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"shard": "0"},
        {"shard": 0, "terms": TERMS},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "sizes": [1 << 50]}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "sizes": [-1]}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "dtypes": ["load"]}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "dtypes": []}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "rule": "ruin"}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "decay": "slow"}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "momentum": "much"}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "more": 1}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "compress": "zip"}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "compress": ["int8"]}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "compress": "topk", "density": 0}},
        {"shard": "0", "replica": 0, "terms": {**TERMS, "compress": "topk", "density": "few"}},
    ],
    ids=str,
)
def test_a_server_checks_what_it_is_to_hold(server: Server, hello: dict[str, Any]) -> None:
    assert is_ended(meet(server, hello))


PUSH: dict[str, Any] = {
    "op": "speak",
    "kind": "gradient",
    "base": 0,
    "rate": 0.1,
    "sparse": None,
    "fetch": False,
    "certain": False,
    "at_least": 0,
}


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        ({}, 0),
        ({"op": "crash"}, 0),
        ({"op": "begin", "slots": 1 << 40}, 3),
        ({**PUSH, "rate": "fast"}, 3),
        ({**PUSH, "rate": float("nan")}, 3),
        ({**PUSH, "base": None}, 3),
        ({**PUSH, "base": 1}, 3),
        ({**PUSH, "kind": "wish"}, 3),
        ({**PUSH, "sparse": [1 << 40]}, 3),
        ({**PUSH, "sparse": [1, 1]}, 3),
        ({**PUSH, "fetch": "all"}, 3),
        (PUSH, 4),
    ],
    ids=str,
)
def test_a_server_checks_what_is_pushed(server: Server, head: dict[str, Any], sent: int) -> None:
    hello = {"shard": "0", "replica": 0, "terms": TERMS}
    with meet(server, hello) as sane:
        sane.receive()
        sane.send({"op": "begin", "slots": 0}, [torch.ones(3)])
        sane.receive()
        wrong = meet(server, hello)
        wrong.receive()
        wrong.send(head, [torch.zeros(sent)] if sent else [])
        assert is_ended(wrong)
        sane.send({**PUSH, "fetch": True}, [torch.ones(3)])
        head_back, (weights,) = sane.receive()
        assert head_back["version"] == 1
        assert torch.allclose(weights.view(torch.float32), torch.full((3,), 0.9))


@pytest.mark.parametrize("place", [-1, 2000])
def test_a_sparse_push_to_places_that_are_not_there_loses_its_link_alone(server: Server, place: int) -> None:
    hello = {"shard": "0", "replica": 0, "terms": {**TERMS, "sizes": [2000]}}
    with meet(server, hello) as sane:
        sane.receive()
        sane.send({"op": "begin", "slots": 0}, [torch.ones(2000)])
        sane.receive()
        wrong = meet(server, hello)
        wrong.receive()
        wrong.send({**PUSH, "sparse": [2]}, [torch.tensor([3, place], dtype=torch.int32), torch.ones(2)])
        assert is_ended(wrong)
        sane.send({**PUSH, "kind": None, "fetch": True})
        head_back, (weights,) = sane.receive()
        assert head_back["version"] == 0
        assert torch.equal(weights.view(torch.float32), torch.ones(2000))


def place(number: int) -> torch.Tensor:
    """A topk payload of 2000 elements, of which 20 are sent, whose last place is this one."""
    payload = torch.zeros(160, dtype=torch.uint8)
    payload[-4:] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    return payload


@pytest.mark.parametrize(
    ("compress", "head", "payload"),
    [
        ("int8", PUSH, torch.zeros(2000)),
        ("int8", PUSH, torch.zeros(2000 + 4 * 4 - 1, dtype=torch.uint8)),
        ("int8", {**PUSH, "sparse": [2000]}, torch.zeros(2000 + 4 * 4, dtype=torch.uint8)),
        ("int8", {**PUSH, "kind": "weights"}, torch.zeros(2000 + 4 * 4, dtype=torch.uint8)),
        ("sign", PUSH, torch.zeros(250, dtype=torch.uint8)),
        ("bf16", PUSH, torch.zeros(2001, dtype=torch.bfloat16)),
        ("topk", PUSH, torch.zeros(168, dtype=torch.uint8)),
        ("topk", PUSH, place(2000)),
        ("topk", PUSH, place(-1)),
        ("none", PUSH, torch.zeros(2000 + 4 * 4, dtype=torch.uint8)),
    ],
    ids=str,
)
def test_a_server_checks_what_is_compressed(
    server: Server, compress: str, head: dict[str, Any], payload: torch.Tensor
) -> None:
    """The wrong one loses its link, and a sane push after it does what it says."""
    hello = {"shard": "0", "replica": 0, "terms": {**TERMS, "sizes": [2000], "compress": compress}}
    with meet(server, hello) as sane:
        sane.receive()
        sane.send({"op": "begin", "slots": 0}, [torch.ones(2000)])
        sane.receive()
        wrong = meet(server, hello)
        wrong.receive()
        wrong.send(head, [payload])
        assert is_ended(wrong)
        ones = torch.ones(2000)
        sent = ones if compress == "none" else make_codec(compress).encode(ones)  # type: ignore[arg-type]
        sane.send({**PUSH, "fetch": True}, [sent])
        head_back, (weights,) = sane.receive()
        assert head_back["version"] == 1
        changed = weights.view(torch.float32) != 1
        assert int(changed.sum()) == (20 if compress == "topk" else 2000)
        assert torch.allclose(weights.view(torch.float32)[changed], torch.tensor(0.9))


def test_fields_say_what_belongs_there() -> None:
    with pytest.raises(LinkRefused, match=r"rank = 'x{59}\.\.\. where an integer from 0 to 9 belongs"):
        fields.integer({"rank": "x" * 1000}, "rank", most=9)
    with pytest.raises(LinkRefused, match="as = None where a or b belongs"):
        fields.text({}, "as", ("a", "b"))
    assert fields.number({"rate": 1}, "rate") == 1.0
    assert fields.address({"at": ["host", 5]}, "at") == ("host", 5)
