"""Which layer is at fault: the first thing that is wrong though everything it depends on is right. Pure.

capture              the network laid on one rank differs from the module already
output               forwards, the first layer whose output differs: all that it reads agrees
result               every layer agrees, but not what the ranks are given
parameter gradient   backwards, the first layer whose parameters' gradient differs while its output's agrees
input gradient       backwards, the first value whose gradient differs; the layer that reads it passed it back
buffers, evaluation, steps: what is left when the first training pass agrees
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.graph import Layer, LayerGraph, State, Value
from shoal.verdict import Fault
from shoal.verifying.differences import Differences, Kind


@dataclass(frozen=True)
class Suspects:
    """Layers of which one is at fault."""

    layers: tuple[str, ...]
    fault: Fault
    difference: float
    value: str | None = None
    """The value that they read and whose gradient is wrong."""
    after_steps: bool = False
    """Whether the first pass is right."""


def suspects(
    training: LayerGraph, evaluation: LayerGraph, differences: Differences, tolerance: float, later_tolerance: float
) -> Suspects | None:
    """The first fault that a step meets; None where everything agrees."""
    wrong = {
        (kind, name): difference
        for (kind, name), difference in differences.items()
        if not difference <= (later_tolerance if kind.startswith("later") else tolerance)
    }
    every = (
        *_forwards(training, "value", "output", wrong),
        *_results(training, wrong, "output", "loss"),
        *_backwards(training, wrong),
        *_states(training, "buffer", "buffers", wrong),
        *_forwards(evaluation, "evaluated value", "evaluation", wrong),
        *_states(training, "later state", "steps", wrong),
        *_results(evaluation, wrong, "later evaluation"),
    )
    return every[0] if every else None


def _forwards(graph: LayerGraph, kind: Kind, fault: Fault, wrong: Differences) -> Iterator[Suspects]:
    for layer in graph.layers:
        if (kind, layer.name) in wrong:
            yield Suspects((layer.name,), fault, wrong[kind, layer.name])


def _results(graph: LayerGraph, wrong: Differences, *kinds: Kind) -> Iterator[Suspects]:
    for kind in kinds:
        if (kind, "") in wrong:
            yield Suspects((graph.output,), "result", wrong[kind, ""], after_steps=kind.startswith("later"))


def _backwards(graph: LayerGraph, wrong: Differences) -> Iterator[Suspects]:
    users = users_of(graph)
    for layer in reversed(graph.layers):
        if (difference := wrong.get(("value gradient", layer.name))) is not None:
            readers = readers_of(graph, layer.name)
            if readers:
                yield Suspects(readers, "input gradient", difference, layer.name)
            else:
                yield Suspects((layer.name,), "result", difference)
        for name in states_of(layer):
            # a shared parameter is judged at its first user, when all of them have been passed
            if ("gradient", name) in wrong and users[name][0] == layer.name:
                yield Suspects(users[name], "parameter gradient", wrong["gradient", name])
    if ("input gradient", "") in wrong:
        first = next(iter(graph.inputs))
        yield Suspects(readers_of(graph, first), "input gradient", wrong["input gradient", ""], first)


def _states(graph: LayerGraph, kind: Kind, fault: Fault, wrong: Differences) -> Iterator[Suspects]:
    users = users_of(graph)
    for (compared, name), difference in wrong.items():
        if compared == kind:
            yield Suspects(users.get(name, (name,)), fault, difference, after_steps=kind.startswith("later"))


def readers_of(graph: LayerGraph, value: str) -> tuple[str, ...]:
    """The layers that read a value, in order."""
    return tuple(layer.name for layer in graph.layers if value in layer.reads)


def states_of(layer: Layer) -> tuple[str, ...]:
    """The parameters and buffers that a layer uses, each once."""
    return tuple(dict.fromkeys(ref.name for _, ref in layer.tensors if isinstance(ref, State)))


def users_of(graph: LayerGraph) -> dict[str, tuple[str, ...]]:
    """For every parameter and buffer the layers that use it, in order."""
    users: dict[str, tuple[str, ...]] = {}
    for layer in graph.layers:
        for name in states_of(layer):
            users[name] = (*users.get(name, ()), layer.name)
    return users


def with_readers_apart(graph: LayerGraph, value: str) -> tuple[LayerGraph, Mapping[str, str]]:
    """The same network, each reader of `value` reading a copy of its own; and whose copy each is, by its name.

    The gradient of a value is the sum of what its readers pass back; the gradients of the copies tell them apart.
    """
    layers: list[Layer] = []
    copies: dict[str, str] = {}
    for layer in graph.layers:
        if value in layer.reads:
            name = f"{layer.name} <- {value}"
            copies[name] = layer.name
            layers.append(Layer(name, "aten.clone.default", {"self": Value(value)}, graph.specs[value]))
            layer = replace(layer, arguments={key: _renamed(a, value, name) for key, a in layer.arguments.items()})
        layers.append(layer)
    return replace(graph, layers=tuple(layers)), copies


def _renamed(argument: object, old: str, new: str) -> object:
    if isinstance(argument, Value):
        return Value(new) if argument.name == old else argument
    return tuple(_renamed(item, old, new) for item in argument) if isinstance(argument, tuple) else argument
