"""LayerGraph: one network as a list of operators with their shapes. What the planner and the executor see.

Layers stand in an order in which each reads only what stands before it. Shapes are global: those of one
device running the whole batch. The graph is functional: no layer changes a tensor in place, so a value is
what its layer wrote, for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import zip_longest
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor, and how its shape follows the batch."""

    shape: tuple[int, ...]
    dtype: str
    per_sample: tuple[int, ...] = ()
    """For each dim the rows it has per sample of the batch, 0 where it does not grow; () if none does."""

    def at_batch(self, batch: int) -> "TensorSpec":
        """The same tensor for another number of samples."""
        if not any(self.per_sample):
            return self
        shape = tuple(rows * batch if rows else size for rows, size in zip(self.per_sample, self.shape, strict=True))
        return replace(self, shape=shape)

    @property
    def differentiable(self) -> bool:
        """Whether its values can have a gradient."""
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is a tensor of the graph: a layer's output or an input, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class State:
    """An argument that is a parameter, a buffer or a constant of the module, by its path."""

    name: str


@dataclass(frozen=True)
class Layer:
    """One operator with everything it is called with, under the names of the operator's own schema."""

    name: str
    """Unique: the module's path, with the operator where the module has several."""
    op: str
    """Such as `aten.conv2d.default`."""
    arguments: Mapping[str, Any]
    """Tensors appear as `Value` or `State`, alone or in a list; everything else as it is."""
    output: TensorSpec
    result: int | None = None
    """Which of several results this layer stands for; None where the operator has one."""
    per_sample: Mapping[str, Any] = field(default_factory=dict)
    """Of arguments that follow the batch: what they have per sample, in their own form; 0 for what stays."""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the layer reads, each once, in order."""
        return tuple(dict.fromkeys(ref.name for _, ref in self.tensors if isinstance(ref, Value)))

    @cached_property
    def tensors(self) -> tuple[tuple[str, Value | State], ...]:
        """(argument, reference) for every tensor argument; one of a list is called `argument.index`."""
        found: list[tuple[str, Value | State]] = []
        for name, argument in self.arguments.items():
            if isinstance(argument, Value | State):
                found.append((name, argument))
            elif isinstance(argument, tuple):
                references = [(f"{name}.{index}", item) for index, item in enumerate(argument)]
                found += [(place, item) for place, item in references if isinstance(item, Value | State)]
        return tuple(found)

    def at_batch(self, batch: int) -> "Layer":
        """The same layer for another number of samples."""
        grown = {name: _grown(self.arguments[name], rows, batch) for name, rows in self.per_sample.items()}
        return replace(self, output=self.output.at_batch(batch), arguments={**self.arguments, **grown})


def _grown(argument: Any, per_sample: Any, batch: int) -> Any:
    if isinstance(per_sample, tuple):
        return tuple(_grown(item, rows, batch) for item, rows in zip(argument, per_sample, strict=True))
    return per_sample * batch if per_sample else argument


@dataclass(frozen=True)
class LayerGraph:
    """A captured network. `states` are the tensors of the module, `inputs` those of the caller."""

    layers: tuple[Layer, ...]
    inputs: Mapping[str, TensorSpec]
    states: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    """Names of the values that the network returns, each once; `capturing/signature.py` knows their structure."""
    training: bool
    batch: int
    any_batch: bool
    """Whether `at_batch` can give the graph for other numbers of samples, as far as two traces tell."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Buffers that count forward passes in training (batch norm's `num_batches_tracked`), and by how much."""
    shared: tuple[str, ...] = ()
    """The inputs that have no samples, of which every rank is given the whole."""
    targets: tuple[str, ...] = ()
    """The inputs that a loss at the end compares the result with."""
    autocast: str = ""
    """Where the network sets torch.autocast itself, for people. Its casts are layers; an autocast around it is none."""
    worked_out: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What was worked out about its layers and is asked for again and again; a copy with changes begins anew."""

    @property
    def output(self) -> str:
        """The first value that the network returns."""
        return self.outputs[0]

    def batch_dim(self, name: str) -> int | None:
        """The dim of a value that counts samples, one row each; None where it has none.

        Where traces of two batches do not tell, the one dim that has the batch's size. A `ValueError` says why it
        cannot be told.
        """
        spec = self.specs[name]
        if not self.any_batch and not spec.per_sample:
            dims = [dim for dim, size in enumerate(spec.shape) if size == self.batch]
            if len(dims) > 1:
                raise ValueError(f"dims {dims} of {name!r}, {spec.shape}, all have the size of the batch")
            return dims[0] if dims else None
        growing = [dim for dim, rows in enumerate(spec.per_sample) if rows]
        if not growing:
            return None
        if len(growing) > 1 or spec.per_sample[growing[0]] != 1:
            rows = [spec.per_sample[dim] for dim in growing]
            raise ValueError(f"{name!r}, {spec.shape}, has {rows} rows for each sample in dims {growing}")
        return growing[0]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every value's spec by name: inputs and layers."""
        return {**self.inputs, **{layer.name: layer.output for layer in self.layers}}

    def spec(self, reference: Value | State) -> TensorSpec:
        """The spec of any tensor that a layer may name."""
        return self.specs[reference.name] if isinstance(reference, Value) else self.states[reference.name]

    def holds_for(self, batch: int) -> bool:
        """Whether `at_batch` can give the graph for this number of samples."""
        return batch == self.batch or self.any_batch

    def at_batch(self, batch: int) -> "LayerGraph":
        """The same network for another number of samples. Costs no new capture."""
        if batch == self.batch:
            return self
        if not self.holds_for(batch):
            raise ValueError(f"captured for a batch of {self.batch}, which does not hold for {batch}")
        return replace(
            self,
            batch=batch,
            inputs={name: spec.at_batch(batch) for name, spec in self.inputs.items()},
            layers=tuple(layer.at_batch(batch) for layer in self.layers),
        )


def same_graph(one: LayerGraph, other: LayerGraph) -> str | None:
    """Where two graphs first differ, for people; None where they compute the same."""
    for what in ("training", "batch", "outputs", "counters"):
        if getattr(one, what) != getattr(other, what):
            return f"{what} is {getattr(one, what)} and {getattr(other, what)}"
    for kind in ("inputs", "states"):
        left, right = getattr(one, kind), getattr(other, kind)
        for name in {**left, **right}:
            if not _same_spec(left.get(name), right.get(name)):
                return f"of the {kind}, {name!r} is {_told(left.get(name))} and {_told(right.get(name))}"
    for first, second in zip_longest(one.layers, other.layers):
        if first is None or second is None:
            return f"layer {(first or second).name!r} is only in one of them"
        if (first.name, first.op, first.result) != (second.name, second.op, second.result):
            return f"layer {first.name!r} ({first.op}) is {second.name!r} ({second.op})"
        for argument in {**first.arguments, **second.arguments}:
            values = first.arguments.get(argument), second.arguments.get(argument)
            if not _same_value(*values):
                return f"layer {first.name!r} has {argument}={_told(values[0])} and {_told(values[1])}"
        if not _same_spec(first.output, second.output):
            return f"layer {first.name!r} gives {_told(first.output)} and {_told(second.output)}"
    return None


def _same_spec(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    return one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # nan is nan


def _told(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"{value.dtype} {value.shape}"
    return f"{value.name!r}" if isinstance(value, Value | State) else str(value)


def fingerprint(graph: LayerGraph) -> str:
    """A short name that graphs share if they are equal, in all processes. Values of states are not looked at."""
    layers = [
        (layer.name, layer.op, layer.result, sorted((k, str(v)) for k, v in layer.arguments.items()), str(layer.output))
        for layer in graph.layers
    ]
    others = [sorted((k, str(v)) for k, v in each.items()) for each in (graph.inputs, graph.states, graph.counters)]
    what = (layers, others, graph.outputs, graph.training, graph.batch, graph.any_batch, graph.shared)
    return blake2b(repr(what).encode(), digest_size=8).hexdigest()
