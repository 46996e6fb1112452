"""`allreduce`: in every step all replicas take the mean of their gradients, then the same step each.

Keeps       R replicas with a batch of b each are one replica with a batch of R b, to the order of additions; every
            replica has the same weights, bit for bit. Batch norm takes its statistics within each replica.
Gives up    nothing but time: a step lasts as long as the slowest replica's.
Costs       2 (R-1)/R of the gradients' bytes sent by each replica per step.
Failure     a replica that is lost ends the run with a message that names it, one that is frozen is awaited for as long
            as `--timeout` says; `--resume` goes on from the last checkpoint.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.exchanging.base import Exchange
from shoal.exchanging.replica import Replica
from shoal.traffic import ring_bytes


class Allreduce(Exchange):
    """One rank of one replica, and the group of the ranks that hold the same shards in the other replicas."""

    def __init__(self, replica: Replica, group: Any, *, number: int, replicas: int, bucket_bytes: int) -> None:
        super().__init__(replica)
        self._group, self._number, self._replicas = group, number, replicas
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []

    def begin(self, *, first: bool) -> None:  # noqa: ARG002  (replica 0's weights, whoever came first)
        if self._replicas > 1:
            for tensor in self.replica.weights:
                self._group.broadcast(tensor, 0).wait()
        self.replica.spread()

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        self.tally.updates += 1
        with self._waiting():
            if self._replicas > 1:
                self._average(self.replica.gradients())
            self.replica.spread_gradients()
        self._own_step(rate)
        return True

    def settle(self) -> None:
        """Replicas are equal after every step."""

    def _average(self, gradients: Sequence[Tensor]) -> None:
        parts = _grouped(gradients, self._bucket_bytes)
        if not self._buckets:
            self._buckets = [
                torch.empty(sum(g.numel() for g in part), dtype=part[0].dtype, device=part[0].device) for part in parts
            ]
        works = []
        for bucket, part in zip(self._buckets, parts, strict=True):
            torch.cat(list(part), out=bucket)
            works.append(self._group.allreduce([bucket]))
            self.tally.sent_bytes += ring_bytes(bucket.nbytes, self._replicas, self._number)
            before = (self._number - 1) % self._replicas
            self.tally.received_bytes += ring_bytes(bucket.nbytes, self._replicas, before)
        for work, bucket, part in zip(works, self._buckets, parts, strict=True):
            work.wait()
            bucket.div_(self._replicas)
            start = 0
            for gradient in part:
                gradient.copy_(bucket[start : start + gradient.numel()])
                start += gradient.numel()


def _grouped(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Tensors of one type, in order, about `limit` bytes at a time."""
    found: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not found or size + tensor.nbytes > limit or found[-1][0].dtype != tensor.dtype:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.nbytes
    return found
