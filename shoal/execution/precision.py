"""The type of every value of a step, known on ranks that do not compute it too."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.graph import LayerGraph, Value
from shoal.operators.registry import facts_of


def value_types(graph: LayerGraph, example: Tensor | None) -> Mapping[str, torch.dtype]:
    """The type of every value, for inputs of `example`'s type and under the autocast that is on now.

    A `RunError` where the network was captured with an autocast of its own: what it does under two was not seen.
    """
    captured = {name: getattr(torch, spec.dtype) for name, spec in graph.specs.items()}
    first = next(iter(graph.inputs))
    if example is not None and example.is_floating_point() and example.dtype != captured[first]:
        before = captured[first]
        captured = {name: example.dtype if dtype == before else dtype for name, dtype in captured.items()}
    device = "cpu" if example is None else example.device.type
    if not torch.is_autocast_enabled(device):
        return captured
    if graph.autocast:
        raise RunError(
            f"the network sets torch.autocast itself{graph.autocast}, and is called under another one.",
            "Call it without torch.autocast, or let all of it run under the outer one.",
        )
    lower = torch.get_autocast_dtype(device)
    types = {name: captured[name] for name in graph.inputs}
    for layer in graph.layers:
        autocast = facts_of(layer.op).autocast
        if not captured[layer.name].is_floating_point:
            types[layer.name] = captured[layer.name]
        elif autocast == "lower":
            types[layer.name] = lower
        elif autocast == "full":
            types[layer.name] = torch.float32
        else:
            read = [types[ref.name] for _, ref in layer.tensors if isinstance(ref, Value)]
            floats = [dtype for dtype in read if dtype.is_floating_point]
            types[layer.name] = _widest(floats) if floats else captured[layer.name]
    return types


def _widest(types: list[torch.dtype]) -> torch.dtype:
    widest = types[0]
    for dtype in types[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
