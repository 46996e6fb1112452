"""Losses, one number per sample or pixel; the mean over a rank's share is taken by the executor.

Under a channel cut no rank ever holds all scores of a sample: parts hold partial losses that add up,
    loss = log sum_c exp(x_c)  [first part]   -  x_target  [the part that has it].
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from shoal.operators.base import Axis, Call, GroupSum, Need, Op, Part, Rule, letters, of_each, wide
from shoal.partition import Box, whole

EACH = 0
"""torch's number for `reduction="none"`."""


_WORK = 5
"""FLOPs per element that is read, by a count of what the formulas do to each."""


class ScoreLoss(Rule):
    """nll_loss against class numbers, with weights and ignored targets."""

    autocast = "full"
    saves_input = True

    def speaks_of(self, op: Op) -> bool:
        of_numbers = len(op.shapes["target"]) == len(op.shapes["self"]) - 1 > 0
        return of_numbers and bool(op["reduction"] == EACH)

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(_WORK, needs)

    def _ndim(self, op: Op) -> int:
        return len(op.shapes["self"])

    def axes(self, op: Op) -> tuple[Axis, ...]:
        shape = op.shapes["self"]
        return tuple(
            Axis(letter, size, summed=letter == "c") for letter, size in zip(letters(len(shape)), shape, strict=True)
        )

    def writes(self, op: Op, part: Part) -> Box:
        return tuple(part[letter] for letter in letters(self._ndim(op)) if letter != "c")

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        needs = {
            "self": Need(tuple(part[letter] for letter in letters(self._ndim(op)))),
            "target": Need(self.writes(op, part)),
        }
        if "weight" in op.shapes:
            needs["weight"] = Need(whole(op.shapes["weight"]))
        return needs

    def run(self, call: Call) -> Tensor:
        op, x, target = call.op, call.tensors["self"], call.tensors["target"]
        weight = call.tensors.get("weight")
        if "c" not in call.cut:
            return call.torch()
        mine, classes = call.part["c"], op.shapes["self"][1]
        counted = target != op["ignore_index"]
        torch._assert_async(
            (~counted | ((target >= 0) & (target < classes))).all(), f"a target is not one of the {classes} classes"
        )
        kept = counted.to(x.dtype)
        weights = kept if weight is None else kept * weight[target.where(counted, 0)]
        local = (target - mine.start).clamp(0, len(mine) - 1)
        here = (target >= mine.start) & (target < mine.stop)
        picked = x.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        smoothing = float(op.layer.arguments.get("label_smoothing", 0.0))
        loss: Tensor = -(1 - smoothing) * weights * picked
        scale = (1 - smoothing) * weights
        if smoothing:
            spread = x if weight is None else x * weight[mine.start : mine.stop].view(-1, *(1,) * (x.ndim - 2))
            loss = loss - smoothing / classes * spread.sum(1) * kept
            scale = scale + smoothing * (1.0 if weight is None else weight.mean()) * kept
        return self._with_total(call, x, loss, scale)

    def _with_total(self, call: Call, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        """The part's loss with what depends on all scores of a sample; `scale`: by how much that counts."""
        return loss


class CrossEntropy(ScoreLoss):
    """cross_entropy against class numbers: of scores that are no logarithms yet, with label smoothing."""

    def _with_total(self, call: Call, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        x = wide(x)
        top = call.peers.max(x.amax(1), "c")
        total = call.peers.sum((x - top.unsqueeze(1)).exp().sum(1), "c").log() + top
        # one part adds it, but it is in every part's graph: all take part in the sum of its gradient
        return loss + total * (scale if call.part["c"].start == 0 else torch.zeros_like(scale))

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        if "c" not in cut:
            return ()
        elements = prod(map(len, self.writes(op, part)))
        return (GroupSum("c", elements, backward=False), GroupSum("c", elements))


def loss_weights(op: Op, target: Tensor, weight: Tensor | None) -> Tensor:
    """What the mean of a loss divides by, for one rank's own targets."""
    if "ignore_index" not in op.layer.arguments:
        return target.new_tensor(float(target.numel()), dtype=torch.float64)
    counted: Tensor = target != op["ignore_index"]
    if weight is None:
        return counted.sum().double()
    return weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum().double()


class PairLoss(Rule):
    """mse_loss and others that compare element by element."""

    autocast = "full"
    saves_input = True

    def speaks_of(self, op: Op) -> bool:
        return op.shapes["self"] == op.shapes["target"] and bool(op["reduction"] == EACH)

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return of_each(_WORK, needs)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {name: Need(op.output_box(part)) for name in ("self", "target")}

    def run(self, call: Call) -> Tensor:
        return call.torch(reduction=0)
