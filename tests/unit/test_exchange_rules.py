"""Rules of a server: those of torch, to the bit, however tensors are cut; and the same with some elements."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Optimizer

from shoal.exchanging.servers.rules import Adagrad, Add, Sgd, UpdateRule, make_rule, staleness_factor
from shoal.exchanging.servers.slices import cut_over
from shoal.exchanging.servers.sparse import Sparse

pytestmark = pytest.mark.usefixtures("one_thread")

few = settings(max_examples=25, derandomize=True)
sizes = st.lists(st.integers(1, 400), min_size=1, max_size=4)
servers = st.integers(1, 5)
momenta = st.sampled_from([0.0, 0.9])
decays = st.sampled_from([0.0, 5e-4])
RATES = [0.1, 0.1, 0.03, 0.2]


def normal(sizes: Sequence[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def zeros(rule: UpdateRule, weights: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[torch.zeros_like(weight) for weight in weights] for _ in range(rule.states)]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b, strict=True))


def trained_on_servers(rule: UpdateRule, sizes: Sequence[int], servers: int) -> list[Tensor]:
    """What weights become when each server updates its shards, four pushes long."""
    weights = normal(sizes, seed=0)
    shards = cut_over({str(place): size for place, size in enumerate(sizes)}, servers)

    def parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensors[int(part.name)][part.start : part.stop] for part in shard] for shard in shards]

    held = parts(weights)
    states = [zeros(rule, shard) for shard in held]
    for step, rate in enumerate(RATES):
        for mine, pushed, state in zip(held, parts(normal(sizes, seed=step + 1)), states, strict=True):
            rule.apply(mine, pushed, state, rate)
    return weights


def trained_by_torch(make: Callable[[list[Tensor]], Optimizer], sizes: Sequence[int]) -> list[Tensor]:
    weights = normal(sizes, seed=0)
    optimizer = make(weights)
    for step, rate in enumerate(RATES):
        for weight, gradient in zip(weights, normal(sizes, seed=step + 1), strict=True):
            weight.grad = gradient
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return weights


@given(sizes, servers, momenta, decays)
@few
def test_sgd_has_the_bits_of_torch(sizes: list[int], servers: int, momentum: float, decay: float) -> None:
    expected = trained_by_torch(partial(SGD, lr=0.1, momentum=momentum, weight_decay=decay, fused=True), sizes)
    assert equal(trained_on_servers(Sgd(momentum, decay), sizes, servers), expected)


@given(sizes, servers, decays)
@few
def test_adagrad_is_that_of_torch_and_the_same_on_any_servers(sizes: list[int], servers: int, decay: float) -> None:
    found = trained_on_servers(Adagrad(decay), sizes, servers)
    assert equal(found, trained_on_servers(Adagrad(decay), sizes, 1))
    for fused, same in ((True, equal), (False, close)):
        make = partial(torch.optim.Adagrad, lr=0.1, weight_decay=decay, fused=fused)
        assert same(found, trained_by_torch(make, sizes))


@given(sizes, servers)
@few
def test_add_adds_whatever_the_rate(sizes: list[int], servers: int) -> None:
    expected = normal(sizes, seed=0)
    for step in range(len(RATES)):
        expected = [weight + change for weight, change in zip(expected, normal(sizes, seed=step + 1), strict=True)]
    assert equal(trained_on_servers(Add(), sizes, servers), expected)


RULES: list[UpdateRule] = [Sgd(), Sgd(momentum=0.9), Adagrad(), Add()]


def some(values: Tensor, every: int) -> Sparse:
    indices = torch.arange(0, len(values), every, dtype=torch.int32)
    return Sparse(indices, values[indices], len(values))


def whole(values: Tensor) -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.int32), values, len(values))


@pytest.mark.parametrize("rule", RULES)
def test_some_elements_are_zeros_elsewhere(rule: UpdateRule) -> None:
    dense, sparse = normal([300, 77], seed=0), normal([300, 77], seed=0)
    dense_state, sparse_state = zeros(rule, dense), zeros(rule, sparse)
    for step, rate in enumerate(RATES):
        pushed = [some(values, every=step + 2) for values in normal([300, 77], seed=step + 1)]
        rule.apply(dense, [push.dense() for push in pushed], dense_state, rate)
        rule.apply_sparse(sparse, pushed, sparse_state, rate)
        assert close(dense, sparse)
        assert all(close(ours, theirs) for ours, theirs in zip(sparse_state, dense_state, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_whole_tensors_pushed_sparse_have_the_bits_of_dense_ones(rule: UpdateRule) -> None:
    dense, sparse = normal([300, 77], seed=0), normal([300, 77], seed=0)
    dense_state, sparse_state = zeros(rule, dense), zeros(rule, sparse)
    for step, rate in enumerate(RATES):
        pushed = normal([300, 77], seed=step + 1)
        rule.apply(dense, pushed, dense_state, rate)
        rule.apply_sparse(sparse, [whole(values) for values in pushed], sparse_state, rate)
    assert equal(dense, sparse)


@pytest.mark.parametrize("rule", [Sgd(weight_decay=0.1), Adagrad(weight_decay=0.1)])
def test_sparse_pushes_decay_nothing(rule: UpdateRule) -> None:
    weights = normal([50, 8], seed=0)
    rule.apply_sparse(weights, [some(torch.zeros(50), 10), whole(torch.zeros(8))], zeros(rule, weights), rate=1.0)
    assert equal(weights, normal([50, 8], seed=0))


def test_momentum_moves_weights_that_were_not_pushed() -> None:
    rule, weight = Sgd(momentum=0.5), torch.zeros(4)
    state = zeros(rule, [weight])
    rule.apply_sparse([weight], [Sparse(torch.tensor([1], dtype=torch.int32), torch.tensor([1.0]), 4)], state, rate=1.0)
    rule.apply_sparse([weight], [Sparse(torch.tensor([2], dtype=torch.int32), torch.tensor([4.0]), 4)], state, rate=1.0)
    assert weight.tolist() == [0, -1.5, -4, 0]
    assert state[0][0].tolist() == [0, 0.5, 4, 0]


@pytest.mark.parametrize("rule", RULES)
def test_a_server_that_holds_nothing_does_nothing(rule: UpdateRule) -> None:
    rule.apply([], [], zeros(rule, []), 0.1)
    rule.apply_sparse([], [], zeros(rule, []), 0.1)


def test_rules_by_name() -> None:
    assert make_rule("sgd", 0.9, 5e-4) == Sgd(momentum=0.9, weight_decay=5e-4)
    assert make_rule("adagrad", 0.9, 5e-4) == Adagrad(weight_decay=5e-4)
    assert make_rule("add", 0.9, 5e-4) == Add()
    assert [rule.states for rule in RULES] == [0, 1, 1, 0]


@given(st.integers(0, 1000), st.floats(0.01, 1))
def test_older_pushes_count_less(staleness: int, base: float) -> None:
    assert staleness_factor(staleness, "none", base) == 1
    assert staleness_factor(staleness, "exponential", base) == base**staleness
    assert staleness_factor(staleness, "inverse", base) == 1 / max(1, staleness)
    assert staleness_factor(0, "exponential", base) == staleness_factor(0, "inverse", base) == 1


def test_no_push_is_from_the_future() -> None:
    with pytest.raises(ValueError, match="-1 updates old"):
        staleness_factor(-1, "inverse", 1.0)
