"""Moves: every needed element arrives, once, and the way back is the transpose of the way there."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.execution.transfer import begin_transfer
from shoal.moves import Layout, Move, add_moves, copy_moves, crossing
from shoal.operators.base import Need
from shoal.partition import Box, Span, cut, overlap, slices, volume, whole
from shoal.transport import Transport
from shoal.transport.memory import run_ranks

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(span.start, span.stop) for span in box)))


@st.composite
def disjoint(draw: st.DrawFn, shape: Sequence[int], ranks: int) -> Layout:
    """A tensor cut over some ranks, in any order; the others hold nothing."""
    parts: list[tuple[Span, ...]] = []
    for size in shape:
        most = max(1, min(size, ranks // max(1, len(list(product(*parts))))))
        parts.append(cut(size, draw(st.integers(1, most))))
    boxes: list[Box | None] = list(product(*parts))
    return tuple(draw(st.permutations(boxes + [None] * (ranks - len(boxes)))))


@st.composite
def anything(draw: st.DrawFn, shape: Sequence[int], ranks: int) -> Layout:
    """Any box on any rank, or none: halos overlap, some boxes are empty."""

    def span(size: int) -> Span:
        start = draw(st.integers(0, size))
        return Span(start, draw(st.integers(start, size)))

    return tuple(tuple(span(size) for size in shape) if draw(st.integers(0, 4)) else None for _ in range(ranks))


@st.composite
def cases(draw: st.DrawFn, partial: bool) -> tuple[list[int], Layout, Layout]:
    shape, ranks = draw(sizes), draw(st.integers(1, 5))
    have = draw(anything(shape, ranks) if partial else disjoint(shape, ranks))
    return shape, have, draw(anything(shape, ranks))


@given(cases(partial=False))
def test_every_needed_element_arrives_once(case: tuple[list[int], Layout, Layout]) -> None:
    _, have, need = case
    moves = add_moves(have, need)
    for rank, wanted in enumerate(need):
        arrived = Counter(element for move in moves if move.dst == rank for element in elements(move.box))
        assert arrived == Counter(dict.fromkeys(elements(wanted or (Span(0, 0),)), 1))
    for move in moves:
        source, wanted = have[move.src], need[move.dst]
        assert source is not None
        assert wanted is not None
        assert overlap(source, move.box) == overlap(wanted, move.box) == move.box


@given(cases(partial=False))
def test_what_stays_on_its_rank_crosses_nothing(case: tuple[list[int], Layout, Layout]) -> None:
    _, have, need = case
    moves = add_moves(have, need)
    foreign = [
        len(elements(wanted) - elements(held or (Span(0, 0),)))
        for wanted, held in zip(need, have, strict=True)
        if wanted is not None
    ]
    assert crossing(moves) == sum(foreign)
    assert crossing(add_moves(have, have)) == 0


def values(layout: Layout, seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        None if box is None else torch.rand([len(span) for span in box], generator=generator, dtype=torch.float64)
        for box in layout
    ]


def apply(moves: Sequence[Move], x: Sequence[Tensor | None], have: Layout, need: Layout) -> list[Tensor | None]:
    """The map that the header of moves.py defines, in five lines."""
    found: list[Tensor | None] = [None if box is None else torch.zeros([len(s) for s in box]).double() for box in need]
    for move in moves:
        source, target, held, wanted = x[move.src], found[move.dst], have[move.src], need[move.dst]
        assert source is not None and target is not None and held is not None and wanted is not None  # noqa: PT018
        target[slices(move.box, wanted)] += source[slices(move.box, held)]
    return found


def dot(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


@given(cases(partial=True))
def test_moves_turned_round_are_the_transpose(case: tuple[list[int], Layout, Layout]) -> None:
    _, have, need = case
    moves = add_moves(have, need)
    x, y = values(have, 1), values(need, 2)
    there = apply(moves, x, have, need)
    back = apply([move.reversed() for move in moves], y, need, have)
    assert abs(dot(there, y) - dot(x, back)) < 1e-9


@given(cases(partial=True))
@settings(max_examples=40, derandomize=True)
def test_the_executor_does_what_moves_say(case: tuple[list[int], Layout, Layout]) -> None:
    """Partial results are added up at their destinations, and so are gradients on their way back."""
    _, have, need = case
    moves = add_moves(have, need)
    for there, held, wanted in ((moves, have, need), ([move.reversed() for move in moves], need, have)):
        x = values(held, 1)

        def send(
            link: Transport,
            x: list[Tensor | None] = x,
            there: Sequence[Move] = there,
            held: Layout = held,
            wanted: Layout = wanted,
        ) -> Tensor | None:
            box = wanted[link.rank]
            like = torch.empty(0, dtype=torch.float64)
            tile = None if box is None else Need(box)
            return begin_transfer(x[link.rank], held[link.rank], tile, there, link, tag=0, like=like, add=True).wait()

        for found, expected in zip(run_ranks(len(have), send), apply(there, x, held, wanted), strict=True):
            assert (found is None) == (expected is None)
            assert found is None or expected is None or torch.allclose(found, expected, rtol=1e-12)


@given(cases(partial=False), st.integers(0, 3))
@settings(max_examples=25, derandomize=True)
def test_a_tile_has_its_border_around_what_arrives(case: tuple[list[int], Layout, Layout], width: int) -> None:
    shape, have, need = case
    full = torch.rand(shape, dtype=torch.float64)
    pad = ((width, 1), *((0, 0),) * (len(shape) - 1))

    def send(link: Transport) -> Tensor | None:
        held, wanted = have[link.rank], need[link.rank]
        local = None if held is None else full[slices(held, whole(shape))]
        tile = None if wanted is None else Need(wanted, pad, float("-inf"))
        like = torch.empty(0, dtype=torch.float64)
        return begin_transfer(local, held, tile, add_moves(have, need), link, tag=0, like=like, add=False).wait()

    for found, wanted in zip(run_ranks(len(have), send), need, strict=True):
        if wanted is not None:
            assert found is not None
            inner = full[slices(wanted, whole(shape))]
            border = [0] * (2 * len(shape) - 2) + [width, 1]
            assert torch.equal(found, torch.nn.functional.pad(inner, border, value=float("-inf")))


@given(st.data(), sizes, st.integers(1, 5))
def test_copies_come_from_one_holder_and_from_oneself_first(data: st.DataObject, shape: list[int], ranks: int) -> None:
    holders = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    have: Layout = tuple(whole(shape) if rank in holders else None for rank in range(ranks))
    need = data.draw(anything(shape, ranks))
    moves = copy_moves(have, need)
    for rank, wanted in enumerate(need):
        mine = [move for move in moves if move.dst == rank]
        assert [move.box for move in mine] == ([wanted] if wanted is not None and volume(wanted) else [])
        assert all(move.src in holders and (move.src == rank or rank not in holders) for move in mine)
