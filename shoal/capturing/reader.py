"""From an exported program to a LayerGraph: one walk over its nodes."""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from shoal.capturing.custom_functions import function_of, is_function
from shoal.capturing.functional import arguments_of, functional_names, twin
from shoal.capturing.place import line_of
from shoal.capturing.signature import Returned
from shoal.errors import CaptureError
from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.operators.registry import facts_of
from shoal.operators.user_function import NAMESPACE, WORD


@dataclass(frozen=True)
class Reading:
    """One capture of a network."""

    graph: LayerGraph
    states: Mapping[str, Tensor]
    """Its tensors by the names that the graph gives them, constants included."""
    returned: Returned
    asked: Mapping[str, str] = field(default_factory=dict)
    """What the network asks about its call (questions.py), and where."""


def read(program: ExportedProgram, model: nn.Module, batch: int) -> Reading:
    """The graph of a program without hidden writes."""
    reader = _Reader(program, model, batch)
    graph, returned = reader.read()
    return Reading(graph, {name: reader.tensors[name] for name in graph.states}, returned)


def counting_nodes(program: ExportedProgram) -> dict[Node, Node]:
    """Nodes that count up a buffer by one, as batch norm counts its batches, with the buffer's own node."""
    signature = program.graph_signature
    counted = {spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION}
    counters: dict[Node, Node] = {}
    for node in program.graph.nodes:
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or not _counts_up(node):
            continue
        buffer = counters.get(first, first)
        in_place = twin(node.target) is not node.target
        if buffer.name not in signature.inputs_to_buffers or buffer.meta["val"].ndim:
            continue
        if in_place or _ends_in(node, counted):
            counters[node] = buffer
    return counters


def _ends_in(node: Node, names: set[str]) -> bool:
    """Whether a node, or one that adds 1 to it again, is among the named ones."""
    again = (user for user in node.users if _counts_up(user))
    return node.name in names or any(_ends_in(user, names) for user in again)


def _counts_up(node: Node) -> bool:
    return facts_of(str(node.target)).counts_up(node.args[1:], node.kwargs)


class _Reader:
    def __init__(self, program: ExportedProgram, model: nn.Module, batch: int) -> None:
        self.program = program
        self.model = model
        self.batch = batch
        self.references: dict[Node, Value | State] = {}
        self.layers: dict[str, Layer] = {}
        self.inputs: dict[str, TensorSpec] = {}
        self.states: dict[str, TensorSpec] = {}
        self.tensors: dict[str, Tensor] = {}
        self.counting = counting_nodes(program)
        self.counters: Counter[str] = Counter()
        self.counts: dict[Node, int] = {}
        self.first_names = _first_names(model)
        self.names = _Names(model)

    def read(self) -> tuple[LayerGraph, Returned]:
        self._read_inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
        outputs, returned = self._read_outputs()
        layers = self._used_for(outputs)
        if not any(self.inputs.keys() & set(layer.reads) for layer in layers):
            raise CaptureError(
                f"the network {type(self.model).__name__} does not use its input.",
                "Use it; else there is nothing to cut.",
            )
        graph = LayerGraph(
            layers=layers,
            inputs=self.inputs,
            states=self.states,
            outputs=outputs,
            training=self.model.training,
            batch=self.batch,
            any_batch=False,
            counters=dict(self.counters),
        )
        return graph, returned

    # Inputs and states

    def _read_inputs(self) -> None:
        nodes = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        constants = count()
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            target = str(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(node.meta.get("val"), Tensor):
                    name = self.names.of_input(node.name)
                    self.inputs[name] = _spec(node.meta["val"])
                    self.references[node] = Value(name)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                tensors = self.program.state_dict if spec.persistent in (None, True) else self.program.constants
                self._add_state(node, self.first_names.get(target, target), tensors[target])
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                name = f"constant_{'training' if self.model.training else 'evaluation'}_{next(constants)}"
                self._add_state(node, name, self.program.constants[target])
            else:
                raise CaptureError(
                    f"the network {type(self.model).__name__} uses {target!r}, which is no tensor.",
                    "Use tensors and plain numbers inside of the network.",
                )

    def _add_state(self, node: Node, name: str, tensor: Tensor) -> None:
        self.states[name] = _spec(tensor)
        self.tensors.setdefault(name, tensor)
        self.references[node] = State(name)

    # Layers

    def _read_call(self, node: Node) -> None:
        if node.target is operator.getitem:
            self._read_result(node, *node.args)
        elif node in self.counting:
            self._read_count(node)
        elif not isinstance(node.target, OpOverload):
            raise CaptureError(
                f"the network uses {node.target}{line_of(node)}, which a plan cannot follow.",
                "Put torch.autocast around the call of the network, not inside of it; leave other such parts outside "
                "of shoal.parallelize.",
            )
        elif twin(node.target) is None:
            raise CaptureError(
                f"the network changes a tensor in place by {node.target}{line_of(node)}, which has no other form.",
                "Write the new values to a new tensor.",
            )
        elif facts_of(str(node.target)).overwrites:
            self._read_copy(node)
        elif self._is_made_constant(node):
            self.references[node] = self.references[node.all_input_nodes[0]]
        elif isinstance(node.meta.get("val"), Tensor):
            self._add_layer(node, node, None)
        # what is left are operators with several results, read at their getitem, and numbers, refused where used

    def _read_result(self, node: Node, source: Any, index: Any) -> None:
        """One of several results. Batch norm's new statistics are its own buffers: the rule updates them."""
        argument = facts_of(str(source.target)).returns.get(index)
        if argument is not None:
            self.references[node] = self.references[arguments_of(source)[argument]]
        else:
            self._add_layer(node, source, index)

    def _add_layer(self, node: Node, call: Node, result: int | None) -> None:
        assert isinstance(call.target, OpOverload)
        op, word = functional_names(call.target)
        arguments = self._arguments(call)
        if is_function(op):
            function = function_of(arguments["call"])
            op, word = f"{NAMESPACE}.{WORD}.{function.name}", function.cls.__name__
            arguments = {**arguments, "call": function}
        layer = Layer(self.names.of_layer(call, word), op, arguments, _spec(node.meta["val"]), result)
        self.layers[layer.name] = layer
        self.references[node] = Value(layer.name)

    def _arguments(self, call: Node) -> Mapping[str, Any]:
        """Under the names of the functional operator, which has the same arguments at the same places."""
        assert isinstance(call.target, OpOverload)
        functional = twin(call.target)
        assert functional is not None
        given = dict(enumerate(call.args))
        return {
            argument.name: self._argument(
                given.get(place, call.kwargs.get(own.name, own.default_value)), call
            )
            for place, (argument, own) in enumerate(
                zip(functional._schema.arguments, call.target._schema.arguments, strict=True)
            )
        }  # fmt: skip

    def _argument(self, value: Any, call: Node) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self._argument(item, call) for item in value)
        if not isinstance(value, Node):
            return value
        if value in self.counting:
            self._add_counted(value)
        if value not in self.references:
            raise CaptureError(
                f"the network takes a number out of a tensor{line_of(value) or line_of(call)}.",
                "Keep it a tensor (x.mean() instead of x.mean().item()), or make it a fixed setting.",
            )
        return self.references[value]

    def _read_count(self, node: Node) -> None:
        buffer = self.references[self.counting[node]]
        self.counters[buffer.name] += 1
        self.counts[node] = self.counters[buffer.name]

    def _add_counted(self, node: Node) -> None:
        """A layer for a counter that the network itself reads; buffers are counted up after the pass."""
        if node not in self.references:
            buffer = self.references[self.counting[node]]
            arguments = {"self": buffer, "other": self.counts[node], "alpha": 1}
            self._add(node, f"{buffer.name}.add", "aten.add.Tensor", arguments)

    def _read_copy(self, node: Node) -> None:
        """`copy`, which has no derivative: the source, in the shape and type of what it is copied to."""
        source: Any = node.args[1]
        was, becomes = source.meta["val"], node.meta["val"]
        self.references[node] = self._argument(source, node)
        if was.dtype != becomes.dtype:
            arguments = {"self": self.references[node], "dtype": becomes.dtype, "non_blocking": False, "copy": False}
            spec = _spec(was.to(becomes.dtype))
            self._add(node, "to", "aten.to.dtype", {**arguments, "memory_format": None}, spec)
        if was.shape != becomes.shape:
            size = tuple(map(int, becomes.shape))
            self._add(
                node, "expand", "aten.expand.default", {"self": self.references[node], "size": size, "implicit": False}
            )

    def _is_made_constant(self, node: Node) -> bool:
        """`detach_`, with which torch.tensor ends."""
        made_by = [facts_of(str(source.target)) for source in node.all_input_nodes]
        in_place = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        return in_place and facts_of(str(node.target)).detaches and all(facts.constant for facts in made_by)

    def _add(
        self, node: Node, name: str, op: str, arguments: Mapping[str, Any], spec: TensorSpec | None = None
    ) -> None:
        """A layer that stands for no operator of the exported program."""
        name = self.names.unused(name)
        self.layers[name] = Layer(name, op, arguments, spec or _spec(node.meta["val"]))
        self.references[node] = Value(name)

    # Outputs

    def _read_outputs(self) -> tuple[tuple[str, ...], Returned]:
        node = next(node for node in self.program.graph.nodes if node.op == "output")
        specs = self.program.graph_signature.output_specs
        returned = []
        for spec, value in zip(specs, node.args[0], strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                returned.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                self._read_change(str(spec.target), value)
            else:
                raise CaptureError(
                    f"the network changes {spec.target!r} in its forward pass.",
                    "Change parameters between steps, outside of the network.",
                )
        if not any(isinstance(value, Node) for value in returned):
            raise CaptureError(
                f"the network {type(self.model).__name__} returns no tensor.",
                "Return the tensors that are trained on from its forward.",
            )
        names = {value: self._output(value) for value in returned if isinstance(value, Node)}
        outputs = list(dict.fromkeys(names.values()))
        leaves = tuple(outputs.index(names[value]) if isinstance(value, Node) else None for value in returned)
        plain = tuple(None if isinstance(value, Node) else value for value in returned)
        return tuple(outputs), Returned(self.program.call_spec.out_spec, leaves, plain)

    def _output(self, node: Node) -> str:
        """The layer of the result; a network that returns an input or a parameter as it is gets one that copies."""
        reference = self._argument(node, node)
        if isinstance(reference, Value) and reference.name in self.layers:
            return reference.name
        self._add(node, "output", "aten.clone.default", {"self": reference, "memory_format": None})
        return self.references[node].name

    def _read_change(self, buffer: str, value: Node) -> None:
        """Buffers that the network changes: batch norm's statistics and counters are all we can follow."""
        name = self.first_names.get(buffer, buffer)
        source = self.counting.get(value, value)
        if self.references.get(source) != State(name):
            raise CaptureError(
                f"forward writes buffer {buffer!r}{line_of(value)} (such as spectral_norm's power iteration); only "
                "batch norm's statistics and counters can be followed.",
                "Update it outside of forward.",
            )

    def _used_for(self, outputs: Sequence[str]) -> tuple[Layer, ...]:
        """Layers that the result needs, and those that change buffers even if nobody reads what they return."""
        wanted = set(outputs)
        for layer in reversed(self.layers.values()):
            if layer.name in wanted or facts_of(layer.op).updates(layer):
                wanted.add(layer.name)
                wanted.update(layer.reads)
        return tuple(layer for layer in self.layers.values() if layer.name in wanted)


class _Names:
    """Names for layers: a leaf module's path for its first operator, `path.word` for all others; each once."""

    def __init__(self, model: nn.Module) -> None:
        self.leaves = {
            path for path, module in model.named_modules(remove_duplicate=False) if path and not any(module.children())
        }
        self.taken: set[str] = set()

    def of_input(self, name: str) -> str:
        return self.unused(name)

    def of_layer(self, call: Node, word: str) -> str:
        stack = [path for path, _ in call.meta.get("nn_module_stack", {}).values()]
        path = (stack[-1] if stack else "").partition("@")[0]
        if path in self.leaves and path not in self.taken:
            self.taken.add(path)
            return path
        return self.unused(f"{path}.{word}" if path else word)

    def unused(self, name: str) -> str:
        """`name`, or `name_2`, `name_3`, ...; paths of leaf modules are theirs alone."""
        candidates = (name if index == 1 else f"{name}_{index}" for index in count(1))
        free = next(path for path in candidates if path not in self.taken and path not in self.leaves)
        self.taken.add(free)
        return free


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every parameter and buffer that has several names, under which of them it is known: the first."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in tensors}
