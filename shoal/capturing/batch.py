"""How a graph follows the number of samples.

The network is captured twice, the second time with twice the batch, and the two graphs are laid side by side.
A number that doubled counts something per sample; one that stayed does not; anything else (another operator, a
number that grew otherwise, another constant), and the graph holds for its own batch only. So it is the network's
own code that says what follows the batch, be it a shape, a `view`, or a division by `x.shape[0]`. That it does so for
any batch is a guess, which whoever runs another batch proves by one more trace (`execution/variants.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.graph import Layer, LayerGraph, TensorSpec


class FixedBatchError(ValueError):
    """The two graphs differ by more than the number of samples."""


def follow_batch(
    graph: LayerGraph,
    states: Mapping[str, Tensor],
    doubled: LayerGraph,
    doubled_states: Mapping[str, Tensor],
) -> LayerGraph:
    """`graph` with what it has per sample; `doubled` is the same network's for twice the batch.

    Of a graph that holds for its own batch only, only the results are marked with what they have per sample.
    """
    try:
        _same(list(graph.inputs), list(doubled.inputs))
        _same([layer.name for layer in graph.layers], [layer.name for layer in doubled.layers])
        _same((graph.states, graph.counters, graph.outputs), (doubled.states, doubled.counters, doubled.outputs))
        _same([name for name in states if not _equal(states[name], doubled_states[name])], [])
        batch = graph.batch
        following = replace(
            graph,
            inputs={name: _grown_spec(spec, doubled.inputs[name], batch) for name, spec in graph.inputs.items()},
            layers=tuple(_grown_layer(*pair, batch) for pair in zip(graph.layers, doubled.layers, strict=True)),
            any_batch=True,
        )
    except FixedBatchError:
        return mark_samples(graph, doubled)
    return following


def mark_samples(graph: LayerGraph, other: LayerGraph) -> LayerGraph:
    """`graph` with what its results have per sample, as `other`, of another batch of the same network, shows.

    A result that does not grow evenly, or that the other does not have, is left as it is.
    """
    if len(graph.outputs) != len(other.outputs):
        return graph
    marks = {
        name: mark
        for name, theirs in zip(graph.outputs, other.outputs, strict=True)
        if (mark := _rows_per_sample(graph, name, other, theirs)) is not None
    }
    layers = [
        replace(layer, output=replace(layer.output, per_sample=marks[layer.name])) if layer.name in marks else layer
        for layer in graph.layers
    ]
    return replace(graph, layers=tuple(layers))


def _rows_per_sample(graph: LayerGraph, name: str, other: LayerGraph, theirs: str) -> tuple[int, ...] | None:
    mine, its = graph.specs[name].shape, other.specs[theirs].shape
    if len(mine) != len(its):
        return None
    rows = []
    for size, grown in zip(mine, its, strict=True):
        if size == grown:
            rows.append(0)
        elif size * other.batch == grown * graph.batch and size % graph.batch == 0:
            rows.append(size // graph.batch)
        else:
            return None
    return tuple(rows)


def _same(a: object, b: object) -> None:
    if a != b:
        raise FixedBatchError(f"{a} becomes {b}")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Parameters and buffers are the same tensors; constants must have the same values."""
    return a is b or torch.equal(a, b)


def _grown_layer(layer: Layer, doubled: Layer, batch: int) -> Layer:
    _same((layer.op, layer.result, list(layer.arguments)), (doubled.op, doubled.result, list(doubled.arguments)))
    growth = {
        name: grown
        for name, argument in layer.arguments.items()
        if (grown := _per_sample(argument, doubled.arguments[name], batch))
    }
    return replace(layer, output=_grown_spec(layer.output, doubled.output, batch), per_sample=growth)


def _grown_spec(spec: TensorSpec, doubled: TensorSpec, batch: int) -> TensorSpec:
    _same((spec.dtype, len(spec.shape)), (doubled.dtype, len(doubled.shape)))
    return replace(spec, per_sample=_per_sample(spec.shape, doubled.shape, batch) or ())


def _per_sample(single: Any, doubled: Any, batch: int) -> Any:
    """What an argument has per sample, in the argument's own form; 0, or nothing, where it stays."""
    if isinstance(single, tuple) and isinstance(doubled, tuple) and len(single) == len(doubled):
        items = tuple(_per_sample(*pair, batch) for pair in zip(single, doubled, strict=True))
        return items if any(items) else 0
    if type(single) is int and type(doubled) is int and single and doubled == 2 * single and single % batch == 0:
        return single // batch
    same = single == doubled or (single != single and doubled != doubled)  # nan is nan
    if type(single) is not type(doubled) or not same:
        raise FixedBatchError(f"{single} becomes {doubled}")
    return 0
