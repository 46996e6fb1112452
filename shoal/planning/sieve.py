"""Candidates that no cheapest choice needs are found and dropped, so that the exact search has less to do.

Two kinds are dropped: those whose lower bound is above the cost of a known choice, and those that another candidate
beats whatever the neighbours choose. At least one cheapest choice always stays.
"""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from shoal.planning.cost_tables import Scope, Table, costs_given, magnitude, tables_by_variable, value_of, widened


class Sieve:
    """Drops candidates that no cheapest choice needs.

    Beside the tables it keeps reweighted ones, whose sum is the same for every choice: what a table costs at least for
    a candidate is moved to that candidate, and from there to the tables of the variables that follow (sequential
    reweighting, Kolmogorov 2006). The sum of all reweighted tables' minima is then a good lower bound.
    """

    def __init__(self, sizes: Sequence[int], tables: Mapping[Scope, Table], upper: float = inf) -> None:
        self.domains = [np.arange(size) for size in sizes]
        self.tables = dict(tables)
        self.upper = upper
        """No choice that costs more is of interest."""
        self._touching: list[list[Scope]] = [[] for _ in sizes]
        self._constant = float(tables.get((), 0.0))
        self._alone = [np.zeros(size) for size in sizes]
        self._reweighted: dict[Scope, Table] = {}
        for scope, table in tables.items():
            if len(scope) == 1:
                self._alone[scope[0]] = self._alone[scope[0]] + table
            elif scope:
                self._reweighted[scope] = np.array(table, order="C")
                for v in scope:
                    self._touching[v].append(scope)
        self._floor = [float(alone.min()) for alone in self._alone]
        self._least = {scope: float(table.min()) for scope, table in self._reweighted.items()}
        # Far above the rounding of a few thousand additions, far below what tells two plans apart.
        self._slack = 1e-11 * sum(magnitude(table) for table in tables.values())

    def sweep(self, improve: bool = True) -> bool:
        """Improve the bounds forth and back, drop what they exclude; False if a variable has no candidate left.

        `improve`: also look for choices cheaper than `upper`; False where a choice found so might not be allowed.
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
        """Reweight the tables around one variable and drop its excluded candidates; False if none is left."""
        touching = self._touching[v]
        alone = self._alone[v]
        for scope in touching:
            table = self._reweighted[scope]
            least = table.min(axis=tuple(axis for axis, w in enumerate(scope) if w != v))
            alone = alone + least
            # A forbidden candidate is dropped below; until then its row stays inf.
            table -= widened(np.where(np.isfinite(least), least, 0.0), (v,), scope)
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
                self._reweighted[scope] += widened(share, (v,), scope)
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
        """Drop all other candidates of a variable, here and in every table."""
        if kept.all():
            return
        self.domains[v] = self.domains[v][kept]
        self._alone[v] = self._alone[v][kept]
        if (v,) in self.tables:
            self.tables[v,] = self.tables[v,][kept]
        for scope in self._touching[v]:
            axis = scope.index(v)
            self.tables[scope] = self.tables[scope].compress(kept, axis=axis)
            self._reweighted[scope] = self._reweighted[scope].compress(kept, axis=axis)

    def _improve_upper(self, backward: bool) -> None:
        """Choose one variable after another by the bounds, then improve that choice locally."""
        variables = range(len(self.domains))
        choice: dict[int, int] = {}
        for v in variables if backward else reversed(variables):
            costs = self._alone[v].copy()
            for scope in self._touching[v]:
                index = tuple(choice.get(w, slice(None)) for w in scope)
                free = [w for w in scope if w not in choice]
                costs += self._reweighted[scope][index].min(axis=tuple(i for i, w in enumerate(free) if w != v))
            choice[v] = int(np.argmin(costs))
        improved = _locally_improved(self.tables, [choice[v] for v in variables])
        self.upper = min(self.upper, value_of(self.tables, improved))


def _locally_improved(tables: Mapping[Scope, Table], choice: list[int]) -> list[int]:
    """Choose each variable anew, given the others, until no single change makes it cheaper."""
    touching = tables_by_variable(len(choice), tables)
    waiting = set(range(len(choice)))
    for _ in range(20 * len(choice)):
        if not waiting:
            break
        v = waiting.pop()
        if not touching[v]:
            continue
        costs = costs_given(v, touching[v], choice)
        best = int(np.argmin(costs))
        if costs[best] < costs[choice[v]]:
            choice[v] = best
            waiting.update(w for scope, _ in touching[v] for w in scope if w != v)
    return choice
