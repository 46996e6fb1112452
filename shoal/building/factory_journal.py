"""What a factory did to its tensors, written down instead of done.

Words: a `Memory` is a torch storage that nobody holds: how it began and every write to it since. A `Ref` is a tensor
in it, as it was after so many writes. Chunks are runs of a memory's elements; whatever needs no neighbour is computed
a chunk at a time, so that the whole is never there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.partition import Box

CHUNK = 2**18
"""Elements computed at a time, a multiple of the 16 that torch draws at a time from a normal distribution."""


def grid(elements: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Chunks as (first element, end); a rest joins the last one, because torch draws the last 16 normals together.

    >>> list(grid(40, 16))
    [(0, 16), (16, 40)]
    """
    last = max(elements // chunk - 1, 0) * chunk
    yield from ((start, start + chunk) for start in range(0, last, chunk))
    yield last, elements


@dataclass(frozen=True)
class Place:
    """Where in a memory a tensor lies."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Place":
        """The place of a tensor in its storage."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.size)

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor itself, in a storage that is laid out like the memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def same_as(self, other: "Place") -> bool:
        """Whether both say the same; the stride of a dim with one row says nothing."""
        alike = (self.size, self.offset, self.dtype) == (other.size, other.offset, other.dtype)
        return alike and _by_stride(self) == _by_stride(other)

    def part(self, box: Box) -> "Place":
        """The place of a box of the tensor."""
        begins = sum(span.start * stride for span, stride in zip(box, self.stride, strict=True))
        return Place(tuple(map(len, box)), self.stride, self.offset + begins, self.dtype)

    @property
    def ordered(self) -> bool:
        """Whether rows of longer strides lie apart, so that a run of elements is a few blocks of the tensor."""
        dims = _by_stride(self)
        return all(stride >= _extent(dims[at + 1 :]) for at, (_, _, stride) in enumerate(dims))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], "Place"]]:
        """The blocks of the tensor among the memory's elements start:stop, and where they lie in these."""
        if not self.numel:
            return
        for chosen in _blocks(_by_stride(self), self.offset, start, stop):
            index = tuple(chosen.get(dim, slice(0, size)) for dim, size in enumerate(self.size))
            begins = sum(rows.start * stride for rows, stride in zip(index, self.stride, strict=True))
            size = tuple(rows.stop - rows.start for rows in index)
            yield index, Place(size, self.stride, self.offset + begins - start, self.dtype)


_Dims = Sequence[tuple[int, int, int]]
"""(dim, size, stride) of dims with more than one row, the longest stride first."""


def _by_stride(place: Place) -> _Dims:
    dims = zip(range(len(place.size)), place.size, place.stride, strict=True)
    return sorted((dim for dim in dims if dim[1] > 1), key=lambda dim: -dim[2])


def _extent(dims: _Dims) -> int:
    return 1 + sum((size - 1) * stride for _, size, stride in dims)


def _blocks(dims: _Dims, base: int, start: int, stop: int) -> Iterator[dict[int, slice]]:
    """Rows of every dim of the largest blocks inside start:stop; at most two rows of a dim are taken apart."""
    extent = _extent(dims)
    if base + extent <= start or base >= stop:
        return
    if base >= start and base + extent <= stop:
        yield {}
        return
    (dim, size, stride), *inner = dims
    first = max(0, -((base - start) // stride))
    end = min(size, (stop - _extent(inner) - base) // stride + 1)
    if first < end:
        yield {dim: slice(first, end)}
    for row in {first - 1, end}:
        if 0 <= row < size and not first <= row < end:
            for chosen in _blocks(inner, base + row * stride, start, stop):
                yield {dim: slice(row, row + 1), **chosen}


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor in a memory, after the first `version` writes to it."""

    memory: "Memory"
    version: int
    place: Place

    def __post_init__(self) -> None:
        self.memory.refs.add(self)

    @property
    def covers(self) -> bool:
        """Whether it is the whole memory, in its order."""
        place, memory = self.place, self.memory
        fits = place.offset == 0 and place.numel == memory.elements and place.dtype == memory.dtype
        return fits and _packed(place)


def _packed(place: Place) -> bool:
    expected = 1
    for size, stride in zip(reversed(place.size), reversed(place.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Draws:
    """The generator's state before a random write: one for every chunk, or one for all of it."""

    states: Tensor
    """One in a row."""
    by_chunk: bool


@dataclass(frozen=True, eq=False)
class Step:
    """One call of an operator; tensors that nobody holds are `Ref`s, others are copies of what they were."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Ref | None = None
    """The tensor that the operator writes to."""
    draws: Draws | None = None


@dataclass(frozen=True)
class Filled:
    """A memory that began with one value everywhere; None: with whatever was there."""

    value: Any = None


@dataclass(frozen=True, eq=False)
class Held:
    """A memory that began with these values, which are held."""

    storage: torch.UntypedStorage


@dataclass(frozen=True, eq=False)
class Result:
    """A memory that began as a result of an operator."""

    step: Step
    number: int
    """Which of its results."""
    place: Place


@dataclass(eq=False)
class Memory:
    """A storage that nobody holds."""

    meta: torch.UntypedStorage
    """A storage of this size without memory; kept, because its address is the memory's name."""
    dtype: torch.dtype
    start: Filled | Held | Result
    writes: list[Step] = field(default_factory=list)
    """Those that are needed."""
    forgotten: int = 0
    """Writes before these, which `start` knows of."""
    refs: WeakSet[Ref] = field(default_factory=WeakSet)

    @property
    def elements(self) -> int:
        """Its length."""
        return self.meta.nbytes() // self.dtype.itemsize

    @property
    def version(self) -> int:
        """Writes so far."""
        return self.forgotten + len(self.writes)

    def history(self, version: int) -> tuple[Filled | Held | Result, list[Step]]:
        """All that the first `version` writes left: a start, and the writes that count."""
        writes = self.writes[: version - self.forgotten]
        last = next((at for at in reversed(range(len(writes))) if overwrites(writes[at])), None)
        return (self.start, writes) if last is None else (Filled(), writes[last:])

    def settle(self, values: torch.UntypedStorage) -> bool:
        """Hold the values as they are now instead of how they came to be; not while somebody needs older ones."""
        if any(ref.version < self.version for ref in self.refs if not self._own(ref)):
            return False
        self.start, self.forgotten, self.writes = Held(values), self.version, []
        return True

    def _own(self, ref: Ref) -> bool:
        """Whether it is a write to this memory that needs it, and nobody else."""
        return any(given is ref for step in self.writes for given in tree_leaves((step.args, dict(step.kwargs))))


_OVERWRITING = {"zero_", "fill_", "copy_"}


def overwrites(step: Step) -> bool:
    """Whether nothing of its target's memory is left as it was, or read."""
    if step.target is None or not step.target.covers:
        return False
    if step.draws is not None:
        return step.draws.by_chunk
    own = sum(isinstance(arg, Ref) and arg.memory is step.target.memory for arg in step.args)
    return own == 1 and step.func.overloadpacket.__name__ in _OVERWRITING
