"""`local`: local SGD. Replicas train on their own for some steps, then take the mean of their weights.

Keeps       with period 1, no momentum and no outer optimizer it is `allreduce`, to rounding: the mean of weights
            after a step is the step by the mean of gradients. One replica is plain SGD, bit for bit. With
            average=once the result is the mean of what replicas reached on their own (Zinkevich et al. 2010).
            With `compress` neither holds to the bit, but all have the same weights after a mean, bit for bit, and what
            was sent and what is left are, to rounding, all that replicas did.
Gives up    between two means replicas differ. Momentum is each replica's own.
Costs       every `period` steps a copy of the weights to the servers and one back, and the wait for the slowest
            replica; with an outer optimizer one more copy of the weights at the servers. With average=once nothing,
            until a test or a checkpoint asks every replica for its weights. With `compress` what goes to the servers
            is smaller: the change since the last mean, with what was left out before. Weights come back as they are. A
            replica then has three copies of the weights more: the last mean, the change, and what is left.
Failure     a replica that dies or freezes is not waited for: the mean is over those that are left, and its batches
            since the last mean are handed out again. One that comes late takes the mean. With average=once what a
            dead replica did is lost, though its batches count. A replica that is lost takes with it what `compress`
            has not sent yet; one that came too late for a mean keeps that.

The outer optimizer (DiLoCo, Douillard et al. 2023) takes the way from the last common weights to the mean for a
gradient: `outer_lr` and Nesterov's `outer_momentum`. Unless given the mean itself is taken.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchanges import Holding, Rates
from shoal.exchanging.backup import Ask, Backup
from shoal.exchanging.base import Exchange, OwnWeights
from shoal.exchanging.compression.options import Compressing
from shoal.exchanging.gossip import Gossip, first_share, outbox_of, peers_of
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.server import ShardClient
from shoal.exchanging.servers.shard import copy_all
from shoal.exchanging.servers.slices import Slice

ALL = 1 << 20
"""More replicas than any run has."""


class Options(Compressing):
    """Local SGD: replicas train on their own for some steps, then take the mean of their weights."""

    name = "local"
    asks_ahead = False
    keeps_own = True
    counts_received = True

    average: Literal["period", "once"] = "period"
    """When weights are averaged: every `period` steps, or once, at the end (Zinkevich et al. 2010)."""
    period: int = Field(default=8, gt=0)
    """Steps of each replica between two means."""
    outer_lr: float = Field(default=1.0, gt=0)
    """How far the common weights go towards the mean: 1 is the mean itself; DiLoCo has 0.7."""
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    """Nesterov's momentum of the common weights; DiLoCo has 0.9."""
    shards: int = Field(default=1, gt=0)
    """Servers, each of which holds a part of the weights; large tensors are split."""

    @model_validator(mode="after")
    def _check_compression(self) -> "Options":
        if self.compress != "none" and self.average == "once":
            raise ConfigError(
                f"compress = {self.compress!r} with average = 'once': nothing is sent before the end, and then all.",
                "Give average=period, or leave compress out.",
            )
        return self

    def own_rates(self, given: Rates, replicas: int) -> Rates:  # noqa: ARG002
        """Each steps by a part of the batch, of more noise; and momentum goes on as if weights were no mean of all."""
        return given.remembering(1 / 2)

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:  # noqa: ARG002
        """Processes: replicas wait there for each other. Who averages once needs none."""
        return Holding("none") if self.average == "once" else Holding("processes", self.shards)

    def gradients_per_update(self, replicas: int) -> int:  # noqa: ARG002
        """All replicas' weights make a mean, however many have come."""
        return 0 if self.average == "once" else ALL

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Every `period` steps weights, or compressed changes, there, and weights back."""
        return 0 if self.average == "once" else round((self.pushed_bytes(weights) + weights) / self.period)

    def join(self, replica: Replica, seat: Seat, number: int) -> Exchange:
        """Averaging once is gossip that never speaks."""
        if self.average == "once":
            return Gossip(
                replica,
                peers_of(seat, number),
                random.Random(number),
                share=first_share(seat, number),
                outbox=outbox_of(seat, number),
            )
        terms = {
            "rule": "outer" if self.compress == "none" else "outer_change",
            "momentum": self.outer_momentum,
            "by_tickets": True,
            **self.compression_terms(),
        }
        ask = (lambda head: seat.ask(head).head) if seat.rank == 0 else None
        return Local(replica, reach_shards(replica, seat, number, terms), self, ask=ask)


class Local(OwnWeights, Backup):
    """One replica; a mean is a round in which every replica has a ticket."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        options: Options,
        *,
        ask: Ask | None,
    ) -> None:
        super().__init__(replica, shards, ask=ask, server_momentum=0.0)
        self._outer_rate, self._period = options.outer_lr, options.period
        self._outer_momentum = options.outer_momentum
        self._pushes_changes = options.compress != "none"

    def begin(self, *, first: bool) -> None:
        super().begin(first=first)
        if self._pushes_changes:
            self._mark = [weight.clone() for weight in self.replica.weights]

    @property
    def _server_state(self) -> str | None:
        return "outer_momentum" if self._outer_momentum else None

    def step(self, rate: float | None) -> bool | None:
        self.tally.steps += 1
        self._count += 1
        self._own_step(rate)
        return self._take_mean() if self._count % self._period == 0 else None

    def flush(self) -> bool | None:
        return self._take_mean() if self._count % self._period else None

    def _take_mean(self) -> bool:
        self._count = 0
        counted = self._take_part(self._own_values(), self._outer_rate)
        copy_all(self._mark, self.replica.weights if self._mark else ())
        return counted

    def _own_values(self) -> list[Tensor]:
        """What is pushed: the weights, of which servers take the mean; or the change since the last one."""
        return self._change() if self._pushes_changes else self.replica.weights

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The common weights in the network. The version stays: others wait for this replica's next mean."""
        version, versions = self._version, list(self._versions)
        with super().showing():
            yield
        self._version, self._versions = version, versions

    def settle(self) -> None:
        super().settle()
        self._count = 0
