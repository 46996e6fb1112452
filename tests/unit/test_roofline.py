"""Estimated times: FLOPs beside known and counted ones, cuts that add up, and what bounds a kernel."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal import zoo
from shoal.capturing import capture
from shoal.cluster import Cluster, Device, Efficiency, Tile
from shoal.graph import LayerGraph
from shoal.lowering.placement import op_of
from shoal.operators import Op, Part, Rule, facts_of, rule_for
from shoal.partition import Cut, cut
from shoal.profiling.roofline import bytes_touched, flops, roofline
from tests.unit.operator_cases import EXAMPLES, WITHOUT_RULE, Example

pytestmark = pytest.mark.usefixtures("one_thread")

VIEWS = {
    *("alias", "detach", "view", "reshape", "flatten", "unsqueeze", "squeeze", "_unsafe_view", "unflatten", "permute"),
    *("transpose", "t", "expand", "slice", "select", "unbind", "split", "split_with_sizes", "chunk"),
}


def device(*, half: float = 0.0, launch: float = 0.0, memory_bandwidth: float = 1e30) -> Device:
    """10 FLOP/s at best, and memory that is never waited for unless told."""
    efficiency = Efficiency(peak_fraction=0.5, half=half, launch=launch)
    return Device(
        name="toy", memory=1, flops=20, memory_bandwidth=memory_bandwidth, efficiency=efficiency, source="made up"
    )


def seconds_of(
    op: Op, part: Part, rule: Rule, device: Device, itemsize: int = 4, *, input_grad: bool = True
) -> tuple[float, float]:
    """Forward and backward."""
    time = roofline(op, part, rule, device, itemsize, input_grad=input_grad)
    return time.forward, time.backward


def parts(op: Op, rule: Rule, wanted: str = "1") -> list[Part]:
    """Every part of a layer under a cut."""
    axes = rule.axes(op)
    spans = [cut(axis.size, Cut.parse(wanted).degree(axis.letter), grain=axis.grain) for axis in axes]
    return [{axis.letter: span for axis, span in zip(axes, chosen, strict=True)} for chosen in product(*spans)]


@cache
def network(name: str) -> LayerGraph:
    return capture(zoo.build(name, input=(3, 224, 224), classes=1000), torch.zeros(2, 3, 224, 224))


def ops(graph: LayerGraph) -> Iterator[tuple[Op, Rule]]:
    for layer in graph.layers:
        op = op_of(layer, graph)
        yield op, rule_for(op)


def only(module: nn.Module, *shape: int) -> tuple[Op, Rule]:
    """The one layer of a module."""
    graph = capture(module, torch.zeros(shape))
    ((op, rule),) = ops(graph)
    return op, rule


@pytest.mark.parametrize(("name", "known"), [("alexnet", 1.43e9), ("vgg16", 30.96e9), ("resnet18", 3.64e9)])
def test_networks_have_the_flops_that_are_known(name: str, known: float) -> None:
    graph = network(name)
    total = sum(flops(op, part, rule) for op, rule in ops(graph) for part in parts(op, rule))
    assert total / graph.batch == pytest.approx(known, rel=0.02)


@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
@pytest.mark.parametrize("degree", [2, 3])
def test_cuts_by_sample_add_up_to_the_whole(name: str, degree: int) -> None:
    for op, rule in ops(network(name).at_batch(4)):
        (whole,) = parts(op, rule)
        shares = [flops(op, part, rule) for part in parts(op, rule, f"n{degree}")]
        assert sum(shares) == flops(op, whole, rule), op.layer.name
        assert len(shares) == degree


CONTRACTIONS = {
    "conv": (nn.Conv2d(4, 6, 3), (2, 4, 9, 7)),
    "stride and padding": (nn.Conv2d(4, 6, (5, 3), stride=2, padding=2, bias=False), (2, 4, 9, 7)),
    "dilation": (nn.Conv2d(4, 6, 3, dilation=2, padding="same"), (2, 4, 9, 7)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 9, 7)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 7)),
    "pointwise": (nn.Conv2d(4, 6, 1), (2, 4, 9, 7)),
    "1-D": (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "3-D": (nn.Conv3d(4, 6, 3), (2, 4, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 9, 7)),
    "transposed groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 9, 7)),
    "linear": (nn.Linear(12, 7), (4, 12)),
    "linear of more dims": (nn.Linear(12, 8), (4, 3, 12)),
}


@pytest.mark.parametrize("case", CONTRACTIONS)
def test_contractions_count_as_torch_counts_them(case: str) -> None:
    """Forward, and backward with and without an input gradient; torch's counter is the oracle."""
    module, shape = CONTRACTIONS[case]
    op, rule = only(module, *shape)
    (part,) = parts(op, rule)
    for input_grad in (True, False):
        with FlopCounterMode(display=False) as counter:
            out = module(torch.zeros(shape, requires_grad=input_grad))
            forward = counter.get_total_flops()
            out.sum().backward()
        assert flops(op, part, rule) == forward
        # torch 2.13 counts the weights' gradient of grouped convolutions as if every group read all channels
        groups = int(getattr(module, "groups", 1))
        of_weights = counter.get_total_flops() - forward * (2 if input_grad else 1)
        backward = of_weights / groups + (forward if input_grad else 0)
        assert seconds_of(op, part, rule, device(), input_grad=input_grad) == pytest.approx(
            (forward / 10, backward / 10)
        )


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        *(("conv", text) for text in ("n2", "c3", "h2", "w5", "k4", "n2c2h3w2k2")),
        *(("stride and padding", text) for text in ("h5", "w4", "c2h2")),
        *(("groups", text) for text in ("c2", "n2c2h2")),
        *(("depthwise", text) for text in ("c4", "w2")),
        *(("transposed", text) for text in ("n2", "c3", "k2")),
        *(("linear", text) for text in ("n3", "c7", "k5", "n2c2k2")),
    ],
)
def test_cuts_of_a_contraction_add_up_to_the_whole(case: str, wanted: str) -> None:
    module, shape = CONTRACTIONS[case]
    op, rule = only(module, *shape)
    (whole,) = parts(op, rule)
    assert sum(flops(op, part, rule) for part in parts(op, rule, wanted)) == flops(op, whole, rule)


def test_cutting_in_halves_halves_the_work_but_never_the_whole_time() -> None:
    op, rule = only(nn.Conv2d(4, 6, 3, padding=1), 4, 4, 8, 8)
    (whole,) = parts(op, rule)
    slow = device(half=1e5, launch=1.0)
    for letter in "nchw":
        half, other = parts(op, rule, f"{letter}2")
        assert flops(op, half, rule) == flops(op, other, rule) == flops(op, whole, rule) / 2
        for part_seconds, whole_seconds in zip(
            seconds_of(op, half, rule, slow), seconds_of(op, whole, rule, slow), strict=True
        ):
            assert whole_seconds / 2 < part_seconds < whole_seconds


def test_parts_read_their_halo_and_their_weights_again() -> None:
    op, rule = only(nn.Conv2d(4, 6, 3, padding=1, bias=False), 2, 4, 8, 8)
    (whole,) = parts(op, rule)
    weights, row = 6 * 4 * 9, 2 * 4 * 8
    assert bytes_touched(op, whole, rule) == 4 * (2 * 4 * 64 + weights + 2 * 6 * 64)
    by_sample, by_height = (
        sum(bytes_touched(op, part, rule) for part in parts(op, rule, text)) for text in ("n2", "h2")
    )
    assert by_sample - bytes_touched(op, whole, rule) == 4 * weights
    assert by_height - bytes_touched(op, whole, rule) == 4 * (weights + 2 * row)
    assert bytes_touched(op, whole, rule, itemsize=2) == bytes_touched(op, whole, rule) / 2


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.MaxPool2d(3, stride=2), (2, 4, 9, 9), 2 * 4 * 16 * 9),
        (nn.AvgPool2d((2, 3)), (2, 4, 8, 9), 2 * 4 * 12 * 6),
        (nn.AvgPool1d(4), (2, 4, 8), 2 * 4 * 2 * 4),
        (nn.AdaptiveAvgPool2d(1), (2, 4, 8, 9), 2 * 4 * 72),
        (nn.ReLU(), (2, 4, 8, 9), 2 * 4 * 72),
        (nn.BatchNorm2d(4), (2, 4, 8, 9), 2 * 4 * 72 * 8),
        (nn.LayerNorm(9), (2, 4, 8, 9), 2 * 4 * 72 * 8),
        (nn.Flatten(), (2, 4, 8, 9), 0),
    ],
    ids=str,
)
def test_others_count_per_element(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    op, rule = only(module, *shape)
    (part,) = parts(op, rule)
    assert flops(op, part, rule) == expected
    assert not facts_of(op.layer.op).contracts


def test_a_norm_reads_its_input_twice() -> None:
    op, rule = only(nn.BatchNorm2d(4), 2, 4, 8, 9)
    (part,) = parts(op, rule)
    assert bytes_touched(op, part, rule) == 4 * (3 * 2 * 4 * 72 + 4 * 4)


def test_elementwise_layers_take_their_bytes_and_their_launch() -> None:
    op, rule = only(nn.ReLU(), 2, 5)
    (part,) = parts(op, rule)
    slow = device(memory_bandwidth=1e-3, launch=7.0, half=1e9)
    assert seconds_of(op, part, rule, slow) == pytest.approx((80e3 + 7, 120e3 + 7))
    assert seconds_of(op, part, rule, slow, itemsize=2) == pytest.approx((40e3 + 7, 60e3 + 7))
    assert seconds_of(op, part, rule, slow, input_grad=False) == pytest.approx((80e3 + 7, 0))


def test_small_contractions_follow_the_curve() -> None:
    op, rule = only(nn.Linear(5, 5), 2, 5)
    (part,) = parts(op, rule)
    assert seconds_of(op, part, rule, device(half=100)) == pytest.approx((20.0, 40.0))


@pytest.mark.parametrize(
    ("case", "results"),
    [
        ("conv", ((2 * 7 * 5, 6), (2 * 9 * 7, 4), (6, 4 * 9))),
        ("transposed", ((2 * 18 * 14, 6), (2 * 9 * 7, 4), (6, 4 * 9))),
        ("linear", ((4, 7), (4, 12), (7, 12))),
        ("depthwise", None),
    ],
)
def test_each_gradient_fills_tiles_by_what_it_computes(case: str, results: tuple[tuple[int, int], ...] | None) -> None:
    module, shape = CONTRACTIONS[case]
    op, rule = only(module, *shape)
    (part,) = parts(op, rule)
    plain, tile = device(), Tile(rows=128, columns=32)
    tiled = plain.model_copy(update={"efficiency": plain.efficiency.model_copy(update={"tile": tile})})
    one, other = roofline(op, part, rule, plain), roofline(op, part, rule, tiled)
    filled = [tile.filled(*result) for result in results] if results else [1.0] * 3
    assert (one.forward / other.forward, one.to_input / other.to_input, one.to_weights / other.to_weights) == (
        pytest.approx(tuple(filled))
    )


def test_a_sum_of_two_passes_its_gradient_on() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    op, rule = only(Twice(), 2, 5)
    (part,) = parts(op, rule)
    assert seconds_of(op, part, rule, device()) == (1.0, 0.0)


@pytest.mark.parametrize(
    "example", [*EXAMPLES, *WITHOUT_RULE], ids=lambda example: f"{example.op}{example.note and '*'}"
)
def test_every_operator_has_a_time_and_views_have_none(example: Example) -> None:
    op, rule = example.at_hand, example.rule
    real = Cluster.load("p100-4x4").device
    for wanted in ["1", *(f"{axis.letter}2" for axis in example.axes)]:
        for part in parts(op, rule, wanted):
            forward, backward = seconds_of(op, part, rule, real)
            if example.word in VIEWS:
                assert (forward, backward) == (0, 0)
                assert flops(op, part, rule) == bytes_touched(op, part, rule) == 0
            else:
                assert real.efficiency.launch < forward < 1e-4
                assert backward == 0 or backward >= forward
                assert op.layer.output.differentiable or backward == 0


@pytest.mark.parametrize(
    ("cluster", "batch", "images_per_second"),
    [("k20-8", 128, 1.28e6 * 90 / (98.05 * 3600)), ("titan-4", 256, 1.28e6 * 100 / (10.5 * 86400))],
)
def test_one_device_of_two_papers_takes_the_time_it_took(cluster: str, batch: int, images_per_second: float) -> None:
    """AlexNet: 90 epochs in 98.05 hours, and 100 in 10.5 days. The presets' fraction of the peak is fitted to it."""
    graph = network("alexnet").at_batch(batch)
    one = Cluster.load(cluster).device
    seconds = 0.0
    for op, rule in ops(graph):
        (part,) = parts(op, rule)
        seconds += sum(seconds_of(op, part, rule, one, input_grad=not set(op.layer.reads) <= graph.inputs.keys()))
    assert batch / seconds == pytest.approx(images_per_second, rel=0.05)
