"""`backup`: synchronous steps that do not wait for the slowest b of N + b replicas (Chen et al. 2016).

Keeps       every update is the mean of N gradients of the same version: with b = 0 it is full synchrony, to rounding.
            No late gradient is applied: whether one counts is decided by a ticket before it is sent, for all servers
            alike.
Gives up    the work of those that come late; their batches are handed out again, so every sample is used.
Costs       per step and replica a ticket, a copy of the gradients to the servers and one of the weights back; servers
            keep one more copy for the sum.
Failure     a replica that dies or freezes is a backup less; with fewer than N left, the mean is taken over those. A
            server that dies ends the run, which can be resumed from its last checkpoint.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.exchanging.downpour import Downpour
from shoal.exchanging.replica import Replica
from shoal.exchanging.server import ShardClient
from shoal.exchanging.shards import Slice

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Backup(Downpour):
    """One replica; its first rank asks for tickets."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        *,
        ask: Ask | None,
        server_momentum: float,
    ) -> None:
        super().__init__(replica, shards, rule="sgd", server_momentum=server_momentum, push_every=1, fetch_every=1)
        self._ask = ask
        self._version = 0

    def begin(self, *, first: bool) -> None:
        super().begin(first=first)
        # What a late replica finds may be an update apart in different shards: a ticket for the older version is given
        # only if there is no newer one. A rank that speaks for nothing has no version.
        oldest = min(self._versions, default=math.inf)
        self._version = int(min(row[0] for row in self.replica.transport.gather_numbers([oldest])))

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        with self._waiting():
            reply = {} if self._ask is None else self._ask({"ask": "ticket", "version": self._version})
            mine = [float(reply.get("counts", 0)), float(reply.get("version", 0))]
            counts, version = self.replica.transport.gather_numbers(mine)[0]
        if counts:
            applied = self._exchange(self.replica.gradients(), rate, into=self.replica.weights)
            self._version += 1
        else:
            applied = False
            self.tally.dropped += 1
            self._exchange(None, rate, into=self.replica.weights, at_least=int(version))
            self._version = int(version)
        self.replica.spread()
        return applied
