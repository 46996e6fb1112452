"""From what was written down to values: a chunk at a time where no element needs another, else a memory whole.

Promise   bit for bit what torch would have computed at the time. By chunks go only operators whose every element is
          rounded by IEEE's own rule, so that it does not matter where it stood in a vector, and random fills whose
          numbers come one after the other; all else runs as it ran, on whole tensors.
Cost      by chunks: the chunks of all tensors involved. Whole: all tensors that the wanted one was made of.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.building.factory_journal import Filled, Held, Memory, Place, Ref, Result, Step, grid
from shoal.errors import ModelError

_EXACT = {
    *("zero_", "fill_", "copy_", "clone", "_to_copy", "where", "masked_fill", "masked_fill_"),
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "neg_", "abs", "abs_", "sqrt", "sqrt_"),
    *("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "sign", "sign_"),
    *("floor", "floor_", "ceil", "ceil_", "round", "round_", "trunc", "trunc_", "maximum", "minimum"),
    *("lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
}
"""Operators with one right result for each element. Not `exp` or `sigmoid`, which differ between the vectors and the
rest of a tensor, nor the random fills that are drawn by threads."""

_NEUTRAL = {"alpha": 1, "rounding_mode": None, "decimals": 0}
"""Keywords that make an exact operator another one, and what they are otherwise."""

_SETTLED_EARLY = {"any.default": True, "all.default": False}
"""Reductions that one chunk can decide."""


def obstacle(ref: Ref) -> str | None:
    """The operator that keeps a tensor from being computed by chunks; None: nothing does."""
    return _Obstacles().of_memory(ref.memory, ref.version) if ref.place.ordered else "a view with overlaps"


class _Obstacles:
    """Each memory and version is looked at once: a rejection sampler meets the same one a thousand times."""

    def __init__(self) -> None:
        self._known: dict[tuple[Memory, int], str | None] = {}

    def of_memory(self, memory: Memory, version: int) -> str | None:
        key = memory, version
        if key not in self._known:
            self._known[key] = self._search(memory, version)
        return self._known[key]

    def _search(self, memory: Memory, version: int) -> str | None:
        if memory.dtype.is_complex:
            return "complex numbers"
        start, writes = memory.history(version)
        if isinstance(start, Result) and (obstacle := self._of_result(start, memory)):
            return obstacle
        return next(filter(None, map(self._of_write, writes)), None)

    def _of_write(self, step: Step) -> str | None:
        target = step.target
        assert target is not None
        if step.draws is not None:
            return None if step.draws.by_chunk else name_of(step)
        if not _exact(step) or not target.place.ordered or target.place.dtype != target.memory.dtype:
            return name_of(step)
        for leaf in tree_leaves((step.args, dict(step.kwargs))):
            if isinstance(leaf, Ref) and leaf is not target:
                if not (target.covers and leaf.covers and leaf.place.size == target.place.size):
                    return name_of(step)
                if leaf.memory is not target.memory and (obstacle := self.of_memory(leaf.memory, leaf.version)):
                    return obstacle
        return None

    def _of_result(self, result: Result, memory: Memory) -> str | None:
        step = result.step
        if not _exact(step) or not Ref(memory, memory.version, result.place).covers:
            return name_of(step)
        for leaf in tree_leaves((step.args, dict(step.kwargs))):
            if isinstance(leaf, Ref):
                if not leaf.covers or leaf.place.size != result.place.size:
                    return name_of(step)
                if obstacle := self.of_memory(leaf.memory, leaf.version):
                    return obstacle
            elif isinstance(leaf, Tensor) and leaf.ndim and leaf.shape != result.place.size:
                return name_of(step)
        return None


def _exact(step: Step) -> bool:
    known = step.func.overloadpacket.__name__ in _EXACT
    return known and all(step.kwargs.get(word, usual) == usual for word, usual in _NEUTRAL.items())


def name_of(step: Step) -> str:
    """The operator's name without the library's."""
    return str(step.func.overloadpacket.__name__)


def held_elements(ref: Ref) -> int:
    """The length of the longest tensor that is held for this one since it was written to: a file's, for example."""
    start, writes = ref.memory.history(ref.version)
    own = ref.memory.elements if isinstance(start, Held) else 0
    operands = tree_leaves([step.args for step in writes])
    return max([own, *(operand.numel() for operand in operands if isinstance(operand, Tensor))])


def stream(ref: Ref, into: Tensor, place: Place, chunk: int) -> None:
    """Write the elements at `place`, a part of `ref`, into a tensor of that size; `obstacle(ref)` must be None."""
    for start, stop in grid(ref.memory.elements, chunk):
        if pieces := list(place.pieces(start, stop)):
            elements = _Chunk(start, stop, chunk).of(ref.memory, ref.version)
            for index, piece in pieces:
                into[index].copy_(piece.tensor(elements.untyped_storage()))


class _Chunk:
    """The elements start:stop of any memory of one length."""

    def __init__(self, start: int, stop: int, chunk: int) -> None:
        self._start, self._stop, self._number = start, stop, start // chunk
        self._known: dict[tuple[Memory, int], Tensor] = {}

    def of(self, memory: Memory, version: int) -> Tensor:
        """To be read only."""
        key = memory, version
        if key not in self._known:
            self._known[key] = self._compute(memory, version)
        return self._known[key]

    def _compute(self, memory: Memory, version: int) -> Tensor:
        start, writes = memory.history(version)
        elements = self._begin(memory, start)
        for step in writes:
            self._write(step, elements)
        return elements

    def _begin(self, memory: Memory, start: Filled | Held | Result) -> Tensor:
        length = self._stop - self._start
        if isinstance(start, Filled):
            return torch.full((length,), start.value or 0, dtype=memory.dtype)
        if isinstance(start, Held):
            return Place((length,), (1,), self._start, memory.dtype).tensor(start.storage).clone()
        step = start.step
        args, kwargs = tree_map_only((Ref, Tensor), self._operand, (step.args, dict(step.kwargs)))
        result: Tensor = step.func(*args, **kwargs)
        return result.contiguous()

    def _operand(self, given: Ref | Tensor) -> Tensor:
        if isinstance(given, Ref):
            return self.of(given.memory, given.version)
        return given.reshape(-1)[self._start : self._stop] if given.ndim else given

    def _write(self, step: Step, elements: Tensor) -> None:
        target = step.target
        assert target is not None
        if step.draws is not None:
            generator = _generator(step.draws.states[self._number])
            args = (elements if arg is target else arg for arg in step.args)
            step.func(*args, **step.kwargs, generator=generator)
            return
        for index, piece in target.place.pieces(self._start, self._stop):
            part = partial(self._part, target, elements, index, piece)
            args, kwargs = tree_map_only((Ref, Tensor), part, (step.args, dict(step.kwargs)))
            step.func(*args, **kwargs)

    def _part(
        self, target: Ref, elements: Tensor, index: tuple[slice, ...], piece: Place, given: Ref | Tensor
    ) -> Tensor:
        """What an operator that writes to a piece of its target needs of one of its tensors."""
        if isinstance(given, Ref):
            own = given.memory is target.memory
            source = elements if own else self.of(given.memory, given.version)
            return Place(piece.size, piece.stride, piece.offset, source.dtype).tensor(source.untyped_storage())
        return given.expand(target.place.size)[index] if given.ndim else given


class Whole:
    """Whole memories, each computed once as long as this object lives. What it gives is to be read only."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._known: dict[tuple[Memory, int], torch.UntypedStorage] = {}
        self._results: dict[Step, list[Any]] = {}

    def tensor(self, ref: Ref) -> Tensor:
        """A tensor's values."""
        return ref.place.tensor(self.storage(ref.memory, ref.version))

    def storage(self, memory: Memory, version: int) -> torch.UntypedStorage:
        """A memory's values."""
        key = memory, version
        if key not in self._known:
            with torch.no_grad():
                self._known[key] = self._compute(memory, version)
        return self._known[key]

    def arguments(self, given: Any) -> Any:
        """A structure with tensors in place of references."""
        return tree_map_only(Ref, self.tensor, given)

    def settle(self) -> None:
        """Let memories that cannot be computed by chunks hold what was computed here, if that is what they are now.

        Else a loop that looks at its tensors, as a rejection sampler does, would compute all its rounds in every round.
        """
        settled = {
            memory: values
            for (memory, version), values in self._known.items()
            if version == memory.version and _Obstacles().of_memory(memory, version) is not None
        }
        self._known.clear()
        self._results.clear()
        while some := [memory for memory, values in settled.items() if memory.settle(values)]:
            for memory in some:
                del settled[memory]  # whoever it was made of may now be free of readers

    def _compute(self, memory: Memory, version: int) -> torch.UntypedStorage:
        start, writes = memory.history(version)
        storage = self._begin(memory, start, private=bool(writes))
        for step in writes:
            self._write(step, memory, storage)
        return storage

    def _begin(self, memory: Memory, start: Filled | Held | Result, *, private: bool) -> torch.UntypedStorage:
        if isinstance(start, Filled):
            return torch.full((memory.elements,), start.value or 0, dtype=memory.dtype).untyped_storage()
        if isinstance(start, Held):
            return _copy(start.storage) if private else start.storage
        result = self._run(start.step)[start.number]
        if not isinstance(result, Tensor) or not start.place.same_as(Place.of(result)):
            raise ModelError(
                f"torch lays the result of {name_of(start.step)} out otherwise than it said.",
                "Compute that tensor without this operator, or build the network before it is made parallel.",
            )
        storage = result.untyped_storage()
        if storage.nbytes() < memory.meta.nbytes():
            storage = torch.empty(memory.elements, dtype=memory.dtype).untyped_storage()
            start.place.tensor(storage).copy_(result)
            return storage
        return _copy(storage) if private else storage

    def _write(self, step: Step, memory: Memory, storage: torch.UntypedStorage) -> None:
        """Run it on the values as they are now: whatever it reads of its own memory, it reads there."""

        def operand(ref: Ref) -> Tensor:
            return ref.place.tensor(storage) if ref.memory is memory else self.tensor(ref)

        args, kwargs = tree_map_only(Ref, operand, (step.args, dict(step.kwargs)))
        if step.draws is not None:
            kwargs["generator"] = _generator(step.draws.states[0])
        step.func(*args, **kwargs)

    def _run(self, step: Step) -> list[Any]:
        if step not in self._results:
            decided = self._decide(step)
            self._results[step] = tree_leaves(self._call(step)) if decided is None else [torch.tensor(decided)]
        return self._results[step]

    def _call(self, step: Step) -> Any:
        args, kwargs = self.arguments((step.args, dict(step.kwargs)))
        return step.func(*args, **kwargs)

    def _decide(self, step: Step) -> bool | None:
        """Any or all of a mask that need not be whole for it; None where it must be."""
        settled = _SETTLED_EARLY.get(f"{name_of(step)}.{step.func._overloadname}")
        mask = step.args[0] if step.args else None
        if settled is None or not isinstance(mask, Ref) or not mask.covers or obstacle(mask) is not None:
            return None
        of_chunk: Callable[[Tensor], Tensor] = torch.any if settled else torch.all
        chunks: Iterable[tuple[int, int]] = grid(mask.memory.elements, self._chunk)
        for start, stop in chunks:
            if bool(of_chunk(_Chunk(start, stop, self._chunk).of(mask.memory, mask.version))) == settled:
                return settled
        return not settled


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone().untyped_storage()


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state.clone())  # torch takes a row of a matrix for the matrix, and dies
    return generator
