"""How long moves take on a cluster's links, for many pairs of cuts at once.

A transfer takes, on each level of links that it crosses, the latency once and then the bytes of the busiest rank, sent
or received, whichever is more; where the ranks of a host share one link, the bytes of the busiest host. Levels are
other links and work at the same time, so that the slowest decides. Backward moves the same bytes the other way, in
the same time. It is what the simulator has for a transfer that meets nothing else on its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster, Level
from shoal.planning.boxes import Boxes, Ints

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
AnyFloats = TypeVar("AnyFloats", Floats, Singles, Ints)
MANY_RANKS = 16
"""Beyond so many ranks transfers are priced a little more roughly."""
MANY_SAMPLED = 16
"""There the busiest rank is sought among about so many."""
SAMPLED_RANKS = 64
"""Beyond so many ranks the busiest is sought among this many, evenly spread, first and last included."""
_AT_ONCE = 100_000
"""Entries of one temporary array, which should stay in the processor's cache."""
Edges = tuple[Floats, Floats]
"""Where boxes start and stop: (..., ranks, dims) each."""


def transfer_seconds(have: Boxes, need: Boxes, itemsize: int, cluster: Cluster) -> Floats:
    """(cuts of have, cuts of need): seconds of one pass, forward or backward."""
    shape = (have.starts.shape[0], need.starts.shape[0])
    if have.everywhere or not cluster.levels:
        return np.zeros(shape)
    ranks = have.starts.shape[1]
    if ranks > MANY_RANKS and need.lists is not None:
        return _among_many(have, need, itemsize, cluster)
    seen = _seen(ranks, cluster, SAMPLED_RANKS)
    seconds = np.empty(shape)
    have_starts, have_stops = _by_dim(have.starts, have.stops)
    need_starts, need_stops = _by_dim(need.starts, need.stops)
    wanted = need_starts[None], need_stops[None]
    volumes = need.volumes[None, :, seen].astype(np.float64)
    rows = max(1, _AT_ONCE // (shape[1] * len(seen)))
    for start in range(0, shape[0], rows):
        block = slice(start, start + rows)
        mine = have_starts[block, None], have_stops[block, None]
        read = _sent_to_all(have_starts[block][:, seen], have_stops[block][:, seen], need)
        seconds[block] = _slowest(mine, wanted, volumes, read, seen, itemsize, cluster)
    return seconds


def paired_seconds(have: Boxes, need: Boxes, itemsize: int, cluster: Cluster) -> Floats:
    """(cuts,): the same, of every cut of `have` to the cut of `need` that stands beside it.

    As everywhere here, all elements are there, once each, among the ranks of every cut of `have`.
    """
    count, ranks = have.starts.shape[:2]
    seconds = np.zeros(count)
    if have.everywhere or not cluster.levels:
        return seconds
    seen = _seen(ranks, cluster, SAMPLED_RANKS)
    volumes = need.volumes[:, seen].astype(np.float64)
    rows = max(1, _AT_ONCE // len(seen))
    for start in range(0, count, rows):
        some = slice(start, start + rows)
        mine, wanted = _by_dim(have.starts[some], have.stops[some]), _by_dim(need.starts[some], need.stops[some])
        read = _sent_to_all(mine[0][:, seen], mine[1][:, seen], _some(need, some), paired=True)
        seconds[some] = _slowest(mine, wanted, volumes[some], read, seen, itemsize, cluster)
    return seconds


def _slowest(
    have: Edges, need: Edges, volumes: Floats, read: Floats, seen: Ints, itemsize: int, cluster: Cluster
) -> Floats:
    """(...): seconds of the slowest of the `seen` ranks. The leading axes of `have` and `need` broadcast.

    `volumes`: elements that each of those ranks needs; `read`: elements that all ranks together read of each one's box.
    """
    ranks = need[0].shape[-2]
    (mine_starts, mine_stops), (wanted_starts, wanted_stops) = _of_ranks(have, seen), _of_ranks(need, seen)
    own = _overlap(mine_starts, mine_stops, wanted_starts, wanted_stops)
    received_within, sent_within = own, own
    seconds = np.zeros(own.shape)
    inner: Level | None = None
    for level in cluster.levels:
        if level is cluster.levels[-1]:
            received, sent = np.broadcast_to(volumes, own.shape), read
        else:
            received, sent = received_within.copy(), sent_within.copy()
            base = seen // level.size * level.size
            first = 1 if inner is None else inner.size
            for offset in range(first, level.size):  # ranks of the same group, not of the same inner group
                other = base + ((seen - base) // first * first + offset) % level.size
                there = other < ranks
                other = np.minimum(other, ranks - 1)
                received += there * _overlap(*_of_ranks(have, other), wanted_starts, wanted_stops)
                sent += there * _overlap(mine_starts, mine_stops, *_of_ranks(need, other))
        crossings = received - received_within, sent - sent_within
        if level.shared and inner is not None:
            crossings = _of_hosts(crossings[0], seen // inner.size), _of_hosts(crossings[1], seen // inner.size)
        crossing = np.maximum(*crossings) * itemsize
        np.maximum(seconds, np.where(crossing > 0, level.meeting + crossing / level.bandwidth, 0.0), out=seconds)
        received_within, sent_within, inner = received, sent, level
    slowest: Floats = seconds.max(axis=-1)
    return slowest


def _of_ranks(edges: Edges, ranks: Ints) -> Edges:
    return edges[0][..., ranks, :], edges[1][..., ranks, :]


def _some(boxes: Boxes, cuts: slice) -> Boxes:
    """Those of some of the cuts."""
    return replace(
        boxes,
        starts=boxes.starts[cuts],
        stops=boxes.stops[cuts],
        kinds=None if boxes.kinds is None else boxes.kinds[cuts],
        copies=None if boxes.copies is None else boxes.copies[cuts],
    )


def _among_many(have: Boxes, need: Boxes, itemsize: int, cluster: Cluster) -> Floats:
    """The same for large clusters, a little rougher and many times faster.

    The busiest rank is sought among a few hosts; what the ranks of a host hold is taken as one box, and what each of
    them sends within the host as its share of that box.
    """
    count, ranks = have.starts.shape[:2]
    seen = _seen(ranks, cluster, MANY_SAMPLED)
    mine = _small(have.starts[:, seen]), _small(have.stops[:, seen])
    wanted = _small(need.starts[:, seen]), _small(need.stops[:, seen])
    volumes = np.multiply.reduce(wanted[1] - wanted[0], axis=0)  # rounded as overlaps are, so that equal ones cancel
    shares = _shares_of_groups(have, seen, cluster)
    within = [(_small(starts), _small(stops)) for starts, stops in _held_by_groups(have, seen, cluster)]
    overlaps = [_overlaps(*held, *wanted) for held in [mine, *within]]
    read = _reads(*mine, need)
    seconds = np.empty((count, need.starts.shape[0]))
    rows = max(1, _AT_ONCE // (need.starts.shape[0] * len(seen)))
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        held = [overlap.of(part) for overlap in overlaps]
        taken = np.zeros((len(held[0]), len(volumes)), dtype=np.float32)
        sent_before = held[0]
        for index, level in enumerate(cluster.levels):
            last = index == len(cluster.levels) - 1
            received = (volumes[None] if last else held[index + 1]) - held[index]
            if last:
                sent_within = read.of(part)
            else:
                groups = seen // level.size
                of_group = _spread(_host_sums(received, groups), groups)
                sent_within = sent_before + of_group * shares[index][part, None]
            sent = sent_within - sent_before
            if level.shared and index:
                hosts = seen // cluster.levels[index - 1].size
                received, sent = _host_sums(received, hosts), _host_sums(sent, hosts)
            crossing = _largest(np.maximum(received, sent)) * np.float32(itemsize)
            busy = np.where(crossing > 0.5, np.float32(level.meeting) + crossing / np.float32(level.bandwidth), 0)
            np.maximum(taken, busy, out=taken)
            sent_before = sent_within
        seconds[part] = taken
    return seconds


@dataclass(frozen=True)
class _Product:
    """For every pair of cuts and every rank a product, mostly over dims. Its factors are the same for many cuts: each
    is a table over the few kinds of cuts that it tells apart.
    """

    factors: Sequence[tuple[Singles, Ints, Ints]]
    """(kinds of have, kinds of need, ranks), and which kind each cut of have and each of need is."""

    def of(self, part: slice) -> Singles:
        """(some cuts of have, cuts of need, ranks)."""
        product: Singles | None = None
        for table, have, need in self.factors:
            factor: Singles = table[have[part]].take(need, axis=1)  # several times as fast as an index
            product = factor if product is None else np.multiply(product, factor, out=product)
        assert product is not None
        return product


def _overlaps(starts: Singles, stops: Singles, need_starts: Singles, need_stops: Singles) -> _Product:
    """(cuts of have, cuts of need, ranks): elements that both have."""
    factors = []
    for dims in _dims_together(len(starts)):
        first, have = _kinds(starts[dims], stops[dims])
        need_first, wanted = _kinds(need_starts[dims], need_stops[dims])
        table = _overlap_of(
            starts[dims][:, first],
            stops[dims][:, first],
            need_starts[dims][:, need_first],
            need_stops[dims][:, need_first],
        )
        factors.append((table, have, wanted))
    return _Product(factors)


def _reads(starts: Singles, stops: Singles, need: Boxes) -> _Product:
    """(cuts of have, cuts of need, ranks): elements that all ranks together read of each rank's box."""
    assert need.lists is not None
    assert need.kinds is not None
    assert need.copies is not None
    factors = []
    for dims in _dims_together(len(starts)):
        first, have = _kinds(starts[dims], stops[dims])
        numbers = need.kinds[:, dims]
        if not dims.start:
            numbers = np.column_stack([need.copies, numbers])
        told, wanted = _kinds(numbers.T[:, :, None])
        table = np.ones((len(first), len(told), starts.shape[2]), dtype=np.float32)
        if not dims.start:
            table *= need.copies[told].astype(np.float32)[None, :, None]
        for dim in range(*dims.indices(len(starts))):
            read = np.stack([_read(starts[dim][first], stops[dim][first], *spans) for spans in need.lists[dim]])
            table *= read[need.kinds[told, dim]].transpose(1, 0, 2)
        factors.append((table, have, wanted))
    return _Product(factors)


def _dims_together(dims: int) -> list[slice]:
    """The first two dims, in which few kinds of cuts differ where there are more dims, then each by itself."""
    return (
        [slice(0, 2), *(slice(dim, dim + 1) for dim in range(2, dims))]
        if dims > 2
        else [slice(dim, dim + 1) for dim in range(dims)]
    )


def _kinds(*numbers: NDArray[Any]) -> tuple[Ints, Ints]:
    """(dims, cuts, ranks) each: the first cut of every kind, and the kind of every cut; alike are those with the same
    numbers.
    """
    rows = np.concatenate(
        [np.ascontiguousarray(each.transpose(1, 0, 2)).reshape(each.shape[1], -1) for each in numbers], axis=1
    )
    known: dict[bytes, int] = {}
    # As bytes, all at once. What drops zeros at the end keeps apart what is equally long.
    texts = rows.view(f"S{rows.itemsize * rows.shape[1]}").ravel().tolist()
    kinds = [known.setdefault(text, len(known)) for text in texts]
    _, first = np.unique(kinds, return_index=True)
    return first, np.array(kinds, dtype=np.int64)


def _largest(numbers: Singles) -> Singles:
    """Over the last axis, which is short: in halves, which numpy does many times faster."""
    while (length := numbers.shape[2]) > 1:
        half = np.maximum(numbers[:, :, : length - 1 : 2], numbers[:, :, 1::2])
        if length % 2:
            np.maximum(half[:, :, 0], numbers[:, :, -1], out=half[:, :, 0])
        numbers = half
    return numbers[:, :, 0]


def _small(numbers: Ints) -> Singles:
    """By dim first, in single precision: rows of real tensors are exact in it."""
    return np.ascontiguousarray(numbers.transpose(2, 0, 1), dtype=np.float32)


def _overlap_of(starts: Singles, stops: Singles, need_starts: Singles, need_stops: Singles) -> Singles:
    """(cuts of have, cuts of need, ranks): elements that both have."""
    volume: Singles | None = None
    for dim in range(len(starts)):
        rows: Singles = np.minimum(stops[dim][:, None], need_stops[dim][None])
        rows -= np.maximum(starts[dim][:, None], need_starts[dim][None])
        np.maximum(rows, 0, out=rows)
        volume = rows if volume is None else np.multiply(volume, rows, out=volume)
    assert volume is not None
    return volume


def _shares_of_groups(have: Boxes, seen: Ints, cluster: Cluster) -> list[Singles]:
    """For every level but the outermost, which part of what its group holds each seen rank has."""
    volumes, shares = have.volumes.astype(np.float32), []
    for level in cluster.levels[:-1]:
        sums = np.add.reduceat(volumes, np.arange(0, volumes.shape[1], level.size), axis=1)[:, seen // level.size]
        shares.append((volumes[:, seen] / np.maximum(sums, 1)).astype(np.float32))
    return shares


def _held_by_groups(have: Boxes, seen: Ints, cluster: Cluster) -> list[tuple[Ints, Ints]]:
    """For every level but the outermost, the box around what each seen rank's group holds."""
    boxes = []
    there = (have.volumes > 0)[:, :, None]
    far = np.iinfo(np.int64).max // 4
    starts, stops = np.where(there, have.starts, far), np.where(there, have.stops, 0)
    for level in cluster.levels[:-1]:
        first = np.arange(0, have.starts.shape[1], level.size)
        group = seen // level.size
        low = np.minimum.reduceat(starts, first, axis=1)[:, group]
        high = np.maximum.reduceat(stops, first, axis=1)[:, group]
        boxes.append((np.where(low < far, low, 0), high))
    return boxes


def _seen(ranks: int, cluster: Cluster, sampled: int) -> Ints:
    """The ranks among which the busiest is sought; all of a host's, where they share its link."""
    shared = [inner.size for inner, level in zip(cluster.levels, cluster.levels[1:], strict=False) if level.shared]
    size = max(shared, default=1)
    hosts = -(-ranks // size)
    first = np.unique(np.linspace(0, hosts - 1, min(hosts, max(2, sampled // size))).astype(np.int64)) * size
    ranks_seen: Ints = (first[:, None] + np.arange(size)).ravel()
    return ranks_seen[ranks_seen < ranks]


def _of_hosts(amounts: AnyFloats, hosts: Ints) -> AnyFloats:
    """For every rank what the ranks of its host together have; `hosts`: the host of each, in order."""
    return _spread(_host_sums(amounts, hosts), hosts)


def _host_sums(amounts: AnyFloats, hosts: Ints) -> AnyFloats:
    """What the ranks of each host together have, along the last axis."""
    first = np.flatnonzero(np.diff(hosts, prepend=-1))
    size = len(hosts) // len(first)
    if size == 1:
        return amounts
    if len(hosts) == size * len(first) and (np.diff(first) == size).all():  # adds whole arrays, in reduceat's order
        each = [amounts[..., member::size] for member in range(size)]
        even: AnyFloats = each[0] + sum(each[2:], start=each[1])
        return even
    sums: AnyFloats = np.add.reduceat(amounts, first, axis=-1)
    return sums


def _spread(sums: AnyFloats, hosts: Ints) -> AnyFloats:
    """By host, as numbers by rank."""
    if sums.shape[-1] == len(hosts):
        return sums
    spread: AnyFloats = np.repeat(sums, np.unique(hosts, return_counts=True)[1], axis=-1)
    return spread


def _overlap(starts: Floats, stops: Floats, need_starts: Floats, need_stops: Floats) -> Floats:
    """(..., ranks): elements that both have, rank by rank."""
    volume: Floats | None = None
    for dim in range(starts.shape[-1]):
        rows: Floats = np.minimum(stops[..., dim], need_stops[..., dim])
        rows -= np.maximum(starts[..., dim], need_starts[..., dim])
        np.maximum(rows, 0, out=rows)
        if volume is None:
            volume = rows
        else:
            volume *= rows
    assert volume is not None
    return volume


def _by_dim(starts: Ints, stops: Ints) -> Edges:
    """The same, with the numbers of one dim side by side in memory, as floats: quicker to compute with."""
    first, last = (np.ascontiguousarray(each.transpose(2, 0, 1), dtype=np.float64) for each in (starts, stops))
    return first.transpose(1, 2, 0), last.transpose(1, 2, 0)


def _sent_to_all(starts: Floats, stops: Floats, need: Boxes, *, paired: bool = False) -> Floats:
    """(cuts of have, cuts of need, ranks): elements that all ranks together read of each rank's box.

    `paired`: (cuts, ranks), of each cut of have by the cut of need beside it.
    """
    if need.lists is None or need.kinds is None or need.copies is None:
        mine = (starts, stops) if paired else (starts[:, None], stops[:, None])
        total: Floats = np.zeros(np.broadcast_shapes(mine[0].shape[:-2], need.starts.shape[:-2]) + starts.shape[1:2])
        for rank in range(need.starts.shape[1]):
            total += _overlap(*mine, *_by_dim(need.starts[:, [rank]], need.stops[:, [rank]]))
        return total
    cuts = np.arange(len(starts)) if paired else np.arange(len(starts))[:, None]
    volume = need.copies[:, None].astype(np.float64)
    for dim, lists in enumerate(need.lists):
        rows = np.stack([_read(starts[:, :, dim], stops[:, :, dim], first, last) for first, last in lists])
        volume = volume * rows[need.kinds[:, dim], cuts]
    return volume


def _read(starts: AnyFloats, stops: AnyFloats, first: Ints, last: Ints) -> AnyFloats:
    """How many rows of each span a list of spans reads, those read twice counted twice.

    Costs the logarithm of the list's length: what the list has up to a row, once for each end.
    """
    edges, sums = [], []
    for ends in (first, last):
        ordered = np.sort(ends)
        edges.append(ordered)
        sums.append(np.concatenate([[0], np.cumsum(ordered)]))

    def upto(rows: Ints) -> Ints:
        begun, ended = (np.searchsorted(ordered, rows) for ordered in edges)
        found: Ints = (begun - ended) * rows - (sums[0][begun] - sums[1][ended])
        return found

    read: AnyFloats = (upto(stops.astype(np.int64)) - upto(starts.astype(np.int64))).astype(starts.dtype)
    return read
