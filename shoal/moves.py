"""Which rows travel between ranks to turn one layout into another. Integers only.

A list of moves is a linear map: every destination starts from zeros and adds the boxes it receives,

    y[dst][box] += x[src][box]      for every Move(src, dst, box)

and its transpose, which is what backward needs, is the list with `src` and `dst` swapped. A halo, a gather,
a re-cut, a change in the number of ranks and a sum of partial results are all such lists: where the sources
are disjoint nothing is really added, where the destinations overlap backward adds. The executor sends the
list, the cost model prices it, the simulator replays it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from shoal.partition import Box, Span, volume

Layout = tuple[Box | None, ...]
"""For every rank the box it holds, or None where it holds nothing."""


@dataclass(frozen=True, slots=True)
class Move:
    """One box from one rank to another, or within a rank where both are the same."""

    src: int
    dst: int
    box: Box

    @property
    def elements(self) -> int:
        """Elements that cross between ranks; a move within a rank crosses nothing."""
        return 0 if self.src == self.dst else volume(self.box)

    def reversed(self) -> Self:
        """The same box on its way back."""
        return type(self)(self.dst, self.src, self.box)


def add_moves(have: Sequence[Box | None], need: Sequence[Box | None]) -> tuple[Move, ...]:
    """Every overlap of what a rank has with what a rank needs.

    With disjoint `have` every needed row arrives once: a copy. With partial results in `have` the rows that
    several ranks hold are added up at their destination. Costs what the list is long, not every pair of ranks: who
    overlaps is found span by span in each dim.
    """
    holders = _Holders(have)
    moves = []
    for dst, wanted in enumerate(need):
        for src in holders.of(wanted) if wanted is not None else ():
            held = have[src]
            assert held is not None
            assert wanted is not None
            moves.append(Move(src, dst, tuple(map(Span.__and__, held, wanted))))
    return tuple(moves)


class _Holders:
    """Who holds rows of a box: in each dim sets of ranks, as bits of one number, that are intersected."""

    def __init__(self, have: Sequence[Box | None]) -> None:
        self._all = sum(1 << rank for rank, box in enumerate(have) if box is not None)
        dims = next((len(box) for box in have if box is not None), 0)
        self._by_span: list[dict[Span, int]] = [{} for _ in range(dims)]
        for rank, box in enumerate(have):
            for spans, span in zip(self._by_span, box or (), strict=False):
                spans[span] = spans.get(span, 0) | 1 << rank
        self._known: list[dict[Span, int]] = [{} for _ in range(dims)]

    def of(self, box: Box) -> Iterator[int]:
        """The ranks, ascending."""
        ranks = self._all
        for known, spans, wanted in zip(self._known, self._by_span, box, strict=True) if ranks else ():
            if wanted not in known:
                known[wanted] = sum(bits for span, bits in spans.items() if span & wanted)
            ranks &= known[wanted]
        while ranks:
            lowest = ranks & -ranks
            yield lowest.bit_length() - 1
            ranks ^= lowest


def copy_moves(have: Sequence[Box | None], need: Sequence[Box | None]) -> tuple[Move, ...]:
    """Each needed box from one rank that holds all of it, itself where it can: for copies of a whole tensor.

    The ranks without a copy are spread over those with one.
    """
    holders = [rank for rank, box in enumerate(have) if box is not None]
    return tuple(
        Move(dst if have[dst] is not None else holders[dst % len(holders)], dst, wanted)
        for dst, wanted in enumerate(need)
        if wanted is not None and volume(wanted)
    )


def crossing(moves: Iterable[Move]) -> int:
    """Elements that these moves send between ranks."""
    return sum(move.elements for move in moves)
