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
from shoal.planning.costs import EXPOSED, CostModel, CostTables
from shoal.planning.elimination import minimise
from shoal.planning.price import Price, price
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.planning.strategies import NAMES
from shoal.planning.why import Alternative, alternatives, explained_by
from shoal.planning.within_limit import minimise_under


@dataclass(frozen=True)
class SearchResult:
    """The best plan that was found, and what it was compared with."""

    plan: Plan
    price: Price
    candidates: tuple[Price, ...]
    """Distinct optima of the search, best first; the first is `price` unless a fixed strategy was better."""
    fixed: tuple[Price, ...]
    """The fixed strategies, best first."""
    bound: float
    """No plan over these cuts takes fewer seconds, under this cost model."""
    why: Mapping[str, Alternative | None]
    """For the first layer of every stage, its next best cut; None where it has no other, as a pinned one."""
    table_seconds: float
    search_seconds: float
    stages: int
    choices: int


def find(
    model: CostModel,
    *,
    pins: Mapping[str, Cut] | None = None,
    memory: int | None = None,
    letters: str = DIMS,
) -> SearchResult:
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
    optima: dict[tuple[int, ...], float] = {}
    bound = 0.0
    for exposed in EXPOSED:
        if memory is None:
            solved = minimise(sizes, tables.factors(exposed))
            optima.setdefault(solved.choice, exposed)
            bound = solved.cost + model.speeds.step_overhead
        else:
            for choice in _within(tables, sizes, exposed, memory, model):
                optima.setdefault(choice, exposed)
    searched = time.perf_counter()
    optimal_prices = {choice: price(model, complete(tables.cuts(choice), model.graph), "auto") for choice in optima}
    fixed = () if pinned else fixed_prices(model)
    candidates = [*optimal_prices.values(), *fixed]
    fitting = [candidate for candidate in candidates if memory is None or candidate.peak <= memory]
    if not fitting:
        least = min((candidate.peak for candidate in candidates), default=None)
        smallest = "" if least is None else f"The smallest found needs {least:,}. "
        raise PlanError(
            f"no plan on {model.ranks} ranks was found that needs at most {memory:,} bytes on each.",
            f"{smallest}Give more memory or more ranks, or recompute.",
        )
    best = min(fitting, key=lambda candidate: candidate.seconds)
    chosen = next((choice for choice, candidate in optimal_prices.items() if candidate is best), None)
    return SearchResult(
        plan=Plan(name=best.name, ranks=model.ranks, layers=tuple(best.cuts.items())),
        price=best,
        candidates=tuple(sorted(optimal_prices.values(), key=lambda candidate: candidate.seconds)),
        fixed=tuple(sorted(fixed, key=lambda candidate: candidate.seconds)),
        bound=bound,
        why=explained_by(tables, best.cuts) if chosen is None else alternatives(tables, chosen, optima[chosen]),
        table_seconds=built - start,
        search_seconds=searched - built,
        stages=len(sizes),
        choices=sum(sizes),
    )


def _within(
    tables: CostTables, sizes: Sequence[int], exposed: float, memory: int, model: CostModel
) -> list[tuple[int, ...]]:
    """Optima under a limit on the tables' memory, which is rougher than the played one: so under several limits."""
    choices = []
    for share in (1.4, 1.2, 1.0, 0.85, 0.7):
        try:
            choice = minimise_under(sizes, tables.factors(exposed), tables.weights(), memory * share).choice
        except PlanError:
            break
        choices.append(choice)
        if price(model, complete(tables.cuts(choice), model.graph), "auto").peak <= memory:
            break
    return choices


def _per_host(model: CostModel) -> int | None:
    levels = model.speeds.cluster.levels
    return levels[0].size if len(levels) > 1 else None


def fixed_prices(model: CostModel) -> tuple[Price, ...]:
    """The fixed strategies under the same cost model."""
    hybrids = [f"{model.ranks // groups}x{groups}" for groups in range(2, model.ranks) if model.ranks % groups == 0]
    names = [*NAMES, *hybrids] if model.ranks > 1 else ["data"]
    return tuple(price(model, resolve(name, model.graph, model.ranks).cuts, name) for name in names)


def complete(cuts: Mapping[str, Cut], graph: LayerGraph) -> dict[str, Cut]:
    """A cut for every layer: those without a choice run whole."""
    return {layer.name: cuts.get(layer.name, Cut()) for layer in graph.layers}


def pinned_layers(graph: LayerGraph, pins: Mapping[str, Cut]) -> dict[str, Cut]:
    """The user's cuts by layer; a pattern that matches nothing is a `PlanError`, a later one wins."""
    pinned: dict[str, Cut] = {}
    names = [layer.name for layer in graph.layers]
    for pattern, cut in pins.items():
        matching = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"pin {pattern!r} matches no layer.", suggestion(pattern, dict.fromkeys(names)))
        pinned.update(dict.fromkeys(matching, cut))
    return pinned
