"""Turn any nn.Module into a LayerGraph.

    nn.Module --torch.export, tracing.py--> ATen graph --prepare.py--> plain operators --functional.py--> no in-place
              operators --reader.py--> LayerGraph --batch.py--> for any number of samples

Promise   the graph computes what the module computes, in the mode (train or eval) that the module is in. In-place
          operators and views are followed or refused, never misread; a module that changes its input is refused.
          What a graph cannot hold (hooks, counters, random numbers of Python's) is refused, never forgotten.
Cost      two runs of torch.export, 0.1 to 2 s each; one more where the module fixes its batch or remembers something.
          Nothing is run on real data.
Failure   a module that torch.export cannot follow (a branch on the values of a tensor, ...) is a
          `CaptureError` with the line of the module's own code and a way out; nothing else is raised.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from threading import Lock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.capturing.batch import follow_batch
from shoal.capturing.functional import changed_memory, doubtful_write, has_hidden_writes, memory_of, operator_of
from shoal.capturing.lean import lean
from shoal.capturing.place import line_of
from shoal.capturing.prepare import make_differentiable, prepare
from shoal.capturing.reader import Reading, counting_nodes, read
from shoal.capturing.signature import Call, bind
from shoal.capturing.tracing import Traced, first_line, refuse_differences, refuse_kept_activations, told, trace
from shoal.capturing.watching import refuse_hooks, without_autocast
from shoal.errors import CaptureError
from shoal.graph import LayerGraph, same_graph
from shoal.operators.base import Op
from shoal.operators.registry import WHOLE, draws, rule_for

_ONE_AT_A_TIME = Lock()
"""torch.export borrows the module and the state of the whole process."""


def capture(model: nn.Module, example: Tensor, *further: Tensor) -> LayerGraph:
    """The graph of `model(example, *further)`, in the mode the model is in.

    `example` has the shape of the global batch; the graph holds for other batch sizes too wherever the
    network itself does.
    """
    return capture_with_states(model, example, *further)[0]


def capture_with_states(model: nn.Module, example: Tensor, *further: Tensor) -> tuple[LayerGraph, Mapping[str, Tensor]]:
    """`capture`, and the module's tensors by the names that the graph knows them under, constants included."""
    reading = capture_call(model, bind(model, (example, *further), {}))
    return reading.graph, reading.states


def capture_call(model: nn.Module, call: Call) -> Reading:
    """The network as it is called with these arguments, of which the tensors' shapes and types count.

    The batch is dim 0 of the first tensor; unless the call says otherwise, every tensor whose dim 0 has that size is
    taken to follow it.
    """
    _refuse_cumulative_averages(model)
    if not call.tensors:
        raise CaptureError(
            f"the network {type(model).__name__} was given no tensor.", "Pass an example of every tensor it is fed."
        )
    batch = call.samples
    with _ONE_AT_A_TIME, _quiet(), lean(), torch.enable_grad(), without_autocast(), told(model, call.tensors):
        refuse_hooks(model)
        reading, traced = _read(model, call, batch)
        _refuse_unknown_draws(reading.graph)
        _refuse_sparse_gradients(reading.graph)
        followed = _following(model, call, reading)
        if traced.changes or not followed.any_batch:  # perhaps it does something else in every pass
            with traced.as_left():
                again, second = _read(model, call, batch)
            refuse_differences(traced, second, same_graph(reading.graph, again.graph))
        return replace(reading, graph=followed)


def _following(model: nn.Module, call: Call, reading: Reading) -> LayerGraph:
    """The graph, for any batch where a second trace with twice the batch says so."""
    batch = reading.graph.batch
    tensors = [
        _doubled(tensor) if follows else tensor for tensor, follows in zip(call.tensors, call.following, strict=True)
    ]
    larger = replace(call, tensors=tuple(tensors), follows=call.following)
    try:
        doubled, _ = _read(model, larger, 2 * batch)
    except CaptureError:  # some operator does not work for another batch
        return reading.graph
    if not reading.returned.same_as(doubled.returned):
        return reading.graph
    return follow_batch(reading.graph, reading.states, doubled.graph, doubled.states)


def _read(model: nn.Module, call: Call, batch: int) -> tuple[Reading, Traced]:
    """One trace, and what it says."""
    traced = _functional(model, call)
    reading = read(traced.program, model, batch)
    inputs = zip(reading.graph.inputs, call.following, strict=True)
    shared = tuple(name for name, follows in inputs if not follows)
    graph = replace(reading.graph, autocast=traced.autocast, shared=shared)
    return replace(reading, graph=graph, asked=traced.asked), traced


def _functional(model: nn.Module, call: Call) -> Traced:
    """An exported program in which no operator changes a tensor that is read under another name."""
    traced = trace(model, *call.arguments(call.tensors), records=call.records)
    program = traced.program
    prepare(program)
    refuse_kept_activations(traced)
    _refuse_changed_inputs(program)
    if (node := doubtful_write(program.graph)) is not None:
        raise CaptureError(
            f"the network changes a tensor in place that may be another tensor too{line_of(node)}.",
            "Write the new values to a new tensor.",
        )
    if has_hidden_writes(program.graph, set(counting_nodes(program))):
        traced = replace(traced, program=_without_writes(program, model))  # slow, and right in every case
        make_differentiable(traced.program)
    return traced


def _refuse_changed_inputs(program: ExportedProgram) -> None:
    given = {memory_of(node): node.name for node in program.graph.nodes if node.op == "placeholder"}
    own = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        changed = {given[memory] for memory in changed_memory(node) if memory in given} & own
        if changed:
            raise CaptureError(
                f"the network changes its input {min(changed)!r} in place{line_of(node)}, which its caller would not "
                "see.",
                "Write the new values to a new tensor (x = x + 1 instead of x += 1, ReLU without inplace=True), or "
                "begin with x = x.clone().",
            )


def _without_writes(program: ExportedProgram, model: nn.Module) -> ExportedProgram:
    try:
        functional: ExportedProgram = program.run_decompositions({})
    except Exception as error:
        raise CaptureError(
            f"the network {type(model).__name__} changes tensors in place in a way that torch cannot take apart: "
            f"{first_line(error)}.",
            "Write new values to new tensors where views of the old ones are still used.",
        ) from error
    return functional


def _doubled(tensor: Tensor) -> Tensor:
    """A tensor for twice the batch, of which only the shape counts."""
    return torch.empty((2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


def _refuse_cumulative_averages(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and module.training
            and module.momentum is None
            and module.track_running_stats
        ):
            raise CaptureError(
                f"batch norm {name!r} has momentum=None, a cumulative average, which cannot be captured.",
                "Give it a momentum, such as 0.1.",
            )


def _refuse_unknown_draws(graph: LayerGraph) -> None:
    """Ranks that run an operator whole must get the same result, so they must not draw it each for itself."""
    for layer in graph.layers:
        if draws(operator_of(layer), layer.arguments):
            op = Op(layer, {name: graph.spec(reference).shape for name, reference in layer.tensors})
            if rule_for(op) is WHOLE:
                raise CaptureError(
                    f"layer {layer.name!r} draws random numbers by {layer.op}, which ranks would draw differently.",
                    "Use dropout or torch.bernoulli with a fixed probability, or pass the numbers in as an input.",
                )


def _refuse_sparse_gradients(graph: LayerGraph) -> None:
    for layer in graph.layers:
        if layer.arguments.get("sparse") is True:
            raise CaptureError(
                f"layer {layer.name!r} asks for sparse gradients (sparse=True), which ranks cannot sum.",
                "Leave sparse=True out, and use an optimizer for dense gradients.",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own messages about its own internals: what is wrong is in our error."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
