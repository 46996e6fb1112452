"""Boxes of many cuts at once, as arrays: what the search needs to price thousands of re-cuts in one stroke.

Most rules are separable: each dim of a box follows one letter of the cut. Then the boxes of all parts of all cuts
come together from the spans along single letters, a few hundred calls of the rule where one by one there would be a
million. A rule that is not separable is asked part by part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from shoal.lowering.boundary import tile_cut, tile_letters
from shoal.lowering.placement import place
from shoal.moves import Layout
from shoal.operators.base import Axis, Op, Part
from shoal.operators.registry import WHOLE, axes_of, rule_for
from shoal.partition import Box, Cut, Span, cut, volume, whole

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Boxes:
    """For C cuts and R ranks the box that each rank has; boxes of nothing are empty in every dim."""

    starts: Ints
    """Of shape (C, R, dims)."""
    stops: Ints
    lists: tuple[tuple[tuple[Ints, Ints], ...], ...] | None
    """Where separable: for each dim its distinct lists of spans, as (starts, stops) by part."""
    kinds: Ints | None
    """(C, dims): which of those lists a cut has."""
    copies: Ints | None
    """(C,): how many ranks have the same box."""
    everywhere: bool = False
    """Every rank has the whole tensor for itself."""

    @property
    def volumes(self) -> Ints:
        """(C, R): elements of each box."""
        volumes: Ints = np.prod(self.stops - self.starts, axis=2)
        return volumes


def owned_boxes(op: Op, cuts: Sequence[Cut], ranks: int) -> Boxes:
    """What each rank owns of a layer's finished output, under each cut."""
    rule = rule_for(op)
    if rule is WHOLE:
        return _everywhere(op.out, len(cuts), ranks)
    summed = {axis.letter for axis in axes_of(op) if axis.summed}
    plain = [not any(letter in summed for letter, _ in candidate.degrees) for candidate in cuts]
    if all(plain):
        return _boxes(op, cuts, ranks, lambda part: rule.writes(op, part))
    summing = [candidate for candidate, is_plain in zip(cuts, plain, strict=True) if not is_plain]
    partial = _divided(op, summing, ranks, summed)
    starts = np.zeros((len(cuts), *partial.starts.shape[1:]), dtype=np.int64)
    stops = np.zeros_like(starts)
    mask = np.array(plain)
    starts[~mask], stops[~mask] = partial.starts, partial.stops
    if mask.any():
        rest = [candidate for candidate, is_plain in zip(cuts, plain, strict=True) if is_plain]
        whole = _boxes(op, rest, ranks, lambda part: rule.writes(op, part))
        starts[mask], stops[mask] = whole.starts, whole.stops
    return Boxes(starts, stops, None, None, None)


def _divided(op: Op, cuts: Sequence[Cut], ranks: int, summed: set[str]) -> Boxes:
    """Each box among the ranks that hold partial sums of it, as `Placed.owns` does it, of all cuts at once."""
    rule = rule_for(op)
    partial = _boxes(op, cuts, ranks, lambda part: rule.writes(op, part))
    numbers, holders = _degrees_and_strides(cuts, next(iter(summed)))
    if len(summed) > 1 or partial.copies is None or (partial.copies != numbers).any():  # others hold the same box too
        return _from_layouts([place(op, candidate, ranks, everywhere=False).owns for candidate in cuts], len(op.out))
    sizes = partial.stops - partial.starts
    longest = sizes.argmax(axis=2)[:, :, None]
    length = np.take_along_axis(sizes, longest, axis=2)[:, :, 0]
    number = np.arange(ranks)[None] // holders[:, None] % numbers[:, None]
    pieces = np.minimum(numbers[:, None], length)
    even, longer = np.divmod(length, np.maximum(pieces, 1))
    starts, stops = partial.starts.copy(), partial.stops.copy()
    first = np.take_along_axis(starts, longest, axis=2)[:, :, 0]
    for edges, index in ((starts, number), (stops, number + 1)):
        cut_here = first + index * even + np.minimum(index, longer)
        np.put_along_axis(edges, longest, cut_here[:, :, None], axis=2)
        edges[number >= pieces] = 0
    return Boxes(starts, stops, None, None, None)


def needed_boxes(op: Op, argument: str, cuts: Sequence[Cut], ranks: int) -> Boxes:
    """What each rank reads of one tensor argument, under each cut; padding is not part of a box."""
    rule = rule_for(op)
    if rule is WHOLE:
        return _everywhere(op.shapes[argument], len(cuts), ranks)

    def read(part: Part) -> Box | None:
        need = rule.needs(op, part).get(argument)
        return None if need is None else need.box

    return _boxes(op, cuts, ranks, read)


def padding_boxes(op: Op, argument: str, cuts: Sequence[Cut], ranks: int) -> Boxes | None:
    """The rows of padding around what each rank reads, as spans from minus those before to those after.

    None where no cut pads anything.
    """
    rule = rule_for(op)
    if rule is WHOLE:
        return None

    def padded(part: Part) -> Box | None:
        need = rule.needs(op, part).get(argument)
        if need is None:
            return None
        return tuple(Span(-before, after) for before, after in need.pad or ((0, 0),) * len(need.box))

    boxes = _boxes(op, cuts, ranks, padded)
    return boxes if boxes.starts.any() or boxes.stops.any() else None


def _everywhere(shape: Sequence[int], count: int, ranks: int) -> Boxes:
    dims = max(len(shape), 1)
    stops = np.broadcast_to(np.array(list(shape) or [1], dtype=np.int64), (count, ranks, dims))
    return Boxes(np.zeros_like(stops), np.array(stops), None, None, None, everywhere=True)


def _boxes(op: Op, cuts: Sequence[Cut], ranks: int, ask: Callable[[Part], Box | None]) -> Boxes:
    axes = {axis.letter: axis for axis in axes_of(op)}
    whole: dict[str, Span] = {letter: Span(0, axis.size) for letter, axis in axes.items()}
    base = ask(whole)
    single = {
        (letter, degree): [ask({**whole, letter: span}) for span in _spans(axes[letter], degree)]
        for letter, degree in sorted({own for candidate in cuts for own in candidate.degrees})
    }
    governs = _governing(base, single)
    if base is None or governs is None or not _agrees(ask, axes, cuts, single, base, governs):
        layouts = []
        for candidate in cuts:
            parts = place(op, candidate, ranks, everywhere=False).parts
            layouts.append(tuple(None if part is None else ask(part) for part in parts))
        return _from_layouts(layouts, len(base or ()) or 1)
    return _composed(cuts, ranks, single, base, governs)


def _spans(axis: Axis, degree: int) -> tuple[Span, ...]:
    return cut(axis.size, degree, grain=axis.grain)


def _governing(base: Box | None, single: Mapping[tuple[str, int], Sequence[Box | None]]) -> dict[int, str] | None:
    """For every dim of the box the letter that changes it; None where two letters would, or where a part reads nothing
    and no dim tells that.
    """
    if base is None:
        return None
    governs: dict[int, str] = {}
    silent: set[str] = set()
    for (letter, _), boxes in single.items():
        for box in boxes:
            if box is None:
                silent.add(letter)
                continue
            for dim, (span, everything) in enumerate(zip(box, base, strict=True)):
                if span != everything and governs.setdefault(dim, letter) != letter:
                    return None
    if silent - set(governs.values()):
        return None
    return governs


def _composed(
    cuts: Sequence[Cut],
    ranks: int,
    single: Mapping[tuple[str, int], Sequence[Box | None]],
    base: Box,
    governs: Mapping[int, str],
) -> Boxes:
    dims = max(len(base), 1)
    box = base or (Span(0, 1),)
    parts = np.array([candidate.parts for candidate in cuts])
    copies = [prod(degree for letter, degree in c.degrees if letter not in governs.values()) for c in cuts]
    numbers = np.arange(ranks)
    used = numbers[None] < parts[:, None]
    lists: list[tuple[tuple[Ints, Ints], ...]] = []
    kinds = np.zeros((len(cuts), dims), dtype=np.int64)
    # Dim by dim in memory, as those who compute with them want it.
    starts = np.zeros((dims, len(cuts), ranks), dtype=np.int64)
    stops = np.zeros_like(starts)
    for dim in range(dims):
        letter = governs.get(dim, "")
        degrees, strides = _degrees_and_strides(cuts, letter)
        known: dict[int, int] = {}
        kinds[:, dim] = [known.setdefault(degree, len(known)) for degree in degrees.tolist()]
        listed = [_span_list([box] if degree == 1 else single[letter, degree], dim) for degree in known]
        lists.append(tuple(listed))
        places = np.cumsum([0, *(len(first) for first, _ in listed)])[kinds[:, dim]]
        place = places[:, None] + numbers[None] // strides[:, None] % degrees[:, None]
        for edges, which in ((starts, 0), (stops, 1)):
            edges[dim] = np.where(used, np.concatenate([spans[which] for spans in listed])[place], 0)
    return Boxes(
        starts.transpose(1, 2, 0), stops.transpose(1, 2, 0), tuple(lists), kinds, np.array(copies, dtype=np.int64)
    )


def _degrees_and_strides(cuts: Sequence[Cut], letter: str) -> tuple[Ints, Ints]:
    """For every cut its parts along a letter, and how far apart in ranks two that follow each other are."""
    return _places(tuple([candidate.degrees for candidate in cuts]), letter)


@lru_cache(maxsize=64)
def _places(cuts: tuple[tuple[tuple[str, int], ...], ...], letter: str) -> tuple[Ints, Ints]:
    """The same of cuts' degrees: the values that meet at a stage ask alike one after the other."""
    degrees, strides = np.ones((2, len(cuts)), dtype=np.int64)
    for number, own in enumerate(cuts):
        stride = 1
        for other, degree in reversed(own):
            if other == letter:
                degrees[number], strides[number] = degree, stride
                break
            stride *= degree
    return degrees, strides


def _span_list(parts: Sequence[Box | None], dim: int) -> tuple[Ints, Ints]:
    spans = [Span(0, 0) if part is None else part[dim] for part in parts]
    return np.array([span.start for span in spans]), np.array([max(span.stop, span.start) for span in spans])


def _agrees(
    ask: Callable[[Part], Box | None],
    axes: Mapping[str, Axis],
    cuts: Sequence[Cut],
    single: Mapping[tuple[str, int], Sequence[Box | None]],
    base: Box,
    governs: Mapping[int, str],
) -> bool:
    """Whether the corners of some cuts of several letters are what single letters say."""
    several = [candidate for candidate in cuts if len(candidate.degrees) > 1]
    for candidate in several[:: max(len(several) // 8, 1)]:
        for last in (False, True):
            indices = {letter: degree - 1 if last else 0 for letter, degree in candidate.degrees}
            part = {letter: Span(0, axis.size) for letter, axis in axes.items()}
            part.update({letter: _spans(axes[letter], candidate.degree(letter))[i] for letter, i in indices.items()})
            pieces = {letter: single[letter, candidate.degree(letter)][i] for letter, i in indices.items()}
            box = ask(part)
            if any(piece is None for piece in pieces.values()):
                if box is not None and volume(box):
                    return False
                continue
            expected = []
            for dim, span in enumerate(base):
                piece = pieces.get(governs.get(dim, ""))
                expected.append(span if piece is None else piece[dim])
            if box != tuple(expected):
                return False
    return True


def _from_layouts(layouts: Sequence[Layout], dims: int) -> Boxes:
    dims = max(dims, 1)
    ranks = len(layouts[0])
    starts = np.zeros((len(layouts), ranks, dims), dtype=np.int64)
    stops = np.zeros_like(starts)
    for number, layout in enumerate(layouts):
        for rank, box in enumerate(layout):
            if box is not None:
                starts[number, rank] = [span.start for span in box] or [0]
                stops[number, rank] = [max(span.stop, span.start) for span in box] or [1]
    return Boxes(starts, stops, None, None, None)


def tile_boxes(shape: Sequence[int], cuts: Sequence[Cut], ranks: int, *, channels: str = "-") -> Boxes:
    """As `boundary.tiles`, of many cuts at once."""
    names, box = tile_letters(shape, channels), whole(shape)
    fitted = [tile_cut(shape, names, wanted) for wanted in cuts]
    governs = {dim: letter for dim, letter in enumerate(names) if letter != "-"}
    single = {
        (letter, degree): [(*box[:dim], span, *box[dim + 1 :]) for span in cut(shape[dim], degree)]
        for dim, letter in governs.items()
        for degree in sorted({own for candidate in fitted for other, own in candidate.degrees if other == letter})
    }
    return _composed(fitted, ranks, single, box, governs)


def layouts_boxes(layouts: Sequence[Layout]) -> Boxes:
    """Given layouts, each as a cut of its own."""
    return _from_layouts(layouts, next((len(box) for layout in layouts for box in layout if box is not None), 1))
