"""Shards: every element has one server, and no server has much more than another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.exchanging.servers.slices import Slice, cut_over

names = st.text("abcdef", min_size=1, max_size=3)
tensors = st.dictionaries(names, st.integers(0, 700), max_size=8)
servers = st.integers(1, 9)
grains = st.sampled_from([1, 7, 64])


@given(tensors, servers, grains)
def test_every_element_has_one_server(sizes: dict[str, int], servers: int, grain: int) -> None:
    shards = cut_over(sizes, servers, grain)
    assert len(shards) == servers
    for name, size in sizes.items():
        slices = [part for shard in shards for part in shard if part.name == name]
        assert [part.start for part in slices] == [0, *(part.stop for part in slices)][: len(slices)]
        assert sum(part.size for part in slices) == size
        assert all(part.size > 0 and part.start % grain == 0 for part in slices)


@given(tensors, servers, grains)
def test_tensors_stay_in_order_and_are_cut_once_per_server(sizes: dict[str, int], servers: int, grain: int) -> None:
    slices = [part for shard in cut_over(sizes, servers, grain) for part in shard]
    order = {name: place for place, name in enumerate(sizes)}
    assert [order[part.name] for part in slices] == sorted(order[part.name] for part in slices)
    assert len(slices) <= sum(size > 0 for size in sizes.values()) + servers - 1


@given(tensors, servers, grains)
def test_no_server_is_a_grain_from_the_even_share(sizes: dict[str, int], servers: int, grain: int) -> None:
    even = sum(sizes.values()) / servers
    loads = [sum(part.size for part in shard) for shard in cut_over(sizes, servers, grain)]
    assert all(abs(load - even) < grain for load in loads)


@given(st.lists(st.integers(0, 20), max_size=8), servers, grains)
def test_loads_of_whole_grains_differ_by_one_grain(grains_of: list[int], servers: int, grain: int) -> None:
    sizes = {str(place): count * grain for place, count in enumerate(grains_of)}
    loads = [sum(part.size for part in shard) for shard in cut_over(sizes, servers, grain)]
    assert max(loads) - min(loads) <= grain


def test_too_little_goes_to_the_first_servers() -> None:
    assert cut_over({"bias": 10}, 3) == [[Slice("bias", 0, 10)], [], []]
    assert cut_over({}, 2) == [[], []]


@pytest.mark.parametrize(("servers", "grain"), [(0, 64), (2, 0)])
def test_no_servers_and_no_grain_are_refused(servers: int, grain: int) -> None:
    with pytest.raises(ValueError, match=f"over {servers} servers in grains of {grain}"):
        cut_over({"bias": 10}, servers, grain)
