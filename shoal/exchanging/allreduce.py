"""`allreduce`: in every step all replicas take the mean of their gradients, then the same step each.

Keeps       R replicas with a batch of b each are one replica with a batch of R b, to the order of additions; every
            replica has the same weights, bit for bit. Batch norm takes its statistics within each replica.
Gives up    nothing but time: a step lasts as long as the slowest replica's.
Costs       2 (R-1)/R of the gradients' bytes sent by each replica per step. With `compress` less, see
            `compression/hook.py`; the mean is then of what was sent, still the same bits on every replica, and what was
            not sent is in the next step's: R replicas are no longer exactly one. One replica sends and loses nothing.
Failure     a replica that is lost ends the run with a message that names it, one that is frozen is awaited for as long
            as `--timeout` says; `--resume` goes on from the last checkpoint.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from shoal.errors import PeerError
from shoal.exchanging.base import Exchange, OutOfStepError
from shoal.exchanging.compression.averaging import Averager, bucket_sizes
from shoal.exchanging.compression.codecs import Codec
from shoal.exchanging.compression.hook import mean_bytes
from shoal.exchanging.compression.options import FLOAT_BYTES, Compressing
from shoal.exchanging.membership.meeting import Meeting
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.traffic import ring_bytes
from shoal.transport.groups import named_group
from shoal.transport.table import table_at

LOOK = timedelta(seconds=0.5)
"""Time between two checks whether a step was interrupted."""


class Options(Compressing):
    """Every step all replicas take the mean of their gradients. Exact: R replicas are one with R times the batch."""

    name = "allreduce"
    same_batch = True
    averages_every_step = True
    survives = False
    takes_late = False

    bucket_bytes: int = Field(default=25 << 20, gt=0)
    """Bytes of gradients that are summed at a time."""

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Of a ring; compressed, of replicas of one worker each: groups may have a scale more in each rank."""
        if self.codec is None:
            return round(2 * (replicas - 1) / replicas * weights)
        sizes = bucket_sizes(weights // FLOAT_BYTES, FLOAT_BYTES, self.bucket_bytes)
        ranks = range(replicas)
        total = sum(mean_bytes(self.codec, size, torch.float32, replicas, rank) for size in sizes for rank in ranks)
        return round(total / replicas)

    def join(self, replica: Replica, seat: Seat, number: int) -> "Allreduce":
        """The ranks that hold the same shards in all replicas make a group."""
        meeting = seat.meeting
        group = None
        if meeting.replicas > 1:
            group = _group(meeting, seat.rank, number) if seat.world is None else seat.world.group(number)
        return Allreduce(
            replica,
            group,
            number=number,
            replicas=meeting.replicas,
            bucket_bytes=self.bucket_bytes,
            codec=self.codec,
        )


class Allreduce(Exchange):
    """One rank of one replica, and the group of the ranks that hold the same shards in the other replicas."""

    def __init__(
        self,
        replica: Replica,
        group: Any,
        *,
        number: int,
        replicas: int,
        bucket_bytes: int,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(replica)
        self._group, self._number, self._replicas = group, number, replicas
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []
        """Memory for gradients that are summed together, with one more number at the end: how many replicas rest."""
        self._resting: list[tuple[Any, Tensor]] = []
        """All-reduces begun when this replica began to rest, and their buffers: its part of the others' next step."""
        self._interrupted = False
        self.averager = None if codec is None or replicas == 1 else Averager(codec, group, number, bucket_bytes)
        """Only where gradients are compressed: it holds the residual, what was not sent yet."""

    def begin(self, *, first: bool) -> None:  # noqa: ARG002  (replica 0's weights, whoever came first)
        if self._replicas > 1:
            for tensor in self.replica.weights:
                self._group.broadcast(tensor, 0).wait()
        self.replica.tell_weights()

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        self.tally.updates += 1
        with self._waiting("mean of all replicas' gradients"):
            if self.averager is not None:
                moved = self.averager.average(self.replica.gradients())
                self.tally.sent_bytes += moved.sent
                self.tally.received_bytes += moved.received
            elif self._replicas > 1:
                self._average(self.replica.gradients())
            self.replica.tell_gradients()
        self._own_step(rate)
        return True

    def settle(self) -> None:
        """Replicas are equal after every step."""

    def _kept_back(self) -> list[Tensor]:
        return [] if self.averager is None else self.averager.state()

    def _put_back(self, left: Sequence[Tensor]) -> None:
        if self.averager is not None:
            self.averager.load_state(left)

    def rest(self) -> None:
        """Takes part in the others' next all-reduce with zeros and a mark that this replica takes no step.

        Where all replicas rest, nothing else happens. This replica does not wait for the all-reduce.
        """
        if self._replicas == 1 or self._resting or self.averager is not None:
            return  # compressed payloads have no room for the mark: others learn of it from the coordinator
        for bucket in self._made(self._parts(self.replica.weights)):
            bucket.zero_()[-1] = 1
            self._resting.append((self._group.allreduce([bucket]), bucket))
        self._buckets = []  # the all-reduces use this memory until the others come

    def wake(self, *, complete: bool) -> None:
        if complete:
            for work, _ in self._resting:
                with suppress(RuntimeError):  # a replica that was lost meanwhile is noticed in the next step
                    work.wait()
            self._resting = []

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Closes connections, so that replicas that wait for this one notice. Not during an all-reduce: closing
        would wait for it, and the end of the process closes them then.
        """
        if not self._resting and not self._interrupted:
            self._group = None

    def _wait(self, work: Any) -> None:
        """Until it is done, or `interrupt` is called."""
        while not work.is_completed():
            if self._interrupted:
                raise OutOfStepError
            with suppress(RuntimeError):  # not done yet; an error is raised by the wait below
                work.wait(LOOK)
        work.wait()

    def _average(self, gradients: Sequence[Tensor]) -> None:
        parts = self._parts(gradients)
        self._buckets = self._buckets or self._made(parts)
        works = []
        for bucket, part in zip(self._buckets, parts, strict=True):
            bucket[-1] = 0
            if part:
                torch.cat(list(part), out=bucket[:-1])
            works.append(self._group.allreduce([bucket]))
            size = bucket[:-1].nbytes
            self.tally.sent_bytes += ring_bytes(size, self._replicas, self._number)
            before = (self._number - 1) % self._replicas
            self.tally.received_bytes += ring_bytes(size, self._replicas, before)
        for work, bucket, part in zip(works, self._buckets, parts, strict=True):
            self._wait(work)
            if bucket[-1]:
                raise OutOfStepError
            bucket.div_(self._replicas)
            start = 0
            for gradient in part:
                gradient.copy_(bucket[start : start + gradient.numel()])
                start += gradient.numel()

    def _parts(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors, grouped as they are summed; one empty group where this rank speaks for nothing."""
        return _grouped(gradients, self._bucket_bytes) or [[]]

    def _made(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [
            torch.empty(
                sum(g.numel() for g in part) + 1,
                dtype=part[0].dtype if part else None,
                device=part[0].device if part else None,
            )
            for part in parts
        ]


def _grouped(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Tensors of one type, in order, about `limit` bytes at a time."""
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not groups or size + tensor.nbytes > limit or groups[-1][0].dtype != tensor.dtype:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _group(meeting: Meeting, column: int, number: int) -> Any:
    """The ranks that hold the same shards in all replicas, as a process group of their own."""
    if meeting.store is None:
        raise PeerError("replicas have no table to meet at.", "This is a bug: please report it.")
    table = table_at(meeting.store, meeting.timeout)
    name = f"{meeting.name}/{column}"
    return named_group(table, name, number, meeting.replicas, meeting.timeout, meeting.address[0])
