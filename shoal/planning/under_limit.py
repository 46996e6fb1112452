"""Plans within a limit of memory, with recomputing as a choice: a front of plans from the lightest up to the limit.

A plan is a choice of every stage's cut, and whether its step recomputes. Two prices count, both of the played step: its
seconds, and its peak. What is played:

    bases      under the tables, for steps that recompute and for others: the lightest choice, the quickest, and the
               quickest within limits between these two (`within_limit.py`); and the fixed strategies
    explored   of a plan that is clearly quicker than every lighter one: its closest calls decided the other way, one at
               a time, and the same cuts recomputing or not; the lightest such plan first, up to the limit

Promise   a larger limit never gives a slower plan: bases know nothing of the limit, and what a smaller limit explores a
          larger one explores first, in the same order. A limit that is refused with the smallest peak that was found is
          not refused at that peak.
Cost      some searches of the tables, and a few plays for each plan explored; each is so much quicker than the one
          before it that they are some tens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shoal.planning.costs import EXPOSED, CostTables
from shoal.planning.elimination import minimise
from shoal.planning.price import PlayedPlan
from shoal.planning.stages import FEW_RANKS
from shoal.planning.why import close_calls
from shoal.planning.within_limit import minimise_under

BETWEEN = 4
"""Limits between the lightest and the quickest choice that the tables are searched under."""
EFFORT = 1e8
"""Of each of these searches, in entries of tables: some tenths of a second. Exploring closes what gap it leaves."""
CALLS, CALLS_OF_MANY = 4, 2
"""Closest calls that are decided the other way, on few and on many ranks."""
QUICKER = 0.02
"""A plan is explored that is quicker than every lighter one by this part of its step."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One choice of every stage's cut, and whether the step recomputes."""

    recompute: bool
    choice: tuple[int, ...]


Play = Callable[[Candidate], PlayedPlan]


def bases(tables: CostTables, modes: Sequence[bool], kept: float) -> dict[Candidate, float]:
    """Where the exploring begins, with the share of the gradients' sums that was taken for exposed.

    `modes`: whether to recompute, or both; `kept`: the share that recomputing leaves of what lives until backward.
    """
    sizes = [len(stage.choices) for stage in tables.stages]
    found: dict[Candidate, float] = {}
    for recompute in modes:
        weights = tables.weights(kept if recompute else 1.0)
        lightest = minimise(sizes, weights)
        found.setdefault(Candidate(recompute, lightest.choice), EXPOSED[0])
        for exposed in EXPOSED[:: len(EXPOSED) - 1] if recompute else EXPOSED:
            factors = tables.factors(exposed, recompute=recompute)
            quickest = minimise(sizes, factors).choice
            found.setdefault(Candidate(recompute, quickest), exposed)
            heaviest = sum(float(one.costs[tuple(quickest[v] for v in one.variables)]) for one in weights)
            if heaviest <= lightest.cost:
                continue
            for limit in np.geomspace(max(lightest.cost, 1.0), heaviest, BETWEEN + 2)[1:-1]:
                choice = minimise_under(sizes, factors, weights, float(limit), EFFORT).choice
                found.setdefault(Candidate(recompute, choice), exposed)
    return found


def explore(tables: CostTables, shares: dict[Candidate, float], memory: int, play: Play, modes: Sequence[bool]) -> None:
    """Play what lies beside the plans within a limit; `shares` gets those that were found so."""
    explored: set[Candidate] = set()
    while (best := _next(shares, explored, memory, play)) is not None:
        explored.add(best)
        exposed = shares[best]
        calls = CALLS if play(best).ranks <= FEW_RANKS else CALLS_OF_MANY
        decided = sorted(close_calls(tables, best.choice, exposed, recompute=best.recompute), key=lambda call: call[2])[
            :calls
        ]
        beside = [(*best.choice[:stage], other, *best.choice[stage + 1 :]) for stage, other, _ in decided]
        candidates = [Candidate(best.recompute, choice) for choice in beside if tables.cost(choice, exposed) < inf]
        candidates += [Candidate(mode, best.choice) for mode in modes]
        for candidate in candidates:
            play(candidate)
            shares.setdefault(candidate, exposed)


def _next(shares: dict[Candidate, float], explored: set[Candidate], memory: int, play: Play) -> Candidate | None:
    """The lightest plan that is clearly quicker than all lighter ones and not explored; of those within the limit, or
    the lightest of all.
    """
    quickest = inf
    order = sorted(shares, key=lambda one: (play(one).peak, play(one).seconds, one))
    for candidate in order:
        found = play(candidate)
        if found.peak > max(memory, play(order[0]).peak):
            return None
        if found.seconds < (1 - QUICKER) * quickest and candidate not in explored:
            return candidate
        quickest = min(quickest, found.seconds)
    return None
