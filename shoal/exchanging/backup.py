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

from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.exchanges import Holding
from shoal.exchanging.base import Kind
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.server import ShardClient
from shoal.exchanging.servers.slices import Slice

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Options(Kind):
    """Of N + b replicas the first N gradients of a version count, the others are dropped (Chen et al. 2016)."""

    name = "backup"
    asks_ahead = False
    counts_received = True

    backups: int = Field(default=1, ge=0)
    """b: replicas that a step need not wait for. 0 waits for all."""
    shards: int = Field(default=1, gt=0)
    """Servers, each of which holds a part of the weights; large tensors are split."""

    @property
    def drops(self) -> bool:
        """Those of the backups."""
        return self.backups > 0

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:  # noqa: ARG002
        """Processes: replicas wait there for each other."""
        return Holding("processes", self.shards)

    def gradients_per_update(self, replicas: int) -> int:
        """N."""
        return self.parts_of_batch(replicas)

    def parts_of_batch(self, replicas: int) -> int:
        """Without the backups: whichever replicas are late."""
        return replicas - self.backups

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:  # noqa: ARG002
        """With backups it depends on who is late."""
        return None if self.backups else 2 * weights

    def check_replicas(self, replicas: int) -> None:
        """At least one gradient must count."""
        if self.backups >= replicas:
            raise ConfigError(
                f"backups = {self.backups} leaves none of {replicas} replicas to wait for.",
                "Give more replicas, or fewer backups.",
            )

    def warnings(self, replicas: int, *, lr: float, momentum: float) -> list[str]:  # noqa: ARG002
        """Without backups other exchanges are simpler."""
        if self.backups:
            return []
        return [
            "backups=0 waits for every replica; so does sync, with fewer messages, and allreduce, without a server."
        ]

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float]:
        """Momentum and weight decay."""
        return taken_over(optimizer, "use the exchange 'allreduce', where every replica steps by itself")

    def join(self, replica: Replica, seat: Seat, number: int) -> "Backup":
        """Servers take momentum and weight decay of the optimizer over."""
        settings = self.taken_over(replica.optimizer)
        terms = {"rule": "sgd", **settings, "by_tickets": True}
        ask = (lambda head: seat.ask(head).head) if seat.rank == 0 else None
        shards = reach_shards(replica, seat, number, terms)
        return Backup(replica, shards, ask=ask, server_momentum=settings["momentum"])


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
        self._take_version()

    def settle(self) -> None:
        super().settle()
        self._take_version()

    def _take_version(self) -> None:
        """Shards may be one update apart; the oldest version is the one this replica asks a ticket for.

        A rank that speaks for nothing has no version.
        """
        oldest = min(self._versions, default=math.inf)
        self._version = int(min(row[0] for row in self.replica.transport.gather_numbers([oldest])))

    def step(self, rate: float | None) -> bool | None:
        self.tally.steps += 1
        return self._take_part(self.replica.gradients(), rate)

    def _take_part(self, values: Sequence[Tensor], rate: float | None) -> bool:
        """Push `values` if they count, and fetch the weights of this round's update."""
        with self._waiting("ticket for the next round"):
            reply = {} if self._ask is None else self._ask({"ask": "ticket", "version": self._version})
            mine = [float(reply.get("counts", 0)), float(reply.get("version", 0))]
            counts, version = self.replica.transport.gather_numbers(mine)[0]
        if counts:
            applied = self._push_and_fetch(values, rate, into=self.replica.weights)
            self._version += 1
        else:
            applied = False
            self.tally.dropped += 1
            self._push_and_fetch(None, rate, into=self.replica.weights, at_least=int(version))
            self._version = int(version)
        self.replica.tell_weights()
        return applied
