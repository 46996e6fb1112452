"""Sparse pushes: the large elements go, nothing is lost, and both sides know what the other has."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.exchanging.servers import sparse
from shoal.exchanging.servers.sparse import DENSE_BELOW, Mirror, Remainder, Selection, Selector

pytestmark = pytest.mark.usefixtures("one_thread")

few = settings(max_examples=15, derandomize=True)
BEYOND_A_BLOCK = sparse._BLOCK + 7
KINDS: tuple[Selection, ...] = get_args(Selection)
sizes = st.lists(st.sampled_from([0, 1, 5, DENSE_BELOW, 1500, 9001, BEYOND_A_BLOCK]), min_size=1, max_size=3)
selectors = st.builds(
    Selector,
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.001, 0.01, 0.2, 0.7]),
    threshold=st.sampled_from([0.0, 0.5, 2.0, 9.0]),
)
zeros = st.sampled_from([0.0, 0.5, 0.999])


def normal(size: int, seed: int, zeros: float = 0.0) -> Tensor:
    """Normal values, `zeros` of which are zero."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) >= zeros)


def selected(kind: Selection, values: Tensor, density: float = 0.01, threshold: float = 2.0) -> Tensor:
    return Selector(kind=kind, density=density, threshold=threshold).select(values).indices


@given(selectors, sizes, zeros, st.integers(0, 99))
@few
def test_what_is_sent_are_elements_in_order(selector: Selector, sizes: list[int], zeros: float, seed: int) -> None:
    for size in sizes:
        values = normal(size, seed, zeros)
        sent = selector.select(values)
        assert sent.indices.dtype == torch.int32
        assert sent.indices.is_contiguous()
        assert sent.values.is_contiguous()
        assert sent.size == size
        assert sent.nbytes == 4 * len(sent.indices) + 4 * len(sent.values) <= 4 * size
        if sent.whole:
            assert len(sent.indices) == 0
            assert torch.equal(sent.values, values)
        else:
            assert size >= DENSE_BELOW
            assert (sent.indices.diff() > 0).all()
            assert torch.equal(sent.values, values[sent.indices])
        assert torch.equal(sent.dense() != 0, (sent.dense() == values) & (values != 0))


@given(selectors, sizes, zeros, st.integers(0, 99))
@few
def test_sent_and_left_are_all_there_is(selector: Selector, sizes: list[int], zeros: float, seed: int) -> None:
    remainder = Remainder(selector, [torch.empty(size) for size in sizes])
    for step in range(3):
        gradients = [normal(size, seed + step, zeros) for size in sizes]
        given_before = [gradient.clone() for gradient in gradients]
        left_before = [left.clone() for left in remainder.left]
        for sent, left, gradient, same, before in zip(
            remainder.take(gradients), remainder.left, gradients, given_before, left_before, strict=True
        ):
            assert torch.equal(gradient, same)
            assert torch.equal(sent.dense() + left, gradient + before)
            assert not ((sent.dense() != 0) & (left != 0)).any()


@given(selectors, sizes, st.integers(0, 99))
@few
def test_a_change_is_taken_as_its_difference(selector: Selector, sizes: list[int], seed: int) -> None:
    whole, blockwise = (Remainder(selector, [torch.empty(size) for size in sizes]) for _ in range(2))
    for step in range(2):
        now, then = ([normal(size, 2 * seed + step + part) for size in sizes] for part in (0, 1))
        expected = whole.take([a - b for a, b in zip(now, then, strict=True)])
        for one, other in zip(blockwise.take_change(now, then), expected, strict=True):
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.values, other.values)
        assert all(torch.equal(a, b) for a, b in zip(blockwise.left, whole.left, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_residual_what_is_not_sent_is_lost(kind: Selection) -> None:
    remainder = Remainder(Selector(kind=kind, threshold=2.0, residual=False), [torch.empty(5000)])
    first, again = (remainder.take([normal(5000, seed=1)])[0] for _ in range(2))
    assert remainder.left == []
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(first.values, again.values)


@pytest.mark.parametrize("kind", KINDS)
def test_small_gradients_add_up_until_they_are_sent(kind: Selection) -> None:
    values = torch.linspace(0.01, 0.02, 2000)
    remainder = Remainder(Selector(kind=kind, density=0.05, threshold=0.04), [values])
    sent = sum(remainder.take([values])[0].dense() for _ in range(60))
    assert isinstance(sent, Tensor)
    assert (sent > 0).all()
    assert torch.allclose(sent + remainder.left[0], 60 * values)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@given(seed=st.integers(0, 99))
@few
def test_a_sample_gives_about_the_density_asked_for(density: float, seed: int) -> None:
    values = normal(120_000, seed)
    assert density / 2 < len(selected("sampled", values, density)) / len(values) < density * 2


def test_a_sample_is_not_one_column_of_a_matrix() -> None:
    columns = 60
    values = normal(columns * 10_000, seed=0).view(-1, columns) * torch.linspace(0, 3, columns).exp()
    share = len(selected("sampled", values.flatten(), 0.01)) / values.numel()
    assert 0.005 < share < 0.02


@given(st.integers(1, 300_000), st.integers(1, 20_000))
@few
def test_a_sample_is_spread_over_all_elements(size: int, wanted: int) -> None:
    places = sparse._sample(size, wanted)
    assert (places is None) == (size <= 2 * wanted)
    if places is None:
        return
    assert len(places) == wanted
    assert (places.diff() > 0).all()
    assert 0 <= places[0] <= places[-1] < size
    assert (places.diff() <= 2 * math.ceil(size / wanted)).all()


@given(st.sampled_from([1024, 4097, BEYOND_A_BLOCK]), st.sampled_from([0.0001, 0.01, 0.3]), zeros, st.integers(0, 99))
@few
def test_topk_are_the_largest(size: int, density: float, zeros: float, seed: int) -> None:
    values = normal(size, seed, zeros)
    count = min(max(1, round(density * size)), int(values.count_nonzero()))
    sizes_sent = values[selected("topk", values, density)].abs().sort(descending=True).values
    assert torch.equal(sizes_sent, values.abs().topk(count).values)


def test_topk_are_the_largest_when_the_sample_misleads() -> None:
    values, density = normal(200_000, seed=0), 0.01
    places = sparse._sample(len(values), round(sparse.SAMPLED_HITS / (2 * density)))
    assert places is not None
    values[places] *= 1000
    found = values[selected("topk", values, density)].abs().sort(descending=True).values
    assert torch.equal(found, values.abs().topk(2000).values)


def test_a_threshold_is_absolute() -> None:
    values = normal(BEYOND_A_BLOCK, seed=3)
    assert selected("threshold", values, threshold=2.5).tolist() == (values.abs() >= 2.5).nonzero().flatten().tolist()
    assert len(selected("threshold", values, threshold=100.0)) == 0


@pytest.mark.parametrize("kind", ["sampled", "topk"])
def test_zeros_are_not_sent_and_one_element_is(kind: Selection) -> None:
    values = torch.zeros(50_000)
    assert len(selected(kind, values)) == 0
    values[777] = -1e-30
    assert selected(kind, values).tolist() == [777]
    assert len(selected(kind, normal(2000, seed=0), density=1e-6)) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 900])
def test_what_is_no_number_is_sent(kind: Selection, wrong: float, count: int) -> None:
    values = normal(100_000, seed=0)
    values[torch.arange(count) * 111 + 5] = wrong
    remainder = Remainder(Selector(kind=kind, threshold=2.0), [values])
    sent = remainder.take([values])[0].dense()
    assert torch.equal(sent.isfinite(), values.isfinite())
    assert remainder.left[0].isfinite().all()
    assert Mirror(remainder.selector, [torch.full_like(values, math.inf)]).changes([values])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_nan_is_sent(kind: Selection) -> None:
    assert Selector(kind=kind, threshold=2.0).select(torch.full((5000,), math.nan)).values.isnan().any()


@pytest.mark.parametrize(
    "selector", [Selector(kind="threshold"), Selector(density=0.5), Selector(kind="topk", density=1.0)]
)
def test_everything_asked_for_is_the_whole_tensor(selector: Selector) -> None:
    values = normal(5000, seed=0, zeros=0.9)
    sent = selector.select(values)
    assert sent.whole
    assert torch.equal(sent.values, values)
    assert sent.values.data_ptr() != values.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_types_that_numpy_lacks_are_chosen_alike(kind: Selection) -> None:
    """The same way is taken on devices that numpy cannot reach."""
    values, base = (normal(BEYOND_A_BLOCK, seed).bfloat16() for seed in (0, 1))
    selector = Selector(kind=kind, threshold=2.0)
    for of in (None, base):
        ours = selector.select(values, of)
        theirs = selector.select(values.float(), None if of is None else of.float())
        assert ours.values.dtype == torch.bfloat16
        if of is None and kind != "topk":  # many magnitudes are equal, and which of them go is open
            assert torch.equal(ours.indices, theirs.indices)
        assert abs(len(ours.indices) - len(theirs.indices)) <= 0.1 * len(theirs.indices)


@given(selectors, sizes, st.integers(0, 99))
@few
def test_the_mirror_is_the_replica(selector: Selector, sizes: list[int], seed: int) -> None:
    weights = [normal(size, seed) for size in sizes]
    replica = [weight.clone() for weight in weights]
    mirror = Mirror(selector, weights)
    for step in range(4):
        for weight in weights:
            weight += normal(len(weight), seed + step + 1)
        for weight, mine, held, change in zip(weights, replica, mirror.held, mirror.changes(weights), strict=True):
            before = mine.clone()
            change.set_in(mine)
            assert torch.equal(mine, held)
            assert (torch.eq(mine, before) | torch.eq(mine, weight)).all()


@pytest.mark.parametrize("kind", ["sampled", "topk"])
@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_the_mirror_reaches_weights_that_stand_still(kind: Selection, size: int) -> None:
    weights = [normal(size, seed=0)]
    mirror = Mirror(Selector(kind=kind, density=0.1), weights)
    weights[0] += normal(size, seed=1)
    rounds = 0
    while not torch.equal(mirror.held[0], weights[0]):
        mirror.changes(weights)
        rounds += 1
        assert rounds <= 40
    assert all(change.whole or len(change.values) == 0 for change in mirror.changes(weights))


def test_a_mirror_with_a_threshold_stays_within_it() -> None:
    weights = [normal(3000, seed=0)]
    mirror = Mirror(Selector(kind="threshold", threshold=0.5), weights)
    weights[0] += normal(3000, seed=1)
    mirror.changes(weights)
    assert (mirror.held[0] - weights[0]).abs().max() < 0.5


@pytest.mark.parametrize(("density", "threshold"), [(0.0, 0.0), (1.5, 0.0), (0.1, -1.0), (math.nan, 0.0)])
def test_shares_and_thresholds_that_cannot_be_are_refused(density: float, threshold: float) -> None:
    with pytest.raises(ValueError, match="cannot send"):
        Selector(density=density, threshold=threshold)
