"""One connection to another process, which carries frames both ways: a small JSON head, then buffers of raw bytes.

    4 bytes     b"SHL1"
    4 + 4       length of the head, number of buffers       (integers in network order)
    8 each      length of every buffer
    ...         the head, UTF-8
    ...         the buffers, one after the other, in the sender's order of bytes

Promise   frames arrive whole and in order; bytes go from tensor to socket to tensor without a copy in this process.
Cost      one system call per frame sent and three per frame received, one more for every further 1,024 buffers.
Failure   a peer that closed or died is a `LinkLost` at once, wherever the transfer stood. One that is silent is a
          `LinkSilent` after `timeout` seconds, which leaves the link as it was, unless part of a frame had moved: then
          the two sides no longer agree on where a frame begins, and the link is lost.
"""

import json
import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch
from torch import Tensor

from shoal.errors import PeerError
from shoal.transport.links.sockets import keep_from_children, limit_cut, limit_waiting, tune

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Buffer: TypeAlias = Tensor | bytes | bytearray | memoryview

LARGEST_HEAD = 16 << 20
"""Bytes of a head with its list of lengths. More is not a head: who sends it is no peer of ours."""

GIVE_UP_SECONDS = 120.0
"""Unless told otherwise, the longest cut of the network that a link survives."""

PREFIX_BYTES = 12
"""What every frame begins with; it says how long its head is."""

_MAGIC = b"SHL1"
_PREFIX = struct.Struct("!4sII")
_SURELY_FREE = 16 << 20
"""Up to so many bytes are allocated without a check of the free memory."""
_CAST_QUICKLY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}
"""Types whose elements Python knows as numbers: fewer calls per buffer, of which a message may have many."""
_AT_ONCE = 1024
"""Buffers that the system takes in one call (IOV_MAX)."""
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""Sending to a closed peer raises an error, also in a program that does not ignore SIGPIPE."""
_WAKE_SECONDS = 1.0
"""Time that an operation in another thread has to notice that the link was closed; it takes microseconds."""


class LinkError(PeerError):
    """A link that could not be made, or a frame that does not fit what it is received into."""


class LinkLost(LinkError):  # noqa: N818  (the name is what callers read beside LinkSilent)
    """The peer closed the link, died or became unreachable; or the link was closed here. It stays lost."""


class LinkSilent(LinkError):  # noqa: N818
    """The peer neither spoke nor listened in time. The link is as it was."""


class LinkRefused(LinkError):  # noqa: N818
    """What the peer sent is malformed. Whoever serves it ends its link, and nothing else."""


class Head(NamedTuple):
    """The beginning of a frame: what it is about, and the bytes of each buffer that follows."""

    head: dict[str, Any]
    lengths: tuple[int, ...]


class Frame(NamedTuple):
    """A whole frame. Buffers are the tensors they were received into, or new ones of bytes (uint8)."""

    head: dict[str, Any]
    buffers: list[Tensor]


class Link:
    """A connected TCP socket, which it owns.

    Any number of threads may send, one after the other; one thread receives. `close` may be called from any thread and
    wakes those that wait. A forked child has no part in its parent's links.
    """

    def __init__(self, sock: socket.socket, name: str, timeout: float | None = None) -> None:
        self.name = name
        """Who is at the other end, for messages: `server 1`."""
        self.sent_bytes = 0
        """Bytes of buffers; heads do not count."""
        self.received_bytes = 0
        self.sent_frames = 0
        self.received_frames = 0
        self._socket = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._awaited: tuple[int, ...] = ()
        """Lengths of the buffers that follow the head which was received last."""
        self._lost: str | None = None
        """Why nothing more can be received or sent."""
        self._closed = False
        self.on_stall: Callable[[], None] | None = None
        """Called when nothing moves for `timeout` seconds in the middle of a frame. The link then waits on; without
        this it is lost."""
        self.waits_to_send = False
        """Whether that also holds before the first byte of a frame is sent; else a silence is a `LinkSilent` there."""
        tune(sock)
        keep_from_children(sock)
        self.give_up_after(GIVE_UP_SECONDS)
        self.timeout = timeout

    def fileno(self) -> int:
        """The number of its file, to wait for it together with others; -1 when it is closed."""
        return self._socket.fileno()

    @property
    def host(self) -> str:
        """The address of the peer's host, as it is seen from here."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError as error:
            raise self._over(f"the link to {self.name} broke: {error.strerror}.") from error

    def give_up_after(self, seconds: float) -> None:
        """How long the network may be cut before the system takes the peer's host for gone and the link is lost.

        When the cut is shorter, all that was sent meanwhile arrives after it. A host that is there and says that the
        peer is gone is believed at once.
        """
        self._check()
        try:
            limit_cut(self._socket, seconds)
        except OSError as error:  # another thread closed it just now
            raise self._over(f"the link to {self.name} broke: {error.strerror}.") from error

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation waits without a byte moving; None waits for ever.

        In the middle of a frame a silence is noticed after one to two of these. A change holds from the next
        operation on.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds is not None and not 0 < seconds < math.inf:
            raise ValueError(f"timeout = {seconds} is not a number of seconds above 0; None waits for ever.")
        self._check()
        try:
            limit_waiting(self._socket, seconds)
        except OSError as error:  # another thread closed it just now
            raise self._over(f"the link to {self.name} broke: {error.strerror}.") from error
        self._timeout = seconds

    @property
    def closed(self) -> bool:
        """Whether `close` was called here. A link that was lost still wants to be closed."""
        return self._closed

    def send(self, head: Mapping[str, JSON], buffers: Sequence[Buffer] = ()) -> None:
        """Send one frame; returns when the system has taken all of it, which does not mean that it arrived.

        Tensors must be contiguous and on the CPU (a `ValueError` otherwise) and stay as they are until this returns.
        After a `LinkLost` here, what the peer had said before can still be received.
        """
        views = [_bytes_of(buffer) for buffer in buffers]
        lengths = [len(view) for view in views]
        beginning = _packed(head, lengths)
        with self._sending:
            self._check()
            self._move([memoryview(beginning), *views], sends=True, begun=False)
            self.sent_frames += 1
            self.sent_bytes += sum(lengths)

    def receive(self, into: Sequence[Tensor] | None = None) -> Frame:
        """Receive one frame, its buffers straight into the tensors `into`, or into new ones of bytes.

        Buffers whose number or sizes differ from those of `into` are a `LinkError`; they can then still be had with
        `receive_into` or `receive_buffers`.
        """
        head, _ = self.receive_head()
        if into is None:
            return Frame(head, self.receive_buffers())
        self.receive_into(into)
        return Frame(head, list(into))

    def receive_head(self, largest: int = LARGEST_HEAD) -> Head:
        """Receive the beginning of a frame, so as to choose by it where its buffers go. They must be taken next.

        A head of more than `largest` bytes, or what is no head at all, is a `LinkLost`.
        """
        with self._receiving:
            self._check()
            if self._awaited:
                raise RuntimeError(f"the {len(self._awaited)} buffers of the last frame were not received yet")
            prefix = bytearray(_PREFIX.size)
            self._move([memoryview(prefix)], sends=False, begun=False)
            follows = announced(prefix, largest)
            if follows is None:
                raise self._talks_otherwise()
            size, count = follows
            rest = bytearray(size + 8 * count)
            self._move([memoryview(rest)], sends=False, begun=True)
            head = understood(rest[8 * count :])
            if head is None:
                raise self._talks_otherwise()
            self._awaited = struct.unpack_from(f"!{count}Q", rest)
            self.received_frames += 1
            return Head(head, self._awaited)

    def receive_into(self, buffers: Sequence[Tensor]) -> None:
        """Receive the buffers of the frame whose head came last into these tensors, which must have their sizes.

        If they do not, it is a `LinkError` and nothing was received. Tensors must be contiguous and on the CPU.
        """
        views = [_bytes_of(buffer) for buffer in buffers]
        with self._receiving:
            self._check()
            given = tuple(len(view) for view in views)
            if given != self._awaited:
                raise self._does_not_fit(given)
            self._move(views, sends=False, begun=True)
            self._awaited = ()
            self.received_bytes += sum(given)

    def receive_buffers(self) -> list[Tensor]:
        """Receive the buffers of the frame whose head came last as new tensors of bytes; `view` gives them a dtype.

        Buffers that this host has no memory for are a `LinkLost`, before any is taken.
        """
        if sum(self._awaited) > _SURELY_FREE and sum(self._awaited) > psutil.virtual_memory().available:
            raise self._lose(f"{self.name} announced buffers of {sum(self._awaited)} bytes, more than are free here.")
        buffers = [torch.empty(length, dtype=torch.uint8) for length in self._awaited]
        self.receive_into(buffers)
        return buffers

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether within `seconds` there is something to receive: a frame, or the news that the peer is gone."""
        with self._receiving:
            self._check()
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            return bool(waiting.poll(math.ceil(1000 * seconds)))

    def close(self) -> None:
        """End the link, here and for the peer. Wakes who waits in another thread.

        What was sent before still arrives, unless something the peer sent was left unread here: the system then resets
        the connection. Where last words matter, let who hears them close first.
        """
        if self._closed:
            return
        self._closed = True
        self._hang_up(socket.SHUT_RDWR)
        # Only when nobody uses the file any more may the system give its number to another. The limit is for a signal
        # handler that closes the link in the midst of an operation of its own thread.
        held = [lock for lock in (self._sending, self._receiving) if lock.acquire(timeout=_WAKE_SECONDS)]
        self._socket.close()
        for lock in held:
            lock.release()

    def __enter__(self) -> "Link":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "lost" if self._lost else "open"
        return f"<Link to {self.name}, {state}>"

    def _move(self, views: list[memoryview], *, sends: bool, begun: bool) -> None:
        """Send or receive all bytes of `views`; `begun` tells whether a part of their frame moved before."""
        step: Callable[[list[memoryview]], int] = self._give if sends else self._take
        views = [view for view in views if len(view)]
        first, middle = 0, " in the middle of a frame"
        try:
            while first < len(views):
                try:
                    moved = step(views[first : first + _AT_ONCE])
                except BlockingIOError:
                    if self.on_stall is None or not (begun or (sends and self.waits_to_send)):
                        raise
                    self.on_stall()
                    continue
                begun = True
                first = _passed(views, first, moved)
        except EOFError:
            raise self._lose(f"{self.name} closed the link{middle if begun else ''}.") from None
        except BlockingIOError:
            what = f"{self.name} {'took' if sends else 'said'} nothing for {self._timeout} seconds"
            if begun:
                raise self._lose(f"{what}{middle}.") from None
            raise LinkSilent(
                f"{what}.", "It may be busy, frozen or cut off. Wait longer for it, or go on without it."
            ) from None
        except OSError as error:
            problem = f"the link to {self.name} broke: {error.strerror or error}."
            if not sends:
                raise self._lose(problem) from error
            self._hang_up(socket.SHUT_WR)  # what the peer said before can still be received
            raise self._over(problem) from error
        except BaseException:  # such as a Ctrl-C, which can come between a call that moved bytes and the note of it
            if begun or sends:
                self._lose(f"the link to {self.name} was interrupted{middle}.")
            raise

    def _give(self, views: list[memoryview]) -> int:
        return self._socket.sendmsg(views, (), _NO_SIGNAL)

    def _take(self, views: list[memoryview]) -> int:
        taken = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not taken:
            raise EOFError
        return taken

    def _check(self) -> None:
        if self._closed or self._lost is not None:
            raise self._over(self._lost or "")

    def _lose(self, problem: str) -> LinkLost:
        """From now on nothing is received or sent; threads that wait on the link wake."""
        self._lost = self._lost or problem
        self._hang_up(socket.SHUT_RDWR)
        return self._over(problem)

    def _over(self, problem: str) -> LinkLost:
        """The error to raise: that it was closed here comes first, then why it was lost, then what this call saw."""
        if self._closed:
            return LinkLost(f"the link to {self.name} was closed here.", "Make a new one to speak to it again.")
        return LinkLost(
            self._lost or problem,
            "If that process failed, its own message tells why; else it was ended, or its host is gone.",
        )

    def _talks_otherwise(self) -> LinkLost:
        self._lose(f"{self.name} sent bytes that are not a Shoal message.")
        return LinkLost(
            f"{self.name} sent bytes that are not a Shoal message.",
            "Something else talks at that address, or another version of Shoal: check the address.",
        )

    def _does_not_fit(self, given: tuple[int, ...]) -> LinkError:
        sent = self._awaited
        if len(sent) != len(given):
            problem = f"{self.name} sent {len(sent)} buffers where {len(given)} were expected."
        else:
            index = next(i for i, (theirs, ours) in enumerate(zip(sent, given, strict=True)) if theirs != ours)
            problem = f"{self.name} sent buffer {index} with {sent[index]} bytes where {given[index]} were expected."
        return LinkError(problem, "Both sides must have the same network, dtype and version of Shoal.")

    def _hang_up(self, how: int) -> None:
        with suppress(OSError):  # the peer may have been first
            self._socket.shutdown(how)


def announced(prefix: bytes | bytearray, largest: int) -> tuple[int, int] | None:
    """(bytes of the head, number of buffers) of a frame that begins so; None for what is no frame, or a larger head."""
    magic, size, count = _PREFIX.unpack(prefix)
    return (size, count) if magic == _MAGIC and size + 8 * count <= largest else None


def understood(text: bytes | bytearray) -> dict[str, Any] | None:
    """What a head says; None where it is no JSON object."""
    try:
        head = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return head if isinstance(head, dict) else None


def _packed(head: Mapping[str, JSON], lengths: Sequence[int]) -> bytes:
    """All of a frame but its buffers."""
    text = json.dumps(dict(head), separators=(",", ":")).encode()
    if len(text) + 8 * len(lengths) > LARGEST_HEAD:
        raise ValueError(
            f"a head of {len(text)} bytes with {len(lengths)} buffers is above the limit of {LARGEST_HEAD}"
            " bytes: large things are buffers."
        )
    return _PREFIX.pack(_MAGIC, len(text), len(lengths)) + struct.pack(f"!{len(lengths)}Q", *lengths) + text


def _bytes_of(buffer: Buffer) -> memoryview:
    """The memory of `buffer` itself, as bytes."""
    if isinstance(buffer, Tensor):
        return _bytes_of_tensor(buffer)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"a buffer must be contiguous, which one of shape {view.shape} is not.")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _bytes_of_tensor(tensor: Tensor) -> memoryview:
    plain = tensor.is_cpu and tensor.layout == torch.strided
    # A conjugated or negated view holds other values than its memory.
    if not plain or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a buffer must be a contiguous tensor on the CPU, which one of shape {tuple(tensor.shape)} on"
            f" {tensor.device} is not: copy it to one first."
        )
    if not tensor.numel():  # which may have any strides
        return memoryview(b"")
    if tensor.dtype in _CAST_QUICKLY:
        return tensor.detach().numpy().data.cast("B")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data  # bytes, since numpy knows no bfloat16


def _passed(views: list[memoryview], first: int, moved: int) -> int:
    """The first view that is yet to be moved, cut to what is left of it, after `moved` bytes from `first` on."""
    while first < len(views) and moved >= len(views[first]):
        moved -= len(views[first])
        first += 1
    if moved:
        views[first] = views[first][moved:]
    return first
