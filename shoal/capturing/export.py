"""Turn any nn.Module into a LayerGraph.

    nn.Module --torch.export--> ATen graph --functional.py--> no in-place operators --read--> LayerGraph

Promise   the graph computes what the module computes, in the mode (train or eval) that the module is in.
Cost      0.1 to 2 s per network; nothing is run on real data.
Failure   a module that torch.export cannot follow (a branch on the values of a tensor, ...) is a
          `CaptureError` with the line of the module's own code and a way out.
"""

import operator
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from shoal.capturing.batch import follow_batch
from shoal.capturing.functional import functional_names, has_hidden_writes
from shoal.errors import CaptureError
from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""Batch norm as torch's functionalisation leaves it: results 3 and 4 are its new running statistics."""


def capture(model: nn.Module, example: Tensor, *further: Tensor) -> LayerGraph:
    """The graph of `model(example, *further)`, in the mode the model is in.

    `example` has the shape of the global batch; the graph holds for other batch sizes too wherever the
    network itself does.
    """
    return capture_with_states(model, example, *further)[0]


def capture_with_states(model: nn.Module, example: Tensor, *further: Tensor) -> tuple[LayerGraph, Mapping[str, Tensor]]:
    """`capture`, and the module's tensors by the names that the graph knows them under, constants included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own internals
        program = _export(model, (example, *further))
        if has_hidden_writes(program.graph):
            program = program.run_decompositions({})  # slow, and right in every case
        graph = follow_batch(_Reader(program, model, example.shape[0]).read())
        tensors = {**program.constants, **program.state_dict}
        return graph, {name: tensors[name] for name in graph.states}


def _export(model: nn.Module, inputs: Sequence[Tensor]) -> ExportedProgram:
    try:
        return torch.export.export(model, tuple(inputs), strict=False)
    except Exception as error:
        raise CaptureError(
            f"the network {type(model).__name__} cannot be captured{_place(error)}: {_first_line(error)}.",
            "Rewrite that line without a decision on tensor values (torch.where, torch.cond, or a fixed "
            "setting), or leave that part of the network outside of shoal.parallelize.",
        ) from error


def _place(error: BaseException) -> str:
    """The deepest line of the user's own code on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/shoal/capturing/" not in f.filename]
    return f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


class _Reader:
    """Walks an exported program once and writes down its layers."""

    def __init__(self, program: ExportedProgram, model: nn.Module, batch: int) -> None:
        self.program = program
        self.model = model
        self.batch = batch
        self.references: dict[Node, Value | State] = {}
        self.layers: dict[str, Layer] = {}
        self.inputs: dict[str, TensorSpec] = {}
        self.states: dict[str, TensorSpec] = {}
        self.counters: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    def read(self) -> LayerGraph:
        self._read_inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
        output = self._read_outputs()
        return LayerGraph(
            layers=self._used_for(output),
            inputs=self.inputs,
            states=self.states,
            output=output,
            training=self.model.training,
            batch=self.batch,
            any_batch=False,
            counters=dict(self.counters),
        )

    def _read_inputs(self) -> None:
        nodes = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self.inputs[node.name] = self._spec(node.meta["val"])
                self.references[node] = Value(node.name)
            elif spec.target is not None:
                self.states[spec.target] = self._spec(node.meta["val"])
                self.references[node] = State(spec.target)

    def _read_call(self, node: Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            self._read_result(node, source, index)
        elif (counter := self._counter(node)) is not None:
            self.counters[counter.name] += 1
            self.references[node] = counter
        elif isinstance(value, Tensor):
            self._add_layer(node, node, None)
        # what is left are operators with several results, read at their getitem

    def _counter(self, node: Node) -> State | None:
        """The buffer of `buffer += 1`, as batch norm counts its batches."""
        first = node.args[0] if node.args else None
        reference = self.references.get(first) if isinstance(first, Node) else None
        adds_one = str(node.target) in ("aten.add_.Tensor", "aten.add.Tensor") and node.args[1:] == (1,)
        return reference if adds_one and isinstance(reference, State) and not node.meta["val"].ndim else None

    def _read_result(self, node: Node, source: Any, index: Any) -> None:
        """One of several results. Batch norm's new statistics are its own buffers: the rule updates them."""
        if str(source.target) == BATCH_NORM and index in (3, 4):
            self.references[node] = self.references[source.args[index]]
        else:
            self._add_layer(node, source, index)

    def _add_layer(self, node: Node, call: Node, result: int | None) -> None:
        layer = Layer(
            name=self._name(call),
            op=functional_names(call.target)[0],
            arguments=self._arguments(call),
            output=self._spec(node.meta["val"]),
            result=result,
        )
        self.layers[layer.name] = layer
        self.references[node] = Value(layer.name)

    def _arguments(self, call: Node) -> Mapping[str, Any]:
        assert isinstance(call.target, torch._ops.OpOverload)
        given = dict(zip((a.name for a in call.target._schema.arguments), call.args, strict=False))
        given |= call.kwargs
        return {
            argument.name: self._argument(given.get(argument.name, argument.default_value))
            for argument in call.target._schema.arguments
        }

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        if not isinstance(value, Node):
            return value
        return self.references[value]

    def _spec(self, value: Tensor) -> TensorSpec:
        return TensorSpec(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))

    def _name(self, call: Node) -> str:
        stack = [path for path, _ in call.meta.get("nn_module_stack", {}).values()]
        path = (stack[-1] if stack else "").partition("@")[0]
        word = functional_names(call.target)[1]
        first = path and not self.names[path] and not any(self.model.get_submodule(path).children())
        name = path if first else f"{path}.{word}" if path else word
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}_{self.names[name]}"

    def _read_outputs(self) -> str:
        node = next(node for node in self.program.graph.nodes if node.op == "output")
        returned: list[str] = []
        for spec, value in zip(self.program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                self._read_mutation(str(spec.target), value)
            elif spec.kind is OutputKind.USER_OUTPUT and value in self.references:
                returned.append(self.references[value].name)
        if len(returned) != 1:
            raise CaptureError(
                f"the network {type(self.model).__name__} returns {len(returned)} tensors.",
                "Return one tensor; wrap the network in a module that chooses it.",
            )
        return returned[0]

    def _read_mutation(self, buffer: str, value: Node) -> None:
        """Buffers that the network changes: batch norm's statistics and counters are all we can follow."""
        if self.references.get(value) != State(buffer):
            raise CaptureError(
                f"the network changes its buffer {buffer!r} in a way that a plan cannot follow.",
                "Keep running values outside of shoal.parallelize, or use batch norm's.",
            )

    def _used_for(self, output: str) -> tuple[Layer, ...]:
        wanted = {output}
        for layer in reversed(self.layers.values()):
            if layer.name in wanted:
                wanted.update(layer.reads)
        return tuple(layer for layer in self.layers.values() if layer.name in wanted)
