"""The cheapest choice of one candidate per variable, where costs are tables over a few variables each.

Variables are eliminated one after another: all tables that mention one are added, and the minimum over it is a
new table over its neighbours. OptCNN's two rules (Jia et al. 2018) are the cases of one layer between two others
(eq. 2) and of two tables over the same pair (eq. 3); here a variable may have any number of neighbours, so graphs
that the rules do not reduce are solved as well, as long as the tables that their shape forces can be kept.

Where the tables would grow large, candidates that no cheapest choice needs are dropped before (`sieve.py`).

All sums are float64 and "exact" means up to their rounding; costs returned are summed anew from the choice.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf, prod

import numpy as np

from shoal.errors import PlanError
from shoal.planning.cost_tables import (
    Factor,
    Scope,
    Table,
    all_forbidden,
    costs_given,
    entries_of,
    merged,
    value_of,
    widened,
)
from shoal.planning.sieve import Sieve

LARGEST = 2**27
"""The largest table that is kept, in entries: 1 GiB."""
TILE = 2**14
"""Temporary arrays have about this many entries: small enough to stay in a core's cache."""
WORTH = 4
"""Candidates are dropped first where elimination would join more than this many times the entries of the tables."""


@dataclass(frozen=True)
class Solution:
    """A cheapest choice, one candidate per variable."""

    choice: tuple[int, ...]
    cost: float
    largest_table: int
    """Entries of the largest table joined, after candidates were dropped; a measure of the graph's width."""


def minimise(sizes: Sequence[int], factors: Sequence[Factor]) -> Solution:
    """The choice with the smallest sum of factors; `sizes` are the candidates of each variable.

    Time and memory grow with the widest table that the graph forces: C^2 per variable for chains and trees, C^3
    for anything that OptCNN's rules reduce. A `PlanError` if every choice is forbidden or a table would pass
    `LARGEST`; a `ValueError` for tables that do not fit `sizes` or hold NaN or -inf.
    """
    tables = merged(sizes, factors)
    solved = solve(sizes, tables)
    if solved is None:
        raise all_forbidden(sizes)
    return Solution(solved.choice, value_of(tables, solved.choice), solved.largest)


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


@dataclass(frozen=True)
class Solved:
    """A cheapest choice, and what it took to find it."""

    choice: tuple[int, ...]
    largest: int
    work: int
    """Entries of all tables read and joined."""


def solve(sizes: Sequence[int], tables: Mapping[Scope, Table]) -> Solved | None:
    """A cheapest choice, or None if every choice is forbidden."""
    if min(sizes, default=1) < 1:
        return None
    if min(sizes, default=2) == 1:
        tables = _without_settled(sizes, tables)
    work = given = entries_of(tables)
    order, join = _order(tuple(sizes), tuple(tables))
    domains = [np.arange(size) for size in sizes]
    if join > WORTH * given:
        sieve, stalled = Sieve(sizes, tables), 0
        while join > WORTH * entries_of(sieve.tables):
            work += 8 * entries_of(sieve.tables)
            if not sieve.sweep():
                return None
            sieve.drop_dominated()
            previous, (order, join) = join, _order(tuple(len(domain) for domain in sieve.domains), tuple(sieve.tables))
            stalled += join > 0.7 * previous
            # An elimination that takes minutes or does not fit is worth sweeps that at first do not help.
            if stalled > (0 if join <= 100 * LARGEST else 10):
                break
        domains, tables = sieve.domains, sieve.tables
    eliminated = _eliminate([len(domain) for domain in domains], tables, order)
    if eliminated is None:
        return None
    choice, largest = eliminated
    return Solved(tuple(int(domains[v][i]) for v, i in enumerate(choice)), largest, work + join)


def _without_settled(sizes: Sequence[int], tables: Mapping[Scope, Table]) -> dict[Scope, Table]:
    """The same sum in tables without the variables that have only one candidate."""
    result: dict[Scope, Table] = {}
    for scope, table in tables.items():
        open_scope = tuple(v for v in scope if sizes[v] > 1)
        smaller = table.reshape(tuple(sizes[v] for v in open_scope))
        result[open_scope] = result[open_scope] + smaller if open_scope in result else smaller
    return result


@lru_cache(maxsize=16)
def _order(sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> tuple[Sequence[int], int]:
    """A good order for all variables that a scope mentions, and the entries it joins: the better of two greedy ones.

    The last few are remembered: a plan's search asks for each share of what hides behind backward.
    """
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
            choice[v] = int(np.argmin(costs_given(v, bucket, choice)))
    return choice, largest


def _absorbed(bucket: list[tuple[Scope, Table]]) -> list[tuple[Scope, Table]]:
    """The same sum with fewer tables: one whose variables are all in another is added to it."""
    bucket = sorted(bucket, key=lambda entry: len(entry[0]))
    result: list[tuple[Scope, Table]] = []
    for i, (scope, table) in enumerate(bucket):
        for k in range(i + 1, len(bucket)):
            wider, larger = bucket[k]
            if set(scope) <= set(wider):
                bucket[k] = wider, larger + widened(table, scope, wider)
                break
        else:
            result.append((scope, table))
    return result


def _min_out(v: int, bucket: list[tuple[Scope, Table]], rest: Scope, shape: tuple[int, ...]) -> Table:
    """The minimum over `v` of the sum of the bucket, as a table over `rest`."""
    operands = []
    for scope, table in bucket:
        others = tuple(w for w in scope if w != v)
        turned = np.ascontiguousarray(np.moveaxis(table, scope.index(v), 0))
        operands.append(turned.reshape((turned.shape[0], *(widened(turned[0], others, rest).shape))))
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
