"""What real steps say of kernels and of links. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, log

from shoal.cluster import Cluster, Level
from shoal.lowering.tasks import Bytes
from shoal.partition import Cut
from shoal.plan import FactorsOption
from shoal.planning.costs import CostModel
from shoal.planning.price import tasks_of
from shoal.profiling.in_step import Noted, Taken, in_step, taken
from shoal.profiling.measured import Measured
from shoal.simulating.durations import Durations
from shoal.simulating.play import play
from shoal.timings import InStep

TRIED = tuple(exp(log(2) * number / 2) for number in range(-8, 9))
"""How many times slower than measured links are tried to be: from 1/16 to 16, in steps of the root of 2."""
WORTH = 0.02
"""Links are corrected where that brings predictions so much nearer, in the mean, as a part of the step."""

Ran = tuple[Mapping[str, Cut], FactorsOption, bool]
"""The cuts of a plan, the layers whose weights' gradients it found from factors, and whether it recomputed."""
Raced = Sequence[tuple[Mapping[str, Cut], FactorsOption, Sequence[Noted]]]
"""Of every plan that ran the same, and what each rank noted."""


def shown(alone: CostModel, dtype: str, raced: Raced) -> InStep:
    """What the steps of some plans show of a network. `alone`: its cost model without any such correction."""
    found: list[Taken] = []
    for cuts, factors, by_rank in raced:
        tasks = tasks_of(replace(alone, factors=factors), cuts)
        found += taken(Durations(tasks, alone.speeds, alone.kernels), dtype, by_rank)
    cuts, _, by_rank = raced[0]
    update = tasks_of(alone, cuts).tasks[-1].work
    assert isinstance(update, Bytes)
    return in_step(found, by_rank, sum(update.by_rank) / len(update.by_rank))


def slower_links(cluster: Cluster, moves: float, sums: float) -> Cluster:
    """The same with links that take so many times as long, for messages and for sums."""
    levels = tuple(_slower(level, moves, sums) for level in cluster.levels)
    return cluster.model_copy(update={"levels": levels})


def _slower(level: Level, moves: float, sums: float) -> Level:
    return level.model_copy(
        update={
            "bandwidth": level.bandwidth / moves,
            "latency": level.latency * moves,
            "wait": level.wait * moves,
            "skew": level.skew * moves,
            "sum_bandwidth": level.sum_rate / sums,
            "sum_latency": None if level.sum_latency is None else level.sum_latency * sums,
        }
    )


def fitted_links(
    predicted: Callable[[float, float], Sequence[float]], measured: Sequence[float]
) -> tuple[float, float]:
    """How many times slower messages and sums are than was thought, so that steps come out as measured.

    `predicted`: the steps of all plans, in the order of `measured`, with such links. (1, 1) unless that is clearly
    worse: a step's own noise must not move them. Costs some forty predictions of every plan.
    """

    def error(scales: tuple[float, float]) -> float:
        pairs = zip(predicted(*scales), measured, strict=True)
        return sum(abs(log(one / other)) for one, other in pairs) / len(measured)

    best = start = (error((1.0, 1.0)), (1.0, 1.0))
    for _, axis in product(range(2), range(2)):
        _, held = best
        tried = [(scale, held[1]) if axis == 0 else (held[0], scale) for scale in TRIED]
        best = min([best, *((error(scales), scales) for scales in tried)], key=lambda one: one[0])
    return best[1] if best[0] < start[0] - WORTH else start[1]


def corrected_cluster(model: CostModel, plans: Sequence[Ran], measured: Sequence[float]) -> Cluster:
    """Links with which these plans' steps come out as measured, as far as links can do that."""
    speeds = model.speeds
    assert isinstance(speeds, Measured)
    steps = [
        Durations(tasks_of(replace(model, factors=own), cuts, recompute=recompute), speeds, model.kernels)
        for cuts, own, recompute in plans
    ]

    def predicted(moves: float, sums: float) -> list[float]:
        cluster = slower_links(speeds.cluster, moves, sums)
        on_these = replace(speeds, timings=replace(speeds.timings, cluster=cluster))
        return [play(replace(step, speeds=on_these)).seconds for step in steps]

    return slower_links(speeds.cluster, *fitted_links(predicted, measured))
