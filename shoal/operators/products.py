"""Operators that contract a dim: linear layers, means and sums."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from shoal.operators.base import Axis, Call, Need, Op, Part, Rule, letters
from shoal.partition import Box, Span


class Linear(Rule):
    """linear. The last dim of the output may be cut (its own rows of the weight), and `k`: partial sums."""

    apart = True

    def axes(self, op: Op) -> tuple[Axis, ...]:
        return (*op.output_axes(), Axis("k", op.shapes["weight"][1], summed=True))

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        needs = {
            "input": Need((*out[:-1], part["k"])),
            "weight": Need((out[-1], part["k"])),
        }
        if "bias" in op.shapes and part["k"].start == 0:  # of parts that are summed, one adds the bias
            needs["bias"] = Need((out[-1],))
        return needs

    def run(self, call: Call) -> Tensor:
        return F.linear(call.tensors["input"], call.tensors["weight"], call.tensors.get("bias"))


class Reduce(Rule):
    """mean and sum over some dims. Those dims may be cut too: each part then holds a partial sum."""

    def _reduced(self, op: Op) -> set[int]:
        ndim = len(op.shapes["self"])
        dims = op.layer.arguments.get("dim")
        dims = (dims,) if isinstance(dims, int) else dims
        return {dim % ndim for dim in dims} if dims else set(range(ndim))

    def axes(self, op: Op) -> tuple[Axis, ...]:
        shape, reduced = op.shapes["self"], self._reduced(op)
        return tuple(
            Axis(letter, size, summed=dim in reduced)
            for dim, (letter, size) in enumerate(zip(letters(len(shape)), shape, strict=True))
            if letter != "-"
        )

    def _box(self, op: Op, part: Part) -> list[Span]:
        shape = op.shapes["self"]
        return [part.get(x, Span(0, size)) for x, size in zip(letters(len(shape)), shape, strict=True)]

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": Need(tuple(self._box(op, part)))}

    def writes(self, op: Op, part: Part) -> Box:
        reduced, keep = self._reduced(op), op.layer.arguments.get("keepdim", False)
        return tuple(
            Span(0, 1) if dim in reduced else span
            for dim, span in enumerate(self._box(op, part))
            if keep or dim not in reduced
        )

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["self"]
        reduced = self._reduced(op)
        if not call.cut & {letters(x.ndim)[dim] for dim in reduced}:
            return call.torch()
        total = x.sum(sorted(reduced), keepdim=op.layer.arguments.get("keepdim", False))
        if op.layer.op.split(".")[1] == "sum":
            return total
        count = 1
        for dim in reduced:
            count *= op.shapes["self"][dim]
        return total / count
