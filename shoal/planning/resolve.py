"""From a plan, by name or as a file's patterns, to one cut for every layer of a network."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.lowering.placement import check_fits, depends_on_input, op_of
from shoal.operators.registry import WHOLE, axes_of, rule_for
from shoal.partition import Cut
from shoal.plan import Laps, Plan
from shoal.planning.strategies import check_name, fit, followed, laps_of, wanted_cuts


@dataclass(frozen=True)
class Resolved:
    """One cut per layer, and what had to be said on the way."""

    name: str
    cuts: Mapping[str, Cut]
    smaller: Mapping[str, Cut]
    """Layers that were too small for the named strategy, with the cut they got."""
    whole: Mapping[str, str]
    """Layers whose operator has no rule, with the operator: they run whole on every rank."""
    laps: Laps | None = None
    """How the linear layers and all behind them run over a training batch in laps."""

    def plan(self, ranks: int, also: Mapping[str, Cut] | None = None) -> Plan:
        """The same as a plan that can be saved, one line per layer; `also` are layers of another mode only."""
        layers = tuple({**(also or {}), **self.cuts}.items())
        return Plan(name=self.name, ranks=ranks, layers=layers, laps=self.laps)


def resolve(plan: str | Path | Plan, graph: LayerGraph, ranks: int, also: Iterable[str] = ()) -> Resolved:
    """The cut of every layer.

    A named strategy takes the largest degree that fits a small layer. A plan's own lines are taken at their
    word: one that does not fit is a `PlanError` with the layer's name and the cuts that do. A layer that no
    line names follows the layer it reads. `also`: layers that a line may name though this graph has them not,
    since a network has some in training only.
    """
    plan = check(plan, ranks)
    sees_batch = depends_on_input(graph)
    whole = {
        layer.name: layer.op
        for layer in graph.layers
        if layer.name in sees_batch and rule_for(op_of(layer, graph)) is WHOLE
    }
    if isinstance(plan, Plan):
        _check_lines(plan, [*(layer.name for layer in graph.layers), *also])
        return Resolved(plan.name, _from_lines(plan, graph, ranks, sees_batch, whole), {}, whole, plan.laps)
    cuts, smaller = {}, {}
    for layer, wanted in zip(graph.layers, wanted_cuts(plan, graph, ranks).values(), strict=True):
        cuts[layer.name] = Cut()
        if layer.name in sees_batch and layer.name not in whole:
            cuts[layer.name] = fit(wanted, axes_of(op_of(layer, graph)))
            if cuts[layer.name] != wanted:
                smaller[layer.name] = cuts[layer.name]
    return Resolved(plan, cuts, smaller, whole, laps_of(plan))


def check(plan: str | Path | Plan, ranks: int) -> str | Plan:
    """What can be known before the network is: a name, or a plan that was read, for this number of ranks.

    Else a `PlanError`: an unknown name, a file that cannot be read, another number of ranks.
    """
    plan = read_plan(plan)
    if isinstance(plan, str):
        check_name(plan, ranks)
    elif plan.ranks != ranks:
        raise PlanError(
            f"plan {plan.name!r} is for {plan.ranks} ranks; there are {ranks}.",
            f"Start {plan.ranks} ranks, or make a plan for {ranks}.",
        )
    return plan


def read_plan(plan: str | Path | Plan) -> str | Plan:
    """A name, or a plan that was read; a file that cannot be read is a `PlanError`."""
    is_file = isinstance(plan, Path) or (isinstance(plan, str) and (plan.endswith(".json") or "/" in plan))
    return Plan.load(str(plan)) if is_file else plan  # type: ignore[return-value]


def planned_laps(plan: str | Path | Plan) -> Laps | None:
    """How a plan's linear layers run over the batch in laps; None: all of it at once."""
    plan = read_plan(plan)
    return plan.laps if isinstance(plan, Plan) else laps_of(plan)


def without_laps(plan: str | Path | Plan) -> str | Plan:
    """The same cuts, with the linear layers over all of the batch at once."""
    plan = read_plan(plan)
    if isinstance(plan, Plan):
        return replace(plan, laps=None)
    return plan if laps_of(plan) is None else "owt"


def refuse_laps(plan: str | Path | Plan) -> None:
    """A `PlanError` where a plan that runs in laps is to be priced or simulated: the cost model does not know them."""
    if planned_laps(plan) is not None:
        plan = read_plan(plan)
        name = plan.name if isinstance(plan, Plan) else plan
        raise PlanError(
            f"plan {name!r} runs linear layers in laps, which the cost model does not price.",
            "Price the same cuts without laps, as 'owt' or without \"laps\" in the plan file: its features are the "
            "same bytes, sent all at once. Time a real run with `shoal train --trace`.",
        )


def _check_lines(plan: Plan, known: Sequence[str]) -> None:
    """Every line must speak of some layer; of the loss's layers also where the network is laid without its loss."""
    no_loss = not any(map(_of_loss, known))
    for pattern, _ in plan.layers:
        if not any(_names(pattern, name) for name in known) and not (no_loss and _of_loss(pattern)):
            raise PlanError(
                f"plan {plan.name!r} names {pattern!r}, which matches no layer.",
                suggestion(pattern, dict.fromkeys(known)),
            )


def _of_loss(layer: str) -> bool:
    """Whether a layer of this name belongs to the loss, as in training, `shoal plan` and `parallelize(loss=...)`."""
    return layer.partition(".")[0] == "loss"


def _names(pattern: str, layer: str) -> bool:
    """Whether a line speaks of a layer; a layer's own name always does, whatever signs are in it."""
    return pattern == layer or fnmatchcase(layer, pattern)


def _from_lines(
    plan: Plan, graph: LayerGraph, ranks: int, sees_batch: set[str], whole: Mapping[str, str]
) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    for layer in graph.layers:
        line = next(((p, cut) for p, cut in reversed(plan.layers) if _names(p, layer.name)), None)
        op = op_of(layer, graph)
        if layer.name not in sees_batch:
            cuts[layer.name] = Cut()
        elif layer.name in whole:
            if line is not None and line[0] == layer.name:
                check_fits(op, line[1], (), ranks)
            cuts[layer.name] = Cut()
        elif line is not None:
            check_fits(op, line[1], rule_for(op).axes(op), ranks)
            cuts[layer.name] = line[1]
        else:
            before = next((cuts[read] for read in layer.reads if read in cuts and read in sees_batch), Cut.of(n=ranks))
            cuts[layer.name] = fit(followed(before), rule_for(op).axes(op))
    return cuts
