"""Which weights' gradients come from factors, not from a sum: what the user says, or what takes less time. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.lowering.factors import Factors
from shoal.operators.registry import facts_of
from shoal.plan import FactorsOption

LEAST_BYTES = 1 << 20
"""A smaller gradient is summed: it shares its bucket with others, and so next to nothing could be saved."""


@dataclass(frozen=True)
class Ways:
    """Seconds of both ways to one weight's gradient, on the rank that takes longest."""

    summed: float
    gathered: float
    """Until everybody has the factors of all."""
    product: float
    """What multiplying the rows of all ranks takes beyond one's own, which nothing hides."""

    @property
    def factors_pay(self) -> bool:
        """Whether factors take less."""
        return self.gathered + self.product < self.summed


def large_enough(factors: Factors, itemsize: int) -> bool:
    """Whether a sum of this gradient would take any time worth saving."""
    return max(map(prod, factors.widths)) * itemsize >= LEAST_BYTES


def chosen_factors(
    found: Mapping[str, Factors], wanted: FactorsOption, ways: Callable[[Factors], Ways | None]
) -> dict[str, Factors]:
    """Those that are to be used. `ways`: asked for "auto"; None where a weight is summed in any case."""

    def use(factors: Factors) -> bool:
        if wanted == "auto":
            both = ways(factors)
            return both is not None and both.factors_pay
        return wanted == "always" or (wanted != "never" and factors.layer in wanted)

    return {weight: factors for weight, factors in found.items() if use(factors)}


def check_factors(wanted: FactorsOption, *graphs: LayerGraph) -> None:
    """A `PlanError` for a layer that no graph has, or that is no linear one. Of one on one rank nothing is sent."""
    if isinstance(wanted, str):
        return
    operators = {layer.name: layer.op for graph in graphs for layer in graph.layers}
    linear = [name for name, op in operators.items() if facts_of(op).outer_product]
    for name in wanted:
        if name not in linear:
            what = f"is no linear layer but {operators[name]}" if name in operators else "matches no layer"
            raise PlanError(f"factors name {name!r}, which {what}.", suggestion(name, dict.fromkeys(linear)))
