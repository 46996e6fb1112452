"""Links: what goes in comes out, and a peer that dies, freezes or talks nonsense is noticed."""

import multiprocessing as mp
import os
import pickle
import queue
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config import TrainConfig
from shoal.errors import ConfigError
from shoal.transport.links import Door, Link, LinkError, LinkLost, LinkSilent, connect, own_address
from shoal.transport.links import door as doors
from shoal.transport.links import link as frames
from tests.transport import peers

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX sockets and signals"),
]

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread and no process outlives a test."""
    before, children = set(threading.enumerate()), set(mp.active_children())  # other tests keep ranks for later ones
    yield
    assert set(threading.enumerate()) <= before
    assert set(mp.active_children()) <= children


@contextmanager
def wire(timeout: float | None = None) -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the bare socket at its other end."""
    with socket.create_server((LOOPBACK, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with theirs, Link(ours, "the wire", timeout) as near:
        yield near, theirs


@contextmanager
def pair(timeout: float | None = None) -> Iterator[tuple[Link, Link]]:
    """Two ends of a link."""
    with wire(timeout) as (near, theirs), Link(theirs, "the near end", timeout) as far:
        near.name = "the far end"
        yield near, far


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    with pair() as both:
        yield both


@contextmanager
def in_thread(function: Callable[..., object], *args: object) -> Iterator[None]:
    """`function` beside what stands within; what it raises is raised here at the end."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function, *args)
        yield
        future.result()


def no_error(_link: Link, _hello: dict[str, Any], error: Exception) -> None:
    raise AssertionError("a handler failed") from error


@contextmanager
def process(job: Callable[..., None]) -> Iterator[tuple[SpawnProcess, Link]]:
    """A process that does `job`, and the link to it. It is ended afterwards, whatever happened to it."""
    arrived: queue.Queue[Link] = queue.Queue()
    over = threading.Event()

    def keep(link: Link, _hello: dict[str, Any]) -> None:
        link.name = "the peer"
        arrived.put(link)
        over.wait()

    with Door(keep, on_error=no_error) as door:
        peer = mp.get_context("spawn").Process(target=job, args=(door.address, door.token))
        peer.start()
        try:
            yield peer, arrived.get(timeout=25)
        finally:
            over.set()
            peer.kill()
            peer.join()


def send_for_ever(link: Link) -> None:
    while True:
        link.send({"number": link.sent_frames}, [bytes(4000)])


def some(size: int, dtype: torch.dtype) -> Tensor:
    """`size` elements of any bits; a bool has only two."""
    if dtype == torch.bool:
        return torch.rand(size) < 0.5
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit by bit, since some bits are not a number."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


# What goes in comes out


@pytest.mark.parametrize("size", [0, 1, 7, 4099])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    ],
    ids=str,
)
def test_tensors_of_any_dtype_and_size(links: tuple[Link, Link], dtype: torch.dtype, size: int) -> None:
    near, far = links
    sent = [some(size, dtype), some(1, dtype).reshape(()), some(6 * size, dtype).reshape(2, size, 3)]
    near.send({"kind": "push"}, sent)
    head, buffers = far.receive()
    assert head == {"kind": "push"}
    assert all(same(given, arrived.view(dtype)) for given, arrived in zip(sent, buffers, strict=True))
    far.send({}, sent)
    into = [torch.empty_like(tensor) for tensor in sent]
    assert near.receive(into).buffers == into
    assert all(same(given, arrived) for given, arrived in zip(sent, into, strict=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.tuples(st.dictionaries(st.text(), json_values, max_size=4), st.lists(st.binary())), max_size=4))
@settings(max_examples=60, deadline=None)
def test_frames_arrive_whole_and_in_order(sent: list[tuple[dict[str, Any], list[bytes]]]) -> None:
    with pair() as (near, far):
        for head, buffers in sent:
            near.send(head, buffers)
        for head, buffers in sent:
            got = far.receive()
            assert got.head == head
            assert [bytes(buffer.numpy()) for buffer in got.buffers] == buffers


def test_more_buffers_than_the_system_takes_at_once(links: tuple[Link, Link]) -> None:
    near, far = links
    sent = [some(number % 1500, torch.uint8) for number in range(3001)]
    with in_thread(near.send, {"many": True}, sent):
        frame = far.receive()
    assert len(frame.buffers) == 3001
    assert all(map(torch.equal, sent, frame.buffers))


def test_a_large_tensor_both_ways_at_once_and_what_is_counted(links: tuple[Link, Link]) -> None:
    near, far = links
    there, back = some(16_000_000, torch.float32), some(16_000_000, torch.float32)
    into = torch.empty_like(there)
    with in_thread(near.send, {}, [there]), in_thread(far.send, {}, [back]), in_thread(far.receive, [into]):
        (got,) = near.receive().buffers
    assert same(into, there)
    assert same(got, back)
    assert (near.sent_bytes, near.received_bytes, near.sent_frames, near.received_frames) == (64e6, 64e6, 1, 1)
    assert (far.sent_bytes, far.received_bytes, far.sent_frames, far.received_frames) == (64e6, 64e6, 1, 1)


def test_the_head_decides_where_buffers_go(links: tuple[Link, Link]) -> None:
    near, far = links
    near.send({"shard": 1}, [torch.tensor([5.0, 6.0]), b"abc"])
    shards = [torch.zeros(2), torch.zeros(2)]
    head, lengths = far.receive_head()
    assert lengths == (8, 3)
    with pytest.raises(RuntimeError, match="2 buffers of the last frame"):
        far.receive_head()
    rest = torch.empty(3, dtype=torch.uint8)
    far.receive_into([shards[head["shard"]], rest])
    assert shards[1].tolist() == [5.0, 6.0]
    assert bytes(rest.numpy()) == b"abc"


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ([2], "sent 2 buffers where 1 were expected"),
        ([2, 2], "sent buffer 1 with 12 bytes where 8 were expected"),
    ],
)
def test_buffers_that_do_not_fit_are_told_and_can_still_be_had(
    links: tuple[Link, Link], into: Sequence[int], words: str
) -> None:
    near, far = links
    near.send({}, [torch.zeros(2), torch.ones(3)])
    near.send({"next": True})
    with pytest.raises(LinkError, match=words):
        far.receive([torch.zeros(size) for size in into])
    assert far.receive_buffers()[1].view(torch.float32).tolist() == [1, 1, 1]
    assert far.receive().head == {"next": True}


def test_frames_of_several_threads_do_not_mix(links: tuple[Link, Link]) -> None:
    near, far = links
    each, threads = 30, 6

    def push(thread: int) -> None:
        for number in range(each):
            near.send({"thread": thread, "number": number}, [torch.full((50_000,), thread), b""])

    seen: dict[int, list[int]] = {thread: [] for thread in range(threads)}
    with ThreadPoolExecutor(threads) as pool:
        pushes = [pool.submit(push, thread) for thread in range(threads)]
        for _ in range(each * threads):
            head, (values, _) = far.receive()
            assert bool((values.view(torch.int64) == head["thread"]).all())
            seen[head["thread"]].append(head["number"])
        for future in pushes:
            future.result()
    assert seen == {thread: list(range(each)) for thread in range(threads)}


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4, 4).t(),
        torch.zeros(1).expand(4),
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4).to_sparse(),
        memoryview(b"abcd")[::2],
    ],
    ids=["transposed", "expanded", "another device", "conjugated", "sparse", "every second byte"],
)
def test_what_is_no_plain_memory_is_refused_before_anything_is_sent(links: tuple[Link, Link], buffer: Tensor) -> None:
    near, far = links
    with pytest.raises(ValueError, match="contiguous"):
        near.send({}, [buffer])
    near.send({"after": True})
    assert far.receive().head == {"after": True}


def test_a_parameter_is_sent_and_received_as_its_values(links: tuple[Link, Link]) -> None:
    near, far = links
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    near.send({}, [ours.weight])
    far.receive([theirs.weight])
    assert torch.equal(ours.weight, theirs.weight)


def test_a_head_is_for_small_things(links: tuple[Link, Link]) -> None:
    with pytest.raises(ValueError, match="large things are buffers"):
        links[0].send({"text": "x" * frames.LARGEST_HEAD})


# A peer that dies


def test_a_sender_notices_at_once_that_its_peer_was_killed_in_the_middle() -> None:
    noticed: list[float] = []

    def push(near: Link) -> None:
        with pytest.raises(LinkLost, match="the peer"):
            near.send({}, [torch.zeros(peers.MUCH, dtype=torch.uint8)])
        noticed.append(time.monotonic())

    with process(peers.take_only_the_head) as (peer, near), in_thread(push, near):
        assert near.receive().head == {"begun": True}
        time.sleep(0.2)  # the system takes no more, so the sender waits in the middle
        assert not noticed
        killed = time.monotonic()
        peer.kill()
        peer.join()
    assert peer.exitcode == -signal.SIGKILL
    assert noticed[0] - killed < 10  # how soon: benchmarks/links
    assert near.sent_bytes == 0


def test_a_receiver_notices_at_once_that_its_peer_was_killed_in_the_middle() -> None:
    noticed: list[float] = []

    def take(near: Link) -> None:
        with pytest.raises(LinkLost, match="the peer closed the link in the middle of a frame"):
            near.receive_buffers()
        noticed.append(time.monotonic())

    with process(peers.send_much) as (peer, near):
        assert near.receive_head().lengths == (peers.MUCH,)
        assert peer.pid is not None
        os.kill(peer.pid, signal.SIGSTOP)  # so that the receiver waits in the middle
        with in_thread(take, near):
            time.sleep(0.3)
            assert not noticed
            killed = time.monotonic()
            peer.kill()
            peer.join()
        assert peer.exitcode == -signal.SIGKILL
        assert noticed[0] - killed < 10
        assert near.received_bytes == 0
        with pytest.raises(LinkLost, match="in the middle"):
            near.send({})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_keep_a_dead_parents_link_open() -> None:
    with process(peers.have_a_child) as (peer, near):
        child = near.receive().head["child"]
        try:
            killed = time.monotonic()
            peer.kill()
            with pytest.raises(LinkLost, match="the peer closed the link"):
                near.receive()
            assert time.monotonic() - killed < 10
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_last_words_are_heard_though_sending_fails(links: tuple[Link, Link]) -> None:
    near, far = links
    far.send({"bye": "enough"})
    far.close()
    with pytest.raises(LinkLost, match="the far end"):
        send_for_ever(near)
    assert near.receive().head == {"bye": "enough"}
    with pytest.raises(LinkLost, match="the far end"):
        near.receive()


def test_the_errors_survive_pickling() -> None:
    again = pickle.loads(pickle.dumps(LinkLost("replica 0 closed the link.", "Look there.")))
    assert type(again) is LinkLost
    assert str(again) == "replica 0 closed the link.\nLook there."


# A peer that is silent


def test_a_frozen_peer_is_silent_and_the_link_works_when_it_thaws() -> None:
    with process(peers.echo) as (peer, near):
        assert peer.pid is not None
        near.send({"number": 0})
        assert near.receive().head == {"number": 0}
        os.kill(peer.pid, signal.SIGSTOP)
        near.timeout = 0.3
        near.send({"number": 1}, [torch.ones(3)])
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(LinkSilent, match=r"the peer said nothing for 0\.3 seconds"):
                near.receive()
            assert 0.25 < time.monotonic() - start < 10
        assert not near.poll(0.05)
        os.kill(peer.pid, signal.SIGCONT)
        near.timeout = 20
        assert near.poll(20)
        head, (buffer,) = near.receive()
        assert head == {"number": 1}
        assert buffer.view(torch.float32).tolist() == [1, 1, 1]


def test_a_peer_that_takes_nothing_is_silent_and_later_gets_whole_frames() -> None:
    with pair(timeout=0.1) as (near, far):
        with pytest.raises((LinkSilent, LinkLost)) as caught:
            send_for_ever(near)
        sent = near.sent_frames
        assert sent > 100
        assert "the far end took nothing for 0.1 seconds" in caught.value.problem
        for number in range(sent):
            assert far.receive().head == {"number": number}
        if caught.type is LinkSilent:
            near.send({"after": True})
            assert far.receive().head == {"after": True}


@pytest.mark.parametrize("part", [1, 11, 12, 20])
def test_silence_in_the_middle_of_a_frame_is_a_loss(part: int) -> None:
    frame = frames._packed({"kind": "push"}, [4]) + b"1234"
    with wire(timeout=0.1) as (near, theirs):
        theirs.sendall(frame[:part])
        with pytest.raises(LinkLost, match=r"said nothing for 0\.1 seconds in the middle of a frame"):
            near.receive()
        with pytest.raises(LinkLost, match="in the middle of a frame"):
            near.send({})


def test_progress_restarts_the_time() -> None:
    frame = frames._packed({"kind": "push"}, [4]) + b"1234"

    def drip(theirs: socket.socket) -> None:
        for index in range(len(frame)):
            theirs.sendall(frame[index : index + 1])
            time.sleep(0.03)

    with wire(timeout=0.4) as (near, theirs), in_thread(drip, theirs):
        start = time.monotonic()
        assert bytes(near.receive().buffers[0].numpy()) == b"1234"
        assert time.monotonic() - start > 2 * 0.4


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux was told")
@pytest.mark.parametrize("seconds", [3.0, 120.0, 5000.0])
def test_the_system_gives_a_host_up_no_earlier_than_it_was_told(seconds: float) -> None:
    with pair() as both:
        for link in both:
            link.give_up_after(seconds)
            idle, pause, count, limit = (
                link._socket.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            )
            assert idle + pause * count >= seconds
            assert limit == 1000 * seconds


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux was told")
def test_unless_told_a_cut_may_last_as_long_as_replicas_wait_for_each_other(links: tuple[Link, Link]) -> None:
    promised = TrainConfig.model_fields["timeout"].default
    for link in links:
        assert link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) >= 1000 * promised


def test_a_stall_in_the_middle_of_a_frame_is_told_and_the_frame_arrives_later() -> None:
    frame = frames._packed({"a": 1}, [4]) + b"1234"
    with wire(timeout=0.1) as (near, theirs):
        stalls: list[int] = []

        def stalled() -> None:
            stalls.append(len(stalls))
            if len(stalls) == 3:
                theirs.sendall(frame[20:])

        near.on_stall = stalled
        theirs.sendall(frame[:20])
        head, (buffer,) = near.receive()
        assert (head, bytes(buffer.tolist())) == ({"a": 1}, b"1234")
        assert len(stalls) >= 3


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_out_is_a_number_of_seconds(links: tuple[Link, Link], seconds: float) -> None:
    with pytest.raises(ValueError, match="None waits for ever"):
        links[0].timeout = seconds


# A link that is closed


@pytest.mark.parametrize("operation", ["receive", "receive_buffers", "poll", "send"])
def test_closing_wakes_whoever_waits(links: tuple[Link, Link], operation: str) -> None:
    near, far = links

    waiting: dict[str, Callable[[], object]] = {
        "receive": near.receive,
        "receive_buffers": near.receive_buffers,
        "poll": near.receive,
        "send": lambda: near.send({}, [torch.zeros(peers.MUCH, dtype=torch.uint8)]),
    }

    def wait() -> None:
        if operation == "receive_buffers":
            near.receive_head()
        if operation == "poll":
            assert near.poll(30)
        with pytest.raises(LinkLost, match="the link to the far end was closed here"):
            waiting[operation]()

    if operation == "receive_buffers":
        far._socket.sendall(frames._packed({}, [1000]))
    with in_thread(wait):
        time.sleep(0.1)
        start = time.monotonic()
        near.close()
        assert time.monotonic() - start < 10
    assert near.closed
    assert not far.closed
    for again in (near.receive, near.poll, lambda: near.send({}), lambda: setattr(near, "timeout", 1)):
        with pytest.raises(LinkLost, match="closed here"):
            again()
    near.close()


def test_poll_tells_of_frames_and_of_the_end(links: tuple[Link, Link]) -> None:
    near, far = links
    assert not near.poll()
    far.send({})
    assert near.poll(5)
    near.receive()
    assert not near.poll(0.01)
    far.close()
    assert near.poll(5)
    with pytest.raises(LinkLost, match="the far end closed the link"):
        near.receive()


# Nonsense


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n",
        struct.pack("!4sII", b"SHL1", frames.LARGEST_HEAD + 1, 0),
        struct.pack("!4sII", b"SHL1", 0, 0xFFFFFFFF),
        struct.pack("!4sII", b"SHL1", 2, 0) + b"\xff\xff",
        struct.pack("!4sII", b"SHL1", 2, 0) + b"[]",
        struct.pack("!4sII", b"SHL1", 100_000, 0) + b"[" * 100_000,
    ],
    ids=["http", "a huge head", "very many buffers", "no text", "no object", "deeply nested"],
)
def test_what_is_no_frame_is_told_and_ends_the_link(words: bytes) -> None:
    with wire() as (near, theirs):
        theirs.sendall(words)
        with pytest.raises(LinkLost, match=r"the wire sent bytes that are not a Shoal message") as caught:
            near.receive()
        assert "Something else talks at that address" in caught.value.remedy
        with pytest.raises(LinkLost):
            near.receive()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_bytes_that_are_no_frame_are_an_error_of_ours(words: bytes, ours: bool) -> None:
    with wire(timeout=5) as (near, theirs):
        theirs.sendall(b"SHL1" + words if ours else words)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkLost):
            near.receive_head()


# Doors


class Guests:
    """A handler that answers everything, and what it and the door saw."""

    def __init__(self) -> None:
        self.hellos: list[dict[str, Any]] = []
        self.errors: list[tuple[dict[str, Any], Exception]] = []

    def handle(self, link: Link, hello: dict[str, Any]) -> None:
        self.hellos.append(hello)
        while True:
            head, buffers = link.receive()
            if "fail" in head:
                raise KeyError(head["fail"])
            link.send(head, buffers)

    def note(self, _link: Link, hello: dict[str, Any], error: Exception) -> None:
        self.errors.append((hello, error))


@pytest.fixture
def guests() -> Guests:
    return Guests()


@pytest.fixture
def open_door(guests: Guests) -> Iterator[Door]:
    with Door(guests.handle, on_error=guests.note) as door:
        yield door
    assert door.close()  # again, which does no harm


def answers(door: Door) -> bool:
    with connect(door.address, door.token, {}, name="the server", timeout=10) as link:
        link.send({"number": 7}, [b"12"])
        head, buffers = link.receive()
        return head == {"number": 7} and bytes(buffers[0].numpy()) == b"12"


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def hung_up_on(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:  # it had said more than was read
        return True


def test_callers_are_told_apart_by_what_they_say(open_door: Door, guests: Guests) -> None:
    host, port = open_door.address
    assert host == LOOPBACK
    assert port > 0
    links = [connect(open_door.address, open_door.token, {"replica": n}, name="the server") for n in range(3)]
    for number, link in enumerate(links):
        link.send({"number": number})
    assert [link.receive().head["number"] for link in links] == [0, 1, 2]
    assert sorted(hello["replica"] for hello in guests.hellos) == [0, 1, 2]
    links[1].close()  # the others are not touched
    links[2].send({"still": True})
    assert links[2].receive().head == {"still": True}
    for link in links:
        link.close()
    assert until(lambda: not open_door._guests)
    assert guests.errors == []


def test_a_handlers_error_is_told_and_closes_its_link_alone(open_door: Door, guests: Guests) -> None:
    with connect(open_door.address, open_door.token, {"replica": 4}, name="the server") as link:
        link.send({"fail": "weights"})
        with pytest.raises(LinkLost, match="the server closed the link"):
            link.receive()
    assert until(lambda: len(guests.errors) == 1)
    hello, error = guests.errors[0]
    assert hello == {"replica": 4}
    assert isinstance(error, KeyError)
    assert answers(open_door)


def test_a_wrong_token_is_refused_without_a_word(open_door: Door, guests: Guests) -> None:
    for token in ("", open_door.token[:-1], "é\ud800"):
        with pytest.raises(LinkError, match=f"the server at {LOOPBACK}:{open_door.address[1]} refused") as caught:
            connect(open_door.address, token, {}, name="the server")
        assert "token" in caught.value.remedy
    with socket.create_connection(open_door.address) as stranger:
        stranger.sendall(frames._packed({"token": "wrong", "hello": {}}, []))
        assert hung_up_on(stranger)
    assert answers(open_door)
    assert guests.hellos == [{}]


def test_garbage_and_silence_do_not_block_the_door(
    open_door: Door, guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_SECONDS", 0.3)
    silent = [socket.create_connection(open_door.address) for _ in range(5)]
    for words in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), struct.pack("!4sII", b"SHL1", 1 << 20, 0)):
        with socket.create_connection(open_door.address) as stranger:
            stranger.sendall(words)
            assert hung_up_on(stranger)
    start = time.monotonic()
    assert answers(open_door)
    assert time.monotonic() - start < 10
    for stranger in silent:
        stranger.settimeout(5)
        assert hung_up_on(stranger)
        stranger.close()
    assert guests.hellos == [{}]


def test_the_limit_is_for_the_whole_handshake(open_door: Door, guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says a byte now and then is hung up on when its time is over, also when what it says is right."""
    monkeypatch.setattr(doors, "HANDSHAKE_SECONDS", 0.5)
    words = frames._packed({"token": open_door.token, "hello": {"slow": True}}, [])
    with socket.create_connection(open_door.address) as stranger:
        start = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012  (it may come at any byte)
            for index in range(len(words)):
                stranger.sendall(words[index : index + 1])
                time.sleep(0.05)
        assert 0.3 < time.monotonic() - start < 5
    assert answers(open_door)
    assert guests.hellos == [{}]


def test_many_strangers_cost_few_files_and_no_thread_and_others_are_let_in(open_door: Door, guests: Guests) -> None:
    def files() -> int:
        return sum(1 for _ in Path("/dev/fd").iterdir())

    threads, before = threading.active_count(), files()
    crowd = []
    for number in range(400):
        crowd.append(socket.create_connection(open_door.address))
        if number % 2:
            crowd[-1].sendall(b"S")
    assert answers(open_door)
    assert threading.active_count() <= threads + 1  # whoever was let in may just be leaving
    assert files() <= before + len(crowd) + doors.MOST_STRANGERS + 8
    hung_up = 0
    for stranger in crowd:
        stranger.settimeout(0.001)
        try:
            hung_up += stranger.recv(1) == b""
        except ConnectionResetError:
            hung_up += 1
        except TimeoutError:
            continue
        finally:
            stranger.close()
    assert hung_up >= 400 - doors.MOST_STRANGERS
    assert guests.hellos == [{}]


def test_a_crowd_from_one_address_does_not_drive_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with selectors.DefaultSelector() as selector:
        monkeypatch.setattr(doors, "MOST_STRANGERS", 4)
        strangers = doors._Strangers(selector)
        ends = [socket.socketpair() for _ in range(8)]
        first = strangers.add(ends[0][0], ("10.0.0.1", 1))
        crowd = [strangers.add(end, ("10.0.0.2", port)) for port, (end, _) in enumerate(ends[1:])]
        assert list(strangers._waiting) == [first, *crowd[-3:]]
        strangers.drop_all()
        assert not strangers._waiting
        for _, end in ends:
            end.close()


def test_a_caller_that_talks_nonsense_loses_its_link_and_nothing_else(
    guests: Guests, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(link: Link, _hello: dict[str, Any]) -> None:
        link.receive([torch.zeros(2)])

    with (
        Door(handle, on_error=guests.note) as door,
        connect(door.address, door.token, {}, name="the server") as link,
    ):
        link.send({}, [torch.zeros(3)])
        with pytest.raises(LinkLost, match="the server"):
            link.receive()
    assert guests.errors == []
    assert "was ended" in caplog.text


def test_closing_a_door_waits_for_callers_that_are_just_leaving(
    guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, leaving, go_on = Link.close, threading.Event(), threading.Event()

    def slowly(link: Link) -> None:
        if threading.current_thread().name.startswith("shoal-link-"):
            leaving.set()
            go_on.wait(10)
        close(link)

    monkeypatch.setattr(Link, "close", slowly)
    open_door = Door(guests.handle, on_error=guests.note)
    connect(open_door.address, open_door.token, {}, name="the server").close()
    assert leaving.wait(10)
    assert not open_door.close(0.05)
    go_on.set()
    assert open_door.close()


def test_buffers_that_no_memory_holds_are_refused_before_any_is_taken() -> None:
    with wire() as (near, theirs):
        theirs.sendall(frames._packed({"kind": "push"}, [1 << 62]))
        with pytest.raises(LinkLost, match=r"announced buffers of \d+ bytes, more than are free here"):
            near.receive()


def test_closing_a_door_ends_its_links_and_threads(guests: Guests) -> None:
    open_door = Door(guests.handle, on_error=guests.note)
    link = connect(open_door.address, open_door.token, {}, name="the server")
    silent = socket.create_connection(open_door.address)
    assert until(lambda: len(open_door._guests) == 1)
    assert sum(thread.name.startswith("shoal-") for thread in threading.enumerate()) == 2  # none for a stranger
    start = time.monotonic()
    assert open_door.close()
    assert time.monotonic() - start < 10
    assert not any(thread.name.startswith("shoal-") for thread in threading.enumerate())
    with pytest.raises(LinkLost, match="the server"):
        link.receive()
    assert silent.recv(1) == b""
    with pytest.raises(LinkError, match="cannot be reached"):
        connect(open_door.address, open_door.token, {}, name="the server", timeout=0.1)
    link.close()
    silent.close()
    assert guests.errors == []


def test_a_handler_may_close_the_door_and_one_that_does_not_end_is_told() -> None:
    release, closed = threading.Event(), threading.Event()

    def handle(_link: Link, hello: dict[str, Any]) -> None:
        if hello["closes"]:
            assert not front.close(0.1)
            closed.set()
        else:
            release.wait()

    front = Door(handle, on_error=no_error)
    with (
        connect(front.address, front.token, {"closes": False}, name="the server"),
        connect(front.address, front.token, {"closes": True}, name="the server"),
    ):
        assert closed.wait(5)
    release.set()
    assert front.close()


def test_connecting_waits_for_a_peer_that_is_still_starting(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _bytes: "known beforehand")
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
    late: list[Door] = []

    def open_late() -> None:
        time.sleep(0.3)
        late.append(Door(guests.handle, on_error=guests.note, port=address[1]))

    with in_thread(open_late):
        link = connect(address, "known beforehand", {"early": True}, name="the server", timeout=10)
    assert until(lambda: guests.hellos == [{"early": True}])
    link.close()
    late[0].close()


def test_who_cannot_be_reached_is_named_with_the_address() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
        with pytest.raises(LinkError, match=f"server 1 at {LOOPBACK}:{address[1]} took the connection but gave no"):
            connect(address, "", {}, name="server 1", timeout=0.2)
    with pytest.raises(LinkError) as caught:
        connect(address, "", {}, name="server 1", timeout=0.2)
    assert f"server 1 cannot be reached at {LOOPBACK}:{address[1]}: Connection refused" in caught.value.problem
    assert "See whether that process runs" in caught.value.remedy


def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0"):
        Door(no_error_handler, on_error=no_error, host="192.0.2.1")
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(ConfigError, match="in use"):
        Door(no_error_handler, on_error=no_error, port=taken.getsockname()[1])


def no_error_handler(_link: Link, _hello: dict[str, Any]) -> None:
    raise AssertionError("nobody comes")


def test_the_address_others_reach_this_host_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address(LOOPBACK) == LOOPBACK
    assert own_address("localhost") in (LOOPBACK, "::1")

    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="no way from this host to 'nowhere': Name or service not known"):
        own_address("nowhere")
