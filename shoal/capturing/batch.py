"""How every shape of a graph follows the number of samples.

The graph is run once more on shapes alone, with twice the batch. A dim that doubled has rows for each sample,
a dim that stayed has none; anything else, and the graph holds for its own batch only. Sizes that were written
into the graph as numbers (`view`, `expand`, `empty`) are first adapted by the dims they come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.operators.views import dim_groups

SIZE_ARGUMENTS = ("size", "shape")


def follow_batch(graph: LayerGraph) -> LayerGraph:
    """`graph` with rows per sample in every spec, or unchanged where it holds for its own batch only."""
    try:
        shapes = _shapes_at(graph, 2 * graph.batch)
        inputs = {name: _grown(spec, shapes[name], graph.batch) for name, spec in graph.inputs.items()}
        layers = tuple(
            replace(layer, output=_grown(layer.output, shapes[layer.name], graph.batch)) for layer in graph.layers
        )
    except (RuntimeError, ValueError, TypeError):  # some operator does not work for another batch
        return graph
    return replace(graph, inputs=inputs, layers=layers, any_batch=True)


def _grown(spec: TensorSpec, doubled: Sequence[int], batch: int) -> TensorSpec:
    per_sample = []
    for before, after in zip(spec.shape, doubled, strict=True):
        if after == before:
            per_sample.append(0)
        elif after == 2 * before and before % batch == 0:
            per_sample.append(before // batch)
        else:
            raise ValueError(f"{before} rows become {after}")
    return replace(spec, per_sample=tuple(per_sample) if any(per_sample) else ())


def _shapes_at(graph: LayerGraph, batch: int) -> dict[str, tuple[int, ...]]:
    with FakeTensorMode(), torch.no_grad():
        tensors: dict[Value | State, Tensor] = {
            **{State(name): _empty(spec, spec.shape) for name, spec in graph.states.items()},
            **{
                Value(name): _empty(spec, (batch, *spec.shape[1:]) if spec.shape[:1] == (graph.batch,) else spec.shape)
                for name, spec in graph.inputs.items()
            },
        }
        for layer in graph.layers:
            tensors[Value(layer.name)] = _run(layer, tensors, graph, batch)
        return {ref.name: tuple(tensor.shape) for ref, tensor in tensors.items() if isinstance(ref, Value)}


def _empty(spec: TensorSpec, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, spec.dtype))


def _run(layer: Layer, tensors: Mapping[Value | State, Tensor], graph: LayerGraph, batch: int) -> Tensor:
    arguments = {name: _materialised(value, tensors) for name, value in layer.arguments.items()}
    for name in SIZE_ARGUMENTS:
        if name in arguments and isinstance(arguments[name], list):
            arguments[name] = _sizes_at(layer, arguments, graph, batch)
    result = operator_of(layer)(**arguments)
    picked: Tensor = result if layer.result is None else result[layer.result]
    return picked


def operator_of(layer: Layer) -> Any:
    """The torch operator that a layer names."""
    namespace, word, overload = layer.op.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), word), overload)


def _materialised(value: Any, tensors: Mapping[Value | State, Tensor]) -> Any:
    if isinstance(value, Value | State):
        return tensors[value]
    return [_materialised(item, tensors) for item in value] if isinstance(value, tuple) else value


def _sizes_at(layer: Layer, arguments: Mapping[str, Any], graph: LayerGraph, batch: int) -> list[int]:
    """The sizes in a layer's arguments for another batch.

    A view's: the leading dim of the group whose leading dim grew. Of others, such as `empty` and `expand`, the
    leading dim, where it has the batch's size.
    """
    sizes = list(layer.output.shape)
    source = layer.arguments.get("self")
    if layer.op.split(".")[1] in ("expand", "empty", "zeros", "ones", "full") or not isinstance(source, Value):
        return [batch, *sizes[1:]] if sizes[:1] == [graph.batch] else sizes
    old, new = graph.specs[source.name].shape, arguments["self"].shape
    for inputs, outputs in dim_groups(old, tuple(sizes)):
        grown = [dim for dim in inputs if old[dim] != new[dim]]
        if grown and outputs and (grown == [inputs[0]] or len(outputs) == 1):
            sizes[outputs[0]] = sizes[outputs[0]] * new[grown[0]] // old[grown[0]]
        elif grown:
            raise ValueError("the batch is folded into a dim that is not the first of its group")
    return sizes
