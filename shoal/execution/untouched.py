"""Whether what a backward pass reads again is what its forward pass left, known before any rank reads it.

torch refuses a change in place when it comes to the tensor that was changed: on the rank that holds it, in the midst of
the pass, while the others wait. So every rank looks before it begins, and tells the others (autograd_node.py).

Promise   refused is what torch would refuse, and with `recompute` every change; not one that no gradient depends on,
          such as that of a bias.
Cost      one comparison of integers for each parameter, input and result of a pass; no memory of theirs is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.execution.tape import Tape
from shoal.lowering.program import Compute


@dataclass(frozen=True)
class Change:
    """A tensor that is not what it was."""

    what: str
    again: bool
    """Whether the pass computes with it again, as `recompute` does; else autograd has kept it."""
    always: bool = True
    """Whether it stands in the way of this rank's own gradients; else only of those of results it does not use."""

    def told(self, rank: int) -> str:
        """For people."""
        start = f"{self.what} was changed in place on rank {rank} between a forward pass"
        if self.again:
            return f"{start} with recompute=True and its backward pass, which reads it again."
        return (
            f"{start} and its backward pass: one of the variables needed for gradient computation has been modified by "
            "an inplace operation."
        )


class Untouched:
    """The tensors of one pass as they were when it ended.

    `read`: parameters, buffers and inputs, by name; `results`: what the caller got. With `again` a pass computes with
    what it read a second time.
    """

    def __init__(self, read: Mapping[str, Tensor], results: Iterable[tuple[str, Tensor]], *, again: bool) -> None:
        self._read = [(name, one, one._version) for name, one in read.items() if not one.is_inference()]
        self._results = [(name, one, one._version) for name, one in map(_without_memory, results)]
        self._again = again

    def change(self, tape: Tape, given: Sequence[bool]) -> Change | None:
        """What stands in the way of backward, on this rank; `given`: the results that have a gradient here."""
        read = [name for name, one, before in self._read if one._version != before]
        results = [name for name, one, before in self._results if one._version != before]
        if (not read and not results) or tape.used:
            return None
        if read and self._again:
            return Change(repr(read[0]), again=True)
        outputs = tape.program.graph.outputs
        behind = tape.program.behind(frozenset(name for name, has in zip(outputs, given, strict=True) if has))
        found = None
        recorded = tape.recorded
        for index, layer in _refusing(recorded):
            here = {name for _, name, *_ in recorded.route.parts[index].states}
            here |= recorded.records[index].inputs.states.keys()
            names = [repr(name) for name in read if name in here] or [
                *(f"the result {name!r}" for name in results if name == layer),
                *map(repr, read),
                *(f"the result {name!r}" for name in results),
            ]
            found = Change(names[0], again=False, always=layer in behind)
            if found.always:
                break
        return found


def _without_memory(result: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """A tensor that counts changes with another, and holds nothing of it."""
    name, tensor = result
    counting = tensor.detach()
    counting.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return name, counting


def _refusing(tape: Tape) -> Iterator[tuple[int, str]]:
    """Layers, last first, in whose graphs torch would refuse to read something that it kept."""
    for index in sorted(tape.records, reverse=True):
        compute = tape.program.instructions[index]
        assert isinstance(compute, Compute)
        name = compute.placed.layer.name
        if name in tape.route.grads_for and any(map(_refuses, _nodes(tape.records[index].output.node))):
            yield index, name


def _nodes(start: Any) -> Iterator[Any]:
    left, seen = [start], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


def _refuses(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    return True
    return False
