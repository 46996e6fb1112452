"""How long a part of a layer would take on a device that is not here, from its FLOPs and its bytes.

    seconds of a kernel = max(flops / (peak * fraction), bytes / memory bandwidth) + launch

The fraction is the device's efficiency curve for convolutions and matrix products, and its upper end for all
others, whose time their bytes decide.

What this does not see: the shape of a kernel (narrow channels, odd sizes, a strided or depthwise convolution run
below the curve), faster algorithms (Winograd, FFT) and tensor cores, which pass the peak, caches that keep a tensor
between layers, kernels that a compiler fuses, copies to make a view contiguous, padding and halo assembled
before the layer, two kernels at a time, clocks that fall with heat. It ranks cuts; it is no measurement.
"""

from collections.abc import Callable, Mapping
from math import prod

from shoal.cluster import Device
from shoal.graph import State
from shoal.operators.base import Need, Op, Part, Rule
from shoal.partition import volume

_VIEWS = {
    *("view", "reshape", "flatten", "unsqueeze", "squeeze", "_unsafe_view", "unflatten", "permute", "transpose", "t"),
    *("expand", "slice", "select", "split", "split_with_sizes", "chunk", "alias", "detach"),
}
"""Words of operators that run no kernel."""
_COPIES = {
    *("cat", "pad", "constant_pad_nd", "flip", "clone", "contiguous", "to", "_to_copy", "lift_fresh_copy"),
    *("pixel_shuffle", "pixel_unshuffle", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like"),
}
"""Words of operators that move or fill elements and compute nothing."""
_MATRICES = {"matmul": "self", "mm": "self", "bmm": "self", "mv": "self", "addmm": "mat1", "baddbmm": "batch1"}
"""Words of matrix products, and the argument whose last dim is contracted."""
_PASSED = {"add"}
"""Words of operators whose input gradient is their output gradient itself."""
_NORMS = ("batch_norm", "group_norm", "layer_norm", "instance_norm", "native_batch_norm", "_native_batch_norm")
_NORM, _SOFTMAX, _LOSS = 8, 5, 5
"""FLOPs per element that is read, by a count of what the formula does to each."""


def roofline(
    op: Op, part: Part, rule: Rule, device: Device, itemsize: int = 4, *, input_grad: bool = True
) -> tuple[float, float]:
    """Seconds of forward and of backward of one part of a layer. Views are free.

    A convolution or matrix product has a kernel like forward's for each gradient, that of its input and that of its
    parameters; `input_grad=False`, for a layer that reads only the batch, leaves the first out. Others have one kernel
    that also reads the gradient, or none where there is nothing to differentiate.
    """
    if _word(op) in _VIEWS:
        return 0.0, 0.0
    work, touched = flops(op, part, rule), bytes_touched(op, part, rule, itemsize)
    curved = contracts(op)
    forward = _kernel(work, touched, device, curved=curved)
    has_parameters = any(isinstance(reference, State) for _, reference in op.layer.tensors)
    if not op.layer.output.differentiable or not (input_grad or has_parameters):
        return forward, 0.0
    if curved:
        return forward, forward * (2 if input_grad else 1)
    if _word(op) in _PASSED:
        return forward, 0.0
    gradient = volume(rule.writes(op, part)) * itemsize
    return forward, _kernel(work, touched + gradient, device, curved=False)


def flops(op: Op, part: Part, rule: Rule) -> int:
    """Floating-point operations of the forward pass of one part; a multiplication and an addition are two.

    Convolutions, pooling and matrix products are counted exactly as a direct kernel runs them, products with padding
    included; the rest, which is little, by a few per element. An operator that is not known counts one per element.
    """
    word = _word(op)
    if word in _VIEWS or word in _COPIES:
        return 0
    needs, written = rule.needs(op, part), volume(rule.writes(op, part))
    for prefix, count in _COUNTS.items():
        if word.startswith(prefix):
            return count(op, needs, written)
    if word in _MATRICES:
        return 2 * written * op.shapes[_MATRICES[word]][-1]
    return written


def bytes_touched(op: Op, part: Part, rule: Rule, itemsize: int = 4) -> int:
    """Bytes that the forward pass of one part reads and writes, each tensor once, and a norm's input twice.

    Views touch none. All tensors count `itemsize` bytes per element, whole numbers too.
    """
    if _word(op) in _VIEWS:
        return 0
    read = {name: volume(need.box) for name, need in rule.needs(op, part).items()}
    statistics = read["input"] if _word(op).startswith(_NORMS) else 0
    return (sum(read.values()) + statistics + volume(rule.writes(op, part))) * itemsize


def contracts(op: Op) -> bool:
    """Whether it is a convolution or a matrix product, which alone are bound by arithmetic."""
    return _word(op).startswith(("conv1d", "conv2d", "conv3d", "conv_transpose", "linear")) or _word(op) in _MATRICES


def _kernel(work: float, touched: float, device: Device, *, curved: bool) -> float:
    """Seconds of one kernel; nothing to do takes none."""
    if not work and not touched:
        return 0.0
    fraction = device.efficiency.fraction(work) if curved and work else device.efficiency.peak_fraction
    return max(work / (device.flops * fraction), touched / device.memory_bandwidth) + device.efficiency.launch


def _word(op: Op) -> str:
    return op.layer.op.split(".")[1]


Count = Callable[[Op, Mapping[str, Need], int], int]


def _convolution(_: Op, needs: Mapping[str, Need], written: int) -> int:
    """Every output element sums over its group's channels and the window."""
    return 2 * written * volume(needs["weight"].box[1:])


def _transposed(_: Op, needs: Mapping[str, Need], __: int) -> int:
    """Every input element is spread over its group's filters and the window."""
    return 2 * volume(needs["input"].box) * volume(needs["weight"].box[1:])


def _pool(op: Op, _: Mapping[str, Need], written: int) -> int:
    """Every output element sees its window."""
    kernel, dims = op["kernel_size"], int(_word(op)[len("max_pool")])
    numbers = tuple(kernel) if isinstance(kernel, tuple | list) else (kernel,)
    return written * int(prod(numbers if len(numbers) == dims else numbers * dims))


def _read(each: int) -> Count:
    """So many for each element of the first argument."""

    def count(_: Op, needs: Mapping[str, Need], __: int) -> int:
        return each * volume(next(iter(needs.values())).box)

    return count


_COUNTS: dict[str, Count] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), _convolution),
    "conv_transpose": _transposed,
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool", "mean", "sum"), _read(1)),
    **dict.fromkeys(_NORMS, _read(_NORM)),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _read(_SOFTMAX)),
    **dict.fromkeys(("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _read(_LOSS)),
}
"""How operators whose word begins so are counted."""
