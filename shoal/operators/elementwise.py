"""Operators that treat every element alone, with broadcasting; random masks; tensors made from nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.operators.base import Call, Facts, Need, Op, Part, Rule
from shoal.operators.views import broadcast_box
from shoal.partition import Box, Span


class Elementwise(Rule):
    """Every dim of the output may be cut; arguments are read where broadcasting lays them."""

    follows = True

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        return {name: Need(broadcast_box(out, shape)) for name, shape in op.shapes.items()}

    def run(self, call: Call) -> Tensor:
        return call.torch()


class SavesInput(Elementwise):
    """mul, silu and others whose slope is found from what they were given."""

    saves_input = True


class SavesOutput(Elementwise):
    """relu, exp and others whose slope is found from what they gave."""

    saves_output = True


class Relu(SavesOutput):
    """relu."""

    can_overwrite = True

    def run(self, call: Call) -> Tensor:
        x = call.tensors["self"]
        return x.relu_() if call.overwrites and not x._is_view() else call.torch()


class Add(Elementwise):
    """add: both inputs have the gradient of the sum."""

    passes_gradient = fresh_output = True

    def counts_up(self, others: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        return others == (1,) and not named


class Copy(Elementwise):
    """clone and others that move or fill elements and compute nothing."""

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 0


class Cast(Copy):
    """to: another type, given by name; as another tensor's, it runs whole."""

    casts = True

    def speaks_of(self, op: Op) -> bool:
        return "other" not in op.layer.arguments


class Constant(Copy):
    """lift_fresh_copy: how torch.export writes down torch.tensor."""

    called = "constant"
    constant = True


class Overwrite(Facts):
    """copy: what is copied, in the form of what it is copied to."""

    overwrites = True


class Alias(Elementwise):
    """alias: another name."""

    view = True


class Detach(Alias):
    """detach: another name, through which no gradient goes back."""

    detaches = True


class PerChannel(SavesInput):
    """prelu: its weight has one element, or one per channel, and belongs to dim 1."""

    def speaks_of(self, op: Op) -> bool:
        return len(op.out) > 1

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        is_common = op.shapes["weight"] == (1,)
        return {"self": Need(out), "weight": Need((Span(0, 1) if is_common else out[1],))}


class Made(Rule):
    """empty, zeros, ones, full: a part makes its own box."""

    def work(self, op: Op, needs: Mapping[str, Need], written: int) -> int:
        return 0

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {}

    def run(self, call: Call) -> Tensor:
        return call.torch(size=[len(span) for span in call.op.output_box(call.part)])


class Mask(Rule):
    """bernoulli with one probability: the part's box of a mask that every plan draws alike."""

    masks = True

    def speaks_of(self, op: Op) -> bool:
        return isinstance(op.layer.arguments.get("p"), int | float)

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": Need(op.output_box(part))}

    def run(self, call: Call) -> Tensor:
        box = call.op.output_box(call.part)
        return call.random.box(call.op.out, box, keep=call.op["p"], like=call.tensors["self"])


class Dropping(Facts):
    """What all kinds of dropout share: in evaluation, or of nothing, they are their input."""

    saves_output = True

    def draws(self, arguments: Mapping[str, Any]) -> bool:
        return arguments["train"] is not False and 0 < arguments["p"] < 1  # None: native_dropout trains

    def idle(self, arguments: Mapping[str, Any]) -> bool:
        return not arguments["train"] or arguments["p"] == 0


class Dropout(Dropping, Rule):
    """dropout; identity in evaluation."""

    follows = True

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"input": Need(op.output_box(part))}

    def _mask(self, shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole mask, and the part's box of it."""
        return shape, box

    def run(self, call: Call) -> Tensor:
        x, p = call.tensors["input"], call.op["p"]
        if call.op["train"] is False or p == 0:
            return x.clone()
        shape, box = self._mask(call.op.out, call.op.output_box(call.part))
        keep = 1.0 - p
        mask = call.random.box(shape, box, keep=keep, like=x)
        return x * mask.div_(keep) if keep else torch.zeros_like(x) * x


class FeatureDropout(Dropout):
    """feature_dropout: drops whole channels."""

    saves_output = False

    def _mask(self, shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
        return (*shape[:2], *(1 for _ in shape[2:])), (*box[:2], *(Span(0, 1) for _ in box[2:]))


class NativeDropout(Dropout):
    """native_dropout, which gives its mask too, and a copy where it drops nothing."""

    def speaks_of(self, op: Op) -> bool:
        return op.layer.result in (None, 0)

    def idle(self, arguments: Mapping[str, Any]) -> bool:
        return False
