"""Why a plan cuts as it does: for every stage the next best cut, also for a plan that no search found."""

from collections.abc import Mapping, Sequence

from shoal.partition import Cut
from shoal.planning.costs import CostModel, CostTables
from shoal.planning.find import EXPOSED, Alternative
from shoal.planning.stages import stages_of


def explained(
    model: CostModel, cuts: Mapping[str, Cut], pins: Mapping[str, Cut] | None = None
) -> dict[str, Alternative]:
    """The next best cut by the first layer of each stage, all others as they are. Costs what the search's tables do.

    `pins`: layers, by name, that have no other cut. Of the shares of gradients' sums that backward may fail to hide,
    that one is taken under which the plan is best. A stage that is cut as no search would cut it, or that meets such
    a stage, is left out.
    """
    tables = model.tables(stages_of(model.graph, model.ranks, pins))
    choice, foreign = [], set()
    for index, stage in enumerate(tables.stages):
        mine = tuple(cuts[op.layer.name] for op in stage.ops)
        if mine not in stage.choices:
            foreign.add(index)
        choice.append(stage.choices.index(mine) if mine in stage.choices else 0)
    met = {v for factor in tables.factors(0.0) if foreign & {*factor.variables} for v in factor.variables}
    by_share = [_alternatives(tables, choice, foreign | met, exposed) for exposed in EXPOSED]
    return max(by_share, key=lambda found: min((one.extra for one in found.values()), default=0.0))


def _alternatives(
    tables: CostTables, choice: Sequence[int], hidden: set[int], exposed: float
) -> dict[str, Alternative]:
    factors = tables.factors(exposed)
    found = {}
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
        found[stage.name] = Alternative(stage.choices[other][0], float(costs[other] - costs[choice[index]]))
    return found
