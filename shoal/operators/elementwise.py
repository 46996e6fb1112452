"""Operators that treat every element alone, with broadcasting; random masks; tensors made from nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.operators.base import Call, Need, Op, Part, Rule
from shoal.operators.views import broadcast_box
from shoal.partition import Span


class Elementwise(Rule):
    """Every dim of the output may be cut; arguments are read where broadcasting lays them."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        return {name: Need(broadcast_box(out, shape)) for name, shape in op.shapes.items()}

    def run(self, call: Call) -> Tensor:
        return call.torch()


class PerChannel(Elementwise):
    """prelu: its weight has one element, or one per channel, and belongs to dim 1."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        out = op.output_box(part)
        one = op.shapes["weight"] == (1,)
        return {"self": Need(out), "weight": Need((Span(0, 1) if one else out[1],))}


class Made(Rule):
    """empty, zeros, ones, full: a part makes its own box."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {}

    def run(self, call: Call) -> Tensor:
        return call.torch(size=[len(span) for span in call.op.output_box(call.part)])


class Mask(Rule):
    """bernoulli: the part's box of a mask that every plan draws alike."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"self": Need(op.output_box(part))}

    def run(self, call: Call) -> Tensor:
        box = call.op.output_box(call.part)
        return call.random.box(call.op.out, box, keep=call.op["p"], like=call.tensors["self"])


class Dropout(Rule):
    """dropout and its kind that drops whole channels; identity in evaluation."""

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {"input": Need(op.output_box(part))}

    def run(self, call: Call) -> Tensor:
        x, p = call.tensors["input"], call.op["p"]
        if call.op["train"] is False or p == 0:  # None: native_dropout trains
            return x.clone()
        shape, box = call.op.out, call.op.output_box(call.part)
        if "feature" in call.op.layer.op:
            shape = (*shape[:2], *(1 for _ in shape[2:]))
            box = (*box[:2], *(Span(0, 1) for _ in box[2:]))
        keep = 1.0 - p
        mask = call.random.box(shape, box, keep=keep, like=x)
        return x * mask.div_(keep) if keep else torch.zeros_like(x) * x
