"""Why a plan cuts as it does: for every stage the next best cut, while all others stay as they are."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.partition import Cut
from shoal.planning.costs import EXPOSED, CostModel, CostTables
from shoal.planning.stages import stages_of


@dataclass(frozen=True)
class Alternative:
    """The next best cut of a layer, all others as they are."""

    cut: Cut
    extra: float
    """Seconds that it would add."""


def explained(
    model: CostModel, cuts: Mapping[str, Cut], pins: Mapping[str, Cut] | None = None
) -> dict[str, Alternative | None]:
    """The next best cut by the first layer of each stage, also for a plan that no search found.

    Costs what the search's tables do. `pins`: layers, by name, that have no other cut.
    """
    return explained_by(model.tables(stages_of(model.graph, model.ranks, pins, per_host=model.per_host)), cuts)


def explained_by(tables: CostTables, cuts: Mapping[str, Cut]) -> dict[str, Alternative | None]:
    """The same where the tables are at hand.

    Of the shares of gradients' sums that backward may fail to hide, that one is taken under which the plan is best. A
    stage that is cut as no search would cut it, or that meets such a stage, has no alternative: None.
    """
    choice, foreign = tables.choice_of(cuts)
    met = {v for factor in tables.factors(0.0) if foreign & {*factor.variables} for v in factor.variables}
    by_share = [alternatives(tables, choice, exposed, foreign | met) for exposed in EXPOSED]
    return max(by_share, key=_least_extra)


def alternatives(
    tables: CostTables,
    choice: Sequence[int],
    exposed: float,
    hidden: Collection[int] = (),
    *,
    recompute: bool = False,
) -> dict[str, Alternative | None]:
    """The next best choice of every stage; None for those that have one choice, and for the hidden ones."""
    by_stage: dict[str, Alternative | None] = {stage.name: None for stage in tables.stages}
    for index, other, extra in close_calls(tables, choice, exposed, hidden, recompute=recompute):
        stage = tables.stages[index]
        by_stage[stage.name] = Alternative(stage.choices[other][0], extra)
    return by_stage


def close_calls(
    tables: CostTables,
    choice: Sequence[int],
    exposed: float,
    hidden: Collection[int] = (),
    *,
    recompute: bool = False,
) -> Iterator[tuple[int, int, float]]:
    """(stage, its next best choice, what that would add) for every stage that has another and is not hidden."""
    factors = tables.factors(exposed, recompute=recompute)
    for index, stage in enumerate(tables.stages):
        if index in hidden or len(stage.choices) < 2:
            continue
        rows = [
            factor.costs[tuple(slice(None) if v == index else choice[v] for v in factor.variables)]
            for factor in factors
            if index in factor.variables
        ]
        costs = sum(rows[1:], start=rows[0])
        other = next(int(i) for i in costs.argsort() if i != choice[index])
        yield index, other, float(costs[other] - costs[choice[index]])


def _least_extra(by_stage: Mapping[str, Alternative | None]) -> float:
    return min((alternative.extra for alternative in by_stage.values() if alternative is not None), default=0.0)
