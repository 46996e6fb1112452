"""Every rule, under random cuts: a cut operator is one device's, in values, gradients, buffers and bytes."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import PlanError
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.execution.module import ParallelModule
from shoal.operators.registry import WHOLE
from shoal.partition import Cut, slices, whole
from shoal.plan import Plan
from shoal.transport import Transport
from shoal.transport.memory import run_ranks
from tests.unit.operator_cases import (
    WITHOUT_RULE,
    Example,
    Function,
    Subject,
    agree,
    fitting_cuts,
    quick_ranks,
    subject_of,
)
from tests.unit.operator_cases import random as values

few = settings(max_examples=8, deadline=None, derandomize=True)
many = settings(max_examples=20, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick_ranks():
        yield


# One operator, random arguments, a random cut


def cut_anyhow(data: st.DataObject, example: Example) -> None:
    world = data.draw(st.integers(1, 4), "ranks")
    example.agrees(data.draw(st.sampled_from(fitting_cuts(example.axes, world)), "cut"), world)


def numbers(data: st.DataObject, dims: int, low: int, high: int, what: str) -> tuple[int, ...]:
    return tuple(data.draw(st.tuples(*(st.integers(low, high),) * dims), what))


def image(data: st.DataObject, dims: int, channels: int | None = None) -> Tensor:
    """Fewer rows where there are more dims."""
    sizes = numbers(data, dims, 1, (11, 7, 5)[dims - 1], "size")
    front = (data.draw(st.integers(1, 3), "samples"), channels or data.draw(st.integers(1, 5), "channels"))
    return values(*front, *sizes)


def grouping(data: st.DataObject) -> tuple[int, int, int]:
    """(groups, input channels per group, output channels per group); depthwise where there is one per group."""
    groups = data.draw(st.sampled_from([1, 1, 2, 3, 4]), "groups")
    return groups, data.draw(st.integers(1, 3), "in"), data.draw(st.integers(1, 3), "out")


@pytest.mark.parametrize("dims", [1, 2, 3])
@many
@given(data=st.data())
def test_convolution(dims: int, data: st.DataObject) -> None:
    groups, per_group, filters = grouping(data)
    x = image(data, dims, groups * per_group)
    kernel = numbers(data, dims, 1, (5, 5, 3)[dims - 1], "kernel")
    dilation = numbers(data, dims, 1, 3, "dilation")
    arguments: dict[str, Any] = {
        "weight": values(groups * filters, per_group, *kernel, seed=1),
        "bias": values(groups * filters, seed=2) if data.draw(st.booleans(), "bias") else None,
        "dilation": dilation,
        "groups": groups,
    }
    named = data.draw(st.sampled_from(["", "", "", "same", "valid"]), "padding's name")
    padding = numbers(data, dims, 0, 3, "padding")
    arguments["padding"] = named or padding
    if named != "same":
        arguments["stride"] = numbers(data, dims, 1, 3, "stride")
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        room = [s + (0 if named else 2 * p) for s, p in zip(x.shape[2:], padding, strict=True)]
        assume(all(r > k for r, k in zip(room, reach, strict=True)))
    cut_anyhow(data, Example(f"conv{dims}d.{'padding' if named else 'default'}", x, arguments, "input"))


@pytest.mark.parametrize("dims", [1, 2, 3])
@many
@given(data=st.data())
def test_transposed_convolution(dims: int, data: st.DataObject) -> None:
    groups, per_group, filters = grouping(data)
    x = image(data, dims, groups * per_group)
    kernel = numbers(data, dims, 1, (5, 4, 3)[dims - 1], "kernel")
    stride, dilation = numbers(data, dims, 1, 3, "stride"), numbers(data, dims, 1, 2, "dilation")
    padding, extra = numbers(data, dims, 0, 2, "padding"), numbers(data, dims, 0, 2, "output padding")
    assume(all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)))
    sizes = zip(x.shape[2:], kernel, stride, dilation, padding, extra, strict=True)
    assume(all((size - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for size, k, s, d, p, e in sizes))
    arguments = {
        "weight": values(groups * per_group, filters, *kernel, seed=1),
        "bias": values(groups * filters, seed=2) if data.draw(st.booleans(), "bias") else None,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "groups": groups,
        "dilation": dilation,
    }
    cut_anyhow(data, Example(f"conv_transpose{dims}d.{'default' if dims == 1 else 'input'}", x, arguments, "input"))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg"])
@many
@given(data=st.data())
def test_pooling(kind: str, dims: int, data: st.DataObject) -> None:
    x = image(data, dims)
    kernel = numbers(data, dims, 1, 4, "kernel")
    dilation = numbers(data, dims, 1, 2, "dilation") if kind == "max" else (1,) * dims
    padding = tuple(min(p, k // 2) for p, k in zip(numbers(data, dims, 0, 2, "padding"), kernel, strict=True))
    stride = data.draw(st.sampled_from([(), numbers(data, dims, 1, 3, "stride")]), "strided")
    ceil_mode = data.draw(st.booleans(), "ceil mode")
    sizes = list(zip(x.shape[2:], kernel, padding, dilation, stride or kernel, strict=True))
    assume(all(size + 2 * p >= d * (k - 1) + 1 for size, k, p, d, _ in sizes))
    arguments: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "ceil_mode": ceil_mode,
    }
    if kind == "max":
        # torch itself writes out of bounds where a window with gaps holds no element at all
        assume(all(d == 1 or (size >= d * k and not ceil_mode) for size, k, _, d, _ in sizes))
        arguments["dilation"] = dilation
    else:
        assume(all(size >= k for size, k, *_ in sizes))
        arguments["count_include_pad"] = data.draw(st.booleans(), "count padding")
        if dims > 1:
            arguments["divisor_override"] = data.draw(st.sampled_from([None, 5]), "divisor")
    cut_anyhow(data, Example(f"{kind}_pool{dims}d.default", x, arguments))


@pytest.mark.parametrize("dims", [1, 2, 3])
@few
@given(data=st.data())
def test_adaptive_average_pooling(dims: int, data: st.DataObject) -> None:
    x, rows = image(data, dims), numbers(data, dims, 1, 5, "rows")
    cut_anyhow(data, Example(f"adaptive_avg_pool{dims}d.default", x, {"output_size": rows}))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", ["upsample_nearest", "_upsample_nearest_exact", "linear"])
@few
@given(data=st.data())
def test_upsampling(mode: str, dims: int, data: st.DataObject) -> None:
    x = image(data, dims)
    by_size = data.draw(st.booleans(), "by size")
    factors = data.draw(st.tuples(*(st.sampled_from([1.0, 1.5, 2.0, 2.3, 3.0, 0.6]),) * dims), "factors")
    assume(by_size or all(int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)))
    arguments: dict[str, Any] = {
        "output_size": numbers(data, dims, 1, 9, "rows") if by_size else None,
        "scale_factors": None if by_size else factors,
    }
    word = f"{mode}{dims}d"
    if mode == "linear":
        word = f"upsample_{('linear', 'bilinear', 'trilinear')[dims - 1]}{dims}d"
        arguments["align_corners"] = data.draw(st.booleans(), "align corners")
    cut_anyhow(data, Example(f"{word}.vec", x, arguments, "input"))


@pytest.mark.parametrize("mode", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize(
    ("channels", "size", "rows"), [(2, 78, 151), (1, 78, 151), (3, 41, 47), (1, 2, 45), (2, 29, 59)]
)
def test_nearest_rounds_as_float32_does(mode: str, channels: int, size: int, rows: int) -> None:
    x = values(1, channels, size, 2).float()
    example = Example(f"{mode}2d.vec", x, {"output_size": (rows, 2), "scale_factors": None}, "input")
    example.agrees(Cut.of(h=3))


@pytest.mark.parametrize("word", ["pixel_shuffle", "pixel_unshuffle"])
@few
@given(data=st.data())
def test_pixel_shuffles(word: str, data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, 3), "factor")
    samples, channels, height, width = numbers(data, 4, 1, 3, "shape")
    if word == "pixel_shuffle":
        shape, name = (samples, channels * factor**2, height, width), "upscale_factor"
    else:
        shape, name = (samples, channels, height * factor, width * factor), "downscale_factor"
    cut_anyhow(data, Example(f"{word}.default", values(*shape), {name: factor}))


@many
@given(data=st.data())
def test_linear(data: st.DataObject) -> None:
    *front, inside, outside = numbers(data, data.draw(st.integers(2, 5), "dims") + 1, 1, 5, "sizes")
    bias = values(outside, seed=2) if data.draw(st.booleans(), "bias") else None
    weight = values(outside, inside, seed=1)
    cut_anyhow(data, Example("linear.default", values(*front, inside), {"weight": weight, "bias": bias}, "input"))


@pytest.mark.parametrize("word", ["mean", "sum"])
@many
@given(data=st.data())
def test_reductions(word: str, data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(1, 5), "dims"), 1, 4, "shape"))
    dims = data.draw(st.lists(st.integers(0, x.ndim - 1), min_size=1, unique=True), "reduced")
    signed = tuple(dim - x.ndim * data.draw(st.integers(0, 1)) for dim in dims)
    arguments = {"dim": signed, "keepdim": data.draw(st.booleans(), "keep")}
    every = data.draw(st.sampled_from([False, False, True]), "all")
    overload = "default" if every else "dim" if word == "mean" else "dim_IntList"
    cut_anyhow(data, Example(f"{word}.{overload}", x, {} if every else arguments))


@many
@given(data=st.data())
def test_batch_norm(data: st.DataObject) -> None:
    channels, dims = data.draw(st.integers(1, 4), "channels"), data.draw(st.integers(0, 3), "dims")
    x = values(data.draw(st.integers(2, 4)), channels, *numbers(data, dims, 1, 4, "size"))
    affine: dict[str, Any] = {"weight": values(channels, seed=1), "bias": values(channels, seed=2)}
    running: dict[str, Any] = {
        "running_mean": values(channels, seed=3),
        "running_var": values(channels, seed=4, low=0.5),
    }
    affine = affine if data.draw(st.booleans(), "affine") else {"weight": None, "bias": None}
    training = data.draw(st.booleans(), "training")
    if training and not data.draw(st.booleans(), "running"):
        running = {"running_mean": None, "running_var": None}
    rest = {"training": training, "momentum": data.draw(st.sampled_from([0.0, 0.1, 0.7, 1.0]), "momentum"), "eps": 1e-5}
    cut_anyhow(data, Example("batch_norm.default", x, {**affine, **running, **rest, "cudnn_enabled": False}, "input"))


@many
@given(data=st.data())
def test_group_and_instance_norm(data: st.DataObject) -> None:
    groups, per_group = data.draw(st.integers(1, 4), "groups"), data.draw(st.integers(1, 3), "per group")
    instance = data.draw(st.booleans(), "instance")
    dims = data.draw(st.integers(1 if instance else 0, 3), "dims")
    x = values(data.draw(st.integers(1, 3)), groups * per_group, *numbers(data, dims, 1, 4, "size"))
    assume(x[0, 0].numel() > 1 if instance else x[:, :per_group].numel() > 1)
    arguments: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-3, "cudnn_enabled": False}
    if data.draw(st.booleans(), "affine"):
        arguments |= {"weight": values(x.shape[1], seed=1), "bias": values(x.shape[1], seed=2)}
    if instance:
        arguments |= {"running_mean": None, "running_var": None, "use_input_stats": True, "momentum": 0.1}
    else:
        arguments |= {"num_groups": groups}
    cut_anyhow(data, Example(f"{'instance' if instance else 'group'}_norm.default", x, arguments, "input"))


@many
@given(data=st.data())
def test_layer_norm(data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(1, 5), "dims"), 1, 4, "shape"))
    inner = x.shape[data.draw(st.integers(0, x.ndim - 1), "first") :]
    arguments: dict[str, Any] = {"normalized_shape": inner, "eps": 1e-3}
    if data.draw(st.booleans(), "affine"):
        arguments |= {"weight": values(*inner, seed=1), "bias": values(*inner, seed=2)}
    cut_anyhow(data, Example("layer_norm.default", x, arguments, "input"))


@pytest.mark.parametrize("word", ["softmax", "log_softmax"])
@few
@given(data=st.data())
def test_softmax(word: str, data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(1, 5), "dims"), 1, 4, "shape"), low=-30, high=30)
    cut_anyhow(data, Example(f"{word}.int", x, {"dim": data.draw(st.integers(-x.ndim, x.ndim - 1), "dim")}))


@pytest.mark.parametrize("word", ["dropout", "feature_dropout", "native_dropout", "bernoulli"])
@few
@given(data=st.data())
def test_masks_do_not_depend_on_the_plan(word: str, data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(2, 5), "dims"), 1, 4, "shape"))
    arguments: dict[str, Any] = {"p": data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]), "p")}
    if word == "bernoulli":
        cut_anyhow(data, Example("bernoulli.p", x, arguments, drawn=True))
    else:
        arguments["train"] = data.draw(st.booleans(), "train")
        result = 0 if word == "native_dropout" else None
        cut_anyhow(data, Example(f"{word}.default", x, arguments, "input", result, drawn=True))


def test_dropout_drops_and_scales() -> None:
    x = torch.ones(64, 100, dtype=torch.float64)
    out = Example("dropout.default", x, {"p": 0.25, "train": True}, "input", drawn=True).subject.reference.out
    assert set(out.flatten().tolist()) == {0.0, 1 / 0.75}
    assert 0.22 < float((out == 0).double().mean()) < 0.28


@many
@given(data=st.data())
def test_views(data: st.DataObject) -> None:
    """Reshape between any two shapes of as many elements."""
    factors = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6), "factors")

    def shape(what: str) -> tuple[int, ...]:
        ends = data.draw(st.lists(st.integers(0, len(factors)), max_size=4), what)
        edges = [0, *sorted(ends), len(factors)]
        return tuple(_product(factors[a:b]) for a, b in pairwise(edges))

    cut_anyhow(data, Example("reshape.default", values(*shape("old")), {"shape": shape("new")}))


def _product(factors: list[int]) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


@many
@given(data=st.data())
def test_permutations(data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(2, 5), "dims"), 1, 4, "shape"))
    dims = tuple(d - x.ndim * data.draw(st.integers(0, 1)) for d in data.draw(st.permutations(range(x.ndim)), "order"))
    example = data.draw(
        st.sampled_from(
            [
                Example("permute.default", x, {"dims": dims}),
                Example("transpose.int", x, {"dim0": dims[0], "dim1": dims[-1]}),
                Example("flip.default", x, {"dims": dims[:2]}),
            ]
        )
    )
    cut_anyhow(data, example)


@many
@given(data=st.data())
def test_chosen_rows(data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(2, 5), "dims"), 1, 6, "shape"))
    dim = data.draw(st.integers(-x.ndim, x.ndim - 1), "dim")
    size = x.shape[dim]
    word = data.draw(st.sampled_from(["slice.Tensor", "select.int", "split.Tensor", "split.sizes", "chunk.default"]))
    arguments: dict[str, Any] = {"dim": dim}
    result = None
    if word == "slice.Tensor":
        arguments["start"] = data.draw(st.none() | st.integers(-size - 1, size - 1), "start")
        arguments["end"] = data.draw(st.none() | st.integers(-size, size + 3), "end")
        arguments["step"] = data.draw(st.integers(1, 3), "step")
    elif word == "select.int":
        arguments["index"] = data.draw(st.integers(-size, size - 1), "index")
    elif word == "split.Tensor":
        arguments["split_size"] = data.draw(st.integers(1, size), "rows")
        result = data.draw(st.integers(0, -(-size // arguments["split_size"]) - 1), "which")
    elif word == "split.sizes":
        first = data.draw(st.integers(0, size), "rows")
        arguments["split_size"], result = (first, size - first), data.draw(st.integers(0, 1), "which")
    else:
        arguments["chunks"] = data.draw(st.integers(1, size + 1), "chunks")
        result = data.draw(st.integers(0, len(x.chunk(arguments["chunks"], dim)) - 1), "which")
    example = Example(word, x, arguments, result=result)
    assume(0 not in example.at_hand.out)
    cut_anyhow(data, example)


@many
@given(data=st.data())
def test_concatenation(data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(1, 5), "dims"), 1, 4, "shape"))
    dim = data.draw(st.integers(-x.ndim, x.ndim - 1), "dim")
    others = []
    for seed, rows in enumerate(data.draw(st.lists(st.integers(0, 4), max_size=3), "others")):
        shape = list(x.shape)
        shape[dim] = rows
        others.append(x if rows == 4 else values(*shape, seed=seed))
    cut_anyhow(data, Example("cat.default", x, {"tensors": (*others[:1], x, *others[1:]), "dim": dim}, ""))


@many
@given(data=st.data())
def test_padding(data: st.DataObject) -> None:
    x = values(*numbers(data, data.draw(st.integers(3, 5), "dims"), 2, 4, "shape"))
    mode = data.draw(st.sampled_from(["constant", "constant", "reflect", "replicate", "circular"]), "mode")
    some = range(1, x.ndim + 1) if mode == "constant" else range(x.ndim - 2, min(x.ndim, 4))  # what torch can
    padded = data.draw(st.sampled_from(some), "padded dims")
    widths = numbers(data, 2 * padded, -1 if mode == "constant" else 0, 4 if mode == "constant" else 1, "widths")
    rows = zip(reversed(x.shape), widths[::2], widths[1::2], strict=False)
    assume(all(size + before + after > 0 for size, before, after in rows))
    value = data.draw(st.sampled_from([None, 0.0, 2.5]), "value") if mode == "constant" else None
    cut_anyhow(data, Example("pad.default", x, {"pad": widths, "mode": mode, "value": value}))


@few
@given(data=st.data())
def test_expansion(data: st.DataObject) -> None:
    shape = numbers(data, data.draw(st.integers(1, 4), "dims"), 1, 3, "shape")
    more = numbers(data, data.draw(st.integers(0, 5 - len(shape)), "new dims"), 1, 3, "more")
    size = (*more, *(3 if rows == 1 else -1 for rows in shape))
    cut_anyhow(data, Example("expand.default", values(*shape), {"size": size}))


@many
@given(data=st.data())
def test_broadcasting(data: st.DataObject) -> None:
    shape = numbers(data, data.draw(st.integers(1, 5), "dims"), 1, 4, "shape")
    kept = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)), "kept")
    other = tuple(rows if keep else 1 for rows, keep in zip(shape, kept, strict=True))
    other = other[data.draw(st.integers(0, len(other)), "dims left out") :]
    pair = [values(*shape), values(*other, seed=1, low=0.5)]
    if data.draw(st.booleans(), "the batch is the smaller one") and len(other) == len(shape):
        pair.reverse()
    word = data.draw(st.sampled_from(["add", "sub", "mul", "div"]), "operator")
    cut_anyhow(data, Example(f"{word}.Tensor", pair[0], {"other": pair[1]}))


@few
@given(data=st.data())
def test_prelu(data: st.DataObject) -> None:
    x = image(data, data.draw(st.integers(1, 3), "dims"))
    rows = data.draw(st.sampled_from([1, x.shape[1]]), "weights")
    cut_anyhow(data, Example("prelu.default", x, {"weight": values(rows, seed=1)}))


@many
@given(data=st.data())
def test_losses_of_scores(data: st.DataObject) -> None:
    """One loss per sample or pixel, from scores that are cut by class."""
    samples, classes, *space = numbers(data, 2 + data.draw(st.integers(0, 3), "dims"), 1, 4, "shape")
    target = torch.arange(samples * _product(space)).view(samples, *space).mul(7).remainder(classes)
    ignored = data.draw(st.sampled_from([-100, 0]), "ignored")
    target = target.masked_fill(target == 1, -100) if ignored == -100 and classes > 1 else target
    arguments: dict[str, Any] = {"target": target, "reduction": 0, "ignore_index": ignored}
    x = values(samples, classes, *space, low=-20, high=20)
    word = data.draw(st.sampled_from(["cross_entropy_loss", "nll_loss_nd"]), "operator")
    if word == "cross_entropy_loss":
        arguments["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.2, 1.0]), "smoothing")
    cut_anyhow(data, Example(f"{word}.default", x, arguments))


@pytest.mark.parametrize("example", WITHOUT_RULE, ids=lambda e: e.op)
@pytest.mark.parametrize("world", [1, 3])
def test_an_operator_without_a_rule_runs_whole(example: Example, world: int) -> None:
    assert example.rule is WHOLE
    example.agrees(Cut(), world)


def unusual() -> Iterator[Example]:
    """Calls that a rule does not speak of: they run whole, or as the rule says, and are right."""
    x = values(3, 4, 5)
    weight = values(2, 3, 3, 3, seed=1)
    yield Example("conv2d.default", x, {"weight": weight, "bias": values(2), "padding": (1, 1)}, "input")
    yield Example("conv_transpose2d.input", x, {"weight": values(3, 2, 2, 2)}, "input")
    yield Example("conv1d.default", values(3, 4), {"weight": values(2, 3, 2)}, "input")
    yield Example("max_pool2d.default", x, {"kernel_size": (2, 2)})
    yield Example("avg_pool2d.default", x, {"kernel_size": (2, 2)})
    yield Example("adaptive_avg_pool2d.default", x, {"output_size": (2, 2)})
    yield Example("pixel_shuffle.default", values(8, 2, 3), {"upscale_factor": 2})
    yield Example("pixel_shuffle.default", values(2, 2, 4, 2, 3), {"upscale_factor": 2})
    yield Example("upsample_nearest2d.default", values(1, 2, 3, 3), {"output_size": (4, 5), "scales_h": 1.5})
    yield Example("linear.default", values(5), {"weight": values(4, 5), "bias": values(4)}, "input")
    yield Example("linear.default", values(2, 1, 2, 1, 2, 3), {"weight": values(4, 3)}, "input")
    yield Example("relu.default", values(2, 2, 2, 2, 2, 2), {})
    yield Example("mean.dim", values(2, 2, 2, 2, 2, 2), {"dim": (1, -1)})
    yield Example("mean.dim", values(2, 3).float(), {"dim": (1,), "dtype": torch.float64})
    yield Example("softmax.int", values(2, 3).float(), {"dim": 1, "dtype": torch.float64})
    yield Example("view.dtype", values(2, 4), {"dtype": torch.int64})
    yield Example("to.other", values(2, 4), {"other": torch.zeros(3, dtype=torch.float32)})
    yield Example("cat.default", x, {"tensors": (x, values(3, 0, 5)), "dim": 1}, "")
    yield Example("cat.default", x, {"tensors": (x, values(0)), "dim": 1}, "")
    yield Example("prelu.default", values(3), {"weight": values(1)})
    yield Example("mse_loss.default", x, {"target": values(3, 1, 5)})
    yield Example("mse_loss.default", x, {"target": values(3, 4, 5, seed=1)})
    yield Example("l1_loss.default", x, {"target": values(3, 4, 5, seed=1), "reduction": 2})
    yield Example("cross_entropy_loss.default", values(3, 4), {"target": torch.tensor([1, 0, 3])})
    yield Example("cross_entropy_loss.default", values(4), {"target": torch.tensor(1), "reduction": 0})
    yield Example("cross_entropy_loss.default", values(3, 4), {"target": values(3, 4).softmax(1), "reduction": 0})
    attention = "scaled_dot_product_attention.default"
    yield Example(attention, values(5, 2), {"key": values(6, 2), "value": values(6, 3)}, "query")
    shared = {"key": values(2, 2, 6, 2), "value": values(2, 2, 6, 3), "enable_gqa": True}
    yield Example(attention, values(2, 4, 5, 2), shared, "query")
    yield Example("instance_norm.default", values(2, 3, 4), {
        "weight": None, "bias": None, "running_mean": values(3), "running_var": values(3, low=0.5),
        "use_input_stats": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False,
    }, "input")  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:An output with one or more")
@pytest.mark.parametrize("example", tuple(unusual()), ids=lambda e: f"{e.op}{tuple(e.x.shape)}")
def test_unusual_calls_are_right(example: Example) -> None:
    for cut in fitting_cuts(example.axes, 3):
        example.agrees(cut, 3)


@pytest.mark.parametrize(
    "example",
    [
        Example("alpha_dropout.default", values(3, 5), {"p": 0.5, "train": True}, "input", drawn=True),
        Example("bernoulli.default", values(3, 5, low=0.0), {}, drawn=True),
        Example("rand_like.default", values(3, 5), {}, drawn=True),
        Example("rrelu.default", values(3, 5), {"training": True}, drawn=True),
    ],
    ids=lambda e: e.op,
)
def test_without_a_rule_random_numbers_are_the_same_on_every_rank(example: Example) -> None:
    assert example.rule is WHOLE
    state = torch.get_rng_state()
    example.agrees(Cut(), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(example.subject.reference.out.flatten().tolist())) > 1


# Modules: several operators, each under a random cut of its own


class Excite(nn.Module):
    """Squeeze and excitation: an operand of shape (N, C, 1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(torch.relu(self.down(pooled))))


class TinyUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high: Tensor = torch.relu(self.down(x))
        low = self.up(self.middle(F.max_pool2d(high, 2)))
        result: Tensor = self.last(torch.cat([high, low], 1))
        return result


class Twice(nn.Module):
    """One layer and its statistics used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(self.norm(self.conv(x))))
        return result


class StochasticDepth(nn.Module):
    """As torchvision has it: a row of the batch is dropped as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype)
        noise = noise.bernoulli_(0.6)
        noise.div_(0.6)
        kept: Tensor = x + self.conv(x) * noise
        return kept


class DropWeights(nn.Module):
    """Dropout of a weight: it does not see the batch, so every rank draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.linear.weight, 0.5), self.linear.bias)


class Dynamic(nn.Module):
    """A kernel that is computed from the batch, and parameters that are added to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(5, 9)
        self.one, self.other = nn.Parameter(torch.zeros(2, 1, 1)), nn.Parameter(torch.zeros(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.make(x.mean((0, 1, 2))).view(1, 1, 3, 3).expand(2, 1, 3, 3)
        return F.conv2d(x, kernel, padding=1, groups=2) + (self.one + self.other)


class Attention(nn.Module):
    """Two heads over all pixels, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.mix = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        n, length, features = pixels.shape
        query, key, value = self.make(pixels).reshape(n, length, 3, 2, features // 2).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = pixels + self.mix(seen.transpose(1, 2).reshape(n, length, features))
        return mixed


def shuffle(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3, stride=2),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def conv_next() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4), Function(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(4),
        nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), Function(lambda x: x.permute(0, 3, 1, 2)),
    )  # fmt: skip


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv net": (conv_net, (3, 2, 11, 10)),
    "conv next": (conv_next, (2, 4, 3, 5)),
    "excite": (Excite, (2, 4, 5, 3)),
    "u-net": (TinyUNet, (2, 2, 6, 4)),
    "twice": (Twice, (2, 3, 5, 3)),
    "attention": (Attention, (2, 4, 3, 2)),
    "dynamic kernel": (Dynamic, (2, 2, 4, 5)),
    "channel shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Function(shuffle)), (2, 3, 3, 3)),
    "response norm": (lambda: nn.LocalResponseNorm(3, alpha=0.5, beta=0.6), (2, 5, 3, 3)),
    "response norm 1d": (lambda: nn.LocalResponseNorm(2, alpha=0.5), (2, 5, 4)),
    "batch norm, evaluation": (lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).eval(), (2, 2, 3, 3)),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3)), (5, 3)),
    "batch norm without anything": (lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False), (2, 3, 3, 3)),
    "instance norm with statistics": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 3)),
    "reflected convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 2, 5, 6)),
    "interpolated": (lambda: Function(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear")), (2, 2, 5, 3)),
    "nearest": (lambda: Function(lambda x: F.interpolate(x, size=(7, 4), mode="nearest-exact")), (2, 2, 5, 3)),
    "scalars": (lambda: Function(lambda x: x + x.mean().sum() + x.mean().softmax(0)), (3, 4)),
    "stopped": (lambda: Function(lambda x: (x * x.detach()).relu() + (x > 0)), (2, 3, 4)),
    "without a rule": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), Function(lambda x: x.cumsum(2).roll(1, 3)), nn.AdaptiveMaxPool2d(2)),
        (2, 2, 6, 5),
    ),
    "without a batch": (
        lambda: nn.Sequential(Function(lambda x: x[0]), nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)),
        (2, 2, 6, 6),
    ),
    "slices": (lambda: Function(lambda x: x[:, ::2, 1:, -1] + x.chunk(2, 1)[1][:, :, :-1, 0]), (2, 4, 5, 3)),
}  # fmt: skip
DRAWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropouts": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.3), nn.Conv2d(3, 4, 1), nn.Dropout2d(0.5)),
        (3, 2, 5, 5),
    ),
    "stochastic depth": (StochasticDepth, (4, 2, 3, 3)),
    "dropped weights": (DropWeights, (3, 4)),
}


@cache
def module_of(name: str, *, input_grad: bool = True) -> Subject:
    make, shape = (MODULES | DRAWN)[name]
    return subject_of(make(), *shape, input_grad=input_grad, drawn=name in DRAWN)


def cut_each_layer(data: st.DataObject, subject: Subject) -> None:
    world = data.draw(st.integers(1, 4), "ranks")
    cuts = {
        name: data.draw(st.sampled_from(fitting_cuts(axes, world)), name) for name, axes in subject.cuttable().items()
    }
    try:
        agree(subject, cuts, world)
    except PlanError as refusal:
        assert "share" in str(refusal)  # noqa: PT017 - layers with a common parameter need one cut


@pytest.mark.parametrize("name", [*MODULES, *DRAWN])
@few
@given(data=st.data())
def test_modules(name: str, data: st.DataObject) -> None:
    cut_each_layer(data, module_of(name))


@pytest.mark.parametrize("name", ["conv net", "conv next", "batch norm 1d", "twice"])
@few
@given(data=st.data())
def test_modules_whose_input_needs_no_gradient(name: str, data: st.DataObject) -> None:
    cut_each_layer(data, module_of(name, input_grad=False))


@few
@given(data=st.data())
def test_a_norm_that_reads_the_input_sends_no_gradient_back(data: st.DataObject) -> None:
    cut_each_layer(data, first_norm(data.draw(st.integers(0, 2), "norm")))


@cache
def first_norm(which: int) -> Subject:
    norm = (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([4, 3, 5]))[which]
    return subject_of(norm, 3, 4, 3, 5, input_grad=False)


def test_statistics_that_only_some_ranks_would_update_are_refused() -> None:
    cuts = {name: Cut() for name in module_of("twice").cuttable()} | {"norm.batch_norm": Cut.of(w=2)}
    with pytest.raises(PlanError, match=r"'norm' updates 'norm.running_mean', .* on some of their ranks only"):
        agree(module_of("twice"), cuts, 2)


def test_gradients_that_are_equal_do_not_share_memory() -> None:
    """A sum hands one gradient to all that it adds; clipping both in place would then clip twice."""
    example = Example("add.Tensor", values(2, 3), {"self": values(2, 3, seed=1), "other": values(2, 3, seed=2)}, "")
    (_, _, module), *_ = run_ranks(1, lambda link: example.subject._step(Plan(name="p", ranks=1, layers=()), link))
    one, other = module._states["self"].grad, module._states["other"].grad
    assert one is not None
    assert other is not None
    assert one.data_ptr() != other.data_ptr()


# Losses at the end of a network


def scores(space: tuple[int, ...]) -> nn.Module:
    return nn.Conv2d(3, 5, 3, padding=1) if space else nn.Linear(3, 5)


LOSSES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.CrossEntropyLoss(), ()),
    "weights": (nn.CrossEntropyLoss(values(5, low=0.1).double()), ()),
    "smoothed weights": (nn.CrossEntropyLoss(values(5, low=0.1).double(), label_smoothing=0.2), (3, 2)),
    "ignored": (nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1), (3, 2)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), ()),
    "doubled": (Function(lambda x: x), (2, 2)),
    "nll": (nn.NLLLoss(values(5, low=0.1).double(), ignore_index=1), (3, 2)),
    "squares": (nn.MSELoss(), (3, 2)),
    "huber": (nn.HuberLoss(), ()),
}


@cache
def loss_case(name: str) -> tuple[Captured, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    loss, space = LOSSES[name]
    if name == "doubled":
        loss = Doubled()
    model = scores(space).double()
    if name == "nll":
        model = nn.Sequential(model, nn.LogSoftmax(1))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=seed))
    x = values(4, 3, *space)
    target = torch.arange(4 * _product(list(space))).view(4, *space).remainder(5)
    if name in ("squares", "huber"):
        target = values(4, 5, *space, seed=9)
    return capture_modes(model, x, loss=loss, target=target), loss, x, target


class Doubled(nn.Module):
    """A mean that is not the last thing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * F.cross_entropy(x, y)


@pytest.mark.parametrize("io", ["share", "whole"])
@pytest.mark.parametrize("name", list(LOSSES))
@few
@given(data=st.data())
def test_losses_at_the_end(name: str, io: Any, data: st.DataObject) -> None:
    captured, loss, x, target = loss_case(name)
    model = captured.model
    model.zero_grad()
    one = loss(model(x), target)
    torch.autograd.backward(one)
    subject = Subject(captured, x, None)
    world = data.draw(st.integers(1, 4), "ranks")
    cuts = {
        name: data.draw(st.sampled_from(fitting_cuts(axes, world)), name) for name, axes in subject.cuttable().items()
    }
    plan = Plan(name="test", ranks=world, layers=tuple(cuts.items()))

    def step(transport: Transport) -> tuple[float, float, ParallelModule]:
        module = lay(captured, plan, transport, io=io, seed=0, bucket_bytes=1 << 10)
        mine = slice(None)
        if io == "share":
            edges = [4 * rank // world for rank in range(world + 1)]
            mine = slice(edges[transport.rank], edges[transport.rank + 1])
        share = module(x[mine], target[mine])
        share.backward()
        return float(share.detach()), _weight_of(loss, target[mine]), module

    results = run_ranks(world, step)
    total = sum(weight for _, weight, _ in results)
    assert sum(share * weight for share, weight, _ in results) / total == pytest.approx(float(one.detach()), rel=1e-9)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for rank, (_, _, module) in enumerate(results):
            box, grad = module._states.layouts[name][rank], module._states[name].grad
            if box is not None and grad is not None:
                wanted = parameter.grad[slices(box, whole(parameter.shape))]
                assert torch.allclose(grad, wanted, rtol=1e-9, atol=1e-11)


def _weight_of(loss: object, target: Tensor) -> float:
    if isinstance(loss, Doubled) or getattr(loss, "reduction", "mean") == "sum":
        return 1.0
    ignored = getattr(loss, "ignore_index", None)
    weight = getattr(loss, "weight", None)
    if target.is_floating_point():
        return float(target.numel())
    counted: Tensor = target.ne(-1 if ignored is None else ignored)
    return float(counted.sum() if weight is None else (weight[target] * counted).sum())


def test_a_target_that_is_no_class_is_an_error_under_a_cut_too() -> None:
    example = Example("cross_entropy_loss.default", values(2, 4), {"target": torch.tensor([1, 3]), "reduction": 0})
    example.subject.captured.states["target"].fill_(4)
    with pytest.raises(RuntimeError, match="not one of the 4 classes"):
        example.subject.ranks({"op": Cut.of(c=2)}, 2)
