"""The search core against brute force and an integer program, on graphs of every shape."""

from itertools import combinations, pairwise, product
from math import inf, isclose, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from shoal.errors import PlanError
from shoal.planning import elimination
from shoal.planning.cost_tables import Factor
from shoal.planning.elimination import minimise, reduce_by_two_rules
from shoal.planning.within_limit import minimise_under

Edges = list[tuple[int, int]]


def value(factors: list[Factor], choice: tuple[int, ...]) -> float:
    return sum(float(factor.costs[tuple(choice[v] for v in factor.variables)]) for factor in factors)


def brute_force(
    sizes: list[int], factors: list[Factor], weights: list[Factor] | None = None, limit: float = inf
) -> float:
    """The optimum, by looking at every choice; inf if there is none."""
    choices = product(*map(range, sizes))
    return min((value(factors, c) for c in choices if not weights or value(weights, c) <= limit), default=inf)


def integer_program(sizes: list[int], factors: list[Factor]) -> float:
    """The optimum by HiGHS: one binary per candidate, one variable per entry of a wider table, tied by marginals."""
    starts = np.cumsum([0, *sizes])
    blocks = np.cumsum([starts[-1], *(factor.costs.size for factor in factors)])
    costs, upper = np.zeros(blocks[-1]), np.ones(blocks[-1])
    for start, factor in zip(blocks, factors, strict=False):
        entries = factor.costs.ravel()
        costs[start : start + entries.size] = np.where(np.isfinite(entries), entries, 0.0)
        upper[start : start + entries.size] = np.isfinite(entries)
    rows: list[tuple[dict[int, float], float]] = [
        ({starts[v] + i: 1.0 for i in range(size)}, 1.0) for v, size in enumerate(sizes)
    ]
    for start, factor in zip(blocks, factors, strict=False):
        numbers = start + np.arange(factor.costs.size).reshape(factor.costs.shape)
        for axis, v in enumerate(factor.variables):
            for i in range(sizes[v]):
                row = dict.fromkeys(numbers.take(i, axis=axis).ravel().tolist(), 1.0)
                rows.append(({**row, int(starts[v] + i): -1.0}, 0.0))
    matrix = lil_array((len(rows), len(costs)))
    for at, (row, _) in enumerate(rows):
        for column, coefficient in row.items():
            matrix[at, column] = coefficient
    right = np.array([side for _, side in rows])
    integral = np.arange(len(costs)) < starts[-1]
    answer = milp(
        costs, integrality=integral, bounds=Bounds(0, upper), constraints=LinearConstraint(matrix.tocsr(), right, right)
    )
    return float(answer.fun) if answer.success else inf


def random_costs(generator: np.random.Generator, shape: tuple[int, ...], forbidden: float) -> np.ndarray:
    """Half of them small whole numbers, which tie; some forbidden."""
    costs = generator.integers(0, 4, shape).astype(float) if generator.random() < 0.5 else generator.random(shape)
    return np.where(generator.random(shape) < forbidden, inf, costs)


def random_problem(
    seed: int, most: int = 7, forbidden: float = 0.08, fewest: int = 1
) -> tuple[list[int], list[Factor]]:
    """A random DAG, each node with one to three inputs among those before it, and some tables of three."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(2, most + 1))
    sizes = [int(size) for size in generator.integers(fewest, 5, count)]
    scopes: list[tuple[int, ...]] = [(v,) for v in range(count) if generator.random() < 0.7]
    for v in range(1, count):
        inputs = generator.choice(v, size=min(v, int(generator.integers(1, 4))), replace=False).tolist()
        scopes += [(u, v) if generator.random() < 0.8 else (v, u) for u in inputs]
    wide = list(combinations(range(count), 3))
    if wide:
        triples = [generator.permutation(wide[generator.integers(len(wide))]) for _ in range(generator.integers(0, 3))]
        scopes += [tuple(triple.tolist()) for triple in triples]
    if generator.random() < 0.3:
        scopes.append(scopes[-1])
    return sizes, [Factor(s, random_costs(generator, tuple(sizes[v] for v in s), forbidden)) for s in scopes]


def random_weights(seed: int, sizes: list[int]) -> list[Factor]:
    generator = np.random.default_rng(seed + 10**6)
    count = len(sizes)
    weights = [Factor((v,), generator.integers(0, 30, sizes[v]).astype(float)) for v in range(count)]
    if generator.random() < 0.3:
        weights.append(Factor((count - 1, 0), generator.integers(0, 9, (sizes[-1], sizes[0])).astype(float)))
    if generator.random() < 0.2:
        weights[0] = Factor((0,), np.where(generator.random(sizes[0]) < 0.3, inf, weights[0].costs))
    return weights


def check(sizes: list[int], factors: list[Factor], optimum: float) -> None:
    if optimum == inf:
        with pytest.raises(PlanError, match="forbidden"):
            minimise(sizes, factors)
        return
    found = minimise(sizes, factors)
    assert isclose(found.cost, optimum, abs_tol=1e-9)
    assert isclose(value(factors, found.choice), found.cost, abs_tol=1e-9)


@pytest.fixture(params=[False, True], ids=["as shipped", "always sieved"])
def sieved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are dropped only where that pays, so small problems would not show a candidate wrongly dropped."""
    if request.param:
        monkeypatch.setattr(elimination, "WORTH", 0)


@pytest.mark.usefixtures("sieved")
@pytest.mark.parametrize("forbidden", [0.0, 0.08, 0.4])
def test_brute_force_agrees(forbidden: float) -> None:
    for seed in range(200):
        sizes, factors = random_problem(seed, most=6, forbidden=forbidden)
        check(sizes, factors, brute_force(sizes, factors))


def test_integer_program_agrees() -> None:
    for seed in range(120):
        sizes, factors = random_problem(1000 + seed, most=7)
        check(sizes, factors, integer_program(sizes, factors))


def test_integer_program_agrees_on_networks_too_large_to_enumerate() -> None:
    for seed, edges in enumerate([residual(6), inception(2, [2, 3, 1]), dense(7)]):
        generator = np.random.default_rng(seed)
        count = 1 + max(map(max, edges))
        sizes = [6] * count
        factors = [Factor((v,), random_costs(generator, (6,), 0.1)) for v in range(count)]
        factors += [Factor(edge, random_costs(generator, (6, 6), 0.1)) for edge in edges]
        check(sizes, factors, integer_program(sizes, factors))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Factor]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    scopes = draw(st.lists(st.lists(st.integers(0, len(sizes) - 1), max_size=3, unique=True).map(tuple), max_size=8))
    costs = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.1, -1.5, inf])
    factors = []
    for scope in scopes:
        shape = tuple(sizes[v] for v in scope)
        entries = draw(st.lists(costs, min_size=prod(shape), max_size=prod(shape)))
        factors.append(Factor(scope, np.array(entries).reshape(shape)))
    return sizes, factors


@settings(max_examples=150)
@given(problems(), st.sampled_from([0, 4]))
def test_any_tables_are_minimised(problem: tuple[list[int], list[Factor]], worth: int) -> None:
    sizes, factors = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "WORTH", worth)
        check(sizes, factors, brute_force(sizes, factors))


@pytest.mark.parametrize("tile", [1, 5, 64])
def test_tables_larger_than_a_tile_are_joined_in_pieces(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "TILE", tile)
    for seed in range(60):
        sizes, factors = random_problem(seed, most=6)
        check(sizes, factors, brute_force(sizes, factors))


def test_dropping_candidates_changes_nothing_in_large_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        generator = np.random.default_rng(seed)
        edges = inception(3, [2, 3, 4, 2])
        count = 1 + max(map(max, edges))
        kinds = generator.integers(0, 4, (24, 3))
        apart = np.abs(kinds[:, None] - kinds[None]).sum(-1).astype(float)
        factors = [Factor((v,), generator.random(24) * 4) for v in range(count)]
        factors += [Factor(edge, apart * generator.random()) for edge in edges]
        monkeypatch.setattr(elimination, "WORTH", 10**9)
        whole = minimise([24] * count, factors)
        monkeypatch.setattr(elimination, "WORTH", 0)
        sieved = minimise([24] * count, factors)
        assert isclose(whole.cost, sieved.cost, rel_tol=1e-12)
        assert sieved.largest_table < whole.largest_table == 24**3


def test_chain_joins_no_more_than_pairs() -> None:
    generator = np.random.default_rng(0)
    factors = [Factor((v, v + 1), generator.random((300, 300))) for v in range(9)]
    found = minimise([300] * 10, factors)
    assert found.largest_table == 300**2
    assert isclose(found.cost, value(factors, found.choice))


def test_variable_without_factors_takes_its_first_candidate() -> None:
    found = minimise([3, 2], [Factor((1,), np.array([2.0, 1.0]))])
    assert (found.choice, found.cost) == ((0, 1), 1.0)
    assert minimise([], []).choice == ()


def test_every_choice_forbidden_is_an_error() -> None:
    unequal = Factor((0, 1), np.array([[inf, 0.0], [0.0, inf]]))
    triangle = [unequal, Factor((1, 2), unequal.costs), Factor((0, 2), unequal.costs)]
    with pytest.raises(PlanError, match="every choice for the 3 layers is forbidden"):
        minimise([2, 2, 2], triangle)
    with pytest.raises(PlanError, match="forbidden"):
        minimise_under([2, 2, 2], triangle, [], 1.0)
    with pytest.raises(PlanError, match="forbidden"):
        minimise([2, 0], [])


def test_table_beyond_the_largest_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "LARGEST", 1000)
    generator = np.random.default_rng(0)
    factors = [Factor(edge, generator.random((12, 12))) for edge in dense(5)]
    with pytest.raises(PlanError, match="entries over 4 layers"):
        minimise([12] * 5, factors)


@pytest.mark.parametrize(
    "factor",
    [
        Factor((0, 0), np.zeros((2, 2))),
        Factor((2,), np.zeros(2)),
        Factor((0,), np.zeros(3)),
        Factor((0,), np.array([0.0, np.nan])),
        Factor((0,), np.array([0.0, -inf])),
    ],
)
def test_tables_that_do_not_fit_are_refused(factor: Factor) -> None:
    with pytest.raises(ValueError, match=r"variables|costs"):
        minimise([2, 2], [factor])


@pytest.mark.usefixtures("sieved")
def test_choices_under_a_limit_agree_with_brute_force() -> None:
    met = 0
    for seed in range(120):
        sizes, factors = random_problem(seed, most=6, forbidden=0.05)
        weights = random_weights(seed, sizes)
        possible = [value(weights, c) for c in product(*map(range, sizes)) if value(factors, c) < inf]
        possible = sorted(weight for weight in possible if weight < inf)
        if not possible:
            continue
        limit = possible[int(len(possible) * np.random.default_rng(seed).random() ** 2)]
        optimum = brute_force(sizes, factors, weights, limit)
        found = minimise_under(sizes, factors, weights, limit)
        assert found.weight == value(weights, found.choice) <= limit
        assert isclose(found.cost, value(factors, found.choice), abs_tol=1e-9)
        assert isclose(found.cost, optimum, abs_tol=1e-9)
        assert found.lower_bound == found.cost
        met += optimum > brute_force(sizes, factors) + 1e-9
        with pytest.raises(PlanError, match=f"the smallest is {possible[0]:.15g}"):
            minimise_under(sizes, factors, weights, possible[0] - 0.5)
    assert met > 30  # the limit mattered


def test_without_effort_the_bound_still_holds() -> None:
    gaps = 0
    for seed in range(100):
        sizes, factors = random_problem(seed, most=6, forbidden=0.0, fewest=3)
        weights = random_weights(seed, sizes)
        possible = sorted(value(weights, c) for c in product(*map(range, sizes)))
        limit = possible[len(possible) // 8]
        if limit == inf:
            continue
        optimum = brute_force(sizes, factors, weights, limit)
        found = minimise_under(sizes, factors, weights, limit, effort=0)
        assert found.weight <= limit
        assert found.lower_bound <= optimum + 1e-9
        assert found.cost >= optimum - 1e-9
        gaps += found.lower_bound < found.cost
    assert gaps > 5  # else the limit on effort was not tried


def test_a_knapsack_is_solved_exactly() -> None:
    """Two candidates each, no edges: the gap of the first bound must be closed by splitting."""
    generator = np.random.default_rng(7)
    values, loads = generator.integers(10, 60, 30), generator.integers(5, 40, 30)
    limit = int(loads.sum()) // 2
    best = np.zeros(limit + 1)
    for worth, load in zip(values, loads, strict=True):
        best[load:] = np.maximum(best[load:], best[: limit + 1 - load] + worth)
    factors = [Factor((v,), np.array([float(worth), 0.0])) for v, worth in enumerate(values)]
    weights = [Factor((v,), np.array([0.0, float(load)])) for v, load in enumerate(loads)]
    found = minimise_under([2] * 30, factors, weights, limit)
    assert found.cost == found.lower_bound == values.sum() - best[-1]


def test_no_limit_is_the_minimum_itself() -> None:
    sizes, factors = random_problem(3, forbidden=0.0)
    found = minimise_under(sizes, factors, random_weights(3, sizes), inf)
    assert found.cost == found.lower_bound == minimise(sizes, factors).cost
    with pytest.raises(ValueError, match="NaN"):
        minimise_under(sizes, factors, [], float("nan"))


def chain(count: int) -> Edges:
    return [(v, v + 1) for v in range(count - 1)]


def residual(blocks: int) -> Edges:
    """Two layers and a sum per block, which also reads the block's input."""
    edges: Edges = []
    for block in range(blocks):
        start = 3 * block
        edges += [(start, start + 1), (start + 1, start + 2), (start + 2, start + 3), (start, start + 3)]
    return edges


def inception(blocks: int, branches: list[int]) -> Edges:
    """Parallel branches of so many layers that read one input and join in one node."""
    edges: Edges = []
    start = 0
    for _ in range(blocks):
        join = start + sum(branches) + 1
        at = start + 1
        for length in branches:
            layers = [start, *range(at, at + length), join]
            edges += pairwise(layers)
            at += length
        start = join
    return edges


def dense(count: int) -> Edges:
    return list(combinations(range(count), 2))


@pytest.mark.parametrize(
    ("count", "edges", "left"),
    [
        (1, [], 1),
        (2, [(0, 1), (0, 1)], 2),
        (22, chain(22), 2),
        (49, residual(16), 2),
        (34, inception(3, [2, 3, 1, 4]), 2),
        (4, dense(4), 4),
        (5, dense(5), 5),
        (4, [(0, 2), (0, 3), (1, 2), (1, 3)], 4),
        (6, [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 5), (4, 5)], 6),
        (5, [(0, 1), (1, 2), (1, 3), (2, 4)], 4),
    ],
)
def test_two_rules_reduce_networks_to_two_nodes_and_others_not(count: int, edges: Edges, left: int) -> None:
    assert reduce_by_two_rules(count, edges) == left
