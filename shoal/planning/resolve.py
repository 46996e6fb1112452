"""From a plan, by name or as a file's patterns, to one cut for every layer of a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.lowering.placement import check_fits, depends_on_input, op_of
from shoal.operators.registry import WHOLE, rule_for
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.planning.strategies import fit, wanted_cuts


@dataclass(frozen=True)
class Resolved:
    """One cut per layer, and what had to be said on the way."""

    name: str
    cuts: Mapping[str, Cut]
    smaller: Mapping[str, Cut]
    """Layers that were too small for the named strategy, with the cut they got."""
    whole: Mapping[str, str]
    """Layers whose operator has no rule, with the operator: they run whole on every rank."""

    def plan(self, ranks: int) -> Plan:
        """The same as a plan that can be saved, one line per layer."""
        return Plan(name=self.name, ranks=ranks, layers=tuple(self.cuts.items()))


def resolve(plan: str | Path | Plan, graph: LayerGraph, ranks: int) -> Resolved:
    """The cut of every layer.

    A named strategy takes the largest degree that fits a small layer. A plan's own lines are taken at their
    word: one that does not fit is a `PlanError` with the layer's name and the cuts that do. A layer that no
    line names follows the layer it reads.
    """
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        plan = Plan.load(plan)
    sees_batch = depends_on_input(graph)
    whole = {
        layer.name: layer.op
        for layer in graph.layers
        if layer.name in sees_batch and rule_for(op_of(layer, graph)) is WHOLE
    }
    if isinstance(plan, Plan):
        return Resolved(plan.name, _from_lines(plan, graph, ranks, sees_batch - whole.keys()), {}, whole)
    cuts, smaller = {}, {}
    for name, wanted in wanted_cuts(plan, graph, ranks).items():
        cuts[name] = Cut()
        if name in sees_batch and name not in whole:
            cuts[name] = _fitted(name, wanted, graph)
            if cuts[name] != wanted:
                smaller[name] = cuts[name]
    return Resolved(plan, cuts, smaller, whole)


def _fitted(name: str, wanted: Cut, graph: LayerGraph) -> Cut:
    op = op_of(next(layer for layer in graph.layers if layer.name == name), graph)
    return fit(wanted, rule_for(op).axes(op))


def _from_lines(plan: Plan, graph: LayerGraph, ranks: int, cuttable: set[str]) -> dict[str, Cut]:
    if plan.ranks != ranks:
        raise PlanError(
            f"plan {plan.name!r} is for {plan.ranks} ranks; there are {ranks}.",
            f"Start {plan.ranks} ranks, or make a plan for {ranks}.",
        )
    names = [layer.name for layer in graph.layers]
    for pattern, _ in plan.layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"plan {plan.name!r} names {pattern!r}, which matches no layer.",
                suggestion(pattern, names),
            )
    cuts: dict[str, Cut] = {}
    for layer in graph.layers:
        lines = [cut for pattern, cut in plan.layers if fnmatchcase(layer.name, pattern)]
        if layer.name not in cuttable:
            cuts[layer.name] = Cut()
        elif lines:
            op = op_of(layer, graph)
            check_fits(op, lines[-1], rule_for(op).axes(op), ranks)
            cuts[layer.name] = lines[-1]
        else:
            before = next((cuts[read] for read in layer.reads if read in cuts), Cut.of(n=ranks))
            cuts[layer.name] = _fitted(layer.name, before, graph)
    return cuts
