"""Sums among the ranks of one host: through memory that they share, not through sockets of the network.

Promise   all ranks end with the same bits, which depend on the values and on the number of ranks alone: a part of the
          tensor is added up by one rank, always the same one, in a fixed order. Sums of one group are taken in the
          order in which they were begun, whoever waits for which first.
Cost      up to `MESSAGE_BYTES`: one message to every other rank. Above: the tensor goes through the shared memory in
          chunks of `CHUNK_BYTES`, which stay in the processor's cache; every rank copies 2 (P-1)/P of it and adds the
          rest. Three chunks of memory per rank and group, reserved when the group is made.
Failure   a rank that ends is `Missing` at once, because the system closes its sockets; one that is frozen is when the
          group's time-out is over. Nothing is left behind, whoever is killed: memory and sockets have no names in
          the file system, and the system frees them with the last process that has them.

Order of memory. No rank looks at shared memory to learn whether something is there: it is told by a byte on a socket.
Whoever sends it has written before the call, and whoever receives it reads after the call; the kernel hands the byte
over under a lock, which orders both on every processor (x86, ARM). So plain stores of torch are enough, and whoever
waits sleeps.

Linux only; elsewhere, between hosts, and for NCCL, `join` gives the reason instead of a group.
"""

import hashlib
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.transport.links.sockets import keep_from_children, limit_waiting

SWITCH = "SHOAL_SUMS"
"""Environment variable: `gloo` on any rank lets ranks of one host sum as ranks of several do."""
MESSAGE_BYTES = 32 << 10
"""Largest tensor that every rank sends to every other. Two of them fit what a socket holds, so nobody waits to send: a
rank is never more than one sum ahead of another."""
CHUNK_BYTES = 1 << 20
"""Of a larger one, what goes through the memory at a time."""
SLOTS = 3
"""Chunks per rank: one is read while the next is added up and the one after it is filled."""
MOST_RANKS = 16
"""Of a group: every two of them have a socket."""
JOIN_SECONDS = 10.0
"""How long ranks that found each other wait for each other's sockets."""
CLOSE_SECONDS = 0.5
"""How long a group that is closed waits for sums that were begun and that nobody waited for."""

How = Literal["sum", "max"]
Gather = Callable[[Tensor], Sequence[Tensor]]
"""Tensors of one shape from every rank of the group to every rank: what finds the others."""

_JOIN: Mapping[How, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda into, other: into.add_(other),
    "max": lambda into, other: torch.maximum(into, other, out=into),
}
_BYTE = b"\1"


class Missing(RuntimeError):  # noqa: N818  (what the rank is)
    """A rank of the group that is gone, or silent for the group's time-out."""

    def __init__(self, peer: int, *, silent: bool) -> None:
        super().__init__(peer, silent)
        self.peer, self.silent = peer, silent


class Reduction:
    """One sum or maximum under way. Done when it is waited for, or before that in the background."""

    def __init__(self, group: "HostGroup", tensor: Tensor, how: How) -> None:
        self.tensor, self.how = tensor, how
        self.done = False
        self.error: BaseException | None = None
        self._group = group
        self._callbacks: list[Callable[[object], object]] = []
        self._changing = threading.Lock()

    def wait(self) -> None:
        """Return when it is done; `Missing` if it cannot be."""
        self._group.run_until(self)
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[object], object]) -> None:
        """Call it once the tensor is ready, in the thread that made it so; not after a failure."""
        with self._changing:
            if not self.done:
                self._callbacks.append(callback)
                return
        if self.error is None:
            callback(self)

    def end(self, error: BaseException | None = None) -> None:
        """Whoever took it says how it went."""
        with self._changing:
            self.error, self.done = error, True
            callbacks, self._callbacks = self._callbacks, []
        if error is None:
            for callback in callbacks:
                callback(self)


class HostGroup:
    """Ranks of one host that add up tensors; `sockets` lead to the others, by rank, `memory` is all of theirs."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], memory: Tensor) -> None:
        self.rank, self.size = rank, len(sockets) + 1
        self._sockets = dict(sockets)
        self._slots = memory.view(self.size, SLOTS, CHUNK_BYTES)
        self._turn = 0
        """Chunks so far: which slot is next."""
        self._begun: deque[Reduction] = deque()
        self._running = threading.Lock()
        """Held while a sum is taken, by whoever takes it."""
        self._wake = threading.Semaphore(0)
        self._worker: threading.Thread | None = None
        self._closed = False
        self._lost: BaseException | None = None
        """Why the group can do nothing any more."""

    # What is begun, and who takes it

    def begin(self, tensor: Tensor, how: How, *, background: bool) -> Reduction:
        """Begin to join a tensor over the ranks, in place on each; it must stay as it is until it is waited for.

        Without `background` nothing happens before somebody waits for it or for a later one.
        """
        begun = Reduction(self, tensor, how)
        self._begun.append(begun)
        if background:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="shoal-sums", daemon=True)
                self._worker.start()
            self._wake.release()
        return begun

    def run_until(self, wanted: Reduction) -> None:
        """Take what was begun, in order, until `wanted` is done. Its own thread may be at it, or this one will be."""
        while not wanted.done:
            with self._running:
                if not wanted.done:
                    self._run_next()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            with self._running:
                self._run_next()

    def _run_next(self) -> None:
        if not self._begun:
            return
        taken = self._begun.popleft()
        if self._lost is not None:
            taken.end(self._lost)
            return
        try:
            self._reduce(taken.tensor, taken.how)
        except BaseException as error:
            # Half of it is done: nobody can go on here, and the others must not wait for this rank.
            self._lost = error
            taken.end(error)
            self._hang_up()
            if not isinstance(error, Exception):
                raise
        else:
            taken.end()

    def close(self) -> None:
        """Let go of sockets and memory, once what was begun is done or `CLOSE_SECONDS` are over."""
        self._closed = True
        if self._worker is not None:
            while self._begun and self._lost is None and self._running.acquire(timeout=CLOSE_SECONDS):
                try:
                    self._run_next()
                finally:
                    self._running.release()
            self._wake.release()
        self._hang_up()
        if self._worker is not None:
            self._worker.join(CLOSE_SECONDS)

    def _hang_up(self) -> None:
        for sock in self._sockets.values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            sock.close()

    # How it is taken

    def _reduce(self, tensor: Tensor, how: How) -> None:
        flat = tensor.detach().contiguous().view(-1)
        if flat.nbytes <= MESSAGE_BYTES:
            self._by_messages(flat, _JOIN[how])
        else:
            self._by_memory(flat, _JOIN[how])
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _by_messages(self, flat: Tensor, join: Callable[[Tensor, Tensor], object]) -> None:
        """Everybody sends all of it to everybody, and joins in the order of ranks."""
        if not flat.numel():
            return
        mine = _raw(flat)
        for peer in self._sockets:
            self._send(peer, mine)
        pieces = []
        for peer in range(self.size):
            if peer != self.rank:
                pieces.append(torch.empty_like(flat))
                self._receive(peer, _raw(pieces[-1]))
            elif self.size > 2:
                pieces.append(flat.clone())
        if self.size == 2:  # a + b = b + a, also in floats
            join(flat, pieces[0])
            return
        for piece in pieces[1:]:
            join(pieces[0], piece)
        flat.copy_(pieces[0])

    def _by_memory(self, flat: Tensor, join: Callable[[Tensor, Tensor], object]) -> None:
        """Chunk by chunk: every rank joins its part of all copies of a chunk, and the others fetch it.

            fill 0 | meet | join 0, fill 1 | meet | fetch 0, join 1, fill 2 | meet | fetch 1, join 2 ... | meet | fetch

        Why three slots are enough: chunk k+3 is filled after meeting k+2 at the earliest, and by that meeting everybody
        has fetched chunk k. Counting goes on from sum to sum, so this holds between them too.
        """
        places = self._slots.view(flat.dtype)
        chunks: tuple[Tensor, ...] = torch.split(flat, places.shape[-1])
        first, self._turn = self._turn, self._turn + len(chunks)

        def shared(chunk: int, owner: int, part: int) -> Tensor:
            """A rank's part of what the owner has put into the memory of one chunk."""
            start, end = self._part(chunks[chunk].numel(), part)
            return places[owner, (first + chunk) % SLOTS, start:end]

        def own(chunk: int, part: int) -> Tensor:
            start, end = self._part(chunks[chunk].numel(), part)
            return chunks[chunk][start:end]

        def fill(chunk: int) -> None:
            for peer in self._sockets:
                shared(chunk, self.rank, peer).copy_(own(chunk, peer))

        fill(0)
        self._meet()
        for chunk in range(len(chunks)):
            mine = own(chunk, self.rank)
            for peer in self._sockets:
                join(mine, shared(chunk, peer, self.rank))
            shared(chunk, self.rank, self.rank).copy_(mine)
            if chunk + 1 < len(chunks):
                fill(chunk + 1)
            self._meet()
            for peer in self._sockets:
                own(chunk, peer).copy_(shared(chunk, peer, peer))

    def _part(self, size: int, rank: int) -> tuple[int, int]:
        return size * rank // self.size, size * (rank + 1) // self.size

    def _meet(self) -> None:
        """Return when all ranks are here: what they wrote before is there to be read after."""
        for peer in self._sockets:
            self._send(peer, _BYTE)
        for peer in self._sockets:
            self._receive(peer, memoryview(bytearray(1)))

    def _send(self, peer: int, data: Any) -> None:
        try:
            self._sockets[peer].sendall(data)
        except OSError as error:
            raise Missing(peer, silent=isinstance(error, BlockingIOError)) from None

    def _receive(self, peer: int, into: memoryview) -> None:
        sock = self._sockets[peer]
        while into:
            try:
                size = sock.recv_into(into)
            except OSError as error:
                raise Missing(peer, silent=isinstance(error, BlockingIOError)) from None
            if not size:
                raise Missing(peer, silent=False)
            into = into[size:]


def _raw(flat: Tensor) -> memoryview:
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


# How ranks of one host find each other

_ADDRESS_BYTES = 16
_HOST_BYTES = 32


def join(gather: Gather, rank: int, size: int, patience: timedelta) -> HostGroup | str:
    """A group of these ranks, or why they have none: the same answer on all of them.

    A collective, with two small gathers. The sockets have random names that only the ranks are told, and talk to
    processes of this user alone.
    """
    if size > MOST_RANKS:
        return f"more than {MOST_RANKS} ranks"
    reason, listener, address = why_not(), None, bytes(_ADDRESS_BYTES)
    if reason is None:
        try:
            listener, address = _listen(size)
        except OSError as error:
            reason = f"no socket on this host ({error})"
    host = hashlib.sha256(_host().encode()).digest() if reason is None else bytes(_HOST_BYTES)
    with listener or nullcontext():
        rows = [bytes(row.tolist()) for row in gather(torch.tensor([*host, *address], dtype=torch.uint8))]
        hosts = {row[:_HOST_BYTES] for row in rows}
        if bytes(_HOST_BYTES) in hosts:
            return reason or "another rank has it turned off"
        if len(hosts) > 1:
            return "several hosts"
        assert listener is not None
        sockets: dict[int, socket.socket] = {}
        try:
            _connect(listener, [row[_HOST_BYTES:] for row in rows], rank, sockets)
            memory = _share(sockets, rank, size)
        except (OSError, ValueError) as error:
            reason = f"no memory could be shared ({error})"
    went_well = gather(torch.tensor([reason is None], dtype=torch.uint8))
    if not all(bool(row) for row in went_well):
        for sock in sockets.values():
            sock.close()
        return reason or "another rank could not share memory"
    for sock in sockets.values():
        sock.settimeout(None)  # Python's own limit would come before the system's
        limit_waiting(sock, patience.total_seconds())
    return HostGroup(rank, {peer: sockets[peer] for peer in sorted(sockets)}, memory)


def why_not() -> str | None:
    """What keeps this process from sharing memory with others, wherever they are; None if nothing does."""
    if os.environ.get(SWITCH, "") == "gloo":
        return f"{SWITCH}=gloo"
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    return None


def _host() -> str:
    """Processes with the same one reach each other's sockets: one running system, one network, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text()} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"


def _listen(size: int) -> tuple[socket.socket, bytes]:
    """A socket without a file, for the others to connect to."""
    address = secrets.token_bytes(_ADDRESS_BYTES)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keep_from_children(sock)
    try:
        sock.bind(b"\0shoal-" + address.hex().encode())
        sock.listen(size)
        sock.settimeout(JOIN_SECONDS)
    except OSError:
        sock.close()
        raise
    return sock, address


def _connect(listener: socket.socket, addresses: Sequence[bytes], rank: int, sockets: dict[int, socket.socket]) -> None:
    """A socket to every other rank, into `sockets`: this one calls those before it and is called by those after."""
    for peer in range(rank):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sockets[peer] = sock
        _prepare(sock)
        sock.connect(b"\0shoal-" + addresses[peer].hex().encode())
        _check_user(sock)
        sock.sendall(bytes([rank]))
    while len(sockets) < len(addresses) - 1:
        sock, _ = listener.accept()
        _prepare(sock)
        _check_user(sock)
        (peer,) = sock.recv(1) or b"\0"
        if not rank < peer < len(addresses) or peer in sockets:
            sock.close()
            raise ValueError("a stranger called")
        sockets[peer] = sock


def _prepare(sock: socket.socket) -> None:
    keep_from_children(sock)
    sock.settimeout(JOIN_SECONDS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MESSAGE_BYTES)


def _check_user(sock: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise ValueError("a process of another user")


def _share(sockets: Mapping[int, socket.socket], rank: int, size: int) -> Tensor:
    """Memory of all ranks: rank 0 makes it and hands it over. It has no name, and its size cannot be changed."""
    length = size * SLOTS * CHUNK_BYTES
    if rank == 0:
        import fcntl

        file = os.memfd_create("shoal-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, length)  # an error now, where there is no room, and not a signal later
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            for sock in sockets.values():
                socket.send_fds(sock, [_BYTE], [file])
            return _mapped(file, length)
        finally:
            os.close(file)
    _, files, _, _ = socket.recv_fds(sockets[0], 1, 1)
    if not files:
        raise ValueError("rank 0 has none")
    try:
        return _mapped(files[0], length)
    finally:
        os.close(files[0])


def _mapped(file: int, length: int) -> Tensor:
    if os.fstat(file).st_size != length:
        raise ValueError("it has another size")
    return torch.frombuffer(mmap.mmap(file, length), dtype=torch.uint8)
