"""`softsync`: servers step by the mean of several gradients, each weakened by its staleness (Zhang et al. 2016).

Keeps       one replica is plain SGD, bit for bit. With n = 1 every update is the mean of as many gradients as there are
            replicas, whichever replicas they are from; staleness is then about 1, and about n in general.
Gives up    a gradient is computed on weights that others have changed since, as in `downpour`, but on fewer versions of
            them. A gradient that is s updates old counts 1 / s. When the run ends up to R / n - 1 gradients may still
            wait for others; they were counted and are in no weights.
Costs       as `downpour` with n_sync 1, and one more copy of the weights at the servers for the sum.
Failure     as `downpour`: nobody waits for anybody.
"""

from collections.abc import Mapping

from pydantic import Field
from torch.optim import Optimizer

from shoal.exchanges import Holding, Rates
from shoal.exchanging.base import Kind
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.options import Servers, check_threads, place_of_weights
from shoal.exchanging.servers.reach import reach_shards


class Options(Kind):
    """Servers step by the mean of R / n gradients, each divided by its staleness (Zhang et al. 2016)."""

    name = "softsync"
    asynchronous = True
    counts_received = True

    n: int = Field(default=1, gt=0)
    """Updates for which R replicas give one gradient each: an update is the mean of R / n of them. Staleness is about
    n; n = R is an update for every gradient."""
    servers: Servers = "auto"
    """Where the weights are: direct (shared memory of one host), processes, threads (in the replicas)."""
    shards: int | None = Field(default=None, gt=0)
    """Into how many parts the weights are cut, each with a lock of its own; large tensors are split."""

    def gathered(self, replicas: int) -> int:
        """Gradients that make an update."""
        return max(1, replicas // self.n)

    def own_rates(self, given: Rates, replicas: int) -> Rates:  # noqa: ARG002
        """An update is by a whole batch, a part of it late, which acts as more momentum; its lateness weakens it."""
        return given.remembering(1 / 2)

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:
        """With the sum beside weights and momentum."""
        return place_of_weights(self.servers, self.shards, replicas, one_host=one_host, needed=3 * weight_bytes)

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Gradients there and weights back."""
        return 0 if in_memory else 2 * weights

    def check_replicas(self, replicas: int) -> None:
        """A replica's threads hold one shard."""
        check_threads(self.servers, self.shards, replicas)

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float]:
        """Momentum and weight decay."""
        return taken_over(optimizer, "use the exchange 'allreduce', where every replica steps by itself")

    def join(self, replica: Replica, seat: Seat, number: int) -> Downpour:
        """Shards that gather are all that is new: the rest is `downpour`'s."""
        settings = self.taken_over(replica.optimizer)
        terms = {"rule": "sgd", **settings, "decay": "inverse", "gather": self.gathered(seat.meeting.replicas)}
        shards = reach_shards(replica, seat, number, terms, self.shards)
        return Downpour.of_every_gradient(replica, shards, momentum=settings["momentum"], turn=number)
