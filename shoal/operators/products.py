"""Operators that contract a dim: linear layers, attention, means and sums."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from shoal.operators.base import Axis, Call, Facts, Need, Op, Part, Rule, letters, of_each
from shoal.operators.views import broadcast_box
from shoal.partition import Box, Span, volume, whole


class Linear(Rule):
    """linear. The last dim of the output may be cut (its own rows of the weight), and `k`: partial sums."""

    apart = contracts = dense = saves_input = fresh_output = outer_product = True
    autocast = "lower"

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 2 * written * len(needs["weight"].box[1])

    def channels(self, op: Op, needs: Mapping[str, Need]) -> tuple[int, int]:
        outputs, inputs = needs["weight"].box
        return len(outputs), len(inputs)

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


class Matrices(Facts):
    """matmul and others that multiply two given tensors. `contracted`: the argument whose last dim is summed over."""

    contracts = saves_input = True
    autocast = "lower"

    def __init__(self, contracted: str) -> None:
        self.contracted = contracted

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 2 * written * op.shapes[self.contracted][-1]


class Einsum(Facts):
    """einsum: of one tensor maybe a view; of several a product, so new memory."""

    saves_input = True

    def may_be_input(self, tensors: int) -> bool:
        return tensors == 1


class AttentionFacts(Facts):
    """scaled_dot_product_attention and the kernels behind it: they draw where their dropout is more than 0."""

    contracts = saves_input = saves_output = True
    autocast = "lower"

    def draws(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("dropout_p", 0.0))


class Recurrent(Facts):
    """LSTM, GRU and RNN of torch.nn: they draw where there is dropout between their layers."""

    saves_input = saves_output = True

    def draws(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments["train"]) and arguments["dropout"] > 0 and arguments["num_layers"] > 1


class Attention(AttentionFacts, Rule):
    """scaled_dot_product_attention without dropout. Samples and heads may be cut: all dims but the last two."""

    def speaks_of(self, op: Op) -> bool:
        front = {op.shapes[name][:-2] for name in ("query", "key", "value")}
        return len(front) == 1 and front != {()} and op["dropout_p"] == 0

    def axes(self, op: Op) -> tuple[Axis, ...]:
        return op.output_axes()[: len(op.out) - 2]

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        front = op.output_box(part)[:-2]
        needs = {name: Need((*front, *whole(op.shapes[name][-2:]))) for name in ("query", "key", "value")}
        if "attn_mask" in op.shapes:
            mask = op.shapes["attn_mask"]
            needs["attn_mask"] = Need((*broadcast_box(front, mask[:-2]), *whole(mask[-2:])))
        return needs

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 2 * (volume(needs["query"].box) + written) * op.shapes["key"][-2]

    def run(self, call: Call) -> Tensor:
        return call.torch()


class Sum(Rule):
    """sum over some dims. Those dims may be cut too: each part then holds a partial sum."""

    def speaks_of(self, op: Op) -> bool:
        return op.layer.arguments.get("dtype") is None and bool(op.shapes["self"])

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(1, needs)

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
        return self._total(op, x.sum(sorted(reduced), keepdim=op.layer.arguments.get("keepdim", False)))

    def _total(self, op: Op, total: Tensor) -> Tensor:
        """What a part's sum adds to the result."""
        return total


class Mean(Sum):
    """mean over some dims, likewise."""

    def _total(self, op: Op, total: Tensor) -> Tensor:
        return total / prod(op.shapes["self"][dim] for dim in self._reduced(op))
