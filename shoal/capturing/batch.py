"""How a graph follows the number of samples.

The network is captured twice, the second time with twice the batch, and the two graphs are laid side by side.
A number that doubled counts something per sample; one that stayed does not; anything else (another operator, a
number that grew otherwise, another constant), and the graph holds for its own batch only. So it is the network's
own code that says what follows the batch, be it a shape, a `view`, or a division by `x.shape[0]`. Where some layer
might read rows by number, the graph is run on shapes alone to find the smallest batch that it holds for.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shoal.capturing.functional import operator_of
from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.operators.base import Op
from shoal.operators.registry import WHOLE, facts_of, rule_for


class FixedBatchError(ValueError):
    """The two graphs differ by more than the number of samples."""


def follow_batch(
    graph: LayerGraph,
    states: Mapping[str, Tensor],
    doubled: LayerGraph,
    doubled_states: Mapping[str, Tensor],
) -> LayerGraph:
    """`graph` with what it has per sample; `doubled` is the same network's for twice the batch.

    A graph that holds for its own batch only is returned as it is.
    """
    try:
        _same(list(graph.inputs), list(doubled.inputs))
        _same([layer.name for layer in graph.layers], [layer.name for layer in doubled.layers])
        _same((graph.states, graph.counters, graph.outputs), (doubled.states, doubled.counters, doubled.outputs))
        _same([name for name in states if not _equal(states[name], doubled_states[name])], [])
        batch = graph.batch
        found = replace(
            graph,
            inputs={name: _grown_spec(spec, doubled.inputs[name], batch) for name, spec in graph.inputs.items()},
            layers=tuple(_grown_layer(*pair, batch) for pair in zip(graph.layers, doubled.layers, strict=True)),
            any_batch=True,
        )
    except FixedBatchError:
        return graph
    return replace(found, smallest_batch=_smallest_batch(found))


def _same(one: object, other: object) -> None:
    if one != other:
        raise FixedBatchError(f"{one} becomes {other}")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Parameters and buffers are the same tensors; constants must have the same values."""
    return one is other or torch.equal(one, other)


def _grown_layer(layer: Layer, doubled: Layer, batch: int) -> Layer:
    _same((layer.op, layer.result, list(layer.arguments)), (doubled.op, doubled.result, list(doubled.arguments)))
    growth = {
        name: found
        for name, argument in layer.arguments.items()
        if (found := _per_sample(argument, doubled.arguments[name], batch))
    }
    return replace(layer, output=_grown_spec(layer.output, doubled.output, batch), per_sample=growth)


def _grown_spec(spec: TensorSpec, doubled: TensorSpec, batch: int) -> TensorSpec:
    _same((spec.dtype, len(spec.shape)), (doubled.dtype, len(doubled.shape)))
    return replace(spec, per_sample=_per_sample(spec.shape, doubled.shape, batch) or ())


def _per_sample(one: Any, other: Any, batch: int) -> Any:
    """What an argument has per sample, in the argument's own form; 0, or nothing, where it stays."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        items = tuple(_per_sample(*pair, batch) for pair in zip(one, other, strict=True))
        return items if any(items) else 0
    if type(one) is int and type(other) is int and one and other == 2 * one and one % batch == 0:
        return one // batch
    if type(one) is not type(other) or not (one == other or (one != one and other != other)):  # nan is nan
        raise FixedBatchError(f"{one} becomes {other}")
    return 0


def _smallest_batch(graph: LayerGraph) -> int:
    """The fewest samples for which every layer has the shape that it should have."""
    if not any(_may_count_rows(layer, graph) for layer in graph.layers):
        return 1
    return next((batch for batch in (1, 2) if batch < graph.batch and _shapes_hold(graph.at_batch(batch))), graph.batch)


def _may_count_rows(layer: Layer, graph: LayerGraph) -> bool:
    """Whether a layer may speak of rows by number; those that run whole may too."""
    shapes = {name: graph.spec(reference).shape for name, reference in layer.tensors}
    return facts_of(layer.op).counts_rows or rule_for(Op(layer, shapes)) is WHOLE


def _shapes_hold(graph: LayerGraph) -> bool:
    """Whether the layers, run on shapes alone, give the shapes that the graph says."""
    with FakeTensorMode(), torch.no_grad():
        tensors: dict[Value | State, Tensor] = {
            **{State(name): _empty(spec) for name, spec in graph.states.items()},
            **{Value(name): _empty(spec) for name, spec in graph.inputs.items()},
        }
        try:
            for layer in graph.layers:
                arguments = {name: _materialised(value, tensors) for name, value in layer.arguments.items()}
                result: Any = operator_of(layer)(**arguments)
                tensors[Value(layer.name)] = result if layer.result is None else result[layer.result]
                if tuple(tensors[Value(layer.name)].shape) != layer.output.shape:
                    return False
        except Exception:  # operators complain about sizes in many ways
            return False
        return True


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def _materialised(value: Any, tensors: Mapping[Value | State, Tensor]) -> Any:
    if isinstance(value, Value | State):
        return tensors[value]
    return [_materialised(item, tensors) for item in value] if isinstance(value, tuple) else value
