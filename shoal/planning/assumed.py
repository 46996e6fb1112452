"""What a cost model takes for granted about messages: as the engine works, or as OptCNN (Jia et al. 2018) counts.

    sums       the quickest of ring, tree and rings within hosts    | to the server of the layer and back, copy by copy
    transfers  ranks send at the same time: the busiest decides     | one after the other, each at its link's speed

The right-hand side is that paper's t_S and t_X, so that a plan can be searched for under its own cost.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from shoal.cluster import Cluster
from shoal.planning.boxes import Boxes, Ints
from shoal.planning.transfers import Floats
from shoal.simulating.collectives import Shape


@dataclass(frozen=True)
class Assumed:
    """As the engine works, unless said otherwise."""

    servers: bool = False
    """Gradients go to a server, which is one of the ranks that hold the parameter, and weights come back."""
    one_by_one: bool = False
    """Of a transfer between layers no two messages are under way at the same time."""


def server_seconds(size: float, shape: Shape, cluster: Cluster) -> float:
    """Seconds in which all copies reach the server's links, and the weights come back by them; without latency.

    Copies of its own host come by the inner level, at the same time as those of others by the outer ones.
    """
    seconds, nearer = 0.0, 1
    for level, joined in zip(cluster.levels, shape.counts, strict=True):
        seconds = max(seconds, 2 * (joined - 1) * nearer * size / level.bandwidth)
        nearer *= joined
    return seconds


def one_by_one_seconds(have: Boxes, need: Boxes, itemsize: int, cluster: Cluster) -> Floats:
    """(cuts of have, cuts of need): seconds of one pass, all messages one after the other; without latency."""
    return _sum_over_pairs(have.starts[:, None], have.stops[:, None], need, itemsize, cluster, free=have.everywhere)


def paired_one_by_one_seconds(have: Boxes, need: Boxes, itemsize: int, cluster: Cluster) -> Floats:
    """(cuts,): the same, of every cut of `have` to the cut of `need` that stands beside it."""
    return _sum_over_pairs(have.starts, have.stops, need, itemsize, cluster, free=have.everywhere)


def _sum_over_pairs(starts: Ints, stops: Ints, need: Boxes, itemsize: int, cluster: Cluster, *, free: bool) -> Floats:
    """`starts`, `stops`: (..., ranks, dims) that broadcast against those of `need`."""
    shape = np.broadcast_shapes(starts.shape[:-2], need.starts.shape[:-2])
    seconds: Floats = np.zeros(shape)
    if free or not cluster.levels:
        return seconds
    for source, target in product(range(need.starts.shape[-2]), repeat=2):
        level = cluster.level_of(source, target)
        if level is None:
            continue
        rows = np.minimum(stops[..., source, :], need.stops[..., target, :]) - np.maximum(
            starts[..., source, :], need.starts[..., target, :]
        )
        seconds += np.maximum(rows, 0).prod(axis=-1) * (itemsize / cluster.levels[level].bandwidth)
    return seconds
