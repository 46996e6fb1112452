"""How ranks add something up, by algorithm: what each way sends over which links, and which is the shortest.

    ring          P ranks in a circle; each sends 2 (P-1)/P of the bytes, in 2 (P-1) messages one after the other
    tree          on every level of links pairs exchange all bytes, log2 of their number times: few messages, more bytes
    hierarchical  a ring within each innermost group, then rings between groups of what each rank is left with

Large sums go by ring or hierarchical, small ones by tree; where a level's `sum_latency` was measured, by the ring that
it was measured with. A host's ranks that share a card put their bytes on it together, as do groups that sum at the same
time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from shoal.cluster import Cluster

PAIR_BYTES = 64 << 10
"""Two ranks add up to so many bytes by one message each way."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a group of ranks lies in a cluster."""

    ranks: int
    counts: tuple[int, ...]
    """By level: how many inner groups, or ranks, each of the level's groups joins at most; 1 where it joins none."""
    even: bool
    """Whether all groups of a level join as many."""


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds that a phase keeps links of one level busy, alone."""

    level: int
    own: float
    """The link of each rank."""
    card: float
    """A card that ranks share, for all of the group's ranks behind it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Messages that follow each other, and the links that they keep busy at once."""

    latency: float
    loads: tuple[Load, ...]

    def seconds(self, cluster: Cluster, sharing: Sequence[int]) -> float:
        """How long it takes where `sharing` groups, by level, do the same at once."""
        return self.latency + max(
            (load.card * sharing[load.level] if is_card(cluster, load.level) else load.own for load in self.loads),
            default=0.0,
        )


def is_card(cluster: Cluster, level: int) -> bool:
    """Whether ranks of an inner group leave it by one link on this level."""
    return level > 0 and cluster.levels[level].shared


def unit_size(cluster: Cluster, level: int) -> int:
    """Ranks of an inner group of a level: those behind one card, where they share it."""
    return cluster.levels[level - 1].size if level else 1


def shape_of(group: Sequence[int], cluster: Cluster) -> Shape:
    """How a group lies in the cluster. Costs the group's size times the levels."""
    counts, even = [], True
    for index, level in enumerate(cluster.levels):
        inner = unit_size(cluster, index)
        joined: dict[int, int] = {}
        for unit in {rank // inner for rank in group}:
            joined[unit * inner // level.size] = joined.get(unit * inner // level.size, 0) + 1
        counts.append(max(joined.values(), default=1))
        even = even and len(set(joined.values())) == 1
    return Shape(len(group), tuple(counts), even)


def sharing_of(groups: Iterable[Sequence[int]], cluster: Cluster) -> tuple[int, ...]:
    """By level: how many of these groups, which sum at once, leave by the busiest card at most."""
    busiest = []
    distinct = list(groups)
    for index in range(len(cluster.levels)):
        inner, outer = unit_size(cluster, index), cluster.levels[index].size
        leaving: dict[int, int] = {}
        for group in distinct:
            units = {rank // inner for rank in group}
            if len({unit * inner // outer for unit in units}) < len(units):
                for unit in units:
                    leaving[unit] = leaving.get(unit, 0) + 1
        busiest.append(max(leaving.values(), default=1))
    return tuple(busiest)


def sum_phases(size: float, shape: Shape, sharing: tuple[int, ...], cluster: Cluster) -> tuple[Phase, ...]:
    """The quickest way to add up `size` bytes; nothing for a group of one."""
    if shape.ranks < 2:
        return ()
    return min(
        _ways(size, shape, cluster),
        key=lambda way: sum(phase.seconds(cluster, sharing) for phase in way),
    )


def pair_phases(size: float, shape: Shape, cluster: Cluster) -> tuple[Phase, ...]:
    """Two ranks that send each other all of it, and stop computing for that."""
    index = _crossed(shape)[-1]
    level = cluster.levels[index]
    busy = size / level.bandwidth
    return (Phase(level.meeting, (Load(index, busy, busy),)),)


def gather_phases(size: float, shape: Shape, cluster: Cluster) -> tuple[Phase, ...]:
    """Every rank sends `size` bytes to each of the others, all at once; nothing for a group of one."""
    loads, near = [], 1
    crossed = _crossed(shape)
    for index in crossed:
        level, joined = cluster.levels[index], shape.counts[index]
        crossing = (joined - 1) * near * size / level.bandwidth
        loads.append(Load(index, crossing, crossing * near))
        near *= joined
    latency = max((cluster.levels[index].latency for index in crossed), default=0.0)
    return (Phase(latency, tuple(loads)),) if loads else ()


def layer_sum_phases(size: float, shape: Shape, sharing: tuple[int, ...], cluster: Cluster) -> tuple[Phase, ...]:
    """The same for a sum within a layer, which its ranks wait for, one of them always later than the others."""
    if shape.ranks < 2:
        return ()
    if shape.ranks == 2 and size <= PAIR_BYTES:
        return pair_phases(size, shape, cluster)
    waiting = cluster.levels[_crossed(shape)[-1]].wait
    return (Phase(waiting, ()), *sum_phases(size, shape, sharing, cluster))


def phase_seconds(phases: Iterable[Phase], sharing: Sequence[int], cluster: Cluster) -> float:
    """How long phases take one after the other."""
    return sum(phase.seconds(cluster, sharing) for phase in phases)


@dataclass
class Sums:
    """Sums on one cluster. What was asked before is remembered: the plans of a search ask the same again and again."""

    cluster: Cluster
    _shapes: dict[Sequence[int], Shape] = field(default_factory=dict)
    _sharing: dict[tuple[Sequence[int], ...], tuple[int, ...]] = field(default_factory=dict)
    _phases: dict[object, tuple[Phase, ...]] = field(default_factory=dict)
    _seconds: dict[object, float] = field(default_factory=dict)

    def shape(self, group: Sequence[int]) -> Shape:
        """As `shape_of`, of a group that can be a key: a tuple or a range."""
        if group not in self._shapes:
            self._shapes[group] = shape_of(group, self.cluster)
        return self._shapes[group]

    def sharing(self, groups: tuple[Sequence[int], ...]) -> tuple[int, ...]:
        """As `sharing_of`."""
        if groups not in self._sharing:
            self._sharing[groups] = sharing_of(groups, self.cluster)
        return self._sharing[groups]

    def phases(self, size: float, shape: Shape, sharing: tuple[int, ...], *, in_layer: bool) -> tuple[Phase, ...]:
        """As `layer_sum_phases` or `sum_phases`."""
        key = (size, shape, sharing, in_layer)
        if key not in self._phases:
            way = layer_sum_phases if in_layer else sum_phases
            self._phases[key] = way(size, shape, sharing, self.cluster)
        return self._phases[key]

    def seconds(self, size: float, shape: Shape, sharing: tuple[int, ...], *, in_layer: bool) -> float:
        """How long those phases take one after the other."""
        key = (size, shape, sharing, in_layer)
        if key not in self._seconds:
            phases = self.phases(size, shape, sharing, in_layer=in_layer)
            self._seconds[key] = phase_seconds(phases, sharing, self.cluster)
        return self._seconds[key]


def _crossed(shape: Shape) -> list[int]:
    return [index for index, count in enumerate(shape.counts) if count > 1]


def _ways(size: float, shape: Shape, cluster: Cluster) -> list[tuple[Phase, ...]]:
    crossed = _crossed(shape)
    ways = [_ring(size, shape, crossed, cluster)]
    if all(cluster.levels[index].sum_latency is None for index in crossed):
        ways.append(_tree(size, shape, crossed, cluster))
        if shape.even and len(crossed) > 1:
            ways.append(_hierarchical(size, shape, crossed, cluster))
    return ways


def _ring(size: float, shape: Shape, crossed: Sequence[int], cluster: Cluster) -> tuple[Phase, ...]:
    levels = [cluster.levels[index] for index in crossed]
    latency = max(level.sum_start(shape.ranks) for level in levels)
    sent = 2 * (shape.ranks - 1) / shape.ranks * size
    loads = [
        Load(index, sent / level.sum_rate, sent / level.sum_rate) for index, level in zip(crossed, levels, strict=True)
    ]
    return (Phase(latency, tuple(loads)),)


def _tree(size: float, shape: Shape, crossed: Sequence[int], cluster: Cluster) -> tuple[Phase, ...]:
    phases, behind = [], _behind(shape)
    for index in crossed:
        level, steps = cluster.levels[index], ceil(log2(shape.counts[index]))
        busy = steps * size / level.sum_rate
        phases.append(Phase(steps * level.latency, (Load(index, busy, busy * behind[index]),)))
    return tuple(phases)


def _hierarchical(size: float, shape: Shape, crossed: Sequence[int], cluster: Cluster) -> tuple[Phase, ...]:
    phases, behind, left = [], _behind(shape), size
    for index in crossed:
        level, joined = cluster.levels[index], shape.counts[index]
        busy = 2 * (joined - 1) / joined * left / level.sum_rate
        phases.append(Phase(2 * (joined - 1) * level.latency, (Load(index, busy, busy * behind[index]),)))
        left /= joined
    return tuple(phases)


def _behind(shape: Shape) -> list[int]:
    """By level: how many of the group's ranks lie behind one link of it."""
    behind, ranks = [], 1
    for count in shape.counts:
        behind.append(ranks)
        ranks *= count
    return behind
