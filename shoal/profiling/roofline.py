"""How long a part of a layer would take on a device that is not here, from its FLOPs and its bytes.

    seconds of a kernel = max(flops / (peak * fraction), bytes / memory bandwidth) + launch

The fraction is the device's efficiency curve for convolutions and matrix products, and its upper end for all
others, whose time their bytes decide. A convolution is the product of matrices that an implicit GEMM computes: a
result of so many rows (pixels of all samples) and columns (channels), padded to whole tiles of the device. So few
channels, and few pixels, cost as much as those of a tile; that is NVIDIA's "tile quantization" (Matrix Multiplication
Background, User's Guide).

What this does not see: other shapes (a strided or depthwise convolution runs below the curve), the last wave of
tiles, which leaves some units idle, narrow tiles that are less efficient than wide ones, faster algorithms (Winograd,
FFT) and tensor cores, which pass the peak, caches that keep a tensor between layers, kernels that a compiler fuses,
copies to make a view contiguous, padding and halo assembled before the layer, two kernels at a time, clocks that fall
with heat. It ranks cuts; it is no measurement.
"""

from collections.abc import Mapping

from shoal.cluster import Device
from shoal.graph import State
from shoal.operators.base import Facts, Need, Op, Part, Rule
from shoal.operators.registry import answers, facts_of
from shoal.partition import volume
from shoal.simulating.speeds import KernelTime


def roofline(
    op: Op, part: Part, rule: Rule, device: Device, itemsize: int = 4, *, input_grad: bool = True
) -> KernelTime:
    """Seconds of forward and of backward of one part of a layer. Views are free.

    A convolution or matrix product has a kernel like forward's for each gradient, that of its input and that of its
    parameters; `input_grad=False`, for a layer that reads only the batch, leaves the first out. Others have one kernel
    that also reads the gradient, or none where there is nothing to differentiate.
    """
    facts = facts_of(op.layer.op)
    if facts.view:
        return KernelTime(0.0)
    needs, written = answers(op, rule, part)
    work, touched = facts.work(op, needs, written), _touched(facts, needs, written) * itemsize
    curved = facts.contracts
    of_output, of_input, of_weights = _results(op, facts, needs, written)
    forward = _kernel(work, touched, device, of_output, curved=curved)
    has_parameters = any(isinstance(reference, State) for _, reference in op.layer.tensors)
    if not op.layer.output.differentiable or not (input_grad or has_parameters):
        return KernelTime(forward)
    if curved:
        to_input = _kernel(work, touched, device, of_input, curved=True) if input_grad else 0.0
        return KernelTime(forward, to_input, _kernel(work, touched, device, of_weights, curved=True))
    if facts.passes_gradient:
        return KernelTime(forward)
    return KernelTime(forward, _kernel(work, touched + written * itemsize, device, None, curved=False))


def flops(op: Op, part: Part, rule: Rule) -> int:
    """Floating-point operations of the forward pass of one part; a multiplication and an addition are two.

    Convolutions, pooling and matrix products are counted exactly as a direct kernel runs them, products with padding
    included; the rest, which is little, by a few per element. An operator that is not known counts one per element.
    """
    return facts_of(op.layer.op).work(op, rule.needs(op, part), volume(rule.writes(op, part)))


def bytes_touched(op: Op, part: Part, rule: Rule, itemsize: int = 4) -> int:
    """Bytes that the forward pass of one part reads and writes, each tensor once, and a norm's input twice.

    Views touch none. All tensors count `itemsize` bytes per element, whole numbers too.
    """
    facts = facts_of(op.layer.op)
    if facts.view:
        return 0
    return _touched(facts, rule.needs(op, part), volume(rule.writes(op, part))) * itemsize


def _touched(facts: Facts, needs: Mapping[str, Need], written: int) -> int:
    """Elements that one part reads and writes."""
    read = [volume(need.box) for need in needs.values()]
    again = read[0] if facts.reads_twice else 0
    return sum(read) + again + written


Result = tuple[float, float]
"""Rows and columns of what a product of matrices computes."""


def _results(
    op: Op, facts: Facts, needs: Mapping[str, Need], written: int
) -> tuple[Result | None, Result | None, Result | None]:
    """What forward and the two gradients compute, where they are products: pixels and samples by channels, and output
    channels by input channels and windows, whose sums over pixels and samples can be divided without end.
    """
    channels = facts.channels(op, needs)
    if channels is None:
        return None, None, None
    outputs, inputs = channels
    read, weights = volume(needs["input"].box), volume(needs["weight"].box)
    return (written / outputs, outputs), (read / inputs, inputs), (outputs, weights / outputs)


def _kernel(work: float, touched: float, device: Device, result: Result | None, *, curved: bool) -> float:
    """Seconds of one kernel; nothing to do takes none."""
    if not work and not touched:
        return 0.0
    fraction = device.efficiency.fraction(work, result) if curved and work else device.efficiency.peak_fraction
    return max(work / (device.flops * fraction), touched / device.memory_bandwidth) + device.efficiency.launch
