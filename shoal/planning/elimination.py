"""The cheapest choice of one candidate per variable, where costs are tables over a few variables each.

Variables are eliminated one after another: all tables that mention one are added, and the minimum over it is a
new table over its neighbours. OptCNN's two rules (Jia et al. 2018) are the cases of one layer between two others
(eq. 2) and of two tables over the same pair (eq. 3); here a variable may have any number of neighbours, so graphs
that the rules do not reduce are solved as well, as long as the tables that their shape forces can be kept.

Before that, candidates that cannot be part of a cheapest choice are dropped: those whose lower bound is above the
cost of a known choice, and those that another candidate beats whatever its neighbours choose.

All sums are float64 and "exact" means up to their rounding; costs returned are summed anew from the choice.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter
from itertools import product
from math import fsum, inf, prod

import numpy as np
from numpy.typing import NDArray

from shoal.errors import PlanError

Table = NDArray[np.float64]
Scope = tuple[int, ...]

LARGEST = 2**27
"""Entries of the largest table that is kept: 1 GiB."""
TILE = 2**14
"""Entries of a temporary: small enough to stay in a core's cache."""
WORTH = 4
"""Dropping candidates is tried while elimination would take this many times the entries given."""
PROBE = 1_000_000
"""What one elimination costs besides its tables, in entries."""


@dataclass(frozen=True)
class Factor:
    """A cost that depends on some variables: one axis per variable; inf is forbidden."""

    variables: Scope
    costs: Table


@dataclass(frozen=True)
class Solution:
    """A cheapest choice, one candidate per variable."""

    choice: tuple[int, ...]
    cost: float
    largest_table: int
    """Entries of the largest table joined, after candidates were dropped; a measure of the graph's width."""


@dataclass(frozen=True)
class Bounded:
    """The cheapest choice found within a limit; no choice within it costs less than `lower_bound`."""

    choice: tuple[int, ...]
    cost: float
    weight: float
    lower_bound: float


def minimise(sizes: Sequence[int], factors: Sequence[Factor]) -> Solution:
    """The choice with the smallest sum of factors; `sizes` are the candidates of each variable.

    Time and memory grow with the widest table that the graph forces: C^2 per variable for chains and trees, C^3
    for anything that OptCNN's rules reduce. A `PlanError` if every choice is forbidden or a table would pass
    `LARGEST`; a `ValueError` for tables that do not fit `sizes` or hold NaN or -inf.
    """
    tables = _merged(sizes, factors)
    solved = _solve(sizes, tables)
    if solved is None:
        raise _forbidden(sizes)
    return Solution(solved.choice, _value(tables, solved.choice), solved.largest)


def minimise_under(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    weights: Sequence[Factor],
    limit: float,
    effort: float = 4e9,
) -> Bounded:
    """The cheapest choice whose weights sum to at most `limit`, with a bound on what it could cost at least.

    Weights are priced: cost + price * weight is minimised for a few prices, which gives choices on both sides of
    the limit and a lower bound. What gap remains is closed by splitting the candidates of a variable on which the
    two sides differ, best bound first, until `lower_bound` equals `cost` or `effort` is spent: table entries read
    and joined, some 3e8 a second. The first bound is always found. Weights of inf are forbidden. A `PlanError` with
    the smallest possible weight if nothing is within the limit; other errors as `minimise`.
    """
    return _Priced(sizes, factors, weights, limit).search(effort)


def reduce_by_two_rules(count: int, edges: Iterable[tuple[int, int]]) -> int:
    """Nodes left of a directed graph when OptCNN's node and edge elimination can do no more.

    A node with one edge in and one out becomes an edge; parallel edges become one. Linear in the edges.

    >>> reduce_by_two_rules(4, [(0, 1), (1, 2), (2, 3), (0, 2)])
    2
    """
    before: list[set[int]] = [set() for _ in range(count)]
    after: list[set[int]] = [set() for _ in range(count)]
    for source, target in edges:
        after[source].add(target)
        before[target].add(source)
    left, waiting = count, list(range(count))
    while waiting:
        node = waiting.pop()
        if len(before[node]) != 1 or len(after[node]) != 1:
            continue
        (source,), (target,) = before[node], after[node]
        if node in (source, target):
            continue
        before[node], after[node] = set(), set()
        after[source].remove(node)
        after[source].add(target)
        before[target].remove(node)
        before[target].add(source)
        left -= 1
        waiting += [source, target]
    return left


def _forbidden(sizes: Sequence[int]) -> PlanError:
    return PlanError(
        f"every choice for the {len(sizes)} layers is forbidden.",
        "Allow more candidates: some layer has none that goes with its neighbours'.",
    )


@dataclass(frozen=True)
class _Solved:
    choice: tuple[int, ...]
    largest: int
    work: int
    """Entries of all tables read and joined."""


def _merged(sizes: Sequence[int], factors: Iterable[Factor]) -> dict[Scope, Table]:
    """One table per set of variables, its axes in ascending order; a `ValueError` for what cannot be one."""
    tables: dict[Scope, Table] = {}
    for given in factors:
        scope, costs = given.variables, np.asarray(given.costs, dtype=np.float64)
        if len(set(scope)) != len(scope) or not all(0 <= v < len(sizes) for v in scope):
            raise ValueError(f"variables {scope} are not distinct ones of {len(sizes)}")
        if costs.shape != tuple(sizes[v] for v in scope):
            raise ValueError(f"costs of {scope} are {costs.shape}; the sizes are {tuple(sizes[v] for v in scope)}")
        # min passes NaN on and finds -inf, without a temporary as large as the table.
        if costs.size and not costs.min() > -inf:
            raise ValueError(f"costs of {scope} hold NaN or -inf")
        order = sorted(range(len(scope)), key=lambda axis: scope[axis])
        key = tuple(scope[axis] for axis in order)
        turned = costs.transpose(order)
        tables[key] = tables[key] + turned if key in tables else turned
    return tables


def _value(tables: Mapping[Scope, Table], choice: Sequence[int]) -> float:
    return fsum(float(table[tuple(choice[v] for v in scope)]) for scope, table in tables.items())


def _restricted(tables: Mapping[Scope, Table], domains: Sequence[NDArray[np.intp]]) -> dict[Scope, Table]:
    """The same tables with only the candidates of `domains`."""
    return {scope: _part(table, [domains[v] for v in scope]) for scope, table in tables.items()}


def _part(table: Table, kept: Sequence[NDArray[np.intp]]) -> Table:
    for axis, indices in enumerate(kept):
        if len(indices) < table.shape[axis]:
            table = table.take(indices, axis=axis)
    return table


def _solve(sizes: Sequence[int], tables: Mapping[Scope, Table]) -> _Solved | None:
    """A cheapest choice, or None if every choice is forbidden."""
    if min(sizes, default=1) < 1:
        return None
    if min(sizes, default=2) == 1:
        tables = _without_settled(sizes, tables)
    work = given = _entries(tables)
    order, join = _order(sizes, tables)
    domains = [np.arange(size) for size in sizes]
    if join > WORTH * given:
        sieve, stalled = _Sieve(sizes, tables), 0
        while join > WORTH * _entries(sieve.tables):
            work += 8 * _entries(sieve.tables)
            if not sieve.sweep():
                return None
            sieve.drop_dominated()
            previous, (order, join) = join, _order([len(domain) for domain in sieve.domains], sieve.tables)
            stalled += join > 0.7 * previous
            # Joins of minutes, or too large to keep, are worth more sweeps that at first seem in vain.
            if stalled > (0 if join <= 100 * LARGEST else 10):
                break
        domains, tables = sieve.domains, sieve.tables
    eliminated = _eliminate([len(domain) for domain in domains], tables, order)
    if eliminated is None:
        return None
    choice, largest = eliminated
    return _Solved(tuple(int(domains[v][i]) for v, i in enumerate(choice)), largest, work + join)


def _entries(tables: Mapping[Scope, Table]) -> int:
    return sum(table.size for table in tables.values())


def _without_settled(sizes: Sequence[int], tables: Mapping[Scope, Table]) -> dict[Scope, Table]:
    """The same sum, its tables not mentioning variables of one candidate."""
    result: dict[Scope, Table] = {}
    for scope, table in tables.items():
        open_ = tuple(v for v in scope if sizes[v] > 1)
        smaller = table.reshape(tuple(sizes[v] for v in open_))
        result[open_] = result[open_] + smaller if open_ in result else smaller
    return result


def _order(sizes: Sequence[int], scopes: Iterable[Scope]) -> tuple[list[int], int]:
    """A good order for all variables that a scope mentions, and the entries it joins: the better of two greedy ones."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    mentioned: set[int] = set()
    for scope in scopes:
        mentioned.update(scope)
        for v in scope:
            neighbours[v].update(scope)
    for v, near in enumerate(neighbours):
        near.discard(v)

    def join(v: int, near: set[int]) -> int:
        return sizes[v] * prod(sizes[w] for w in near)

    def fill(_: int, near: set[int]) -> int:
        return sum(len(near) - 1 - len(near & graph[w]) for w in near)

    best: tuple[list[int], int] | None = None
    for rule in (join, fill):
        graph = [set(near) for near in neighbours]
        keys = {v: (rule(v, graph[v]), join(v, graph[v])) for v in mentioned}
        queue = [(key, v) for v, key in keys.items()]
        heapq.heapify(queue)
        order, total = [], 0
        while queue:
            key, v = heapq.heappop(queue)
            if keys.get(v) != key:
                continue
            total += keys.pop(v)[1]
            order.append(v)
            near = graph[v]
            for w in near:
                graph[w] |= near
                graph[w] -= {v, w}
            # An edge added between two neighbours changes the fill of what lies next to both.
            for w in near if rule is join else near.union(*(graph[w] for w in near)):
                key = (rule(w, graph[w]), join(w, graph[w]))
                if keys[w] != key:
                    keys[w] = key
                    heapq.heappush(queue, (key, w))
        if best is None or total < best[1]:
            best = order, total
    assert best is not None
    return best


def _eliminate(
    sizes: Sequence[int], tables: Mapping[Scope, Table], order: Sequence[int]
) -> tuple[list[int], int] | None:
    """The choice, and the entries of the largest join; None if every choice is forbidden."""
    live = dict(tables)
    constant = float(live.pop((), np.zeros(())))
    buckets: list[list[tuple[Scope, Table]]] = []
    largest = 1
    for v in order:
        bucket = _absorbed([(scope, live.pop(scope)) for scope in [scope for scope in live if v in scope]])
        buckets.append(bucket)
        if not bucket:
            continue
        rest = tuple(sorted({w for scope, _ in bucket for w in scope} - {v}))
        entries = prod(sizes[w] for w in rest)
        largest = max(largest, entries * sizes[v])
        if entries > LARGEST:
            raise PlanError(
                f"the search needs a table of {entries:,} entries over {len(rest)} layers; at most {LARGEST:,}.",
                "Give these layers fewer candidates.",
            )
        smaller = _min_out(v, bucket, rest, tuple(sizes[w] for w in rest))
        if rest:
            live[rest] = live[rest] + smaller if rest in live else smaller
        else:
            constant += float(smaller)
    if constant == inf:
        return None
    # The minimum is looked for again where the neighbours are known: cheaper than keeping every argmin.
    choice = [0] * len(sizes)
    for v, bucket in zip(reversed(order), reversed(buckets), strict=True):
        if bucket:
            choice[v] = int(np.argmin(_given(v, bucket, choice)))
    return choice, largest


def _given(v: int, bucket: Iterable[tuple[Scope, Table]], choice: Sequence[int]) -> Table:
    """The sum of tables for each candidate of `v`, all others being chosen."""
    parts = [table[tuple(slice(None) if w == v else choice[w] for w in scope)] for scope, table in bucket]
    total: Table = sum(parts[1:], start=parts[0])
    return total


def _absorbed(bucket: list[tuple[Scope, Table]]) -> list[tuple[Scope, Table]]:
    """The same sum with fewer tables: one whose variables are all in another is added to it."""
    bucket = sorted(bucket, key=lambda entry: len(entry[0]))
    result: list[tuple[Scope, Table]] = []
    for i, (scope, table) in enumerate(bucket):
        for k in range(i + 1, len(bucket)):
            wider, larger = bucket[k]
            if set(scope) <= set(wider):
                bucket[k] = wider, larger + _spread(table, scope, wider)
                break
        else:
            result.append((scope, table))
    return result


def _spread(table: Table, scope: Scope, wider: Scope) -> Table:
    """A view with an axis for each of `wider`, of one entry where the table does not depend on it."""
    sizes = dict(zip(scope, table.shape, strict=True))
    return table.reshape(tuple(sizes.get(w, 1) for w in wider))


def _min_out(v: int, bucket: list[tuple[Scope, Table]], rest: Scope, shape: tuple[int, ...]) -> Table:
    """The minimum over `v` of the sum of the bucket, as a table over `rest`."""
    operands = []
    for scope, table in bucket:
        others = tuple(w for w in scope if w != v)
        turned = np.ascontiguousarray(np.moveaxis(table, scope.index(v), 0))
        operands.append(turned.reshape((turned.shape[0], *(_spread(turned[0], others, rest).shape))))
    operands.sort(key=lambda operand: operand.size)
    candidates = operands[0].shape[0]
    if len(operands) == 1:
        only: Table = operands[0].min(axis=0)
        return only.reshape(shape)
    result = np.full(shape, inf)
    for tile in _tiles(shape):
        out = result[tile]
        parts = [
            operand[
                (slice(None), *(cut if n > 1 else slice(None) for cut, n in zip(tile, operand.shape[1:], strict=True)))
            ]
            for operand in operands
        ]
        step = max(1, TILE // max(1, out.size))
        for at in range(0, candidates, step):
            total = parts[0][at : at + step]
            for part in parts[1:]:
                total = total + part[at : at + step]
            np.minimum(out, total.min(axis=0) if step > 1 else total[0], out=out)
    return result


def _tiles(shape: tuple[int, ...]) -> Iterable[tuple[slice, ...]]:
    """Slices that cover a table in pieces of about `TILE` entries, whole along its last axes."""
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= TILE:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        return [tuple(slice(None) for _ in shape)]
    step = max(1, TILE // inner)
    outer = [range(n) for n in shape[: axis - 1]]
    return (
        (*(slice(i, i + 1) for i in index), slice(at, at + step), *(slice(None) for _ in shape[axis:]))
        for index in product(*outer)
        for at in range(0, shape[axis - 1], step)
    )


class _Sieve:
    """Drops candidates that no cheapest choice needs.

    Beside the tables it keeps the same sum spread otherwise over them: what a table costs at least for a candidate
    is moved to that candidate, and from there to the tables of the variables that follow (sequential reweighting,
    Kolmogorov 2006). The sum of all tables' minima is then a good lower bound.
    """

    def __init__(self, sizes: Sequence[int], tables: Mapping[Scope, Table], upper: float = inf) -> None:
        self.domains = [np.arange(size) for size in sizes]
        self.tables = dict(tables)
        self.upper = upper
        """No choice that costs more is of interest."""
        self._touching: list[list[Scope]] = [[] for _ in sizes]
        self._constant = float(tables.get((), 0.0))
        self._alone = [np.zeros(size) for size in sizes]
        self._spread: dict[Scope, Table] = {}
        for scope, table in tables.items():
            if len(scope) == 1:
                self._alone[scope[0]] = self._alone[scope[0]] + table
            elif scope:
                self._spread[scope] = np.array(table, order="C")
                for v in scope:
                    self._touching[v].append(scope)
        self._floor = [float(alone.min()) for alone in self._alone]
        self._least = {scope: float(table.min()) for scope, table in self._spread.items()}
        # Far above the rounding of a few thousand additions, far below what tells two plans apart.
        self._slack = 1e-11 * sum(_magnitude(table) for table in tables.values())

    def sweep(self, improve: bool = True) -> bool:
        """Improve the bounds forth and back, drop what they exclude; False if nothing is left of a variable.

        `improve`: also look for cheaper choices than `upper`; not where only some choices are allowed.
        """
        ahead = range(len(self.domains))
        for backward in (False, True):
            for v in reversed(ahead) if backward else ahead:
                if not self._visit(v, backward):
                    return False
            if improve:
                self._improve_upper(backward)
        return True

    def _visit(self, v: int, backward: bool) -> bool:
        touching = self._touching[v]
        alone = self._alone[v]
        for scope in touching:
            table = self._spread[scope]
            least = table.min(axis=tuple(axis for axis, w in enumerate(scope) if w != v))
            alone = alone + least
            # A forbidden candidate goes below; until then its row stays inf.
            table -= _spread(np.where(np.isfinite(least), least, 0.0), (v,), scope)
            self._least[scope] = 0.0
        self._alone[v] = alone
        self._floor[v] = 0.0
        bounds = alone + (sum(self._floor) + sum(self._least.values()) + self._constant)
        self._keep(v, (bounds <= self.upper + self._slack) & (bounds < inf))
        if not len(self.domains[v]):
            return False
        after = [scope for scope in touching if (scope[0] < v if backward else scope[-1] > v)]
        before = [scope for scope in touching if (scope[-1] > v if backward else scope[0] < v)]
        if after:
            share = self._alone[v] / max(len(after), len(before))
            for scope in after:
                self._spread[scope] += _spread(share, (v,), scope)
                self._least[scope] = float(share.min())
            self._alone[v] = self._alone[v] - share * len(after)
        self._floor[v] = float(self._alone[v].min())
        return True

    def drop_dominated(self) -> None:
        """Drop candidates that another, among the most promising, never costs more than."""
        for v in range(len(self.domains)):
            touching = [scope for scope in self._touching[v] if len(scope) > 1]
            rows = [
                np.moveaxis(self.tables[scope], scope.index(v), 0).reshape(len(self.domains[v]), -1)
                for scope in touching
            ]
            alone = self.tables.get((v,), np.zeros(len(self.domains[v])))
            kept = np.ones(len(alone), dtype=np.bool_)
            once = len(alone) * sum(row.shape[1] for row in rows)
            for best in np.argsort(self._alone[v], kind="stable")[: max(2, 500_000 // max(1, once))]:
                if not kept[best]:
                    continue
                # inf - inf is NaN: where both are forbidden neither is worse, and fmax passes over it.
                with np.errstate(invalid="ignore"):
                    worse = sum((np.fmax.reduce(row[best] - row, axis=1) for row in rows), start=np.zeros(len(alone)))
                    dominated = alone - alone[best] >= worse
                dominated[best] = False
                kept &= ~dominated
            self._keep(v, kept)

    def _keep(self, v: int, kept: NDArray[np.bool_]) -> None:
        if kept.all():
            return
        self.domains[v] = self.domains[v][kept]
        self._alone[v] = self._alone[v][kept]
        if (v,) in self.tables:
            self.tables[v,] = self.tables[v,][kept]
        for scope in self._touching[v]:
            axis = scope.index(v)
            self.tables[scope] = self.tables[scope].compress(kept, axis=axis)
            self._spread[scope] = self._spread[scope].compress(kept, axis=axis)

    def _improve_upper(self, backward: bool) -> None:
        """Choose one variable after another by the bounds, then each anew while that helps."""
        variables = range(len(self.domains))
        choice: dict[int, int] = {}
        for v in variables if backward else reversed(variables):
            costs = self._alone[v].copy()
            for scope in self._touching[v]:
                index = tuple(choice.get(w, slice(None)) for w in scope)
                free = [w for w in scope if w not in choice]
                costs += self._spread[scope][index].min(axis=tuple(i for i, w in enumerate(free) if w != v))
            choice[v] = int(np.argmin(costs))
        found = _descend(self.tables, [choice[v] for v in variables])
        self.upper = min(self.upper, _value(self.tables, found))


def _magnitude(table: Table) -> float:
    return float(np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)).max(initial=0.0))


def _touching(count: int, tables: Mapping[Scope, Table]) -> list[list[tuple[Scope, Table]]]:
    touching: list[list[tuple[Scope, Table]]] = [[] for _ in range(count)]
    for scope, table in tables.items():
        for v in scope:
            touching[v].append((scope, table))
    return touching


def _descend(tables: Mapping[Scope, Table], choice: list[int]) -> list[int]:
    """Choose each variable anew, given the others, until that no longer helps."""
    touching = _touching(len(choice), tables)
    waiting = set(range(len(choice)))
    for _ in range(20 * len(choice)):
        if not waiting:
            break
        v = waiting.pop()
        if not touching[v]:
            continue
        costs = _given(v, touching[v], choice)
        best = int(np.argmin(costs))
        if costs[best] < costs[choice[v]]:
            choice[v] = best
            waiting.update(w for scope, _ in touching[v] for w in scope if w != v)
    return choice


Domains = tuple[NDArray[np.intp], ...]


@dataclass(frozen=True)
class _Point:
    """A choice that is the cheapest at some price, what it costs without the price, and what it weighs."""

    choice: tuple[int, ...]
    cost: float
    weight: float


@dataclass(frozen=True)
class _Bracket:
    """The best price for a part of the choices, and a choice on each side of the limit."""

    domains: Domains
    bound: float
    price: float
    heavy: _Point
    light: _Point


class _Priced:
    """Branch and bound for a cheapest choice within a limit; see `minimise_under`."""

    def __init__(
        self, sizes: Sequence[int], factors: Sequence[Factor], weights: Sequence[Factor], limit: float
    ) -> None:
        if limit != limit:
            raise ValueError("the limit is NaN")
        self._sizes, self._limit = tuple(sizes), limit
        weighed = _merged(sizes, weights)
        # A weight of inf is a forbidden choice; as a cost it stays forbidden at a price of 0.
        forbidden = [
            Factor(scope, np.where(np.isfinite(table), 0.0, inf))
            for scope, table in weighed.items()
            if not np.isfinite(table).all()
        ]
        self._weights = {scope: np.where(np.isfinite(table), table, 0.0) for scope, table in weighed.items()}
        self._costs = _merged(sizes, [*factors, *forbidden])
        self._touching_costs = _touching(len(sizes), self._costs)
        self._touching_weights = _touching(len(sizes), self._weights)
        self._least_weight = [np.zeros(size) for size in sizes]
        for scope, table in self._weights.items():
            for axis, v in enumerate(scope):
                others = tuple(other for other in range(len(scope)) if other != axis)
                self._least_weight[v] = self._least_weight[v] + table.min(axis=others, initial=inf)
        self._best: _Point | None = None
        self._spent = 0.0
        self._slack = 1e-12 * sum(_magnitude(table) for table in self._costs.values())

    def search(self, effort: float) -> Bounded:
        """The best choice, once everything else is excluded or the effort is spent."""
        root = tuple(np.arange(size) for size in self._sizes)
        lightest = self._probe(root, inf)
        if lightest is None:
            raise _forbidden(self._sizes)
        if lightest.weight > self._limit:
            raise PlanError(
                f"no choice is within the limit of {self._limit:.15g}; the smallest is {lightest.weight:.15g}.",
                "Raise the limit, or allow candidates that need less.",
            )
        ties = counter()
        waiting: list[tuple[float, int, float, Domains]] = [(-inf, next(ties), 0.0, root)]
        while waiting and waiting[0][0] < self._upper and (self._spent <= effort or waiting[0][0] == -inf):
            bound, _, price, domains = heapq.heappop(waiting)
            bracket = self._bracket(domains, bound, price)
            if bracket is None:
                continue
            self._repair(bracket.heavy)
            self._descend(bracket.light)
            for child in self._split(bracket):
                heapq.heappush(waiting, (bracket.bound, next(ties), bracket.price, child))
        assert self._best is not None
        settled = not waiting or waiting[0][0] >= self._upper
        best = self._best
        return Bounded(best.choice, best.cost, best.weight, best.cost if settled else waiting[0][0])

    @property
    def _upper(self) -> float:
        """A bound that reaches this excludes anything better, but for rounding."""
        return inf if self._best is None else self._best.cost - self._slack

    def _bracket(self, domains: Domains, bound: float, price: float) -> _Bracket | None:
        """The price with the best bound; None if these candidates are settled: solved, forbidden or excluded."""
        root = bound == -inf
        first = self._probe(domains, price)
        if first is None:
            return None
        bound = max(bound, self._priced(first, price))
        if bound >= self._upper:
            return None
        within = first.weight <= self._limit
        heavy = light = first
        if root and not within:
            # A good choice within the limit makes the first price a good one.
            self._repair(first)
            assert self._best is not None
            light = self._best
        else:
            near, other = first, None
            for step in self._steps(price, within):
                point = self._probe(domains, step)
                assert point is not None
                bound = max(bound, self._priced(point, step))
                if (point.weight <= self._limit) != within:
                    other = point
                    break
                near = point
            if other is None:
                return None
            heavy, light = (other, near) if within else (near, other)
        best = price
        for turn in range(100):
            if bound >= self._upper:
                return None
            price = max(0.0, (light.cost - heavy.cost) / (heavy.weight - light.weight))
            if root and turn in (1, 3, 7):
                # All candidates are still there: fewer make the next probes cheap.
                kept = self._sieved(domains, best)
                if kept is None:
                    return None
                domains = kept
            probed = self._probe(domains, price)
            if probed is None:
                return None
            value = self._priced(probed, price)
            if value > bound:
                bound, best = value, price
            if value >= self._priced(heavy, price) - self._slack:
                break
            if probed.weight <= self._limit:
                light = probed
            else:
                heavy = probed
        return None if bound >= self._upper else _Bracket(domains, bound, best, heavy, light)

    @staticmethod
    def _steps(price: float, down: bool) -> tuple[float, ...]:
        """Prices to try for a choice on the other side of the limit; the last settles whether there is one."""
        if down:
            return (0.95 * price, 0.7 * price, 0.0) if price else ()
        return (1.05 * price, 1.5 * price, inf) if price else (inf,)

    def _priced(self, point: _Point, price: float) -> float:
        """A bound, if the point is the cheapest at this price."""
        if price == inf:
            return -inf
        return point.cost + price * (point.weight - self._limit) if price else point.cost

    def _tables(self, domains: Domains, price: float) -> dict[Scope, Table]:
        """Costs with the weights at a price; at a price of inf, the weights of what is not forbidden."""
        costs, weights = _restricted(self._costs, domains), _restricted(self._weights, domains)
        if price == inf:
            costs = {scope: np.where(np.isfinite(table), 0.0, inf) for scope, table in costs.items()}
        factor = 1.0 if price == inf else price
        for scope, table in weights.items() if factor else ():
            costs[scope] = costs[scope] + factor * table if scope in costs else factor * table
        return costs

    def _probe(self, domains: Domains, price: float) -> _Point | None:
        """The cheapest choice at a price, remembered if it is within the limit and the best so far."""
        solved = _solve([len(domain) for domain in domains], self._tables(domains, price))
        if solved is None:
            return None
        self._spent += PROBE + solved.work
        return self._seen(tuple(int(domain[i]) for domain, i in zip(domains, solved.choice, strict=True)))

    def _seen(self, choice: tuple[int, ...]) -> _Point:
        point = _Point(choice, _value(self._costs, choice), _value(self._weights, choice))
        if point.weight <= self._limit and (self._best is None or point.cost < self._best.cost):
            self._best = point
        return point

    def _split(self, bracket: _Bracket) -> Iterable[Domains]:
        """Two parts of what can still be better, with the bracket's two choices in different ones."""
        differing = [v for v in range(len(self._sizes)) if bracket.heavy.choice[v] != bracket.light.choice[v]]

        def ends(v: int) -> tuple[float, float]:
            least = self._least_weight[v]
            return float(least[bracket.heavy.choice[v]]), float(least[bracket.light.choice[v]])

        v = max(differing, key=lambda v: abs(ends(v)[0] - ends(v)[1]))
        kept = self._sieved(bracket.domains, bracket.price)
        if kept is None:
            return
        heavy, light = ends(v)
        if heavy == light:
            side = kept[v] == bracket.light.choice[v]
        else:
            # Halfway may round to the larger end, which must stay on the other side.
            least = self._least_weight[v][kept[v]]
            side = (least <= (heavy + light) / 2) & (least < max(heavy, light))
        for part in (kept[v][side], kept[v][~side]):
            if len(part):
                yield (*kept[:v], part, *kept[v + 1 :])

    def _sieved(self, domains: Domains, price: float) -> Domains | None:
        """Without candidates that the bounds at a price exclude; None if nothing is left that could be better."""
        assert self._best is not None
        tables = self._tables(domains, price)
        self._spent += PROBE + 8 * _entries(tables)
        sieve = _Sieve([len(domain) for domain in domains], tables, self._best.cost + price * self._limit)
        if not sieve.sweep(improve=False):
            return None
        return tuple(domain[left] for domain, left in zip(domains, sieve.domains, strict=True))

    def _changes(self, v: int, choice: Sequence[int]) -> tuple[Table, Table]:
        """What each candidate of `v` would add to the cost and to the weight."""
        costs, weights = (
            _given(v, touching[v], choice) if touching[v] else np.zeros(self._sizes[v])
            for touching in (self._touching_costs, self._touching_weights)
        )
        return costs - costs[choice[v]], weights - weights[choice[v]]

    def _descend(self, point: _Point) -> None:
        """Choose each variable anew within the limit, while that helps."""
        choice, room = list(point.choice), self._limit - point.weight
        for _ in range(20):
            before = list(choice)
            for v in range(len(choice)):
                costs, weights = self._changes(v, choice)
                costs = np.where(weights <= room, costs, inf)
                best = int(np.argmin(costs))
                if costs[best] < 0:
                    choice[v] = best
                    room -= float(weights[best])
            if choice == before:
                break
        self._seen(tuple(choice))

    def _repair(self, point: _Point) -> None:
        """Take the moves that cost least for the weight they save, until the limit is kept."""
        choice, excess = list(point.choice), point.weight - self._limit
        for _ in range(4 * len(choice)):
            moves = []
            for v in range(len(choice)):
                costs, weights = self._changes(v, choice)
                saved = np.minimum(-weights, excess)
                rates = np.divide(costs, saved, where=saved > 0, out=np.full(len(costs), inf))
                best = int(np.argmin(rates))
                moves.append((float(rates[best]), v, best, float(weights[best])))
            rate, v, best, weight = min(moves)
            if rate == inf:
                return
            choice[v] = best
            excess += weight
            if excess <= 0:
                break
        repaired = self._seen(tuple(choice))
        if repaired.weight <= self._limit:
            self._descend(repaired)
