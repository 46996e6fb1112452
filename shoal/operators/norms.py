"""Normalisation: statistics over dims that may be cut are taken over all parts, so they are one device's."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.operators.base import Axis, Call, Facts, GroupSum, Need, Op, Part, Peers, Rule, letters, of_each, wide
from shoal.partition import Span

_NORM, _SOFTMAX = 8, 5
"""FLOPs per element that is read, by a count of what the formulas do to each."""


class Norm(Rule):
    """What all norms share."""

    reads_twice = saves_input = True

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(_NORM, needs)


class BatchNorm(Norm):
    """Statistics per channel, over samples and space.

    Exact: every part sends its mean and variance per channel once forward (one row each of a small table), and
    two sums per channel backward. Local (as DDP): statistics of this sample share alone.
    """

    follows = mixes_samples = fresh_output = True
    statistics = ("running_mean", "running_var")

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        channels = Need((part["c"],))
        states = {name: channels for name in ("weight", "bias", "running_mean", "running_var") if name in op.shapes}
        return {"input": Need(op.output_box(part)), **states}

    def speaks_of(self, op: Op) -> bool:
        return op.layer.result in (None, 0)  # the output; others are statistics

    def trains(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments["training"])

    def check(self, op: Op, parts: Iterable[Part | None], *, local: bool) -> None:
        shape = op.shapes["input"]
        shares = {len(part["n"]) for part in parts if part} if local else {shape[0]}
        for samples in shares if self.trains(op.layer.arguments) else ():
            if samples * prod(shape[2:]) == 1:  # as torch.nn.functional.batch_norm says it
                size = torch.Size((samples, *shape[1:]))
                error = ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
                error.add_note(f"in layer {op.layer.name!r}")
                raise error

    def over(self, op: Op, cut: frozenset[str], *, local: bool) -> str:
        """Axes over which statistics cross parts."""
        if not self.trains(op.layer.arguments) and "running_mean" in op.shapes:
            return ""
        return "".join(x for x in letters(len(op.out)) if x in cut and x not in ("nc" if local else "c"))

    def run(self, call: Call) -> Tensor:
        op, tensors = call.op, call.tensors
        x, weight, bias = tensors["input"], tensors.get("weight"), tensors.get("bias")
        mean, var = tensors.get("running_mean"), tensors.get("running_var")
        training, momentum, eps = self.trains(op.layer.arguments), float(op["momentum"]), float(op["eps"])
        over = self.over(op, call.cut, local=call.local_statistics)
        if not over:
            return F.batch_norm(x, mean, var, weight, bias, training or mean is None, momentum, eps)
        share = x.shape[0] if call.local_statistics else op.out[0]
        count = share * prod(op.out[2:])
        applied = _SharedBatchNorm.apply(x, weight, bias, eps, count, call.peers, over)  # type: ignore[no-untyped-call]
        out, batch_mean, batch_var = applied
        if mean is not None and var is not None:
            # .data: the kernel of another use of these statistics has kept them, though it will not read them
            mean.data.copy_(wide(mean.data).lerp(batch_mean.to(wide(mean).dtype), momentum))
            unbiased = batch_var.to(wide(var).dtype) * (count / (count - 1))
            var.data.copy_(wide(var.data).lerp(unbiased, momentum))
        result: Tensor = out
        return result

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        over = self.over(op, cut, local=local)
        if not over:
            return ()
        channels, group = len(part["c"]), prod(parts[x] for x in over)
        return (
            GroupSum(over, group * (2 * channels + 1), backward=False),
            GroupSum(over, 2 * channels, forward=False),
        )


class FunctionalBatchNorm(BatchNorm):
    """Batch norm as torch's functionalisation leaves it: it gives its new running statistics, too."""

    called = "batch_norm"
    returns: ClassVar[Mapping[int, str]] = {3: "running_mean", 4: "running_var"}


class FixedBatchNorm(BatchNorm):
    """_native_batch_norm_legit_no_training: batch norm by its running statistics."""

    def trains(self, arguments: Mapping[str, Any]) -> bool:
        return False


class _SharedBatchNorm(torch.autograd.Function):
    """Batch norm over several parts. Means are combined as Chan et al. do, without cancellation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
        peers: Peers,
        over: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.given = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        part_mean, part_var = torch.batch_norm_update_stats(wide(x), None, None, 0.0)
        rows = x.numel() // x.shape[1]
        table = part_mean.new_zeros(peers.count(over), 2 * x.shape[1] + 1)
        table[peers.index(over)] = torch.cat([part_mean, part_var, part_mean.new_tensor([rows])])
        peers.sum_now(table, over)
        means, variances, counts = table[:, : x.shape[1]], table[:, x.shape[1] : -1], table[:, -1:] / count
        mean = (counts * means).sum(0)
        var = (counts * (variances + (means - mean).square())).sum(0)
        # a kernel for half precision wants all that is per channel in float32
        weight, bias = (None if tensor is None else wide(tensor) for tensor in (weight, bias))
        out = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.peers, ctx.over = eps, count, peers, over
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        # as if the statistics were constants: one fused kernel gives this and both sums per channel
        through, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(),
            x,
            weight,
            mean,
            var,
            None,
            None,
            False,
            ctx.eps,
            [True, True, True],
        )
        weights_grads = [
            None if dtype is None else grad_of_state.to(dtype)
            for grad_of_state, dtype in zip((weight_grad, bias_grad), ctx.given, strict=True)
        ]
        if not ctx.needs_input_grad[0]:
            return None, *weights_grads, None, None, None, None
        sums = torch.cat([weight_grad, bias_grad])
        ctx.peers.sum_now(sums, ctx.over)
        scaled, shifted = sums[: x.shape[1]], sums[x.shape[1] :]
        inverse = (var + ctx.eps).rsqrt()
        gain = inverse if weight is None else inverse * weight
        slope = gain * inverse * scaled / ctx.count
        offset = gain * shifted / ctx.count - slope * mean
        view = (-1, *(1,) * (x.ndim - 2))
        x_grad = torch.addcmul(through, x, slope.to(x.dtype).view(view), value=-1).sub_(offset.to(x.dtype).view(view))
        return x_grad, *weights_grads, None, None, None, None


def normalise(x: Tensor, dims: list[int], count: int, eps: float, peers: Peers, over: str) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over `dims`, of which parts along `over` hold other rows; float32 or wider."""
    x = wide(x)
    mean = peers.sum(x.sum(dims, keepdim=True), over) / count
    centred = x - mean
    variance = peers.sum(centred.square().sum(dims, keepdim=True), over) / count
    return centred * (variance + eps).rsqrt()


class GroupNorm(Norm):
    """group_norm. Channels are cut in whole groups."""

    def _groups(self, op: Op) -> int:
        return int(op["num_groups"])

    def axes(self, op: Op) -> tuple[Axis, ...]:
        return op.output_axes(c=op.out[1] // self._groups(op))

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        states = {name: Need((part["c"],)) for name in ("weight", "bias") if name in op.shapes}
        return {"input": Need(op.output_box(part)), **states}

    def _over(self, op: Op, cut: frozenset[str]) -> str:
        return "".join(x for x in letters(len(op.out))[2:] if x in cut)

    def run(self, call: Call) -> Tensor:
        op, x = call.op, call.tensors["input"]
        weight, bias = call.tensors.get("weight"), call.tensors.get("bias")
        per_group = op.out[1] // self._groups(op)
        groups = x.shape[1] // per_group
        over = self._over(op, call.cut)
        if not over:
            return torch.group_norm(
                x, groups, weight, bias, float(op["eps"])
            )  # F's check is of the whole, not of a part
        grouped = x.reshape(x.shape[0], groups, -1)
        out = normalise(grouped, [2], per_group * prod(op.out[2:]), float(op["eps"]), call.peers, over).view_as(x)
        view = (-1, *(1,) * (x.ndim - 2))
        out = out if weight is None else out * weight.view(view)
        return (out if bias is None else out + bias.view(view)).to(x.dtype)

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        over = self._over(op, cut)
        elements = len(part["n"]) * len(part["c"]) // (op.out[1] // self._groups(op))
        return (GroupSum(over, elements), GroupSum(over, elements)) if over else ()


class InstanceNorm(GroupNorm):
    """instance_norm as groups of one channel. With running statistics it runs whole, and changes them in training."""

    statistics = ("running_mean", "running_var")

    def speaks_of(self, op: Op) -> bool:
        return "running_mean" not in op.shapes

    def trains(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments["use_input_stats"])

    def _groups(self, op: Op) -> int:
        return op.out[1]


class LayerNorm(Norm):
    """layer_norm over the last dims, which may be cut."""

    def _first(self, op: Op) -> int:
        return len(op.out) - len(op["normalized_shape"])

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        states = {name: Need(out[self._first(op) :]) for name in ("weight", "bias") if name in op.shapes}
        return {"input": Need(out), **states}

    def _over(self, op: Op, cut: frozenset[str]) -> str:
        return "".join(x for x in letters(len(op.out))[self._first(op) :] if x in cut)

    def run(self, call: Call) -> Tensor:
        op, x, first = call.op, call.tensors["input"], self._first(call.op)
        weight, bias = call.tensors.get("weight"), call.tensors.get("bias")
        over = self._over(op, call.cut)
        if not over:
            return F.layer_norm(x, x.shape[first:], weight, bias, float(op["eps"]))
        dims = list(range(first, x.ndim))
        out = normalise(x, dims, prod(op["normalized_shape"]), float(op["eps"]), call.peers, over)
        out = out if weight is None else out * weight
        return (out if bias is None else out + bias).to(x.dtype)

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        over = self._over(op, cut)
        elements = prod(len(span) for span in op.output_box(part)[: self._first(op)])
        return (GroupSum(over, elements), GroupSum(over, elements)) if over else ()


class SoftmaxFacts(Facts):
    """What softmax, log_softmax and the kernels behind them share."""

    saves_output = True

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(_SOFTMAX, needs)


class Softmax(SoftmaxFacts, Rule):
    """softmax along a dim that may be cut."""

    autocast = "full"

    def speaks_of(self, op: Op) -> bool:
        return op.layer.arguments.get("dtype") is None and bool(op.shapes["self"])

    def _dim(self, op: Op) -> int:
        return int(op["dim"]) % len(op.out)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": Need(op.output_box(part))}

    def _over(self, op: Op, cut: frozenset[str]) -> str:
        letter = letters(len(op.out))[self._dim(op)]
        return letter if letter in cut else ""

    def run(self, call: Call) -> Tensor:
        op, x, dim = call.op, call.tensors["self"], self._dim(call.op)
        over = self._over(op, call.cut)
        if not over:
            return call.torch()
        high = wide(x)
        shifted = high - call.peers.max(high.amax(dim, keepdim=True), over)
        total = call.peers.sum(shifted.exp().sum(dim, keepdim=True), over)
        return self._divided(shifted, total).to(x.dtype)

    def _divided(self, shifted: Tensor, total: Tensor) -> Tensor:
        """The result of scores less their largest, and the sum of their exponentials."""
        return shifted.exp() / total

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        over = self._over(op, cut)
        box = list(op.output_box(part))
        box[self._dim(op)] = Span(0, 1)
        elements = prod(map(len, box))
        return (GroupSum(over, elements, backward=False), GroupSum(over, elements)) if over else ()


class LogSoftmax(Softmax):
    """log_softmax, likewise."""

    def _divided(self, shifted: Tensor, total: Tensor) -> Tensor:
        return shifted - total.log()
