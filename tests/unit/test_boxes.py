"""Boxes of many cuts at once are, rank by rank, those that `place` gives one cut at a time."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.capturing import capture
from shoal.lowering.boundary import tiles
from shoal.lowering.placement import depends_on_input, op_of, place
from shoal.moves import Layout
from shoal.operators.base import Op
from shoal.partition import Box, Span, volume
from shoal.planning.boxes import Boxes, layouts_boxes, needed_boxes, owned_boxes, tile_boxes
from shoal.planning.stages import cuts_of
from tests.unit.operator_cases import EXAMPLES, WITHOUT_RULE, Example, Function

pytestmark = pytest.mark.usefixtures("one_thread")


def images(function: Callable[[Tensor], Tensor], *shape: int) -> tuple[nn.Module, tuple[int, ...]]:
    return Function(function), shape


NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "stride": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (6, 3, 13, 9)),
    "dilation": (nn.Conv2d(3, 4, 3, dilation=3, padding=3), (5, 3, 12, 7)),
    "groups": (nn.Conv2d(6, 12, 3, groups=3), (4, 6, 9, 9)),
    "depthwise": (nn.Conv2d(6, 6, 5, groups=6, padding=2, stride=3), (4, 6, 11, 17)),
    "stride beyond the window": (nn.Conv2d(3, 4, 1, stride=3), (4, 3, 10, 7)),
    "padding beyond the window": (nn.Conv2d(2, 4, 3, padding=4), (4, 2, 4, 5)),
    "window over all": (nn.Conv2d(3, 4, 7, padding=3), (4, 3, 4, 4)),
    "sound": (nn.Conv1d(3, 4, 5, stride=2, padding=2), (4, 3, 19)),
    "volume": (nn.Conv3d(2, 4, 3, padding=1), (3, 2, 5, 4, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), (4, 4, 5, 6)),
    "max pool": (nn.MaxPool2d(3, 2, 1), (4, 6, 13, 8)),
    "average pool": (nn.AvgPool2d(3, 2, ceil_mode=True), (4, 6, 12, 9)),
    "adaptive pool": (nn.AdaptiveAvgPool2d((3, 2)), (4, 6, 13, 7)),
    "linear": (nn.Linear(17, 10), (6, 17)),
    "batch norm": (nn.BatchNorm2d(6), (6, 6, 5, 4)),
    "nearest": (nn.Upsample(scale_factor=2), (4, 3, 7, 5)),
    "bilinear": (nn.Upsample(size=(17, 11), mode="bilinear"), (4, 3, 7, 5)),
    "concatenation": images(lambda x: torch.cat([x, x[:, :2], x * 2], 1), 6, 4, 7, 5),
    "concatenation by row": images(lambda x: torch.cat([x, F.relu(x)], 2), 4, 4, 7, 5),
    "sum": images(lambda x: x + x.mean((2, 3), keepdim=True), 6, 4, 7, 5),
    "flatten": images(lambda x: torch.flatten(x, 1), 6, 4, 7, 5),
    "mean": images(lambda x: x.mean((2, 3)), 6, 4, 7, 5),
    "softmax": images(lambda x: F.log_softmax(x.mean((2, 3)), 1), 6, 5, 4, 5),
    "loss": images(lambda x: F.mse_loss(x, F.relu(x), reduction="none"), 6, 4, 7, 5),
    "shuffle": images(lambda x: F.pixel_shuffle(x, 2), 4, 8, 5, 3),
    "pad": images(lambda x: F.pad(x, (1, 2, 0, 3)), 4, 3, 5, 6),
}
CALLS = {f"{example.op} {example.note}".strip(): example for example in (*EXAMPLES, *WITHOUT_RULE)}


@cache
def ops_of(net: str) -> tuple[Op, ...]:
    model, shape = NETS[net]
    graph = capture(model, torch.zeros(shape))
    seen = depends_on_input(graph)
    return tuple(op_of(layer, graph) for layer in graph.layers if layer.name in seen)


def ops_of_call(example: Example) -> Iterator[Op]:
    graph = example.subject.graph
    seen = depends_on_input(graph)
    yield from (op_of(layer, graph) for layer in graph.layers if layer.name in seen)


def rows(boxes: Boxes, cut: int, rank: int) -> Box | None:
    """One box out of the arrays; None where it is empty."""
    pairs = zip(boxes.starts[cut, rank], boxes.stops[cut, rank], strict=True)
    box = tuple(Span(int(start), int(stop)) for start, stop in pairs)
    return box if volume(box) else None


def plain(box: Box | None) -> Box | None:
    """A box as arrays have it: nothing is None, a scalar has one dim."""
    return None if box is None or not volume(box) else box or (Span(0, 1),)


def check(op: Op, ranks: int) -> None:
    cuts = list(cuts_of(op, ranks))
    placed = [place(op, cut, ranks, everywhere=False) for cut in cuts]
    owned = owned_boxes(op, cuts, ranks)
    assert owned.everywhere == placed[0].copies
    needed = {argument: needed_boxes(op, argument, cuts, ranks) for argument, _ in op.layer.tensors}
    for index, one in enumerate(placed):
        for rank in range(ranks):
            where = f"{op.layer.name} {op.layer.op} cut {one.cut}, rank {rank} of {ranks}"
            assert rows(owned, index, rank) == plain(one.owns[rank]), where
            for argument, boxes in needed.items():
                need = one.needs[rank].get(argument)
                assert rows(boxes, index, rank) == plain(None if need is None else need.box), f"{where}, {argument}"
    for boxes in (owned, *needed.values()):
        check_lists(boxes)


def check_lists(boxes: Boxes) -> None:
    """Where boxes are separable, spans by dim and copies count every element that ranks hold."""
    if boxes.lists is None or boxes.kinds is None or boxes.copies is None:
        return
    for index, (kinds, copies) in enumerate(zip(boxes.kinds, boxes.copies, strict=True)):
        elements = int(copies)
        for lists, kind in zip(boxes.lists, kinds, strict=True):
            first, last = lists[kind]
            elements *= int((last - first).sum())
        assert elements == int(boxes.volumes[index].sum())


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("net", NETS)
def test_boxes_of_layers_are_those_of_their_placement(net: str, ranks: int) -> None:
    for op in ops_of(net):
        check(op, ranks)


@pytest.mark.parametrize("net", ["stride", "groups", "max pool", "linear", "concatenation", "flatten", "transposed"])
def test_boxes_over_many_ranks(net: str) -> None:
    for op in ops_of(net):
        check(op, 16)


@pytest.mark.parametrize("call", CALLS)
def test_boxes_of_every_operator_with_a_rule_and_some_without(call: str) -> None:
    for op in ops_of_call(CALLS[call]):
        check(op, 4)


@pytest.mark.parametrize("net", ["stride", "groups", "sound", "volume", "linear", "flatten", "mean"])
@pytest.mark.parametrize("channels", ["-", "k"])
def test_tiles_of_many_cuts_are_those_of_each(net: str, channels: str) -> None:
    for op in ops_of(net):
        for shape in (op.out, *op.shapes.values()):
            for ranks in (3, 4, 16):
                cuts = list(cuts_of(op, ranks, per_host=2))
                found = tile_boxes(shape, cuts, ranks, channels=channels)
                for index, one in enumerate(cuts):
                    wanted = tiles(shape, one, ranks, channels=channels)
                    assert [rows(found, index, rank) for rank in range(ranks)] == [plain(box) for box in wanted]
                check_lists(found)


def test_boxes_of_a_given_layout() -> None:
    layout: Layout = ((Span(0, 2), Span(0, 5)), None, (Span(2, 3), Span(0, 5)))
    boxes = layouts_boxes([layout])
    assert [rows(boxes, 0, rank) for rank in range(3)] == list(layout)
    assert boxes.volumes.tolist() == [[10, 0, 5]]
