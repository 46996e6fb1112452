"""A loss at the end of the network, so that scores may stay cut by channel right through it.

The mean over the batch is taken apart: the graph ends with one loss per sample (or pixel), and each rank divides
the sum of its own share by the weight of its own targets. That is "the loss of this rank's share"; weighted by
those same weights, the ranks' losses average to one device's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.capturing import capture_call
from shoal.capturing.questions import REQUIRES_GRAD
from shoal.capturing.reader import Reading
from shoal.capturing.signature import Call, bind
from shoal.errors import CaptureError, ConfigError
from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.operators.base import Op
from shoal.operators.losses import EACH, PairLoss, ScoreLoss, loss_weights
from shoal.operators.registry import rule_for

MEAN = 1
"""torch's number for `reduction="mean"`."""

Loss = Callable[[Any, Any], Tensor]
"""Of what the network returns and a target: one number."""


@dataclass(frozen=True)
class LossTail:
    """A network with its loss. `mean`: it ends with one loss per sample, else with one number for all."""

    graph: LayerGraph
    states: Mapping[str, Tensor]
    """Tensors of the loss itself, such as class weights, by their name in the graph."""
    mean: bool
    op: Op
    asked: Mapping[str, str]
    """What the loss asks about its call."""

    def weight(self, target: Tensor) -> float:
        """What one rank divides by: the number of its targets, or the sum of their class weights."""
        if not self.mean:
            return 0.0
        given = self.op.layer.arguments.get("weight")
        weight = self.states[given.name].to(target.device) if isinstance(given, State) else None
        return float(loss_weights(self.op, target, weight).item())


class _LossOnly(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss: Any = loss

    def forward(self, scores: Any, target: Any) -> Tensor:
        result: Tensor = self.loss(scores, target)
        return result


def join_loss(network: Reading, call: Call, loss: Loss, target: Any) -> LossTail:
    """A network, captured for `call`, with `loss` behind it. `target` None: class numbers, one per sample or pixel."""
    graph, device = network.graph, call.tensors[0].device
    examples = [
        torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for spec in map(graph.specs.__getitem__, graph.outputs)
    ]
    if target is None:
        shape = examples[0].shape
        target = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64, device=device)
    tail = _LossOnly(loss)
    asks = replace(bind(tail, (network.returned.build(examples), target), {}), records=call.records)
    reading = capture_call(tail, asks)
    learns = any(tensor.requires_grad for tensor in (*call.tensors, *network.states.values()))
    if REQUIRES_GRAD in reading.asked and call.records and learns:
        for example in examples:
            example.requires_grad_(example.is_floating_point() or example.is_complex())
        reading = capture_call(tail, asks)
    end = reading.graph
    _refuse_learning(reading.states)
    if len(end.outputs) > 1:
        raise ConfigError(f"the loss returns {len(end.outputs)} tensors.", "Return the one that is to be trained on.")
    given = [index for index in network.returned.leaves if index is not None]
    values = [graph.outputs[index] for index in given]
    names = {layer.name: f"loss.{layer.name}" if layer.name != "loss" else "loss" for layer in end.layers}
    names = {name: _free(wanted, graph) for name, wanted in names.items()}
    targets = list(end.inputs)[len(values) :]
    names |= dict(zip(end.inputs, [*values, *(_free("target", graph) for _ in targets)], strict=True))
    if len(targets) > 1:
        names |= {name: _free(f"target_{number}", graph) for number, name in enumerate(targets, 1)}
    own = {name: f"loss_state.{name}" for name in end.states}
    layers = [_renamed(layer, names, own) for layer in end.layers]
    joined = replace(
        graph,
        layers=(*graph.layers, *layers),
        inputs={**graph.inputs, **{names[name]: end.inputs[name] for name in targets}},
        states={**graph.states, **{own[name]: spec for name, spec in end.states.items()}},
        outputs=(names[end.output],),
        any_batch=graph.any_batch and end.any_batch,
        targets=tuple(names[name] for name in targets),
    )
    last = layers[-1]
    mean = last.arguments.get("reduction") == MEAN and last.arguments.get("target") == Value(names[targets[-1]])
    each = _per_sample(last, joined) if mean else last
    op = Op(each, {name: joined.spec(reference).shape for name, reference in each.tensors})
    mean = mean and len(targets) == 1 and isinstance(rule_for(op), ScoreLoss | PairLoss)
    if mean:
        joined = replace(joined, layers=(*joined.layers[:-1], each))
    return LossTail(joined, {own[name]: tensor for name, tensor in reading.states.items()}, mean, op, reading.asked)


def _refuse_learning(states: Mapping[str, Tensor]) -> None:
    for name, tensor in states.items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise CaptureError(
                f"the loss has a parameter that learns, {name!r}, which would get no gradient.",
                "Make it a parameter of the network, which may return it, or compute the loss outside of the network.",
            )


def _free(name: str, graph: LayerGraph) -> str:
    """A name that the network itself does not use."""
    return name if name not in graph.specs else _free(f"{name}_of_loss", graph)


def _renamed(layer: Layer, values: Mapping[str, str], states: Mapping[str, str]) -> Layer:
    def name(argument: Any) -> Any:
        if isinstance(argument, Value):
            return Value(values[argument.name])
        if isinstance(argument, State):
            return State(states[argument.name])
        return tuple(map(name, argument)) if isinstance(argument, tuple) else argument

    arguments = {key: name(argument) for key, argument in layer.arguments.items()}
    return replace(layer, name=values[layer.name], arguments=arguments)


def _per_sample(layer: Layer, graph: LayerGraph) -> Layer:
    """The loss layer without its mean."""
    target = graph.spec(layer.arguments["target"])
    dtype = graph.specs[layer.arguments["self"].name].dtype
    output = TensorSpec(target.shape, dtype, target.per_sample)
    return replace(layer, output=output, arguments={**layer.arguments, "reduction": EACH})
