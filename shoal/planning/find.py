"""Find the plan with the shortest step: exact search over the tables, then every candidate played through in time.

The tables are a sum, which elimination minimises exactly. What a sum cannot say is how much of the gradients' sums
hides behind backward, so the search is run for several shares of it; each optimum, and every fixed strategy, is then
played through with overlap, and the shortest wins; where its calls were close, the other choice is played too. What
rank 0 alone computes and waits for bounds every step from below.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.partition import DIMS, Cut
from shoal.plan import Plan
from shoal.planning.costs import EXPOSED, CostModel, CostTables
from shoal.planning.elimination import minimise
from shoal.planning.price import PlayedPlan, Price, play_plan, price
from shoal.planning.resolve import resolve
from shoal.planning.stages import FEW_RANKS, stages_of
from shoal.planning.strategies import NAMES
from shoal.planning.why import Alternative, alternatives, close_calls, explained_by
from shoal.planning.within_limit import minimise_under
from shoal.uncollected import uncollected

TABLES_MEMORY = 2.0
"""The tables' bytes of a plan that just fits, as a multiple of the played ones, are sought up to this."""
HALVINGS = 7
"""Tries to find the tables' limit that a limit stands for."""
FAR_BEHIND = 3.0
"""On many ranks a fixed strategy that takes so many times the best, by the tables, is not played."""
CLOSE_CALLS, CLOSE_CALLS_OF_MANY = 8, 2
"""Stages whose next best cut is tried on the played time, on few and on many ranks."""
ROUNDS = 4
"""How often they are tried at most: each round that made the step shorter is followed by one from there."""


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
    offered: int | None = None
    """Devices that there were to choose from, where the number of ranks was a choice."""


@uncollected()
def find(
    model: CostModel,
    *,
    pins: Mapping[str, Cut] | None = None,
    memory: int | None = None,
    letters: str = DIMS,
) -> SearchResult:
    """The plan with the shortest predicted step. Pure; the garbage collector rests meanwhile.

    `pins`: cuts that the user wants, by pattern of layers' names; `memory`: bytes that a rank may hold at most;
    `letters`: the dims along which layers may be cut.
    A pin that fits no layer, and a memory that no plan keeps to, are a `PlanError`.
    """
    pinned = pinned_layers(model.graph, pins or {})
    start = time.perf_counter()
    tables = model.tables(stages_of(model.graph, model.ranks, pinned, letters, model.per_host))
    built = time.perf_counter()
    sizes = [len(stage.choices) for stage in tables.stages]
    bound = minimise(sizes, tables.least_factors()).cost + model.speeds.step_overhead
    played: dict[tuple[int, ...], PlayedPlan] = {}

    def anew(choice: tuple[int, ...]) -> PlayedPlan:
        return play_plan(model, complete(tables.cuts(choice), model.graph))

    def play(choice: tuple[int, ...]) -> PlayedPlan:
        if choice not in played:
            played[choice] = anew(choice)
        return played[choice]

    shares: dict[tuple[int, ...], float] = {}
    for exposed in EXPOSED:
        if memory is None:
            shares.setdefault(minimise(sizes, tables.factors(exposed)).choice, exposed)
        else:
            for choice in _within(tables, sizes, exposed, memory, play):
                shares.setdefault(choice, exposed)
    searched = time.perf_counter()
    for choice in shares:
        play(choice)
    fixed = () if pinned else fixed_prices(model, tables, min(found.seconds for found in played.values()))
    every: list[PlayedPlan | Price] = [*played.values(), *fixed]
    fitting = [found for found in every if memory is None or found.peak <= memory]
    if not fitting:
        least = min((found.peak for found in every), default=None)
        smallest = "" if least is None else f"The smallest found needs {least:,}. "
        raise PlanError(
            f"no plan on {model.ranks} ranks was found that needs at most {memory:,} bytes on each.",
            f"{smallest}Give more memory or more ranks, or recompute.",
        )
    best = min(fitting, key=lambda found: found.seconds)
    chosen = next((choice for choice, found in played.items() if found is best), None)
    if chosen is not None:
        better, climbed = _climbed(tables, (chosen, played[chosen]), shares[chosen], memory, anew)
        shares.setdefault(better, shares[chosen])
        chosen, played[better] = better, climbed
    optima = {choice: found.price("auto") for choice, found in played.items() if choice in shares}
    if chosen is not None:
        best = optima[chosen]
    assert isinstance(best, Price)
    return SearchResult(
        plan=best.plan(best.name),
        price=best,
        candidates=tuple(sorted(optima.values(), key=lambda candidate: candidate.seconds)),
        fixed=tuple(sorted(fixed, key=lambda candidate: candidate.seconds)),
        bound=bound,
        why=explained_by(tables, best.cuts) if chosen is None else alternatives(tables, chosen, shares[chosen]),
        table_seconds=built - start,
        search_seconds=searched - built,
        stages=len(sizes),
        choices=sum(sizes),
    )


def _within(
    tables: CostTables,
    sizes: Sequence[int],
    exposed: float,
    memory: int,
    play: Callable[[tuple[int, ...]], PlayedPlan],
) -> list[tuple[int, ...]]:
    """Optima under a limit, the lightest choice of all among them.

    The tables' memory is rougher than the played one, mostly above it. So the tables' limit is sought, by halving,
    under which the optimum just keeps the limit when it is played.
    """
    free = minimise(sizes, tables.factors(exposed)).choice
    if play(free).peak <= memory:
        return [free]
    weights = tables.weights()
    lightest = minimise(sizes, weights)
    choices = [lightest.choice]
    fits, above = lightest.cost, max(TABLES_MEMORY * memory, lightest.cost)
    for _ in range(HALVINGS if above > fits else 0):
        limit = (fits + above) / 2
        choice = minimise_under(sizes, tables.factors(exposed), weights, limit).choice
        choices.append(choice)
        if play(choice).peak <= memory:
            fits = limit
        else:
            above = limit
    return choices


def _climbed(
    tables: CostTables,
    start: tuple[tuple[int, ...], PlayedPlan],
    exposed: float,
    memory: int | None,
    play: Callable[[tuple[int, ...]], PlayedPlan],
) -> tuple[tuple[int, ...], PlayedPlan]:
    """Hill climbing on the played time: a choice that is not slower than the given one, played. The same each time.

    In every round each close call, as the sum has them from where the round begins, is taken the other way, the closest
    first, and kept where that plays faster. A round that changes nothing is the last. What was slower once stays so,
    and is forgotten but for that: a plan of many ranks holds much.
    """
    choice, best = start
    tried = {choice}
    calls_tried = CLOSE_CALLS if best.model.ranks <= FEW_RANKS else CLOSE_CALLS_OF_MANY
    for _ in range(ROUNDS):
        begun = choice
        calls = sorted(close_calls(tables, choice, exposed), key=lambda call: call[2])
        for stage, other, _ in calls[:calls_tried]:
            changed = (*choice[:stage], other, *choice[stage + 1 :])
            if changed in tried or tables.cost(changed, exposed) == inf:
                continue
            tried.add(changed)
            found = play(changed)
            if found.seconds < best.seconds and (memory is None or found.peak <= memory):
                choice, best = changed, found
        if choice == begun:
            break
    return choice, best


def fixed_prices(model: CostModel, tables: CostTables, best: float) -> tuple[Price, ...]:
    """The fixed strategies under the same cost model; on many ranks without those far behind `best` seconds."""
    hybrids = [f"{model.ranks // groups}x{groups}" for groups in range(2, model.ranks) if model.ranks % groups == 0]
    prices = []
    for name in [*NAMES, *hybrids] if model.ranks > 1 else ["data"]:
        cuts = resolve(name, model.graph, model.ranks).cuts
        if model.ranks <= FEW_RANKS or _promising(tables, cuts, FAR_BEHIND * best):
            prices.append(price(model, cuts, name))
    return tuple(prices)


def _promising(tables: CostTables, cuts: Mapping[str, Cut], limit: float) -> bool:
    """Whether the tables have a plan within a time, all sums of gradients hidden; a plan that they have not is."""
    choice, foreign = tables.choice_of(cuts)
    return bool(foreign) or tables.cost(choice, 0.0) <= limit


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
