"""Which rows of a parameter a rank keeps where the optimizer's state is cut."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from shoal.lowering import owners
from shoal.lowering.owners import cut_homes
from shoal.lowering.placement import sharers
from shoal.moves import Layout
from shoal.partition import Box, Span, cut, overlap, volume

rows, columns = st.integers(1, 9), st.integers(1, 5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A parameter cut by columns or rows, or not, each box on some ranks, and some ranks without any."""
    height, width, parts = draw(rows), draw(columns), draw(st.integers(1, 3))
    if draw(st.booleans()):
        boxes: list[Box] = [(span, Span(0, width)) for span in cut(height, min(parts, height))]
    else:
        boxes = [(Span(0, height), span) for span in cut(width, min(parts, width))]
    return tuple(draw(st.lists(st.sampled_from([*boxes, None]), min_size=1, max_size=6)))


@given(use=layouts(), least=st.integers(1, 20))
def test_every_row_that_several_ranks_read_has_one_owner_among_them(use: Layout, least: int) -> None:
    with patch.object(owners, "LEAST_ELEMENTS", least):
        homes = cut_homes({"w": use, "buffer": use}, {"w"})
    assert homes["buffer"] == use
    home = homes["w"]
    for box, ranks in sharers(use).items():
        kept = [home[rank] for rank in ranks]
        if volume(box) < least or len(box[0]) < len(ranks):
            assert kept == [box] * len(ranks)
            continue
        sizes = [volume(own) for own in kept if own is not None and overlap(own, box) == own]
        assert sum(sizes) == volume(box)
        assert max(sizes) - min(sizes) <= len(box[1])
        assert not any(overlap(a, b) for i, a in enumerate(kept) for b in kept[:i] if a is not None and b is not None)
    assert [own is None for own in home] == [box is None for box in use]
