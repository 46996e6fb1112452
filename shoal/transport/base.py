"""One seam to the network, over c10d: point-to-point moves and sums within groups of ranks.

Everything that a step sends goes through here and is counted as payload: a message by its bytes, a sum over P
ranks of B bytes as the 2 (P-1) B that a ring sends, shared evenly by its ranks. What is counted is therefore
comparable with what the pure moves predict, whichever algorithm the backend uses.

Why the messages of two networks are never mixed up. Networks on the same ranks share connections, as one after the
other they share the wire. A message is matched by its pair of ranks and its tag, and those of one pair and tag arrive
in the order in which they were sent; sums and gathers of one group are matched in the order in which they were begun.
A program gives all ranks one order, and so do the calls of a script that makes them in the same order on all ranks:
no call returns before everything that it began is waited for. A script that does not is found out by the first gather
of the call (`header`), which tells the networks of a group apart by number; and messages of different networks have
different tags as well, so that even then none takes another's. Networks on different groups share nothing.
"""

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.diary import Diary, MessageEnd, Underway, now
from shoal.errors import PeerError, RunError, SilentError, network_trouble, of_network, show_ranks
from shoal.timeline import Kind
from shoal.traffic import Sent, ring_bytes, total
from shoal.transport.groups import Backend, Circle, in_order, meet, members_of
from shoal.transport.one_host import HostGroup, How, Missing, Reduction

BUCKET_LIMITS = (256 << 10, 25 << 20)
"""Smallest and largest bucket of gradients, in bytes."""
SUMMED_TO_MEASURE = (4 << 10, 4 << 20)
"""Bytes of a small and a large sum by which a link is judged."""
PAIR_BYTES = 64 << 10
"""Largest tensor that two ranks sum by sending it to each other."""
PAIR_TAG = 1 << 30
"""The tag of such messages; moves have the tags of their instructions."""
NETWORK_TAGS = (21, 1 << 9)
"""Bits of the tags of one network; and how many networks on the same ranks have tags of their own."""
EVERYONE = "everyone"
"""The purpose of the group of all ranks: moves, and what ranks tell each other."""
BACKGROUND = "background"
"""The purpose of another group of all ranks, for large moves that must not delay others."""
_GLOO: dict[How, dist.ReduceOp.RedOpType] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
ROW = 8
"""Numbers in a header: what is called, and what goes with it."""
NAME_BYTES = 160
"""Of what ranks called, where they called different things."""


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done."""
        ...


@dataclass(frozen=True, slots=True)
class _Noted:
    """What is noted of a work when it was waited for."""

    diary: Diary
    label: str
    peers: tuple[int, ...]
    """In the world."""
    underway: Underway | None = None
    """What it is a part of; None where somebody else notes its end."""
    arrives: MessageEnd | None = None
    """Where it is a message to this rank: that end of it, but for the time."""

    def waited(self, since: int) -> None:
        at = now()
        self.diary.note("wait", self.label, since, at, peers=self.peers)
        if self.arrives is not None:
            self.diary.end(self.arrives._replace(at=at))
        if self.underway is not None:
            self.underway.done(at)


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A work of c10d, whose failure is raised as one of our errors."""

    work: Waitable
    transport: "Transport"
    ranks: tuple[int, ...]
    label: str
    noted: _Noted | None = None

    def wait(self) -> None:
        """Return when it is done; a PeerError if it cannot be."""
        since = 0 if self.noted is None else now()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.transport.told(error, self.ranks, self.label) from None
        if self.noted is not None:
            self.noted.waited(since)


class Transport:
    """The ranks of one replica; without a process group, this process alone.

    A rank that is gone or silent is a `PeerError` on those that wait for it, and names what they waited for.
    """

    diary: Diary | None = None
    """Where this rank notes what it does, while it is recorded. Of the class: that of all transports of this process
    which have none of their own, for a loop of the user's."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        there = dist.is_available() and dist.is_initialized() and not alone
        self.group = group
        self._members = members_of(group) if there or group is not None else (0,)
        """The ranks' numbers in the world."""
        self.rank = self._members.index(dist.get_rank()) if there else 0
        self.world = len(self._members)
        self.label = ""
        """What the next messages are for: a layer's name."""
        self.counted: dict[str, Sent] = {}
        """Payload that this rank sent, by label."""
        on_gpu = there and "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda") if on_gpu else torch.device("cpu")
        """Where small tensors of our own must lie to be sent."""
        self._met: tuple[Circle, int] | None = None
        """The circle that this transport belongs to, and its number there."""
        self._measured: Sequence[tuple[float, float]] | None = None
        """What some sums took, by rank."""
        self._unread: Callable[[], None] | None = None
        """Reads the header that was begun and not read yet, if there is one."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks' numbers in the world."""
        return self._members

    @property
    def sent(self) -> Sent:
        """All payload that this rank sent."""
        return total(self.counted)

    # Groups

    def make_groups(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Create the groups of ranks that sums will use; a collective, with the same list on every rank.

        A purpose has groups of its own, so that sums of gradients in the background do not delay others.
        """
        if self.world > 1:
            self._group(EVERYONE, tuple(range(self.world)))
            for purpose, ranks in in_order(wanted, self.rank):
                self._group(purpose, ranks)

    def _group(self, purpose: str, ranks: tuple[int, ...]) -> Backend:
        """The group to send or receive in. Reads the last header first: nothing is sent before that."""
        self.read_header()
        circle = self._circle()[0]
        try:
            return circle.group(purpose, ranks, sums=purpose not in (EVERYONE, BACKGROUND))
        except RuntimeError as error:
            raise self.told(error, ranks, f"connections for {purpose}") from None

    def _on_host(self, purpose: str, ranks: tuple[int, ...]) -> HostGroup | None:
        """The ranks of such a group where they sum through shared memory. Reads the last header first, as above."""
        self._group(purpose, ranks)
        return self._circle()[0].on_host(purpose, ranks)

    def _everyone(self) -> Backend:
        return self._group(EVERYONE, tuple(range(self.world)))

    def _circle(self) -> tuple[Circle, int]:
        """Made at the first call that sends something, which is a collective: so all ranks number networks alike."""
        if self._met is None:
            try:
                circle = meet(self.group, self._members, self._device)
            except RuntimeError as error:
                raise self.told(error, range(self.world), "first meeting") from None
            self._met = circle, circle.networks
            circle.networks += 1
        return self._met

    def _network(self) -> int:
        """Which of the networks on these ranks this is."""
        return self._circle()[1]

    # Failures

    def told(self, error: RuntimeError, ranks: Sequence[int], label: str) -> Exception:
        """A network error that came while this rank waited for `ranks`, as an error of ours; others as they are."""
        if isinstance(error, Missing):
            peer = [ranks[error.peer]]
            return self._silent(peer, label, self._patience()) if error.silent else self._gone(peer, label)
        if not of_network(error):
            return error
        others = [rank for rank in ranks if rank != self.rank]
        if network_trouble(error) == "silent":
            return self._silent(others, label, self._patience())
        return self._gone(others, label)

    def _patience(self) -> float | None:
        return None if self._met is None else self._met[0].patience.total_seconds()

    def _silent(self, others: Sequence[int], label: str, seconds: float | None) -> SilentError:
        within = "in time" if seconds is None else f"within {seconds:g} seconds"
        return SilentError(
            f"{self._one_of(others)} did not answer {within}; {self.show([self.rank])} waited for {label!r}.",
            "It is frozen, far behind or in another call: look at what it does. If a step may take longer, give the "
            "process group a longer time-out.",
        )

    def _gone(self, others: Sequence[int], label: str) -> PeerError:
        return PeerError(
            f"{self.show([self.rank])} lost its connection to {self._one_of(others)} while it waited for {label!r}.",
            "Look at the message of the rank that failed first; this one only noticed that it is gone.",
        )

    def _one_of(self, ranks: Sequence[int]) -> str:
        return f"{'one of ' if len(ranks) > 1 else ''}{self.show(ranks)}"

    def show(self, ranks: Sequence[int]) -> str:
        """Ranks for people: as they count here, and in the world where that differs."""
        there = [self._members[rank] for rank in ranks]
        return show_ranks(ranks) + (f" of the group ({show_ranks(there)} of the world)" if there != [*ranks] else "")

    # Payload

    def _count(self, size: int, messages: int, label: str) -> None:
        self.counted[label] = self.counted.get(label, Sent()) + Sent(size, messages)

    def _count_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: str) -> None:
        self._count(ring_bytes(tensor.nbytes, len(ranks), ranks.index(self.rank)), 1, label)

    def begin_moves(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        purpose: str = EVERYONE,
        kind: Kind = "move",
    ) -> Sequence[Waitable]:
        """Start to send and receive whole contiguous tensors, which must stay as they are until all is waited for.

        `purpose`: of a group of all ranks that was made, whose messages do not wait for those of other groups. They
        count under `label`; where steps are recorded they are noted as of this `kind`.
        """
        works = self._begin(sends, receives, tag, kind, purpose)
        if sends:
            self._count(sum(tensor.nbytes for _, tensor in sends), len(sends), self.label)
        return works

    def _begin(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        tag: int,
        kind: Kind,
        purpose: str = EVERYONE,
    ) -> list[_Awaited]:
        everyone, label, works, peer = self._group(purpose, tuple(range(self.world))), self.label, [], self.rank
        bits, networks = NETWORK_TAGS
        tag += self._network() % networks << bits
        notes = iter(self._notes(sends, receives, tag, kind)) if self.diary is not None else repeat(None)
        try:
            for peer, buffer in receives:
                works.append(_Awaited(everyone.recv([_real(buffer)], peer, tag), self, (peer,), label, next(notes)))
            for peer, tensor in sends:
                works.append(_Awaited(everyone.send([_real(tensor)], peer, tag), self, (peer,), label, next(notes)))
        except RuntimeError as error:
            raise self.told(error, (peer,), label) from None
        return works

    def _notes(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int, kind: Kind
    ) -> list[_Noted]:
        """What is noted of these messages when they are waited for, in the order in which they are begun."""
        diary, label, begun = self.diary, self.label, now()
        assert diary is not None
        me, size = self._members[self.rank], sum(tensor.nbytes for _, tensor in sends)
        peers = tuple(sorted({self._members[peer] for peer, _ in (*sends, *receives)}))
        count = len(sends) + len(receives)
        underway = Underway(diary, kind, label, begun=begun, works=count, bytes=size, peers=peers)
        notes = []
        for peer, buffer in receives:
            src = self._members[peer]
            end = MessageEnd(diary.step, src, me, tag, diary.number(src, me, tag), False, 0, label, buffer.nbytes)
            notes.append(_Noted(diary, label, (src,), underway, end))
        for peer, tensor in sends:
            dst = self._members[peer]
            diary.end(
                MessageEnd(diary.step, me, dst, tag, diary.number(me, dst, tag), True, begun, label, tensor.nbytes)
            )
            notes.append(_Noted(diary, label, (dst,), underway))
        return notes

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """Add up a tensor over ranks, in place on each."""
        if self.diary is None or len(ranks) == 1:
            self._sum(tensor, ranks, purpose)
            return
        begun, label, diary = now(), self.label, self.diary
        self._sum(tensor, ranks, purpose)
        diary.note("sum", label, begun, peers=self._in_world(ranks))

    def _in_world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers that other ranks have in the world."""
        return tuple(self._members[rank] for rank in ranks if rank != self.rank)

    def _sum(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        if len(ranks) == 1:
            return
        on_host = self._on_host(purpose, ranks)
        if on_host is None and len(ranks) == 2 and tensor.nbytes <= PAIR_BYTES and self._device.type == "cpu":
            self._sum_pair(tensor, ranks)
            return
        self._count_sum(tensor, ranks, self.label)
        self._reduce_later(tensor, ranks, purpose, self.label, "sum", background=False).wait()

    def _sum_pair(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Two ranks send each other a small tensor, in half of an all-reduce's time. a + b = b + a, also in floats."""
        other = ranks[1 - ranks.index(self.rank)]
        theirs = torch.empty_like(tensor)
        works = self._begin([(other, tensor)], [(other, theirs)], PAIR_TAG, "sum")
        self._count_sum(tensor, ranks, self.label)
        for work in works:
            work.wait()
        tensor.add_(theirs)

    def sum_later(
        self,
        tensor: Tensor,
        ranks: tuple[int, ...],
        purpose: str,
        *,
        label: str,
        kind: Kind = "sum",
        content: str = "",
    ) -> Waitable | None:
        """Start such a sum; the tensor is ready when the work is waited for.

        It counts under `label`; where steps are recorded it is noted as of this `kind`, and of `content`.
        """
        if len(ranks) == 1:
            return None
        self._count_sum(tensor, ranks, label)
        return self._reduce_later(tensor, ranks, purpose, label, "sum", kind, content)

    def _reduce_later(
        self,
        tensor: Tensor,
        ranks: tuple[int, ...],
        purpose: str,
        label: str,
        how: How,
        kind: Kind = "sum",
        content: str = "",
        *,
        background: bool = True,
    ) -> _Awaited:
        """Without `background`: the caller waits for it at once."""
        on_host, begun = self._on_host(purpose, ranks), now()
        work: Any
        if on_host is not None:
            work = on_host.begin(_real(tensor), how, background=background)
        else:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(_GLOO[how])
            try:
                work = self._group(purpose, ranks).allreduce([_real(tensor)], options)
            except RuntimeError as error:
                raise self.told(error, ranks, label) from None
        if self.diary is None:
            return _Awaited(work, self, ranks, label)
        return _Awaited(work, self, ranks, label, self._note_reduce(work, tensor, ranks, begun, kind, content or label))

    def _note_reduce(
        self, work: Any, tensor: Tensor, ranks: tuple[int, ...], begun: int, kind: Kind, label: str
    ) -> _Noted:
        """On the CPU torch tells when the sum is done, whoever computes meanwhile; else its end is that of the wait."""
        assert self.diary is not None
        peers, size = self._in_world(ranks), ring_bytes(tensor.nbytes, len(ranks), ranks.index(self.rank))
        underway = Underway(self.diary, kind, label, begun=begun, bytes=size, peers=peers)
        if self._device.type != "cpu":
            return _Noted(self.diary, label, peers, underway)
        told = work if isinstance(work, Reduction) else work.get_future()
        told.add_done_callback(lambda _: underway.done())
        return _Noted(self.diary, label, peers)

    def tell(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The first rank's tensor, in place on all of `ranks`."""
        if len(ranks) == 1:
            return
        if self.rank == ranks[0]:
            self._count((len(ranks) - 1) * tensor.nbytes, len(ranks) - 1, self.label)
        group, options = self._group(purpose, ranks), dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        heard = ranks if self.rank == ranks[0] else ranks[:1]
        noted = None if self.diary is None else _Noted(self.diary, self.label, self._in_world(heard))
        try:
            work = group.broadcast([_real(tensor)], options)
        except RuntimeError as error:
            raise self.told(error, heard, self.label) from None
        _Awaited(work, self, heard, self.label, noted).wait()

    def max(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The largest over ranks, in place on each."""
        if len(ranks) > 1:
            self._count_sum(tensor, ranks, self.label)
            self._reduce_later(tensor, ranks, purpose, self.label, "max", background=False).wait()

    # What ranks tell each other: control, not counted as payload

    def header(self, operation: str, numbers: Sequence[float] = ()) -> list[list[float]]:
        """What every rank tells at the start of a collective call of one network: up to seven numbers, by rank.

        Cost: one gather of 64 bytes. Ranks that called different things, or the same on different networks, are told
        so at once, all of them, by a RunError with the same words.
        """
        return [row[1 : len(numbers) + 1] for row in self._rows(operation, numbers)]

    def header_later(
        self, operation: str, numbers: Sequence[float], check: Callable[[list[list[float]]], None]
    ) -> None:
        """Such a header that nobody waits for yet, while there is something to compute.

        `check` gets it, and may refuse it, before this rank sends, receives or gathers anything else, and at the latest
        in `read_header`, which whoever began it must call.
        """
        rows = self._begin_rows(operation, numbers)
        self._unread = lambda: check([row[1 : len(numbers) + 1] for row in rows()])

    def read_header(self) -> None:
        """Wait for a header that was begun with `header_later`, if there is one, and check it."""
        if self._unread is not None:
            read, self._unread = self._unread, None
            read()

    def gather_numbers(self, numbers: Sequence[float], operation: str = "gather_numbers") -> list[list[float]]:
        """Some numbers from every rank to every rank."""
        if self.world == 1:
            return [list(numbers)]
        first = ROW - 2
        rows = [row[1:] for row in self._rows(operation, [len(numbers), *numbers[:first]])]
        counts = [int(row[0]) for row in rows]
        gathered = [row[1 : count + 1] for row, count in zip(rows, counts, strict=True)]
        if max(counts) > first:
            rest = torch.zeros(max(counts) - first, dtype=torch.float64, device="cpu")
            rest[: max(0, len(numbers) - first)] = torch.tensor(numbers[first:], dtype=torch.float64, device="cpu")
            for row, count, more in zip(gathered, counts, self._gather(rest, operation), strict=True):
                row += more.tolist()[: max(0, count - first)]
        return gathered

    def gather_objects(self, value: Any, operation: str = "gather_objects") -> list[Any]:
        """Something that pickles, from every rank to every rank."""
        if self.world == 1:
            return [value]
        packed = pickle.dumps(value)
        sizes = [int(row[1]) for row in self._rows(operation, [len(packed)])]
        table = self._gather(_bytes(packed, max(sizes)), operation)
        return [pickle.loads(row.numpy().tobytes()[:size]) for row, size in zip(table, sizes, strict=True)]

    def _rows(self, operation: str, numbers: Sequence[float]) -> list[list[float]]:
        """The first gather of whatever ranks tell each other. All have one width, so that any two can meet here."""
        return self._begin_rows(operation, numbers)()

    def _begin_rows(self, operation: str, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        if len(numbers) > ROW - 1:
            raise ValueError(f"{len(numbers)} numbers do not fit into a header of {ROW - 1}")
        if self.world == 1:
            return lambda: [[0.0, *numbers]]
        called = float((self._network() << 32) + zlib.crc32(operation.encode()))  # exact below 2^53
        row = [called, *numbers, *[0.0] * (ROW - 1 - len(numbers))]
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")  # whatever torch.device the caller is in
        gathered = self._begin_gather(mine, operation)

        def rows() -> list[list[float]]:
            rows = [row.tolist() for row in gathered()]
            if any(row[0] != called for row in rows):
                raise self._different([int(row[0]) >> 32 for row in rows], operation)
            return rows

        return rows

    def _different(self, networks: Sequence[int], operation: str) -> RunError:
        """The error for ranks that called different things. All ranks raise it, since all saw all rows."""
        table = self._gather(_bytes(operation.encode()[:NAME_BYTES], NAME_BYTES), operation)
        names = [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in table]
        callers: dict[str, list[int]] = {}
        for rank, (network, name) in enumerate(zip(networks, names, strict=True)):
            which = f" of network {network + 1} on these ranks" if len(set(networks)) > 1 else ""
            callers.setdefault(f"{name}(){which}", []).append(rank)
        told = " while ".join(f"{self.show(ranks)} called {call}" for call, ranks in callers.items())
        return RunError(
            f"{told}: nobody would get an answer.",
            "Call it on all ranks, in the same order, and write the file on rank 0.",
        )

    def _gather(self, mine: Tensor, operation: str) -> list[Tensor]:
        """Tensors of one shape and type from every rank to every rank."""
        return self._begin_gather(mine, operation)()

    def _begin_gather(self, mine: Tensor, operation: str) -> Callable[[], list[Tensor]]:
        """Begin a gather; the function that is returned waits for it."""
        everyone, ranks = self._everyone(), tuple(range(self.world))
        mine = mine.to(self._device)
        table = mine.new_empty((self.world, *mine.shape))
        try:
            begun = everyone.allgather([list(table.unbind())], [mine])
        except RuntimeError as error:
            raise self.told(error, ranks, operation) from None
        noted = None if self.diary is None else _Noted(self.diary, f"to agree on {operation}", self._in_world(ranks))
        work = _Awaited(begun, self, ranks, operation, noted)

        def gathered() -> list[Tensor]:
            work.wait()
            return list(table.cpu().unbind())

        return gathered

    def good_bucket_bytes(self) -> int:
        """A size of gradient buckets for this link: large enough that latency is a tenth of a bucket's time.

        Measured on six small sums, some ten milliseconds; the ranks agree on the slowest's.
        """
        measured = self.measured_sums()
        if measured is None:
            return BUCKET_LIMITS[1]
        small, large = SUMMED_TO_MEASURE
        wanted = max(10 * latency * (large - small) / max(seconds - latency, 1e-9) for latency, seconds in measured)
        return int(min(max(wanted, BUCKET_LIMITS[0]), BUCKET_LIMITS[1]))

    def measured_sums(self) -> Sequence[tuple[float, float]] | None:
        """By rank: seconds of the sums over all ranks that `SUMMED_TO_MEASURE` tells. Measured once; a collective.

        None where there is no link.
        """
        if self.world == 1 or self._measured is not None:
            return self._measured
        everyone = tuple(range(self.world))
        self.make_groups([("measure", everyone)])
        seconds = []
        for size in SUMMED_TO_MEASURE:
            tensor, times = torch.zeros(size // 4, dtype=torch.float32, device=self._device), []
            for _ in range(3):
                start = time.perf_counter()
                self._reduce_later(tensor, everyone, "measure", "measure", "sum").wait()
                times.append(time.perf_counter() - start)
            seconds.append(min(times))
        self._measured = [(row[0], row[1]) for row in self.gather_numbers(seconds)]
        return self._measured


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of numbers, which every backend can send and add."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(packed: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(packed.ljust(size, b"\0")), dtype=torch.uint8)
