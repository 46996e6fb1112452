"""Find the plan with the shortest step: exact search over the tables, then every candidate played through in time.

The tables are a sum, which elimination minimises exactly. What a sum cannot say is how much of the gradients' sums
hides behind backward, so the search is run for several shares of it; each optimum, and every fixed strategy, is then
played through with overlap, and the shortest wins. With no share exposed the optimum bounds every step from below.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.partition import DIMS, Cut
from shoal.plan import Plan
from shoal.planning.costs import CostModel, CostTables
from shoal.planning.elimination import minimise, minimise_under
from shoal.planning.price import Price, price
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.planning.strategies import NAMES
from shoal.units import show_bytes

EXPOSED = (1.0, 0.5, 0.2, 0.0)
"""Shares of the gradients' sums that backward may fail to hide."""


@dataclass(frozen=True)
class Alternative:
    """The next best cut of a layer, all others as they are."""

    cut: Cut
    extra: float
    """Seconds that it would add."""


@dataclass(frozen=True)
class Found:
    """The best plan that was found, and what it was compared with."""

    plan: Plan
    price: Price
    candidates: tuple[Price, ...]
    """Distinct optima of the search, best first; the first is `price` unless a fixed strategy was better."""
    fixed: tuple[Price, ...]
    """The fixed strategies, best first."""
    bound: float
    """No plan over these cuts takes fewer seconds, under this cost model."""
    why: Mapping[str, Alternative]
    """For the first layer of every stage, what else it could be."""
    table_seconds: float
    search_seconds: float
    stages: int
    choices: int


def find(
    model: CostModel,
    *,
    pins: Mapping[str, Cut] | None = None,
    memory: int | None = None,
    losses: bool = False,
    letters: str = DIMS,
) -> Found:
    """The plan with the shortest predicted step. Pure.

    `pins`: cuts that the user wants, by pattern of layers' names; `memory`: bytes that a rank may hold at most;
    `letters`: the dims along which layers may be cut.
    A pin that fits no layer, and a memory that no plan keeps to, are a `PlanError`.
    """
    pinned = pinned_layers(model.graph, pins or {})
    start = time.perf_counter()
    tables = model.tables(stages_of(model.graph, model.ranks, pinned, letters, _per_host(model)))
    built = time.perf_counter()
    sizes = [len(stage.choices) for stage in tables.stages]
    found: dict[tuple[int, ...], Price] = {}
    bound = 0.0
    for exposed in EXPOSED:
        factors = tables.factors(exposed)
        if memory is None:
            solved = minimise(sizes, factors)
            choices = [solved.choice]
            bound = solved.cost
        else:
            choices = _within(tables, sizes, exposed, memory, model, losses)
        for choice in choices:
            if choice not in found:
                found[choice] = price(model, complete(tables.cuts(choice), model.graph), "auto", losses=losses)
    searched = time.perf_counter()
    fixed = () if pinned else fixed_prices(model, losses=losses)
    fitting = [one for one in (*found.values(), *fixed) if memory is None or one.peak <= memory]
    if not fitting:
        least = min((*found.values(), *fixed), key=lambda one: one.peak)
        raise PlanError(
            f"no plan on {model.ranks} ranks was found that needs at most {show_bytes(memory or 0)} on each.",
            f"The smallest found needs {show_bytes(least.peak)}; give more memory or more ranks, or recompute.",
        )
    best = min(fitting, key=lambda one: one.seconds)
    ordered = sorted(found.items(), key=lambda item: item[1].seconds)
    chosen = next((choice for choice, one in ordered if one is best), ordered[0][0])
    return Found(
        plan=Plan(name=best.name, ranks=model.ranks, layers=tuple(best.cuts.items())),
        price=best,
        candidates=tuple(one for _, one in ordered),
        fixed=tuple(sorted(fixed, key=lambda one: one.seconds)),
        bound=bound,
        why=alternatives(tables, chosen),
        table_seconds=built - start,
        search_seconds=searched - built,
        stages=len(sizes),
        choices=sum(sizes),
    )


def _within(
    tables: CostTables, sizes: Sequence[int], exposed: float, memory: int, model: CostModel, losses: bool
) -> list[tuple[int, ...]]:
    """Optima under a limit on the tables' memory, which is rougher than the played one: so under several limits."""
    found = []
    for share in (1.4, 1.2, 1.0, 0.85, 0.7):
        try:
            choice = minimise_under(sizes, tables.factors(exposed), tables.weights(), memory * share).choice
        except PlanError:
            break
        found.append(choice)
        if price(model, complete(tables.cuts(choice), model.graph), "auto", losses=losses).peak <= memory:
            break
    return found


def _per_host(model: CostModel) -> int | None:
    levels = model.speeds.cluster.levels
    return levels[0].size if len(levels) > 1 else None


def fixed_prices(model: CostModel, *, losses: bool = False) -> tuple[Price, ...]:
    """The fixed strategies under the same cost model."""
    found = []
    hybrids = [f"{model.ranks // groups}x{groups}" for groups in range(2, model.ranks) if model.ranks % groups == 0]
    names = [*NAMES, *hybrids]
    for name in names if model.ranks > 1 else ["data"]:
        cuts = resolve(name, model.graph, model.ranks).cuts
        found.append(price(model, cuts, name, losses=losses))
    return tuple(found)


def complete(cuts: Mapping[str, Cut], graph: LayerGraph) -> dict[str, Cut]:
    """A cut for every layer: those without a choice run whole."""
    return {layer.name: cuts.get(layer.name, Cut()) for layer in graph.layers}


def pinned_layers(graph: LayerGraph, pins: Mapping[str, Cut]) -> dict[str, Cut]:
    """The user's cuts by layer; a pattern that matches nothing is a `PlanError`, a later one wins."""
    found: dict[str, Cut] = {}
    names = [layer.name for layer in graph.layers]
    for pattern, cut in pins.items():
        matching = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"pin {pattern!r} matches no layer.", suggestion(pattern, dict.fromkeys(names)))
        found.update(dict.fromkeys(matching, cut))
    return found


def alternatives(tables: CostTables, choice: Sequence[int]) -> dict[str, Alternative]:
    """For every stage its next best choice while all others stay: what the plan's choice is better than."""
    factors = tables.factors(EXPOSED[1])
    found = {}
    for index, stage in enumerate(tables.stages):
        costs = None
        for factor in factors:
            if index in factor.variables:
                place = tuple(slice(None) if v == index else choice[v] for v in factor.variables)
                row = factor.costs[place]
                costs = row if costs is None else costs + row
        if costs is None or len(stage.choices) < 2:
            continue
        order = [other for other in costs.argsort() if other != choice[index]]
        other = int(order[0])
        found[stage.name] = Alternative(stage.choices[other][0], float(costs[other] - costs[choice[index]]))
    return found
