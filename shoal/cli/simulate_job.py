"""From settings to simulated steps: as the cluster is, and as it would be with each change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.cli.plan_job import capture, load_speeds
from shoal.config import SimulateConfig
from shoal.errors import InputError
from shoal.execution.laying import Captured
from shoal.finding.auto import cost_model
from shoal.finding.simulated import check_slow, cuts_of_plan
from shoal.plan import Plan, factors_option, planned_factors, planned_recompute
from shoal.planning.factors import check_factors
from shoal.planning.price import Price, price, tasks_of
from shoal.planning.resolve import read_plan
from shoal.profiling.measured import Analytic, Measured
from shoal.simulating.durations import Durations
from shoal.simulating.play import Noise, Played, play
from shoal.simulating.simulate import trace_of
from shoal.simulating.speeds import Speeds
from shoal.simulating.what_if import Change
from shoal.timeline import Trace


@dataclass(frozen=True)
class Simulated:
    """One case: a plan on a cluster, changed or not."""

    change: Change
    price: Price
    """Without noise."""
    played: Played

    @property
    def seconds(self) -> float:
        """Of one step, in the mean."""
        return self.played.seconds / self.played.steps

    def trace(self) -> Trace:
        """What every rank did."""
        return trace_of(self.played, f"{self.price.name} on {self.played.durations.cluster.name}")

    def numbers(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "what_if": str(self.change),
            "plan": self.price.name,
            "cluster": self.played.durations.cluster.name,
            "ranks": self.price.ranks,
            "step_seconds": self.seconds,
            "compute_seconds": self.price.compute,
            "exposed_seconds": self.price.exposed,
            "update_seconds": self.price.update,
            "bytes_per_step": self.price.bytes,
            "peak_bytes": self.price.peak,
        }


def simulated(text: str, config: SimulateConfig, changes: Sequence[Change]) -> list[Simulated]:
    """The plan as the cluster is, then with each change. What does not fit is an `InputError`."""
    plan = read_plan(text)
    if isinstance(plan, Plan):
        for ranks in (config.workers, *(change.devices for change in changes)):
            if ranks not in (None, plan.ranks):
                raise InputError(
                    f"plan {plan.name!r} is for {plan.ranks} ranks; {ranks} are asked for.",
                    "Name a strategy (data, owt, ...), which fits any number, or find a plan for them: `shoal plan`.",
                )
    speeds = load_speeds(config.cluster, config.timings, None)
    ranks = plan.ranks if isinstance(plan, Plan) else config.workers or speeds.cluster.ranks
    if isinstance(speeds, Analytic):
        speeds.cluster.first(ranks)
    else:
        speeds = load_speeds(config.cluster, config.timings, ranks)
    captured = capture(config)
    return [_case(plan, config, captured, speeds, ranks, change) for change in (Change(), *changes)]


def _case(
    plan: str | Plan, config: SimulateConfig, captured: Captured, speeds: Speeds, ranks: int, change: Change
) -> Simulated:
    if change.devices not in (None, ranks) and isinstance(speeds, Measured):
        raise InputError(
            f"what if devices={change.devices}: timings hold for the {ranks} ranks that were measured.",
            "Give a --cluster instead.",
        )
    cluster = change.of(speeds.cluster, ranks)
    changed: Speeds = (
        replace(speeds, timings=replace(speeds.timings, cluster=cluster))
        if isinstance(speeds, Measured)
        else Analytic(cluster)
    )
    count = change.devices or ranks
    factors = planned_factors(plan, factors_option(config.factors))
    check_factors(factors, *captured.graphs.values())
    model = cost_model(captured, changed, count, batch_norm=config.batch_norm, factors=factors,
                       recompute=planned_recompute(plan, config.recompute))  # fmt: skip
    cuts = cuts_of_plan(plan, captured, count)
    slow = check_slow(config.slow_ranks, count)
    by_rank = {rank: slow.get(rank, 1.0) * change.compute for rank in range(count)}
    noise = Noise(by_rank if change.compute != 1 else slow, config.jitter, seed=config.seed)
    name = plan.name if isinstance(plan, Plan) else plan
    durations = Durations(tasks_of(model, cuts), model.speeds, model.kernels, model.adding)
    return Simulated(change, price(model, cuts, name), play(durations, steps=config.steps, noise=noise))
