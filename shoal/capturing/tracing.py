"""One run of torch.export under watch, and what the network changed in Python meanwhile.

Promise   the network's attributes and all random generators are left as they were.
Failure   whatever goes wrong is a `CaptureError` with the line of the network's own code.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.capturing.attributes import Change, Picture, take
from shoal.capturing.functional import memory_of
from shoal.capturing.place import line_of_error
from shoal.capturing.watching import Watch, say_once
from shoal.errors import CaptureError, ShoalError

_REMEDY = "Keep such values outside of the network and pass them in as an input, or keep them in a buffer."


@dataclass(frozen=True)
class Traced:
    """What torch.export made of a network."""

    program: ExportedProgram
    autocast: str
    """Where the network sets torch.autocast itself, for people; empty if it does not."""
    before: Picture
    after: Picture
    changes: list[Change]
    """Of attributes, without tensors."""
    kept: list[Change]
    """Attributes that were given new tensors; they have the old ones again."""
    asked: Mapping[str, str]
    """What the network asks about its call (questions.py), and where."""

    @contextmanager
    def as_left(self) -> Iterator[None]:
        """Within, the network's attributes are what the trace left them as."""
        self.after.restore(self.changes)
        try:
            yield
        finally:
            self.before.restore(self.changes)


def trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, records: bool = True) -> Traced:
    """Run torch.export. What the network changed of its own attributes is told and taken back.

    `records`: whether the call that it is for records gradients.
    """
    before = take(model)
    try:
        program, watch = _watched(model, tuple(args), dict(kwargs), records)
    finally:
        before.restore(before.changes(take(model)))
        before.put_back()
    assert watch.before is not None
    assert watch.after is not None
    changes = [change for change in watch.before.changes(watch.after) if not change.expected]
    plain = [change for change in changes if not change.tensors]
    for change in changes:
        if change.structural:
            raise CaptureError(f"{change}.", "Change the parts of a network between steps, outside of its forward.")
    kept = [change for change in changes if change.tensors]
    return Traced(program, watch.autocast, watch.before, watch.after, plain, kept, watch.asked)


def _watched(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], records: bool
) -> tuple[ExportedProgram, Watch]:
    watch = Watch(model, records)
    with told(model, [args, kwargs], watch):
        with watch.on():
            program = torch.export.export(model, args, kwargs, strict=False)
        if watch.drawing is not None:  # or it is torch, which imports much in its first run
            watch = Watch(model, records)
            with watch.on():
                program = torch.export.export(model, args, kwargs, strict=False)
            if watch.drawing is not None:
                watch.refuse_draws()
    return program, watch


def refuse_kept_activations(traced: Traced) -> None:
    """A tensor that is kept and depends on the input would be missed; others, such as cached tables, are made anew."""
    graph = traced.program.graph
    inputs = set(traced.program.graph_signature.user_inputs)
    seen: set[Node] = set()
    memories: dict[int, bool] = {}
    for node in graph.nodes:
        if node.name in inputs or any(source in seen for source in node.all_input_nodes):
            seen.add(node)
        memory = memory_of(node)
        if memory is not None:
            memories[memory] = memories.get(memory, False) or node in seen
    for change in traced.kept:
        if any(memories.get(tensor.untyped_storage()._cdata, True) for tensor in change.tensors):
            raise CaptureError(
                f"{change}.", "To see an inner value, return it as a further output instead of keeping it."
            )


def refuse_differences(first: Traced, second: Traced, difference: str | None) -> None:
    """Refuse a network that is another in its second pass, or changes something in every pass."""
    changes = {(change.owner, change.name): change for change in first.changes}
    for change in second.changes:
        shown = changes.get((change.owner, change.name), change)
        raise CaptureError(f"{shown}, which would be frozen as it is now.", _REMEDY)
    if difference is not None:
        why = f" {first.changes[0]}." if first.changes else ""
        raise CaptureError(f"two passes of the network on the same input differ: {difference}.{why}", _REMEDY)
    for change in first.changes:
        say_once(f"{change}; in a parallel network it stays as it is")


@contextmanager
def told(model: nn.Module, inputs: Sequence[Any], watch: Watch | None = None) -> Iterator[None]:
    """Every error within becomes a `CaptureError` that names the line of the network's code."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        if watch is not None:
            watch.raise_refused()  # torch may have dressed it up
        if _depends_on_values(error):
            problem = "what it does next depends on the values of a tensor"
            remedy = "Write it without the decision (torch.where, or a fixed setting), or leave that part of the "
            remedy += "network outside of shoal.parallelize."
        else:
            problem = first_line(error)
            tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            remedy = f"Check that the network itself runs on an input of shape {shapes}; if it does, torch.export "
            remedy += "cannot follow that line, and the part must be rewritten or left outside of shoal.parallelize."
        raise CaptureError(
            f"the network {type(model).__name__} cannot be captured{line_of_error(error)}: {problem}.", remedy
        ) from error


def _depends_on_values(error: Exception) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError"}) or (
        "data-dependent" in str(error)
    )


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
