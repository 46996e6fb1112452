"""The number of ranks as a choice: the best plan on some or all of the devices that there are.

A network that is too small for all devices is quicker on fewer. The numbers that are tried for N devices are among
those that are tried for more, each on the first devices of the cluster; so a device more never makes the step longer.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from shoal.errors import PlanError
from shoal.partition import Cut
from shoal.planning.costs import CostModel
from shoal.planning.find import SearchResult, find, pinned_layers
from shoal.planning.stages import round_number, stages_of

EVERY_NUMBER = 16
"""Up to so many ranks every number is tried; beyond, those that have no other prime factors than 2, 3 and 5."""


def numbers_of_ranks(most: int) -> list[int]:
    """The numbers of ranks to try where there are `most` devices, the largest first.

    >>> numbers_of_ranks(21)[:6]
    [20, 18, 16, 15, 14, 13]
    """
    return [ranks for ranks in range(most, 0, -1) if ranks <= EVERY_NUMBER or round_number(ranks) == ranks]


def find_on_some(
    model_on: Callable[[int], CostModel],
    most: int,
    *,
    pins: Mapping[str, Cut] | None = None,
    memory: int | None = None,
) -> SearchResult:
    """The plan with the shortest step on at most `most` ranks; with equal steps, on fewer of them. Pure.

    `model_on`: the cost model on the first so many devices; `pins` and `memory` are as for `find`. Costs a search for
    every number of ranks whose lower bound is not above the best step found so far. Where no number of ranks has a
    plan, the `PlanError` is that of the largest.
    """
    best: SearchResult | None = None
    refused: PlanError | None = None
    least = max((cut.parts for cut in (pins or {}).values()), default=1)
    for ranks in numbers_of_ranks(most):
        if ranks < least and (best or refused):
            break
        model = model_on(ranks)
        if _least_seconds(model, pins) > (inf if best is None else best.price.seconds):
            continue
        try:
            found = find(model, pins=pins, memory=memory)
        except PlanError as error:
            refused = refused or error
            continue
        if best is None or found.price.seconds <= best.price.seconds:
            best = found
    if best is None:
        assert refused is not None
        raise refused
    return replace(best, offered=most)


def _least_seconds(model: CostModel, pins: Mapping[str, Cut] | None) -> float:
    """A lower bound of every step on a model's ranks, without the tables of what lies between layers."""
    pinned = pinned_layers(model.graph, pins or {})
    return model.least_seconds(stages_of(model.graph, model.ranks, pinned, per_host=model.per_host))
