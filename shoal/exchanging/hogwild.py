"""`hogwild`: replicas update weights in the memory that they share, without locks (Niu et al. 2011).

Keeps       one replica is plain SGD, bit for bit.
Gives up    what `downpour` gives up, and more: an element that two replicas update at once may keep one of the updates
            only, and what a replica reads may be half of an update. The theory wants gradients that are mostly zeros;
            those of convolutional networks are not, so this is for comparison more than for use.
Costs       no message, no server, no waiting: a pass over the weights per step, and one to read them. On one host only.
Failure     a replica that dies or freezes is missed by nobody, wherever it stood; its batch is handed out again.
"""

from collections.abc import Mapping

from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.exchanges import Holding, Rates
from shoal.exchanging.base import Kind
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.options import asynchronous_rates, no_room
from shoal.exchanging.servers.reach import reach_shards


class Options(Kind):
    """Weights in memory that the replicas of one host share, updated without locks (Niu et al. 2011)."""

    name = "hogwild"
    asynchronous = True

    def own_rates(self, given: Rates, replicas: int) -> Rates:
        """Every replica's gradient is an update."""
        return asynchronous_rates(given, replicas, at_servers=True)

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:  # noqa: ARG002
        """In shared memory, or nowhere."""
        if not one_host:
            raise ConfigError(
                "the exchange 'hogwild' shares memory, but the replicas are on several hosts.",
                "Give --exchange downpour, which has servers between hosts.",
            )
        no_room(2 * weight_bytes, "the exchange 'hogwild'", "Give --exchange downpour")
        return Holding("direct")

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """Nothing is sent."""
        return 0

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float]:
        """Momentum and weight decay."""
        return taken_over(optimizer, "use the exchange 'allreduce', where every replica steps by itself")

    def join(self, replica: Replica, seat: Seat, number: int) -> Downpour:
        """A shard without a lock is all that is new: the rest is `downpour`'s."""
        settings = self.taken_over(replica.optimizer)
        shards = reach_shards(replica, seat, number, {"rule": "sgd", **settings, "locked": False}, shards=1)
        return Downpour.of_every_gradient(replica, shards, momentum=settings["momentum"], turn=number)
