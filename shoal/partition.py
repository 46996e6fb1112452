"""How a layer's work is cut over ranks. Integers only: no tensors, no processes.

Words: a `Span` is a run of rows of one dim, a `Box` one span per dim, a `Cut` says into how many parts each
dim of a layer goes. Parts are as even as possible and the longer ones come first, so no part is ever empty.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple, Self

from shoal.errors import PlanError

DIMS = "nckdhw"
"""Sample, channel, contracted input channel, depth, height, width: the order in which cuts are usually written."""

_TERM = re.compile(r"([a-z])(\d+)")


class Span(NamedTuple):
    """Rows `start` up to, not including, `stop`. Empty spans are allowed and are false.

    A tuple, since a search compares and hashes millions; its length is that of the rows, not 2.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    def __and__(self, other: "Span") -> "Span":
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shifted(self, by: int) -> "Span":
        """The same rows, counted from another origin."""
        return Span(self.start + by, self.stop + by)

    def scaled(self, by: int) -> "Span":
        """The rows that these rows become when each stands for `by` rows."""
        return Span(self.start * by, self.stop * by)


Box = tuple[Span, ...]
"""One span per dim of a tensor, in the whole tensor's own rows."""


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple(Span(0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box; a box without dims is a scalar's and has one."""
    elements = 1
    for span in box:  # asked millions of times by a search: no call per span
        rows = span.stop - span.start
        if rows <= 0:
            return 0
        elements *= rows
    return elements


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    shared = tuple(x & y for x, y in zip(a, b, strict=True))
    return shared if all(shared) else None


def slices(inner: Box, origin: Box) -> tuple[slice, ...]:
    """Where the rows of `inner` stand in a tensor that holds the rows of `origin`."""
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, origin, strict=True))


@lru_cache(maxsize=1 << 14)
def cut(size: int, parts: int, *, grain: int = 1) -> tuple[Span, ...]:
    """Cut `size` rows into `parts` spans, each a multiple of `grain` rows, as even as that allows.

    >>> cut(7, 3)
    (Span(start=0, stop=3), Span(start=3, stop=5), Span(start=5, stop=7))
    >>> cut(12, 2, grain=4)
    (Span(start=0, stop=8), Span(start=8, stop=12))
    """
    grains, rest = divmod(size, grain)
    if rest or not 1 <= parts <= grains:
        unit = "row" if grain == 1 else f"{grain} rows"
        raise PlanError(
            f"{size} rows cannot be cut into {parts} parts.",
            f"Each part needs {unit}: at most {grains} parts fit.",
        )
    base, longer = divmod(grains, parts)
    edges = [(i * base + min(i, longer)) * grain for i in range(parts + 1)]
    return tuple(map(Span, edges, edges[1:]))


@dataclass(frozen=True)
class Cut:
    """Into how many parts each dim is cut; dims that are not named stay whole.

    The order of the letters says which rank has which part: the last letter's parts are on neighbours. `n2c2` has the
    channels of one half of the samples on ranks 0 and 1, `c2n2` has both halves of the samples there.

    >>> Cut.parse("n2h2").parts, str(Cut.parse("h2n2")), str(Cut.parse("n1"))
    (4, 'h2n2', '1')
    >>> Cut.parse("c2n2").seats(5)[1], Cut.parse("c2n2").seats(5)[4]
    ({'c': 0, 'n': 1}, None)
    """

    degrees: tuple[tuple[str, int], ...] = ()
    planned: tuple[tuple[str, int], ...] = ()
    """The degrees by which ranks are counted, where a small batch leaves some of them without a part."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """A cut from its short form: `n2h2` is two parts by sample times two by height, `1` is whole."""
        terms = _TERM.findall(text)
        degrees = {dim: int(degree) for dim, degree in terms}
        spelled = "".join(dim + degree for dim, degree in terms)
        well_formed = spelled == text and len(degrees) == len(terms) > 0 and set(degrees) <= set(DIMS)
        if text != "1" and not well_formed:
            raise PlanError(
                f"{text!r} is not a cut.",
                f"Write a dim of {', '.join(DIMS)} and a number of parts for each dim that is cut, such as "
                "n4, c2 or n2h2; 1 leaves the layer whole.",
            )
        if 0 in degrees.values():
            raise PlanError(f"cut {text!r} asks for 0 parts.", "Each dim has at least 1 part.")
        return cls(tuple((dim, degree) for dim, degree in degrees.items() if degree > 1))

    @classmethod
    def of(cls, **degrees: int) -> Self:
        """A cut from numbers, in the usual order: `Cut.of(n=2, h=2)`; degrees of 1 are left out."""
        return cls(tuple((dim, degrees[dim]) for dim in DIMS if degrees.get(dim, 1) > 1))

    @cached_property
    def parts(self) -> int:
        """Ranks that the cut uses."""
        return prod(degree for _, degree in self.degrees)

    def __str__(self) -> str:
        return "".join(f"{dim}{degree}" for dim, degree in self.degrees) or "1"

    def degree(self, dim: str) -> int:
        """Parts along one dim; 1 where it stays whole."""
        return dict(self.degrees).get(dim, 1)

    def at_most(self, limits: Mapping[str, int]) -> "Cut":
        """The same with fewer parts where a dim has a limit; in the same order, over the first ranks."""
        fitted = ((dim, min(degree, limits.get(dim, degree))) for dim, degree in self.degrees)
        return Cut(tuple((dim, degree) for dim, degree in fitted if degree > 1))

    def shrunk(self, dim: str, limit: int) -> "Cut":
        """The same with at most `limit` parts along one dim; every part left stays on its rank."""
        return replace(self.at_most({dim: limit}), planned=self.planned or self.degrees)

    def seats(self, ranks: int) -> tuple[Mapping[str, int] | None, ...]:
        """For every rank the number of its part along each dim that is cut; None for a rank without a part."""
        found: list[Mapping[str, int] | None] = [None] * ranks
        strides, stride = {}, 1
        for dim, degree in reversed(self.planned or self.degrees):
            strides[dim] = stride
            stride *= degree
        dims = [dim for dim, _ in self.degrees]
        for numbers in product(*(range(degree) for _, degree in self.degrees)):
            found[sum(strides[dim] * number for dim, number in zip(dims, numbers, strict=True))] = dict(
                zip(dims, numbers, strict=True)
            )
        return tuple(found)
