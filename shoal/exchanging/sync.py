"""`sync`: synchronous SGD by parameter servers (the first mode of Campos et al. 2017).

Keeps       R replicas with a batch of b each are one replica with a batch of R b, to the order of additions: every
            update is the mean of one gradient of each replica, all of the same version. Every replica has the same
            weights, bit for bit. Batch norm takes its statistics within each replica.
Gives up    nothing but time: a step lasts as long as the slowest replica's.
Costs       per step and replica a copy of the gradients to the servers and one of the weights back, to `shards` servers
            at once; servers keep one more copy for the sum. `allreduce` sends less, and needs no server; here replicas
            keep no optimizer state. With `compress` gradients are smaller on their way, weights come back as they are;
            then the mean is of what was sent: R replicas are no longer exactly one, though equal to the bit.
Failure     a replica that is lost ends the run with a message that names it, one that is frozen is awaited for as long
            as `--timeout` says, and so does a server; `--resume` goes on from the last checkpoint.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch.optim import Optimizer

from shoal.exchanges import Holding
from shoal.exchanging.base import Exchange
from shoal.exchanging.compression.options import Compressing
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.options import check_threads
from shoal.exchanging.servers.reach import reach_shards


class Options(Compressing):
    """In every step servers take the mean of all replicas' gradients: R replicas are one with R times the batch."""

    name = "sync"
    same_batch = True
    averages_every_step = True
    survives = False
    takes_late = False
    counts_received = True

    servers: Literal["processes", "threads"] = "processes"
    """Where the weights are: processes, or threads (in the replicas)."""
    shards: int | None = Field(default=None, gt=0)
    """Servers, each of which holds a part of the weights; large tensors are split. Unless given 1, of threads one in
    each replica."""

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:  # noqa: ARG002
        """With servers, where replicas wait for each other."""
        return Holding(self.servers, self.shards or (replicas if self.servers == "threads" else 1))

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Gradients there, compressed or not, and weights back."""
        return self.pushed_bytes(weights) + weights

    def check_replicas(self, replicas: int) -> None:
        """A replica's threads hold one shard."""
        check_threads(self.servers, self.shards, replicas)

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float]:
        """Momentum and weight decay."""
        return taken_over(optimizer, "use the exchange 'allreduce', where every replica steps by itself")

    def join(self, replica: Replica, seat: Seat, number: int) -> Exchange:
        """A push that waits for those of all others is all that is new: the rest is `downpour`'s."""
        settings = self.taken_over(replica.optimizer)
        terms = {"rule": "sgd", **settings, "wanted": seat.meeting.replicas, **self.compression_terms()}
        shards = reach_shards(replica, seat, number, terms)
        return Downpour.of_every_gradient(replica, shards, momentum=settings["momentum"], turn=number)
