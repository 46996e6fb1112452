"""Bytes of a list of moves by rank and level of links, without listing the moves: overlaps of all pairs as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.lowering.tasks import Moved
from shoal.moves import Layout
from shoal.partition import Span, volume

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_AT_ONCE = 1 << 20
"""Pairs of ranks that are looked at together."""


@dataclass(frozen=True)
class Flows:
    """Who sends how much to whom, as sums by rank."""

    received: Ints
    """(levels, ranks): elements that come over links of each level."""
    sent: Ints
    arriving: Ints
    """(ranks,): elements that are put together at each rank, its own included."""
    leaving: Ints
    """(ranks,): elements that ranks put together of what each has; what arrives when the same boxes go back."""
    packed: NDArray[np.uint8]
    """(ranks, ranks / 8): for every rank, as bits, those that it gets something from."""

    @cached_property
    def sources(self) -> Bools:
        """(ranks, ranks): whether a rank gets something from another."""
        return np.unpackbits(self.packed, axis=1, count=len(self.packed)).astype(bool)

    @cached_property
    def back(self) -> "Flows":
        """The same boxes on their way back."""
        packed = np.packbits(self.sources.T, axis=1)
        return Flows(self.sent, self.received, self.leaving, self.arriving, packed)


def flows_of(work: Moved, levels: Sequence[int]) -> Flows:
    """The flows of the moves from `have` to `need`; `levels`: the ranks of one group of every level, innermost first.

    Backward's are their `back`. Costs every pair of ranks, some 50 million pairs a second.
    """
    ranks = len(work.have)
    totals = _Totals(ranks, levels)
    rows = max(1, _AT_ONCE // ranks)
    for first in range(0, ranks, rows):
        totals.add(first, elements_between(work, slice(first, first + rows)))
    return totals.flows()


def elements_between(work: Moved, rows: slice) -> Ints:
    """(some destinations, sources): elements that go from one to the other in forward, or stay where they are."""
    if not work.copies:
        return _overlaps(work.have, work.need, rows)
    wanted = work.need[rows]
    elements = np.zeros((len(wanted), len(work.have)), dtype=np.int64)
    holders = [rank for rank, box in enumerate(work.have) if box is not None]
    for row, box in enumerate(wanted):
        dst = range(len(work.need))[rows][row]
        if box is not None:
            elements[row, dst if work.have[dst] is not None else holders[dst % len(holders)]] = volume(box)
    return elements


def _overlaps(have: Layout, need: Layout, rows: slice) -> Ints:
    """Elements that boxes of two layouts share, from the overlaps of their few distinct spans in each dim."""
    wanted = need[rows]
    there, needed = np.array([box is not None for box in have]), np.array([box is not None for box in wanted])
    elements: Ints = (needed[:, None] & there[None]).astype(np.int64)
    for dim in range(next((len(box) for box in (*have, *wanted) if box is not None), 0)):
        held, held_index = _distinct(have, dim)
        asked, asked_index = _distinct(wanted, dim)
        starts = np.maximum(asked[:, None, 0], held[None, :, 0])
        lengths = np.maximum(np.minimum(asked[:, None, 1], held[None, :, 1]) - starts, 0)
        if lengths.size > 1:
            elements *= lengths[asked_index][:, held_index]
        elif lengths[0, 0] != 1:
            elements *= lengths[0, 0]
    return elements


def _distinct(layout: Layout, dim: int) -> tuple[Ints, Ints]:
    """The distinct spans of one dim, and which each rank has."""
    numbers: dict[Span, int] = {}
    index = [0 if box is None else numbers.setdefault(box[dim], len(numbers)) for box in layout]
    spans = [(span.start, span.stop) for span in numbers] or [(0, 0)]
    return np.array(spans, dtype=np.int64), np.array(index, dtype=np.int64)


class _Totals:
    """Sums over blocks of destinations."""

    def __init__(self, ranks: int, levels: Sequence[int]) -> None:
        self._ranks, self._levels = ranks, levels
        self._received = np.zeros((len(levels), ranks), dtype=np.int64)
        self._sent = np.zeros_like(self._received)
        self._arriving, self._leaving = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        self._packed = np.zeros((ranks, -(-ranks // 8)), dtype=np.uint8)

    def add(self, first: int, elements: Ints) -> None:
        """(destinations from `first` on, sources)."""
        rows = np.arange(first, first + len(elements))
        self._arriving[rows] = elements.sum(axis=1)
        self._leaving += elements.sum(axis=0)
        own = elements[np.arange(len(rows)), rows]
        elements[np.arange(len(rows)), rows] = 0
        self._packed[rows] = np.packbits(elements > 0, axis=1)
        sources = np.arange(self._ranks)
        within_received, within_sent = np.zeros(len(rows), dtype=np.int64), np.zeros(self._ranks, dtype=np.int64)
        for index, size in enumerate(self._levels):
            last = index == len(self._levels) - 1
            near = elements if last else np.where(rows[:, None] // size == sources[None] // size, elements, 0)
            received, sent = near.sum(axis=1), near.sum(axis=0)
            self._received[index, rows] = received - within_received
            self._sent[index] += sent - within_sent
            within_received, within_sent = received, sent
        elements[np.arange(len(rows)), rows] = own

    def flows(self) -> Flows:
        return Flows(self._received, self._sent, self._arriving, self._leaving, self._packed)
