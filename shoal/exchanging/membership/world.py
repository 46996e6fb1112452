"""What an exchange reaches beyond its own process, where that is not the network: a simulation gives its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shoal.exchanging.membership.peers import Peers
    from shoal.exchanging.replica import Replica
    from shoal.exchanging.servers.server import ShardClient
    from shoal.exchanging.servers.slices import Slice


class World(Protocol):
    """The others, as one replica's exchange reaches them. All that waits here waits in the world's own time."""

    def shards(
        self, replica: "Replica", number: int, terms: Mapping[str, Any]
    ) -> "list[tuple[Sequence[Slice], ShardClient]]":
        """The shards of the common weights; `terms`: fields of `Terms`."""
        ...

    def peers(self, number: int) -> "Peers":
        """The other replicas, as replica `number` reaches them."""
        ...

    def outbox(self, number: int, deliver: Callable[..., None]) -> Any:
        """What sends one message at a time beside the training of replica `number`, as gossip's own does."""
        ...

    def group(self, number: int) -> Any:
        """A process group of all replicas: its `broadcast` and `allreduce`."""
        ...
