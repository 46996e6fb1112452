"""Spans, boxes and cuts: integers that everything else is built on."""

from itertools import pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.operators.views import clamp
from shoal.partition import Box, Span, cut, overlap, slices, volume, whole

spans = st.builds(lambda start, length: Span(start, start + length), st.integers(-6, 6), st.integers(0, 6))


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    return tuple(draw(spans) for _ in range(dims))


def rows(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(rows(span) for span in box)))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 5))
def test_parts_cover_a_dim_in_order_as_evenly_as_grains_allow(grains: int, parts: int, grain: int) -> None:
    assume(parts <= grains)
    found = cut(grains * grain, parts, grain=grain)
    lengths = [len(span) for span in found]
    assert len(found) == parts
    assert (found[0].start, found[-1].stop) == (0, grains * grain)
    assert all(before.stop == after.start for before, after in pairwise(found))
    assert all(length > 0 and length % grain == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= grain
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(0, 12), st.integers(-1, 14), st.integers(1, 4))
def test_a_cut_without_a_grain_for_each_part_is_refused(size: int, parts: int, grain: int) -> None:
    assume(size % grain or not 1 <= parts <= size // grain)
    with pytest.raises(PlanError, match=f"{size} rows cannot be cut into {parts} parts"):
        cut(size, parts, grain=grain)


@given(spans, spans)
def test_spans_meet_in_the_rows_they_share(a: Span, b: Span) -> None:
    assert rows(a & b) == rows(a) & rows(b)
    assert len(a & b) == len(rows(a) & rows(b))
    assert bool(a & b) == bool(rows(a) & rows(b))


@given(spans, st.integers(-4, 4), st.integers(1, 4))
def test_a_span_shifts_and_scales_row_by_row(span: Span, by: int, times: int) -> None:
    assert rows(span.shifted(by)) == {row + by for row in rows(span)}
    assert rows(span.scaled(times)) == {row * times + more for row in rows(span) for more in range(times)}


@given(st.data(), st.integers(0, 3))
def test_boxes_meet_in_the_elements_they_share(data: st.DataObject, dims: int) -> None:
    a, b = data.draw(boxes(dims)), data.draw(boxes(dims))
    shared = overlap(a, b)
    assert (set() if shared is None else elements(shared)) == elements(a) & elements(b)
    assert shared is None or volume(shared) == len(elements(a) & elements(b)) > 0
    assert overlap(b, a) == shared


@given(st.data(), st.integers(0, 3))
def test_volume_counts_elements(data: st.DataObject, dims: int) -> None:
    box = data.draw(boxes(dims))
    assert volume(box) == len(elements(box))


@given(st.lists(st.integers(0, 5), max_size=4))
def test_the_whole_box_has_every_element(shape: list[int]) -> None:
    assert elements(whole(shape)) == set(product(*map(range, shape)))


@given(st.data(), st.integers(1, 3))
def test_slices_find_a_boxs_rows_in_the_tensor_that_holds_them(data: st.DataObject, dims: int) -> None:
    origin = data.draw(boxes(dims))
    inner = tuple(Span(data.draw(st.integers(span.start, span.stop)), span.stop) for span in origin)
    for part, own, span in zip(slices(inner, origin), origin, inner, strict=True):
        assert list(range(own.start, own.stop))[part] == list(range(span.start, span.stop))


@given(spans, st.integers(0, 8))
def test_clamp_parts_the_rows_that_exist_from_the_padding(span: Span, size: int) -> None:
    inside, (before, after) = clamp(span, size)
    exist = rows(span) & set(range(size))
    assert rows(inside) == exist
    assert 0 <= inside.start <= inside.stop <= size
    assert before + len(inside) + after == len(span)
    if exist:
        assert (before, after) == (min(exist) - span.start, span.stop - 1 - max(exist))
    assert before >= 0 <= after
