"""Operators that only rename or choose rows: views, permutations, slices, concatenation, padding."""

from collections.abc import Iterator, Mapping
from math import lcm, prod

import torch
from torch import Tensor

from shoal.operators.base import Axis, Call, Facts, Need, Op, Part, Rule, letters
from shoal.partition import Box, Span, whole


def dim_groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims of two shapes that hold the same elements, in order.

    >>> list(dim_groups((2, 3, 4), (6, 4)))
    [([0, 1], [0]), ([2], [1])]
    >>> list(dim_groups((2, 8, 5), (2, 2, 4, 5)))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    i = j = 0
    while i < len(old) or j < len(new):
        inputs, outputs = [], []
        before = after = 1
        if i < len(old):
            inputs, before, i = [i], old[i], i + 1
        if j < len(new):
            outputs, after, j = [j], new[j], j + 1
        while before != after:
            if before < after and i < len(old):
                inputs.append(i)
                before, i = before * old[i], i + 1
            elif j < len(new):
                outputs.append(j)
                after, j = after * new[j], j + 1
            else:
                raise ValueError(f"{old} and {new} do not hold the same number of elements")
        while i < len(old) and old[i] == 1 and not (j < len(new) and new[j] == 1):
            inputs.append(i)
            i += 1
        while j < len(new) and new[j] == 1 and not (i < len(old) and old[i] == 1):
            outputs.append(j)
            j += 1
        yield inputs, outputs


def _first_real(dims: list[int], shape: tuple[int, ...]) -> int | None:
    """The leading dim of a group, dims of one row passed over."""
    return next((dim for dim in dims if shape[dim] > 1), None)


class Reshape(Rule):
    """reshape, flatten, unsqueeze and their kin: within a group of dims, the leading one may be cut.

    A cut must fall on rows of both shapes, so parts hold multiples of the coarser of the two.
    """

    view = True

    def axes(self, op: Op) -> tuple[Axis, ...]:
        old, new = op.shapes["self"], op.out
        names = letters(len(new))
        axes = []
        for inputs, outputs in dim_groups(old, new):
            i, o = _first_real(inputs, old), _first_real(outputs, new)
            if i is None or o is None or names[o] == "-":
                continue
            inner_old = prod(old[dim] for dim in inputs if dim > i)
            inner_new = prod(new[dim] for dim in outputs if dim > o)
            axes.append(Axis(names[o], new[o], lcm(inner_old, inner_new) // inner_new))
        return tuple(axis for axis in axes if axis.size % axis.grain == 0)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        old, new = op.shapes["self"], op.out
        names = letters(len(new))
        box = list(whole(old))
        for inputs, outputs in dim_groups(old, new):
            i, o = _first_real(inputs, old), _first_real(outputs, new)
            if i is None or o is None or names[o] not in part:
                continue
            inner_old = prod(old[dim] for dim in inputs if dim > i)
            inner_new = prod(new[dim] for dim in outputs if dim > o)
            rows = part[names[o]].scaled(inner_new)
            box[i] = Span(rows.start // inner_old, rows.stop // inner_old)
        return {"self": Need(tuple(box))}

    def run(self, call: Call) -> Tensor:
        return call.tensors["self"].reshape([len(span) for span in call.op.output_box(call.part)])


class View(Reshape):
    """view as another shape; as another type, it runs whole."""

    def speaks_of(self, op: Op) -> bool:
        return "size" in op.layer.arguments


class Squeeze(Reshape):
    """squeeze, which finds the dims of one row."""


class PerhapsView(Facts):
    """type_as and others that return their input where they have nothing to do, though their signature denies it."""

    def may_be_input(self, tensors: int) -> bool:
        return True


class Scatter(Facts):
    """slice_scatter, select_scatter: what a write to a part of a tensor becomes."""

    real_only = True


class Permute(Rule):
    """permute, transpose, t: every dim may be cut, under the letter of its new place."""

    view = True

    def _order(self, op: Op) -> list[int]:
        ndim = len(op.out)
        if "dims" in op.layer.arguments:
            return [dim % ndim for dim in op["dims"]]
        order = list(range(ndim))
        a, b = (op["dim0"] % ndim, op["dim1"] % ndim) if "dim0" in op.layer.arguments else (0, ndim - 1)
        order[a], order[b] = order[b], order[a]
        return order

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        box: list[Span] = [Span(0, 0)] * len(op.out)
        for place, dim in enumerate(self._order(op)):
            box[dim] = op.output_box(part)[place]
        return {"self": Need(tuple(box))}

    def run(self, call: Call) -> Tensor:
        return call.tensors["self"].permute(self._order(call.op))


class Expand(Rule):
    """expand: dims that are repeated need their one row everywhere."""

    view = True

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": Need(broadcast_box(op.output_box(part), op.shapes["self"]))}

    def run(self, call: Call) -> Tensor:
        return call.tensors["self"].expand([len(span) for span in call.op.output_box(call.part)])


def broadcast_box(out: Box, shape: tuple[int, ...]) -> Box:
    """The rows of a tensor that broadcasting lays under the rows `out` of the output."""
    aligned = out[len(out) - len(shape) :]
    return tuple(Span(0, 1) if size == 1 else span for span, size in zip(aligned, shape, strict=True))


class Choose(Rule):
    """slice, split, chunk: rows of one dim, at a fixed distance. All dims of the output may be cut."""

    view = True

    def _chosen(self, op: Op) -> tuple[int, int, int]:
        """(dim, first row, step) of the rows that are chosen."""
        shape, arguments = op.shapes["self"], op.layer.arguments
        dim, before = op["dim"] % len(shape), op.layer.result or 0
        if "step" in arguments:
            start = op["start"] or 0
            start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
            return dim, start, op["step"]
        if "chunks" in arguments:
            return dim, before * -(-shape[dim] // op["chunks"]), 1
        sizes = arguments.get("split_sizes", arguments.get("split_size"))
        return dim, sum(sizes[:before]) if isinstance(sizes, tuple) else before * sizes, 1

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        dim, start, step = self._chosen(op)
        box = list(op.output_box(part))
        rows = box[dim]
        box[dim] = Span(start + rows.start * step, start + (rows.stop - 1) * step + 1)
        return {"self": Need(tuple(box))}

    def run(self, call: Call) -> Tensor:
        dim, _, step = self._chosen(call.op)
        x = call.tensors["self"]
        return x if step == 1 else x[(slice(None),) * dim + (slice(None, None, step),)]


class Select(Rule):
    """select: one row of one dim, which the output has no more."""

    view = True

    def _dim(self, op: Op) -> int:
        return int(op["dim"]) % len(op.shapes["self"])

    def _row(self, op: Op) -> int:
        return int(op["index"])

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        dim = self._dim(op)
        row = self._row(op) % op.shapes["self"][dim]
        out = op.output_box(part)
        return {"self": Need((*out[:dim], Span(row, row + 1), *out[dim:]))}

    def run(self, call: Call) -> Tensor:
        return call.tensors["self"].select(self._dim(call.op), 0)


class Unbind(Select):
    """unbind: every row of one dim as a result of its own."""

    def _row(self, op: Op) -> int:
        return op.layer.result or 0


class Moved(Rule):
    """What operators share that lay elements elsewhere and compute nothing."""

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 0


class Concat(Moved):
    """cat: a part may read rows of several inputs, or of one only."""

    def _spans(self, op: Op) -> tuple[int, dict[str, Span]]:
        """The dim, and for each input the rows of the output that it fills."""
        dim = op["dim"] % len(op.out)
        spans, start = {}, 0
        for name, shape in op.shapes.items():
            spans[name] = Span(start, start + shape[dim])
            start += shape[dim]
        return dim, spans

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        dim, spans = self._spans(op)
        out = op.output_box(part)
        needs = {}
        for name, span in spans.items():
            if shared := span & out[dim]:
                box = (*out[:dim], shared.shifted(-span.start), *out[dim + 1 :])
                needs[name] = Need(box)
        return needs

    def run(self, call: Call) -> Tensor:
        dim, spans = self._spans(call.op)
        return torch.cat([call.tensors[name] for name in spans if name in call.tensors], dim)


class Pad(Moved):
    """Constant padding; negative widths crop. Where a dim is cut the border is laid around the moved tile."""

    def _widths(self, op: Op) -> list[tuple[int, int]]:
        flat = op["pad"]
        ndim = len(op.out)
        widths = [(0, 0)] * ndim
        for index in range(len(flat) // 2):
            widths[ndim - 1 - index] = (flat[2 * index], flat[2 * index + 1])
        return widths

    def axes(self, op: Op) -> tuple[Axis, ...]:
        mode = op.layer.arguments.get("mode", "constant")
        kept = {letter for letter, width in zip(letters(len(op.out)), self._widths(op), strict=True) if not any(width)}
        return tuple(axis for axis in op.output_axes() if mode == "constant" or axis.letter in kept)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        if op.layer.arguments.get("mode", "constant") != "constant":
            out, widths = op.output_box(part), self._widths(op)
            shape = op.shapes["self"]
            return {
                "self": Need(
                    tuple(
                        Span(0, size) if any(width) else span
                        for span, width, size in zip(out, widths, shape, strict=True)
                    )
                )
            }
        box, pad = [], []
        for span, (before, _), size in zip(op.output_box(part), self._widths(op), op.shapes["self"], strict=True):
            rows, around = clamp(span.shifted(-before), size)
            box.append(rows)
            pad.append(around)
        return {"self": Need(tuple(box), tuple(pad), float(op.layer.arguments.get("value") or 0.0))}

    def run(self, call: Call) -> Tensor:
        if call.op.layer.arguments.get("mode", "constant") != "constant":
            return call.torch()
        return call.tensors["self"]


def clamp(span: Span, size: int) -> tuple[Span, tuple[int, int]]:
    """The rows of `span` that exist among `size` rows, and how many of it lie before and after them.

    >>> clamp(Span(-2, 3), 5), clamp(Span(6, 8), 5)
    ((Span(start=0, stop=3), (2, 0)), (Span(start=5, stop=5), (0, 2)))
    """
    start = min(max(span.start, 0), size)
    stop = min(max(span.stop, start), size)
    before = min(max(-span.start, 0), len(span))
    return Span(start, stop), (before, len(span) - (stop - start) - before)


class Flip(Moved):
    """flip: a part reads the mirrored rows."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        box = list(op.output_box(part))
        for dim in op["dims"]:
            size, span = op.out[dim], box[dim]
            box[dim] = Span(size - span.stop, size - span.start)
        return {"self": Need(tuple(box))}

    def run(self, call: Call) -> Tensor:
        return call.tensors["self"].flip(call.op["dims"])
