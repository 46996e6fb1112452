"""`shoal.simulate`: a training step on a described cluster, in time, without a device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.execution.laying import Captured, capture_modes
from shoal.execution.loss import Loss
from shoal.finding.auto import cost_model
from shoal.lowering.boundary import IO
from shoal.partition import Cut
from shoal.plan import Plan, factors_option, planned_factors, planned_recompute
from shoal.planning.factors import check_factors
from shoal.planning.price import tasks_of
from shoal.planning.resolve import read_plan, refuse_laps, resolve
from shoal.profiling.measured import Analytic
from shoal.simulating.play import Noise
from shoal.simulating.simulate import simulate as simulate_tasks
from shoal.timeline import Trace


def simulate(
    model: nn.Module,
    example: Any,
    plan: str | Path | Plan = "data",
    *,
    cluster: str | Cluster,
    ranks: int | None = None,
    loss: Loss | None = None,
    target: Any = None,
    batch_norm: Literal["exact", "local"] = "exact",
    io: IO = "tile",
    factors: Literal["auto", "always", "never"] | Sequence[str] = "auto",
    recompute: bool | None = None,
    steps: int = 1,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Trace:
    """What every rank of a described cluster would do and when, from its data sheet: nothing is measured or started.

    `example`, `loss`, `target`, `factors` and `recompute` are as for `parallelize`; `plan` is a name, a `Plan` or the
    path of a plan file.
    `slow`: speeds of some ranks beside the others', such as {3: 0.5}; `jitter`: the spread of each task's time, as a
    part of it, drawn from `seed`.

    The trace has the form of a recorded one: `save` writes a file for Perfetto. A plan that does not fit the network or
    the ranks, and an unknown cluster, are an `InputError`.
    """
    described = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    read = read_plan(plan)
    count = ranks or (read.ranks if isinstance(read, Plan) else described.ranks)
    captured = capture_modes(model, example, loss, target)
    factored = planned_factors(read, factors_option(factors))
    check_factors(factored, *captured.graphs.values())
    priced = cost_model(
        captured,
        Analytic(described.first(count)),
        count,
        io=io,
        batch_norm=batch_norm,
        factors=factored,
        recompute=planned_recompute(read, recompute),
    )
    tasks = tasks_of(priced, cuts_of_plan(read, captured, count))
    name = read.name if isinstance(read, Plan) else read
    noise = Noise(check_slow(slow or {}, count), jitter, seed=seed)
    return simulate_tasks(tasks, priced.speeds, steps=steps, noise=noise, title=f"{name} on {described.name}")


def cuts_of_plan(plan: str | Plan, captured: Captured, ranks: int) -> Mapping[str, Cut]:
    """The cut of every layer; a plan for other ranks or in laps, and an unknown name, are an `InputError`."""
    refuse_laps(plan)
    also = [layer.name for layer in captured.graphs[False].layers]
    return resolve(plan, captured.graphs[True], ranks, also).cuts


def check_slow(slow: Mapping[int, float], ranks: int) -> dict[int, float]:
    """Speeds of ranks that are there; others are an `InputError`."""
    for rank, speed in slow.items():
        if not 0 <= rank < ranks or not 0 < speed < float("inf"):
            raise InputError(
                f"slow rank {rank} = {speed}: there is no such rank or speed.",
                f"Name ranks 0 to {ranks - 1}, and speeds above 0; 0.5 is half as fast as the others.",
            )
    return dict(slow)
