"""Where a program is cut for recomputing."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.lowering.segments import choose_boundaries

SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=60)


def peak(made: list[int], alive: list[int], boundaries: tuple[int, ...]) -> int:
    largest = max(sum(made[a:b]) for a, b in pairwise((0, *boundaries, len(made))))
    return sum(alive[i] for i in boundaries) + largest


@given(SIZES)
def test_boundaries_are_in_order_and_never_cost_memory(sizes: list[tuple[int, int]]) -> None:
    made, alive = [a for a, _ in sizes], [b for _, b in sizes]
    found = choose_boundaries(made, alive)
    assert list(found) == sorted(set(found))
    assert all(0 < boundary < len(made) for boundary in found)
    assert peak(made, alive, found) <= peak(made, alive, ())


def test_a_chain_of_equal_layers_needs_about_twice_its_root() -> None:
    made, alive = [10] * 100, [10] * 100
    assert peak(made, alive, choose_boundaries(made, alive)) <= 2 * 10 * 10


def test_boundaries_lie_where_little_is_alive() -> None:
    made = [10] * 12
    alive = [100, 100, 100, 1, 100, 100, 1, 100, 100, 1, 100, 100]
    assert set(choose_boundaries(made, alive)) == {3, 6, 9}
