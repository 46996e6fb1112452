"""Find the plan with the shortest step: exact search over the tables, then every candidate played through in time.

The tables are a sum, which elimination minimises exactly. What a sum cannot say is how much of the gradients' sums
hides behind backward, so the search is run for several shares of it; each optimum, and every fixed strategy, is then
played through with overlap, and the shortest wins; where its calls were close, the other choice is played too. Where
that needs more memory than there is, plans within the limit are sought, and whether to recompute is a choice too
(`under_limit.py`). What rank 0 alone computes and waits for bounds every step from below.
"""

import time
from collections.abc import Mapping
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
from shoal.planning.strategies import AUTO, NAMES
from shoal.planning.under_limit import Candidate, Play, bases, explore
from shoal.planning.why import Alternative, alternatives, close_calls, explained_by
from shoal.uncollected import uncollected

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
    """Distinct optima of the search, within a limit where there was one that mattered, best first; the first is `price`
    unless a fixed strategy was better."""
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
    without: Price | None = None
    """Where the plan recomputes to keep a limit: the best plan within it that does not; without any, the same cuts,
    which do not fit."""
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
    `letters`: the dims along which layers may be cut. A plan recomputes where the model says so; where it leaves that
    open, only to keep the limit, and if what keeps it otherwise takes longer. A larger limit never gives a slower plan.
    A pin that fits no layer, and a memory that no plan keeps to, are a `PlanError`.
    """
    pinned = pinned_layers(model.graph, pins or {})
    start = time.perf_counter()
    tables = model.tables(stages_of(model.graph, model.ranks, pinned, letters, model.per_host))
    search = _Search(model, tables, time.perf_counter() - start, pinned=bool(pinned))
    found = search.anyhow()
    return found if memory is None or found.price.peak <= memory else search.within(memory)


@dataclass
class _Search:
    """One search over some tables: what was played, and what it found."""

    model: CostModel
    tables: CostTables
    table_seconds: float
    pinned: bool

    def __post_init__(self) -> None:
        self._begun = time.perf_counter()
        self._sizes = [len(stage.choices) for stage in self.tables.stages]
        self._played: dict[Candidate, PlayedPlan] = {}
        self._shares: dict[Candidate, float] = {}
        self._optima: list[Candidate] = []
        self._fixed: tuple[Price, ...] = ()

    def _play(self, candidate: Candidate) -> PlayedPlan:
        if candidate not in self._played:
            cuts = complete(self.tables.cuts(candidate.choice), self.model.graph)
            self._played[candidate] = play_plan(self.model, cuts, recompute=candidate.recompute)
        return self._played[candidate]

    def anyhow(self) -> SearchResult:
        """The best plan, whatever it holds; it recomputes if that is asked for."""
        recompute = bool(self.model.recompute)
        for exposed in EXPOSED:
            factors = self.tables.factors(exposed, recompute=recompute)
            self._shares.setdefault(Candidate(recompute, minimise(self._sizes, factors).choice), exposed)
        self._searched = time.perf_counter()
        for candidate in self._shares:
            self._play(candidate)
        best = min(found.seconds for found in self._played.values())
        self._fixed = () if self.pinned else fixed_prices(self.model, self.tables, best)
        best = min(best, *(found.seconds for found in self._fixed)) if self._fixed else best
        chosen = next((one for one, found in self._played.items() if found.seconds == best), None)
        if chosen is not None:
            better = _climbed(self.tables, chosen, self._shares[chosen], self._play)
            self._shares.setdefault(better, self._shares[chosen])
            chosen = better
        self._optima = list(self._shares)
        for candidate in self._played:  # what was tried on the way
            self._shares.setdefault(candidate, EXPOSED[0] if chosen is None else self._shares[chosen])
        return self._result(chosen, min(self._fixed, key=_seconds, default=None), None)

    def within(self, memory: int) -> SearchResult:
        """The best plan within a limit, after `anyhow`; recomputing is a choice unless the model says whether to."""
        model = self.model
        modes = (False, True) if model.recompute is None else (model.recompute,)
        free = min(self._shares, key=lambda one: self._play(one).seconds)
        found = bases(self.tables, modes, self._left_by_recomputing(free) if True in modes else 1.0)
        for candidate, exposed in found.items():
            self._shares.setdefault(candidate, exposed)
        self._optima += found
        self._searched = time.perf_counter()
        explore(self.tables, self._shares, memory, self._play, modes)
        if len(modes) > 1:
            again = (price(model, one.cuts, f"{one.name}, recomputing", recompute=True) for one in self._fixed)
            self._fixed = (*self._fixed, *again)
        fitting = [one for one, found in self._played.items() if found.peak <= memory]
        chosen = min(fitting, key=lambda one: (self._played[one].seconds, one), default=None)
        fixed = min((found for found in self._fixed if found.peak <= memory), key=_seconds, default=None)
        if chosen is None and fixed is None:
            raise self._refused(memory)
        self._optima += [] if chosen is None else [chosen]
        return self._result(chosen, fixed, memory)

    def _left_by_recomputing(self, candidate: Candidate) -> float:
        """The share of what its fullest rank keeps that it keeps when it recomputes."""
        cuts = self._play(candidate).cuts
        plain, again = (
            max(one.kept for one in price(self.model, cuts, AUTO, recompute=recompute).memory)
            for recompute in (False, True)
        )
        return min(1.0, again / plain) if plain else 1.0

    def _refused(self, memory: int) -> PlanError:
        ways: list[PlayedPlan | Price] = [*self._played.values(), *self._fixed]
        least = min(ways, key=lambda found: found.peak)
        again = " and recomputes" if least.recompute else ""
        remedy = "" if any(found.recompute for found in ways) else ", or recompute"
        return PlanError(
            f"no plan on {self.model.ranks} ranks was found that needs at most {memory:,} bytes on each.",
            f"The smallest found needs {least.peak:,}{again}. Give more memory or more ranks{remedy}.",
        )

    def _result(self, chosen: Candidate | None, fixed: Price | None, memory: int | None) -> SearchResult:
        """`chosen` of what the search found, or the best fixed strategy where that takes less."""
        tables = self.tables
        prices = {
            one: self._played[one].price(AUTO)
            for one in dict.fromkeys(self._optima if chosen is None else [*self._optima, chosen])
        }
        optima = [prices[one] for one in dict.fromkeys(self._optima)]
        found = None if chosen is None else prices[chosen]
        if found is None or (fixed is not None and fixed.seconds < found.seconds):
            assert fixed is not None
            chosen, found = None, fixed
        bound = minimise(self._sizes, tables.least_factors()).cost + self.model.speeds.step_overhead
        return SearchResult(
            plan=found.plan(found.name),
            price=found,
            candidates=tuple(sorted((one for one in optima if memory is None or one.peak <= memory), key=_seconds)),
            fixed=tuple(sorted(self._fixed, key=_seconds)),
            bound=bound,
            why=explained_by(tables, found.cuts)
            if chosen is None
            else alternatives(tables, chosen.choice, self._shares[chosen], recompute=chosen.recompute),
            table_seconds=self.table_seconds,
            search_seconds=self._searched - self._begun,
            stages=len(self._sizes),
            choices=sum(self._sizes),
            without=None if memory is None else self._without(found, memory),
        )

    def _without(self, found: Price, memory: int) -> Price | None:
        """What a plan that recomputes by choice is compared with."""
        if not found.recompute or self.model.recompute is not None:
            return None
        ways: list[PlayedPlan | Price] = [*self._played.values(), *self._fixed]
        plain = min((one for one in ways if one.peak <= memory and not one.recompute), key=_seconds, default=None)
        if plain is None:
            return price(self.model, found.cuts, found.name, recompute=False)
        return plain.price(AUTO) if isinstance(plain, PlayedPlan) else plain


def _seconds(found: PlayedPlan | Price) -> float:
    return found.seconds


def _climbed(tables: CostTables, candidate: Candidate, exposed: float, play: Play) -> Candidate:
    """Hill climbing on the played time: a choice that is not slower than the given one. The same each time.

    In every round each close call, as the sum has them from where the round begins, is taken the other way, the closest
    first, and kept where that plays faster. A round that changes nothing is the last. What was slower once stays so.
    """
    calls_tried = CLOSE_CALLS if play(candidate).ranks <= FEW_RANKS else CLOSE_CALLS_OF_MANY
    choice, recompute = candidate.choice, candidate.recompute
    tried = {choice}
    for _ in range(ROUNDS):
        begun = choice
        calls = sorted(close_calls(tables, choice, exposed, recompute=recompute), key=lambda call: call[2])
        for stage, other, _ in calls[:calls_tried]:
            changed = (*choice[:stage], other, *choice[stage + 1 :])
            if changed in tried or tables.cost(changed, exposed) == inf:
                continue
            tried.add(changed)
            if play(Candidate(recompute, changed)).seconds < play(Candidate(recompute, choice)).seconds:
                choice = changed
        if choice == begun:
            break
    return Candidate(recompute, choice)


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
