"""Operators that slide a window: convolution, transposed convolution, pooling, upsampling.

Note "true borders": along a dim that is not cut a part reads all rows and the kernel pads as always. Along a
cut dim the part reads the rows its windows touch; rows that lie in the padding are filled in while the tile is
assembled, and the kernel pads nothing. A part whose windows lie wholly in the padding gets a tile of fill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.operators.base import Axis, Call, Facts, Need, Op, Part, Rule, letters, of_each
from shoal.operators.views import Moved, clamp
from shoal.partition import Box, Span, volume


def spatial_letters(op: Op) -> str:
    """Letters of the dims that the window slides over."""
    return letters(len(op.out))[2:]


def per_dim(value: Any, dims: int) -> list[int]:
    """One number for every spatial dim, from one number or a list.

    >>> per_dim((2,), 2), per_dim(3, 1), per_dim((1, 2), 2)
    ([2, 2], [3], [1, 2])
    """
    numbers = list(value) if isinstance(value, Sequence) else [value]
    return numbers * dims if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class Window:
    """How a window moves along one dim."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    size: int
    """Rows of the input."""

    def rows(self, out: Span) -> Span:
        """Input rows that output rows touch, padding rows included as rows below 0 or from `size` on."""
        first = out.start * self.stride - self.before
        last = (out.stop - 1) * self.stride - self.before + (self.kernel - 1) * self.dilation + 1
        return Span(first, last)


class Windowed(Rule):
    """What convolution and pooling share: boxes from windows."""

    fill = 0.0

    def windows(self, op: Op) -> list[Window]:
        """How the window moves along each spatial dim."""
        if "windows" not in op.worked_out:
            op.worked_out["windows"] = self._windows(op)
        windows: list[Window] = op.worked_out["windows"]
        return windows

    def _windows(self, op: Op) -> list[Window]:
        raise NotImplementedError

    def tile(self, op: Op, part: Part, channels: Span, source: str) -> Need:
        """The rows that the part's windows touch; see the note "true borders"."""
        box: list[Span] = [part["n"], channels]
        pad = [(0, 0), (0, 0)]
        for letter, window, size in zip(spatial_letters(op), self.windows(op), op.out[2:], strict=True):
            if len(part[letter]) == size and window.before == window.after:
                box.append(Span(0, window.size))
                pad.append((0, 0))
            else:
                rows, around = clamp(window.rows(part[letter]), window.size)
                box.append(rows)
                pad.append(around)
        return Need(tuple(box), tuple(pad), self.fill)

    def native_padding(self, op: Op, part: Part) -> list[int]:
        """What the kernel itself pads: nothing along cut dims."""
        return [
            window.before if len(part[letter]) == size and window.before == window.after else 0
            for letter, window, size in zip(spatial_letters(op), self.windows(op), op.out[2:], strict=True)
        ]


class ConvolutionFacts(Facts):
    """What all convolutions share."""

    contracts = saves_input = fresh_output = own_layout = True
    autocast = "lower"


class Convolution(ConvolutionFacts, Windowed):
    """conv1d, conv2d, conv3d, grouped and depthwise too. `k` cuts the input channels: partial sums."""

    apart = True

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == len(op.shapes["weight"])  # with a batch dim

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        """Every output element sums over its group's channels and the window."""
        return 2 * written * volume(needs["weight"].box[1:])

    def channels(self, op: Op, needs: Mapping[str, Need]) -> tuple[int, int] | None:
        outputs, inputs = needs["weight"].box[:2]
        return (len(outputs), len(inputs)) if op["groups"] == 1 else None

    def _windows(self, op: Op) -> list[Window]:
        sizes, kernels = op.shapes["input"][2:], op.shapes["weight"][2:]
        strides, dilations = per_dim(op["stride"], len(sizes)), per_dim(op["dilation"], len(sizes))
        windows = []
        for dim, (size, kernel) in enumerate(zip(sizes, kernels, strict=True)):
            if isinstance(op["padding"], str):
                total = dilations[dim] * (kernel - 1) if op["padding"] == "same" else 0
                before, after = total // 2, total - total // 2
            else:
                before = after = per_dim(op["padding"], len(sizes))[dim]
            windows.append(Window(kernel, strides[dim], dilations[dim], before, after, size))
        return windows

    def axes(self, op: Op) -> tuple[Axis, ...]:
        grouped = op["groups"] > 1
        axes = op.output_axes(c=op.out[1] // op["groups"] if grouped else 1)
        return axes if grouped else (*axes, Axis("k", op.shapes["input"][1], summed=True))

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        per_group = op.shapes["weight"][1]
        if op["groups"] > 1:
            filters = op.out[1] // op["groups"]
            channels = Span(part["c"].start // filters * per_group, part["c"].stop // filters * per_group)
            inner = Span(0, per_group)
        else:
            channels = inner = part["k"]
        kernel = tuple(Span(0, size) for size in op.shapes["weight"][2:])
        needs = {
            "input": self.tile(op, part, channels, "input"),
            "weight": Need((part["c"], inner, *kernel)),
        }
        if "bias" in op.shapes and inner.start == 0:  # of parts that are summed, one adds the bias
            needs["bias"] = Need((part["c"],))
        return needs

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["input"]
        groups = max(x.shape[1] // call.tensors["weight"].shape[1], 1)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
        padding, dims = self.native_padding(op, call.part), x.ndim - 2
        stride, dilation = per_dim(op["stride"], dims), per_dim(op["dilation"], dims)
        out: Tensor = convolve(x, call.tensors["weight"], call.tensors.get("bias"), stride, padding, dilation, groups)
        return out


class TransposedConvolution(ConvolutionFacts, Rule):
    """conv_transpose1d to 3d. A part reads the input rows whose spread reaches its output rows."""

    apart = True

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == len(op.shapes["weight"])  # with a batch dim

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        """Every input element is spread over its group's filters and the window."""
        return 2 * volume(needs["input"].box) * volume(needs["weight"].box[1:])

    def channels(self, op: Op, needs: Mapping[str, Need]) -> tuple[int, int] | None:
        inputs, outputs = needs["weight"].box[:2]
        return (len(outputs), len(inputs)) if op["groups"] == 1 else None

    def _rows(self, op: Op, dim: int, out: Span) -> Span:
        """Input rows that reach output rows along spatial dim `dim`."""
        dims = len(op.out) - 2
        stride, padding = per_dim(op["stride"], dims)[dim], per_dim(op["padding"], dims)[dim]
        reach = (op.shapes["weight"][2 + dim] - 1) * per_dim(op["dilation"], dims)[dim]
        size = op.shapes["input"][2 + dim]
        first = -((reach - out.start - padding) // stride)  # rounded up
        last = (out.stop - 1 + padding) // stride
        start = min(max(first, 0), size)
        return Span(start, max(start, min(last + 1, size)))

    def axes(self, op: Op) -> tuple[Axis, ...]:
        grouped = op["groups"] > 1
        axes = op.output_axes(c=op.out[1] // op["groups"] if grouped else 1)
        return axes if grouped else (*axes, Axis("k", op.shapes["input"][1], summed=True))

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        in_channels, filters = op.shapes["weight"][:2]
        if op["groups"] > 1:
            per_group = in_channels // op["groups"]
            channels = Span(part["c"].start // filters * per_group, part["c"].stop // filters * per_group)
            columns = Span(0, filters)
        else:
            channels, columns = part["k"], part["c"]
        kernel = tuple(Span(0, size) for size in op.shapes["weight"][2:])
        rows = [
            Span(0, op.shapes["input"][2 + dim])
            if len(part[letter]) == op.out[2 + dim]
            else self._rows(op, dim, part[letter])
            for dim, letter in enumerate(spatial_letters(op))
        ]
        needs = {
            "input": Need((part["n"], channels, *rows)),
            "weight": Need((channels, columns, *kernel)),
        }
        if "bias" in op.shapes and (op["groups"] > 1 or channels.start == 0):
            needs["bias"] = Need((part["c"],))
        return needs

    def run(self, call: Call) -> Tensor:
        op, part, x, weight = call.op, call.part, call.tensors["input"], call.tensors["weight"]
        bias = call.tensors.get("bias")
        dims = x.ndim - 2
        groups = 1 if op["groups"] == 1 else weight.shape[0] // (op.shapes["weight"][0] // op["groups"])
        stride, dilation = per_dim(op["stride"], dims), per_dim(op["dilation"], dims)
        padding, extra = per_dim(op["padding"], dims), per_dim(op["output_padding"], dims)
        crop: list[int] = []
        for dim, letter in reversed(list(enumerate(spatial_letters(op)))):
            if len(part[letter]) == op.out[2 + dim]:
                crop += [0, 0]
                continue
            rows = self._rows(op, dim, part[letter])
            first = rows.start * stride[dim] - padding[dim]
            length = (len(rows) - 1) * stride[dim] + (weight.shape[2 + dim] - 1) * dilation[dim] + 1
            padding[dim] = extra[dim] = 0
            crop += [first - part[letter].start, part[letter].stop - first - length]
        shape = [len(span) for span in op.output_box(part)]
        if x.numel() == 0:
            spread = x.new_zeros(shape)
        else:
            transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            spread = transpose(x, weight, None, stride, padding, extra, groups, dilation)
            spread = F.pad(spread, crop) if any(crop) else spread
        return spread if bias is None else spread + bias.view(-1, *(1,) * dims)


class PoolFacts(Facts):
    """What max and average pooling share over so many dims, however they are called."""

    saves_input = True

    def __init__(self, dims: int) -> None:
        self.dims = dims

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        """Every output element sees its window."""
        return written * prod(per_dim(op["kernel_size"], self.dims))


class MaxPoolFacts(PoolFacts):
    """max_pool1d to 3d, with indices too."""

    index_bytes = 8  # where each maximum was


class Pool(PoolFacts, Windowed):
    """What max and average pooling share."""

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == 2 + self.dims  # with a batch dim

    def _windows(self, op: Op) -> list[Window]:
        sizes = op.shapes["self"][2:]
        dims = len(sizes)
        kernels = per_dim(op["kernel_size"], dims)
        strides = per_dim(op["stride"] or kernels, dims)
        paddings = per_dim(op["padding"], dims)
        dilations = per_dim(op.layer.arguments.get("dilation", 1), dims)
        return [
            Window(kernels[dim], strides[dim], dilations[dim], paddings[dim], paddings[dim], sizes[dim])
            for dim in range(dims)
        ]

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": self.tile(op, part, part["c"], "self")}


class MaxPool(MaxPoolFacts, Pool):
    """max_pool1d to 3d, with padding, dilation and ceil mode."""

    fill = float("-inf")

    def run(self, call: Call) -> Tensor:
        return call.torch(padding=self.native_padding(call.op, call.part))


class AveragePool(Pool):
    """avg_pool1d to 3d. Under a cut: the sum over each window, divided by the count that one device uses."""

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["self"]
        if not call.cut & set(spatial_letters(op)):
            return call.torch()
        windows, dims = self.windows(op), len(op.out) - 2
        kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
        padding = self.native_padding(op, call.part)
        if dims == 1:
            x, kernel, stride, padding = x.unsqueeze(2), [1, *kernel], [1, *stride], [0, *padding]
        pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
        total: Tensor = pool(x, kernel, stride, padding, op["ceil_mode"], True, 1)
        if dims == 1:
            total = total.squeeze(2)
        override = op.layer.arguments.get("divisor_override")
        if override:
            return total / float(override)
        for dim, letter in enumerate(spatial_letters(op)):
            counts = self._counts(windows[dim], call.part[letter], bool(op["count_include_pad"]))
            total = total / torch.tensor(counts, dtype=total.dtype, device=total.device).view(
                -1, *(1,) * (dims - 1 - dim)
            )
        return total

    def _counts(self, window: Window, rows: Span, include_pad: bool) -> list[int]:
        """Rows that each window averages over along one dim."""
        low, high = (-window.before, window.size + window.after) if include_pad else (0, window.size)
        starts = [row * window.stride - window.before for row in range(rows.start, rows.stop)]
        return [min(start + window.kernel, high) - max(start, low) for start in starts]


class AdaptiveAveragePool(Rule):
    """adaptive_avg_pool1d to 3d. To one row: a mean, by partial sums. To more: windows of its own."""

    def __init__(self, dims: int) -> None:
        self.dims = dims

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == 2 + self.dims  # with a batch dim

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(1, needs)

    def axes(self, op: Op) -> tuple[Axis, ...]:
        sizes = (*op.out[:2], *op.shapes["self"][2:])
        return tuple(
            Axis(axis.letter, size, summed=True) if axis.size == 1 and index > 1 else axis
            for index, (axis, size) in enumerate(zip(op.output_axes(), sizes, strict=True))
        )

    def writes(self, op: Op, part: Part) -> Box:
        return tuple(
            Span(0, 1) if size == 1 and index > 1 else span
            for index, (size, span) in enumerate(zip(op.out, op.output_box(part), strict=True))
        )

    def _rows(self, part: Span, out: int, size: int) -> Span:
        if out == 1:
            return part
        return Span(part.start * size // out, -(-part.stop * size // out))

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        shape = op.shapes["self"]
        rows = [
            self._rows(part[letter], out, size)
            for letter, out, size in zip(spatial_letters(op), op.out[2:], shape[2:], strict=True)
        ]
        return {"self": Need((part["n"], part["c"], *rows))}

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["self"]
        if not call.cut & set(spatial_letters(op)):
            return call.torch()
        for dim, letter in enumerate(spatial_letters(op), start=2):
            out, size = op.out[dim], op.shapes["self"][dim]
            if out == 1:
                x = x.sum(dim, keepdim=True) / size
            elif out != size:
                x = torch.tensordot(x, self._means(call.part[letter], out, size, x), dims=([dim], [0])).movedim(-1, dim)
        return x

    def _means(self, part: Span, out: int, size: int, like: Tensor) -> Tensor:
        """Column j averages the rows of the part's j-th window."""
        rows = self._rows(part, out, size)
        matrix = like.new_zeros(len(rows), len(part))
        for column, row in enumerate(range(part.start, part.stop)):
            window = self._rows(Span(row, row + 1), out, size).shifted(-rows.start)
            matrix[window.start : window.stop, column] = 1 / len(window)
        return matrix


class AdaptiveMaxPool(Facts):
    """adaptive_max_pool1d to 3d, which has no rule."""

    saves_input = True
    index_bytes = 8

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(1, needs)


class Upsample(Rule):
    """Linear upsampling, 1-D to 3-D.

    Which rows a row reads, and with which weights, is asked of the kernel itself: it is run once along each
    dim on the numbers of the rows.
    """

    nearest = False

    def speaks_of(self, op: Op) -> bool:
        return "scale_factors" in op.layer.arguments  # one list of sizes or factors, not one argument for each dim

    def _sources(self, op: Op, dim: int) -> Tensor:
        """The place in the input, maybe between two rows, that each output row of a dim reads.

        Nearest rounds, and torch's kernels round differently for float32 and float64, and for one channel and many:
        the question is put in the type and form of the real call.
        """
        size, dims = op.shapes["input"][2 + dim], len(op.out) - 2
        dtype = torch.float32 if self.nearest and op.layer.output.dtype != "float64" else torch.float64
        small = [min(2, op.shapes["input"][1]), *(2,) * dims]
        small[1 + dim] = size
        rows = torch.arange(size, dtype=dtype, device="cpu").view(-1, *(1,) * (dims - 1 - dim))
        rows = rows.expand(1, *small).contiguous()
        arguments = dict(op.layer.arguments)
        if arguments["scale_factors"]:
            arguments["scale_factors"] = [arguments["scale_factors"][dim] if d == dim else 1.0 for d in range(dims)]
        else:
            arguments["output_size"] = [op.out[2 + dim] if d == dim else 2 for d in range(dims)]
        places: Tensor = op.operator(**{**arguments, "input": rows})
        return places[0, 0].movedim(dim, 0).reshape(op.out[2 + dim], -1)[:, 0].double()

    def _reads(self, op: Op, dim: int, part: Span) -> tuple[Span, Tensor]:
        """(input rows read, place of each output row). Where a dim is not cut: all rows, for the kernel itself."""
        places = self._sources(op, dim)[part.start : part.stop]
        size = op.shapes["input"][2 + dim]
        if len(part) == op.out[2 + dim]:
            return Span(0, size), places
        first, last = int(places.min().floor()), int(places.max().ceil())
        return Span(first, min(last + 1, size)), places

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        rows = [self._reads(op, dim, part[letter])[0] for dim, letter in enumerate(spatial_letters(op))]
        return {"input": Need((part["n"], part["c"], *rows))}

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["input"]
        if not call.cut & set(spatial_letters(op)):
            return call.torch()
        for dim, letter in enumerate(spatial_letters(op)):
            rows, places = self._reads(op, dim, call.part[letter])
            places = (places - rows.start).to(x.device)
            below = places.floor()
            low = x.index_select(2 + dim, below.long())
            if self.nearest:
                x = low
                continue
            high = x.index_select(2 + dim, (below + 1).clamp(max=len(rows) - 1).long())
            weight = (places - below).to(x.dtype).view(-1, *(1,) * (len(op.out) - 3 - dim))
            x = low + (high - low) * weight
        return x


class NearestUpsample(Upsample):
    """Nearest upsampling, likewise."""

    nearest = True


class PixelShuffle(Moved):
    """pixel_shuffle: blocks of channels become blocks of pixels."""

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == 4

    def axes(self, op: Op) -> tuple[Axis, ...]:
        factor = op["upscale_factor"]
        return op.output_axes(h=factor, w=factor)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        factor = op["upscale_factor"]
        rows = [Span(part[x].start // factor, part[x].stop // factor) for x in "hw"]
        return {"self": Need((part["n"], part["c"].scaled(factor * factor), *rows))}

    def run(self, call: Call) -> Tensor:
        return call.torch()


class PixelUnshuffle(Moved):
    """pixel_unshuffle: blocks of pixels become blocks of channels, which are cut in whole blocks."""

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) == 4

    def axes(self, op: Op) -> tuple[Axis, ...]:
        return op.output_axes(c=op["downscale_factor"] ** 2)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        factor = op["downscale_factor"]
        channels = Span(part["c"].start // factor**2, part["c"].stop // factor**2)
        return {"self": Need((part["n"], channels, part["h"].scaled(factor), part["w"].scaled(factor)))}

    def run(self, call: Call) -> Tensor:
        return call.torch()
