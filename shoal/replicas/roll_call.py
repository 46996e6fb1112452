"""Which ranks of a world are which replica, found from what every rank says of its own network. Pure.

Every rank hears the same, so all come to the same replicas, or refuse with the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError, show_ranks


@dataclass(frozen=True)
class Presence:
    """What one rank says of itself."""

    ranks: tuple[int, ...]
    """The ranks of the world that its network is laid over, in the order of the network's own ranks."""
    exchange: str
    """Name and options."""
    shards: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and type of each tensor that this rank exchanges."""
    weight_bytes: int
    """Their size."""
    frozen: str
    """A digest of its parameters that do not learn."""
    pid: int


def replicas_of(present: Sequence[Presence]) -> list[tuple[int, ...]]:
    """The ranks of every replica; replicas count by their lowest rank. `present` has one entry for each rank.

    A `ConfigError` where networks overlap, are of different size, are cut differently, or exchange differently.

    >>> [replicas_of([Presence(ranks, "sync", (), 0, "", 1) for ranks in [(0, 2), (1, 3), (0, 2), (1, 3)]])]
    [[(0, 2), (1, 3)]]
    """
    for rank, presence in enumerate(present):
        for other in presence.ranks:
            if present[other].ranks != presence.ranks:
                raise ConfigError(
                    f"the network of rank {rank} is laid over {show_ranks(presence.ranks)}, that of rank {other} over "
                    f"{show_ranks(present[other].ranks)}: a rank can be part of one replica alone.",
                    "Part the world into groups that do not overlap, and pass each rank its own as "
                    "shoal.parallelize(..., group=...).",
                )
    replicas = sorted({presence.ranks for presence in present}, key=min)
    for ranks in replicas[1:]:
        if len(ranks) != len(replicas[0]):
            raise ConfigError(
                f"{show_ranks(replicas[0])} are one replica and {show_ranks(ranks)} another: replicas must have "
                f"equally many ranks, not {len(replicas[0])} and {len(ranks)}.",
                "Lay the network over groups of the same size, which together are all ranks of the world.",
            )
    first = present[0]
    for rank, presence in enumerate(present):
        if presence.exchange != first.exchange:
            raise ConfigError(
                f"rank 0 exchanges by {first.exchange}, rank {rank} by {presence.exchange}.",
                "Give all ranks the same exchange with the same options.",
            )
    for ranks in replicas[1:]:
        for rank, other in zip(replicas[0], ranks, strict=True):
            _check_alike(rank, present[rank], other, present[other])
    return replicas


def _check_alike(rank: int, here: Presence, other: int, there: Presence) -> None:
    """What ranks in the same place of two replicas exchange must fit."""
    if here.shards == there.shards:
        if here.frozen != there.frozen:
            raise ConfigError(
                f"parameters that do not learn (requires_grad=False) are not the same on ranks {rank} and {other}.",
                "Nobody exchanges them: load the same on all ranks.",
            )
        return
    differing = sorted(set(here.shards) ^ set(there.shards))
    name = differing[0][0] if differing else here.shards[0][0]
    said = [
        next((f"{shape} of {kind}" for own, shape, kind in presence.shards if own == name), "nothing of it")
        for presence in (here, there)
    ]
    raise ConfigError(
        f"replicas must train the same parameters, cut alike: of {name!r} rank {rank} exchanges {said[0]}, "
        f"rank {other} {said[1]}.",
        "Build the same network on all ranks, give its parameters to the optimizer in the same way, and lay it by the "
        "same plan in every group (one that plan='auto' found: save it, and pass the file).",
    )
