"""The cheapest choice within a limit: costs are summed over tables, and so are weights (for plans: bytes of memory).

Weights are priced: cost + price * weight is minimised exactly, for one price after another (a Lagrange multiplier).
Each minimum is a lower bound, and the choices found lie on both sides of the limit. Branch and bound closes the gap.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count as counter
from math import inf

import numpy as np
from numpy.typing import NDArray

from shoal.errors import PlanError
from shoal.planning.cost_tables import (
    Factor,
    Scope,
    Table,
    all_forbidden,
    costs_given,
    entries_of,
    magnitude,
    merged,
    restricted,
    tables_by_variable,
    value_of,
)
from shoal.planning.elimination import solve
from shoal.planning.sieve import Sieve

PROBE = 1_000_000
"""What one call of `solve` costs besides reading and joining its tables, counted in entries of effort."""

Domains = tuple[NDArray[np.intp], ...]
"""The candidates of every variable that are still allowed."""


@dataclass(frozen=True)
class Bounded:
    """The cheapest choice found within a limit; no choice within it costs less than `lower_bound`."""

    choice: tuple[int, ...]
    cost: float
    weight: float
    lower_bound: float


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
        weighed = merged(sizes, weights)
        # A weight of inf is a forbidden choice; as a cost it stays forbidden at a price of 0.
        forbidden = [
            Factor(scope, np.where(np.isfinite(table), 0.0, inf))
            for scope, table in weighed.items()
            if not np.isfinite(table).all()
        ]
        self._weights = {scope: np.where(np.isfinite(table), table, 0.0) for scope, table in weighed.items()}
        self._costs = merged(sizes, [*factors, *forbidden])
        self._touching_costs = tables_by_variable(len(sizes), self._costs)
        self._touching_weights = tables_by_variable(len(sizes), self._weights)
        self._least_weight = [np.zeros(size) for size in sizes]
        for scope, table in self._weights.items():
            for axis, v in enumerate(scope):
                others = tuple(other for other in range(len(scope)) if other != axis)
                self._least_weight[v] = self._least_weight[v] + table.min(axis=others, initial=inf)
        self._best: _Point | None = None
        self._spent = 0.0
        self._slack = 1e-12 * sum(magnitude(table) for table in self._costs.values())

    def search(self, effort: float) -> Bounded:
        """The best choice, once everything else is excluded or the effort is spent."""
        root = tuple(np.arange(size) for size in self._sizes)
        lightest = self._probe(root, inf)
        if lightest is None:
            raise all_forbidden(self._sizes)
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
        """A lower bound for every choice within the limit, if the point is the cheapest at this price."""
        if price == inf:
            return -inf
        return point.cost + price * (point.weight - self._limit) if price else point.cost

    def _tables(self, domains: Domains, price: float) -> dict[Scope, Table]:
        """Costs with the weights at a price; at a price of inf, the weights of what is not forbidden."""
        costs, weights = restricted(self._costs, domains), restricted(self._weights, domains)
        if price == inf:
            costs = {scope: np.where(np.isfinite(table), 0.0, inf) for scope, table in costs.items()}
        factor = 1.0 if price == inf else price
        for scope, table in weights.items() if factor else ():
            costs[scope] = costs[scope] + factor * table if scope in costs else factor * table
        return costs

    def _probe(self, domains: Domains, price: float) -> _Point | None:
        """The cheapest choice at a price, remembered if it is within the limit and the best so far."""
        solved = solve([len(domain) for domain in domains], self._tables(domains, price))
        if solved is None:
            return None
        self._spent += PROBE + solved.work
        return self._seen(tuple(int(domain[i]) for domain, i in zip(domains, solved.choice, strict=True)))

    def _seen(self, choice: tuple[int, ...]) -> _Point:
        """What a choice costs and weighs; remembered if it is the best within the limit so far."""
        point = _Point(choice, value_of(self._costs, choice), value_of(self._weights, choice))
        if point.weight <= self._limit and (self._best is None or point.cost < self._best.cost):
            self._best = point
        return point

    def _split(self, bracket: _Bracket) -> Iterable[Domains]:
        """Divide the candidates of one variable in two, so that the bracket's two choices fall into different parts."""
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
        """The candidates that the bounds at a price do not exclude; None if no choice of them could be better."""
        assert self._best is not None
        tables = self._tables(domains, price)
        self._spent += PROBE + 8 * entries_of(tables)
        sieve = Sieve([len(domain) for domain in domains], tables, self._best.cost + price * self._limit)
        if not sieve.sweep(improve=False):
            return None
        return tuple(domain[left] for domain, left in zip(domains, sieve.domains, strict=True))

    def _changes(self, v: int, choice: Sequence[int]) -> tuple[Table, Table]:
        """What each candidate of `v` would add to the cost and to the weight."""
        costs, weights = (
            costs_given(v, touching[v], choice) if touching[v] else np.zeros(self._sizes[v])
            for touching in (self._touching_costs, self._touching_weights)
        )
        return costs - costs[choice[v]], weights - weights[choice[v]]

    def _descend(self, point: _Point) -> None:
        """Choose each variable anew within the limit, until no single change makes it cheaper."""
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
        """Change one variable after another, by what costs least for the weight it saves, until the limit is kept."""
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
