"""Seconds of re-cuts, many at once, beside the same from the list of moves, one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.capturing import capture
from shoal.cluster import Cluster, Device, Efficiency, Level
from shoal.lowering.placement import op_of
from shoal.moves import Layout, add_moves
from shoal.operators.base import Op
from shoal.partition import Cut, volume, whole
from shoal.planning.boxes import Boxes, layouts_boxes, needed_boxes, owned_boxes, tile_boxes
from shoal.planning.stages import cuts_of
from shoal.planning.transfers import paired_seconds, transfer_seconds
from tests.unit.test_boxes import NETS, ops_of, rows
from tests.unit.test_moves import anything, disjoint, sizes

pytestmark = pytest.mark.usefixtures("one_thread")

ITEM = 4
DEVICE = Device(
    name="a device",
    memory=1 << 30,
    flops=1e12,
    memory_bandwidth=1e11,
    efficiency=Efficiency(peak_fraction=1.0, half=0.0, launch=0.0),
    source="made up",
)


def cluster_of(*sizes: int, shared: bool = False) -> Cluster:
    """Levels of these sizes, each slower than the one inside it; `shared`: hosts leave by one link."""
    levels = tuple(
        Level(
            name=f"level {index}",
            size=size,
            bandwidth=1e6 / (index + 1),
            latency=1e-3 * (index + 1),
            shared=shared and index > 0,
            source="made up",
        )
        for index, size in enumerate(sizes)
    )
    return Cluster(name="made up", device=DEVICE, levels=levels)


def reference(have: Layout, need: Layout, cluster: Cluster) -> float:
    """Every move counted at its two ranks, on the level that it crosses; the slowest level of the slowest rank."""
    ranks = len(have)
    sent = np.zeros((len(cluster.levels), ranks))
    received = np.zeros_like(sent)
    for move in add_moves(have, need):
        crossed = cluster.level_of(move.src, move.dst)
        if crossed is not None:
            sent[crossed, move.src] += volume(move.box) * ITEM
            received[crossed, move.dst] += volume(move.box) * ITEM
    seconds = np.zeros(ranks)
    for index, level in enumerate(cluster.levels):
        for rank in range(ranks):
            inner = cluster.levels[index - 1].size if index else 1
            host = rank // inner
            sharing = [other for other in range(ranks) if other // inner == host] if level.shared else [rank]
            busiest = max(sum(sent[index, r] for r in sharing), sum(received[index, r] for r in sharing))
            if busiest:
                seconds[rank] = max(seconds[rank], level.latency + busiest / level.bandwidth)
    return float(seconds.max())


CLUSTERS = {
    2: [cluster_of(2), cluster_of(4)],
    3: [cluster_of(3), cluster_of(2, 3), cluster_of(2, 3, shared=True)],
    4: [cluster_of(4), cluster_of(2, 4), cluster_of(2, 4, shared=True)],
    6: [cluster_of(6), cluster_of(2, 6), cluster_of(3, 6, shared=True), cluster_of(4, 6, shared=True)],
}
"""By number of ranks; some have a last host with fewer ranks."""


def layouts(boxes: Boxes, cut: int) -> Layout:
    return tuple(rows(boxes, cut, rank) for rank in range(boxes.starts.shape[1]))


def check(have: Boxes, need: Boxes, cluster: Cluster) -> None:
    found = transfer_seconds(have, need, ITEM, cluster)
    assert found.shape == (len(have.starts), len(need.starts))
    for a, b in np.ndindex(*found.shape):
        wanted = 0.0 if have.everywhere else reference(layouts(have, a), layouts(need, b), cluster)
        assert found[a, b] == pytest.approx(wanted, rel=1e-9), f"cuts {a} to {b}"


def some_cuts(data: st.DataObject, op: Op, ranks: int) -> list[Cut]:
    return data.draw(st.lists(st.sampled_from(list(cuts_of(op, ranks))), min_size=1, max_size=3, unique=True))


@pytest.mark.parametrize("net", NETS)
@given(data=st.data())
@settings(max_examples=5, derandomize=True)
def test_recuts_between_layers(net: str, data: st.DataObject) -> None:
    """A layer's output, or any layout, to a layer that reads a tensor of that shape, each cut in some ways."""
    reader = data.draw(st.sampled_from(ops_of(net)))
    argument = data.draw(st.sampled_from([name for name, shape in reader.shapes.items() if len(shape)]))
    ranks = data.draw(st.sampled_from([2, 3, 4, 6]))
    cluster = data.draw(st.sampled_from(CLUSTERS[ranks]))
    need = needed_boxes(reader, argument, some_cuts(data, reader, ranks), ranks)
    check(layouts_boxes([data.draw(disjoint(reader.shapes[argument], ranks))]), need, cluster)
    for maker in [op for op in ops_of(net) if op.out == reader.shapes[argument]][:1]:
        check(owned_boxes(maker, some_cuts(data, maker, ranks), ranks), need, cluster)


@given(st.data())
@settings(max_examples=60, derandomize=True)
def test_recuts_between_any_layouts(data: st.DataObject) -> None:
    shape, ranks = data.draw(sizes), data.draw(st.sampled_from([2, 3, 4, 6]))
    have, need = data.draw(disjoint(shape, ranks)), data.draw(anything(shape, ranks))
    if all(box is None for box in need):
        return
    check(layouts_boxes([have]), layouts_boxes([need]), data.draw(st.sampled_from(CLUSTERS[ranks])))


@pytest.mark.parametrize("shared", [False, True])
def test_three_levels(shared: bool) -> None:
    op = ops_of("stride")[0]
    boxes = owned_boxes(op, list(cuts_of(op, 8))[::17], 8)
    to_one: Layout = (*(None,) * 3, whole(op.out), *(None,) * 4)
    check(boxes, boxes, cluster_of(2, 4, 8, shared=shared))
    check(boxes, layouts_boxes([to_one]), cluster_of(2, 4, 8, shared=shared))


@pytest.mark.parametrize("net", ["stride", "linear", "max pool", "flatten"])
@pytest.mark.parametrize("levels", [(4,), (2, 4), (2, 4, 8)])
@pytest.mark.parametrize("shared", [False, True])
def test_cuts_side_by_side_are_priced_as_all_pairs(net: str, levels: tuple[int, ...], shared: bool) -> None:
    op, ranks = ops_of(net)[0], levels[-1]
    argument = next(name for name, shape in op.shapes.items() if len(shape))
    cuts = list(cuts_of(op, ranks))[::3]
    need = needed_boxes(op, argument, cuts, ranks)
    for have in (tile_boxes(op.shapes[argument], cuts, ranks), tile_boxes(op.shapes[argument], cuts[::-1], ranks)):
        pairs = transfer_seconds(have, need, ITEM, cluster_of(*levels, shared=shared))
        beside = paired_seconds(have, need, ITEM, cluster_of(*levels, shared=shared))
        assert beside == pytest.approx(np.diagonal(pairs), rel=1e-12)


def test_nothing_moves_where_all_ranks_have_all_or_there_is_one() -> None:
    op = ops_of("linear")[0]
    cuts = list(cuts_of(op, 4))
    boxes = owned_boxes(op, cuts, 4)
    assert not np.diagonal(transfer_seconds(boxes, boxes, ITEM, cluster_of(2, 4))).any()
    assert not transfer_seconds(boxes, boxes, ITEM, Cluster(name="one", device=DEVICE)).any()


@pytest.mark.parametrize("levels", [(32,), (4, 32)])
def test_many_ranks_are_priced_as_few_where_parts_are_even(levels: tuple[int, ...]) -> None:
    """Beyond 16 ranks the sum is rougher: equal where all parts are, and never far where hosts share nothing."""
    graph = capture(nn.Conv2d(32, 32, 3, padding=1), torch.zeros(32, 32, 16, 16))
    op = op_of(graph.layers[0], graph)
    cuts = [Cut.parse(text) for text in ("1", "n32", "c32", "n8c4", "c8n4", "h4w8", "n2h4w4", "n16", "c4")]
    have = owned_boxes(op, cuts, 32)
    need = needed_boxes(op, "input", cuts, 32)
    cluster = cluster_of(*levels, shared=True)
    found = transfer_seconds(have, need, ITEM, cluster)
    for a, b in np.ndindex(*found.shape):
        wanted = reference(layouts(have, a), layouts(need, b), cluster)
        assert found[a, b] == pytest.approx(wanted, rel=1e-5 if len(levels) == 1 else 0.35), (cuts[a], cuts[b])
