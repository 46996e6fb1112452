"""Why a plan cuts as it does: for every stage the next best cut, also for a plan that no search found."""

from collections.abc import Mapping

from shoal.partition import Cut
from shoal.planning.costs import CostModel
from shoal.planning.find import Alternative, alternatives
from shoal.planning.stages import stages_of


def explained(model: CostModel, cuts: Mapping[str, Cut]) -> dict[str, Alternative]:
    """The next best cut by the first layer of each stage, all others as they are. Costs what the search's tables do.

    A stage that is cut as no search would cut it, or that meets such a stage, is left out.
    """
    tables = model.tables(stages_of(model.graph, model.ranks))
    choice, foreign = [], set()
    for index, stage in enumerate(tables.stages):
        mine = tuple(cuts[op.layer.name] for op in stage.ops)
        if mine not in stage.choices:
            foreign.add(index)
        choice.append(stage.choices.index(mine) if mine in stage.choices else 0)
    met = {v for factor in tables.factors(0.0) if foreign & {*factor.variables} for v in factor.variables}
    hidden = {tables.stages[index].name for index in foreign | met}
    return {name: one for name, one in alternatives(tables, choice).items() if name not in hidden}
