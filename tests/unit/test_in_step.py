"""What real steps say of kernels and links, from made-up diaries and steps whose truth is known."""

from collections.abc import Sequence
from math import exp

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.cluster import Cluster, Device, Efficiency, Level
from shoal.diary import Event
from shoal.finding.corrected import fitted_links, slower_links
from shoal.profiling.in_step import Piece, Taken, factors, noted

MILLI = 1_000_000
"""Nanoseconds."""


def event(kind: str, label: str, start: float, end: float, lane: str = "compute", step: int = 1) -> Event:
    """Milliseconds in, as a diary has it."""
    return kind, label, int(start * MILLI), int(end * MILLI), lane, step, 0, ()  # type: ignore[return-value]


def test_layers_take_what_is_left_without_waiting() -> None:
    found = noted(
        [
            event("forward", "a", 1, 5),
            event("wait", "a", 2, 4),
            event("sum", "a", 1.5, 3),
            event("move", "a", 5, 7),
            event("forward", "b", 7, 8),
            event("backward", "b: input gradient", 8, 10),
            event("backward", "b: weight gradient", 10, 11),
            event("backward", "a", 11, 15),
            event("gradients", "b.weight", 12, 20, "network"),
            event("update", "", 20, 23),
        ],
        {1: 0},
    )
    assert found.places == pytest.approx({("forward", "a"): 1.5e-3, ("forward", "b"): 1e-3, ("backward", "b"): 3e-3})
    assert found.between == pytest.approx(3e-3)  # one before, two of the move
    assert found.update == pytest.approx(3e-3)


def test_a_place_takes_the_median_of_its_steps() -> None:
    steps = [event("forward", "a", 100 * n, 100 * n + taken, step=n) for n, taken in ((1, 1), (2, 9), (3, 2))]
    found = noted(steps, {n: 100 * n * MILLI for n in (1, 2, 3)})
    assert found.places == pytest.approx({("forward", "a"): 2e-3})
    assert found.between == 0


@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6),
    st.floats(1e-5, 1e-1),
)
@example([3.0, 0.25, 1.0], [[0], [0, 0, 1], [1], [0, 0, 1]], 0.0625)
def test_factors_give_back_what_every_chain_took(true: list[float], chains: list[list[int]], scale: float) -> None:
    """Where one factor per kind is the truth it is found, as far as what was noted tells kinds apart."""
    observed = []
    for number, chain in enumerate(chains):
        pieces = tuple(
            Piece(f"tile {number} {place} forward", f"kind {kind} forward", scale * (1 + place))
            for place, kind in enumerate(chain)
        )
        seconds = sum(true[kind] * piece.seconds for kind, piece in zip(chain, pieces, strict=True))
        observed.append(Taken(pieces, seconds))
    fitted = factors(observed)
    assert min(fitted.values()) > 0
    for one in observed:
        by_tile = sum(fitted[piece.tile] * piece.seconds for piece in one.pieces)
        assert by_tile == pytest.approx(one.seconds, rel=1e-6)
    alone = {chain[0] for chain in chains if len(set(chain)) == 1}
    if len(alone) == len({kind for chain in chains for kind in chain}):
        for kind in alone:
            assert fitted[f"kind {kind} forward"] == pytest.approx(true[kind], rel=0.05)


def test_layers_that_take_nothing_have_no_factor() -> None:
    assert factors([Taken((Piece("a", "b", 0.0),), 1.0), Taken((Piece("c", "d", 1.0),), 0.0)]) == {}


def cluster() -> Cluster:
    device = Device(
        name="a device",
        memory=1,
        flops=1.0,
        memory_bandwidth=1.0,
        efficiency=Efficiency(peak_fraction=1.0, half=0.0, launch=0.0),
        source="made up",
    )
    level = Level(
        name="host", size=2, bandwidth=8.0, latency=2.0, sum_latency=3.0, wait=5.0, skew=0.5, source="made up"
    )
    return Cluster(name="made up", device=device, levels=(level,))


def test_slower_links_take_so_many_times_as_long() -> None:
    (level,) = slower_links(cluster(), 2.0, 4.0).levels
    assert (level.bandwidth, level.latency, level.wait, level.sum_bandwidth, level.sum_latency) == (4, 4, 10, 2, 12)
    assert level.skew == 1


COMPUTE, MOVES, SUMS = (1.0, 1.2, 0.9), (0.0, 0.4, 0.2), (0.5, 0.0, 0.1)
"""Of three plans."""


def steps(moves: float, sums: float) -> Sequence[float]:
    return [c + moves * m + sums * s for c, m, s in zip(COMPUTE, MOVES, SUMS, strict=True)]


@pytest.mark.parametrize(("moves", "sums"), [(1.0, 1.0), (4.0, 1.0), (0.25, 0.25), (1.0, 8.0), (0.5, 4.0)])
def test_links_are_found_by_the_steps_they_make(moves: float, sums: float) -> None:
    found = fitted_links(steps, steps(moves, sums))
    assert found == pytest.approx((moves, sums))


def test_noise_of_steps_moves_no_link() -> None:
    noisy = [seconds * exp(noise) for seconds, noise in zip(steps(1, 1), (0.01, -0.02, 0.015), strict=True)]
    assert fitted_links(steps, noisy) == (1.0, 1.0)
