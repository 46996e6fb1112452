"""Costs as tables over a few variables each, and the small operations on them that every search here needs.

A variable is a choice to make (for plans: a stage of the network); its candidates are numbered from 0. A choice has one
candidate per variable and costs the sum of one entry of every table. inf is forbidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

from shoal.errors import PlanError

Table = NDArray[np.float64]
Scope = tuple[int, ...]
"""The variables of a table, one per axis."""


@dataclass(frozen=True)
class Factor:
    """A cost that depends on some variables: one axis per variable; inf is forbidden."""

    variables: Scope
    costs: Table


def merged(sizes: Sequence[int], factors: Iterable[Factor]) -> dict[Scope, Table]:
    """One table per set of variables, its axes in ascending order; a `ValueError` where a factor is no such table."""
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


def value_of(tables: Mapping[Scope, Table], choice: Sequence[int]) -> float:
    """What a choice costs: the sum of its entry in every table, rounded once."""
    return fsum(float(table[tuple(choice[v] for v in scope)]) for scope, table in tables.items())


def costs_given(v: int, tables: Iterable[tuple[Scope, Table]], choice: Sequence[int]) -> Table:
    """For each candidate of `v` the sum of these tables, the other variables being as in `choice`."""
    parts = [table[tuple(slice(None) if w == v else choice[w] for w in scope)] for scope, table in tables]
    total: Table = sum(parts[1:], start=parts[0])
    return total


def restricted(tables: Mapping[Scope, Table], domains: Sequence[NDArray[np.intp]]) -> dict[Scope, Table]:
    """The same tables with only the candidates of `domains`."""
    return {scope: _part(table, [domains[v] for v in scope]) for scope, table in tables.items()}


def _part(table: Table, kept: Sequence[NDArray[np.intp]]) -> Table:
    for axis, indices in enumerate(kept):
        if len(indices) < table.shape[axis]:
            table = table.take(indices, axis=axis)
    return table


def widened(table: Table, scope: Scope, wider: Scope) -> Table:
    """A view with an axis for each variable of `wider`, of length 1 where the table does not depend on it."""
    sizes = dict(zip(scope, table.shape, strict=True))
    return table.reshape(tuple(sizes.get(w, 1) for w in wider))


def tables_by_variable(count: int, tables: Mapping[Scope, Table]) -> list[list[tuple[Scope, Table]]]:
    """For each of `count` variables the tables that depend on it."""
    touching: list[list[tuple[Scope, Table]]] = [[] for _ in range(count)]
    for scope, table in tables.items():
        for v in scope:
            touching[v].append((scope, table))
    return touching


def entries_of(tables: Mapping[Scope, Table]) -> int:
    """Entries of all tables together: a measure of the work of reading them."""
    return sum(table.size for table in tables.values())


def magnitude(table: Table) -> float:
    """The largest absolute value of a table, forbidden entries aside: what its rounding errors are a share of."""
    return float(np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)).max(initial=0.0))


def all_forbidden(sizes: Sequence[int]) -> PlanError:
    """The error to raise where no choice is allowed."""
    return PlanError(
        f"every choice for the {len(sizes)} layers is forbidden.",
        "Allow more candidates: some layer has none that goes with its neighbours'.",
    )
