"""`easgd`: elastic averaging. Replicas train on their own, each tied to a common centre (Zhang et al. 2015).

Keeps       a push and fetch takes from a replica what it gives to the centre: their sum stays, to rounding. The centre
            is what is tested and saved. Between two pushes a replica is plain SGD, bit for bit.
Gives up    replicas differ from each other and from the centre (measured as `spread`). The running statistics of
            batch norm that a test uses are those of the replica that tests.
Costs       every `period` steps a copy of the weights to the centre and one of the difference back, or on one host a
            pass over shared memory; one more copy of the weights in each replica.
Failure     a replica that dies or freezes is missed by nobody; what it did since its last push is lost with it,
            though its batches count. A server that dies ends the run, which can be resumed from its last checkpoint.

Every `period` steps d = a (x - z), x -= d, z += d, where a = `moving_rate` / replicas. With momentum in the replica's
own optimizer it is EAMSGD.
"""

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from shoal.exchanges import Holding
from shoal.exchanging.base import Kind, OwnWeights, distance, steps_apart
from shoal.exchanging.downpour import SPREAD_EVERY, Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.options import Servers, check_threads, place_of_weights
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.server import ShardClient
from shoal.exchanging.servers.slices import Slice


class Options(Kind):
    """Elastic averaging: replicas train on their own, each tied to a common centre (Zhang et al. 2015)."""

    name = "easgd"
    keeps_own = True
    counts_received = True

    period: int = Field(default=4, gt=0)
    """Steps from one push and fetch to the next (tau). Unless given, 4 with two replicas and 2 with more."""
    moving_rate: float = Field(default=0.9, gt=0, le=1)
    """How far the centre goes towards the replicas when each has pushed once (beta): one push goes
    moving_rate / replicas of the way."""
    servers: Servers = "auto"
    """Where the centre is: direct (shared memory of one host), processes, threads (in the replicas)."""
    shards: int | None = Field(default=None, gt=0)
    """Into how many parts the centre is cut, each with a lock of its own; large tensors are split."""

    def among(self, replicas: int) -> Self:
        """Replicas meet the centre more often the more of them there are, unless it was said how often."""
        return self.unless_given("period", steps_apart(replicas))

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:
        """The centre is a copy of the weights."""
        return place_of_weights(self.servers, self.shards, replicas, one_host=one_host, needed=weight_bytes)

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Weights there and the difference back, every `period` steps."""
        return 0 if in_memory else round(2 * weights / self.period)

    def check_replicas(self, replicas: int) -> None:
        """A replica's threads hold one shard."""
        check_threads(self.servers, self.shards, replicas)

    def join(self, replica: Replica, seat: Seat, number: int) -> "Easgd":
        """The centre is a shard whose rule is elastic."""
        shards = reach_shards(replica, seat, number, {"rule": "elastic"}, self.shards)
        rate = self.moving_rate / seat.meeting.replicas
        return Easgd(replica, shards, rate=rate, period=self.period, turn=number)


class Easgd(OwnWeights, Downpour):
    """One replica, and the shards of the centre for what its rank speaks for."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        *,
        rate: float,
        period: int,
        turn: int,
    ) -> None:
        super().__init__(replica, shards, rule="elastic", server_momentum=0.0, push_every=1, fetch_every=1, turn=turn)
        self._moving, self._period = rate, period
        self._difference: list[Tensor] = []

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        self._count += 1
        self._own_step(rate)
        if self._count % self._period == 0:
            self._meet_centre()
        return True

    def _meet_centre(self) -> None:
        weights = self.replica.weights
        self._difference = self._difference or [torch.empty_like(weight) for weight in weights]
        for kept, weight in zip(self._difference, weights, strict=True):
            kept.copy_(weight)
        self._push_and_fetch(self._difference, self._moving, into=self._difference)
        self._fetch_count += 1
        if self._moving and self._fetch_count % SPREAD_EVERY == 0:
            centre = [x - d / self._moving for x, d in zip(weights, self._difference, strict=True)]
            self.tally.spread = distance(weights, centre)
        if weights:
            torch._foreach_sub_(weights, self._difference)
        self.replica.tell_weights()

    def _copy_now_and_then(self) -> list[Tensor] | None:
        """Nothing to measure here: the answer is a difference, not weights (see `_meet_centre`)."""
        return None
