"""`plan="auto"`: profile what is not known yet, search, race the best few, remember the winner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from shoal.cluster import Cluster
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.execution.loss import Loss
from shoal.finding import cache
from shoal.finding.corrected import corrected_cluster, shown
from shoal.finding.race import Finish, race, time_steps
from shoal.graph import fingerprint
from shoal.lowering.boundary import IO, Boundary
from shoal.lowering.owners import OptimizerState
from shoal.partition import Cut
from shoal.plan import FactorsOption, Plan, factors_option, planned_factors
from shoal.planning.costs import CostModel, flowing_values
from shoal.planning.fewer import find_on_some
from shoal.planning.find import SearchResult, find, pinned_layers
from shoal.planning.price import Price, price
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.planning.strategies import AUTO
from shoal.profiling.in_step import Noted
from shoal.profiling.links import here, host_of_this_process
from shoal.profiling.measured import Analytic, Measured, UnmeasuredError
from shoal.profiling.profile import OnMeasured, profile, tiles_to_time
from shoal.simulating.speeds import Speeds
from shoal.timings import InStep, Timings
from shoal.transport import Transport
from shoal.transport.agreement import agree
from shoal.transport.one_host import why_not

RACED = 3
"""Optima of the search that are raced, at most."""
HOPELESS = 1.6
"""A fixed strategy that is predicted to take so many times the best is not raced."""


@dataclass(frozen=True)
class Chosen:
    """The plan to train with, and how it came about."""

    plan: Plan
    search: SearchResult | None
    """The search; None where the winner was remembered."""
    race: tuple[Finish, ...]
    """Measured steps, fastest first; empty where there was no race."""
    entrants: Mapping[str, Plan]
    """The plans that ran, by name; empty where there was no race now."""
    remembered: bool


def cost_model(
    captured: Captured,
    speeds: Speeds,
    ranks: int,
    *,
    io: IO = "tile",
    batch_norm: Literal["exact", "local"] = "exact",
    optimizer_slots: int = 1,
    optimizer_state: OptimizerState = "whole",
    bucket_bytes: int | None = None,
    factors: FactorsOption = "auto",
    recompute: bool | None = None,
) -> CostModel:
    """The cost model of a captured network's training step. Measured speeds are taken as they are for this network.

    `recompute`: whether activations are computed again; None: a search may choose that, to keep a limit of memory.
    """
    if isinstance(speeds, Measured):
        seen = speeds.timings.in_step.get(fingerprint(captured.graphs[True]), InStep())
        speeds = replace(speeds, dtype=dtype_name(captured), in_step=seen)
    parameters = [t for t in captured.states.values() if t.is_floating_point()]
    return CostModel(
        graph=captured.graphs[True],
        ranks=ranks,
        speeds=speeds,
        boundary=Boundary(io, ranks),
        itemsize=parameters[0].element_size() if parameters else 4,
        optimizer_slots=optimizer_slots,
        optimizer_state=optimizer_state,
        local_statistics=batch_norm == "local",
        bucket_bytes=bucket_bytes or 1 << 20,
        losses=gives_losses(captured),
        factors=factors,
        recompute=recompute,
    )


def gives_losses(captured: Captured) -> bool:
    """Whether a training step ends in one loss per sample, left where it is computed."""
    return captured.tail is not None and captured.tail.mean


def find_plan(
    model: nn.Module,
    example: Any,
    *,
    cluster: str | Cluster,
    ranks: int | None = None,
    loss: Loss | None = None,
    target: Any = None,
    batch_norm: Literal["exact", "local"] = "exact",
    memory: int | None = None,
    pins: Mapping[str, str | Cut] | None = None,
    io: IO = "tile",
    factors: Literal["auto", "always", "never"] | Sequence[str] = "auto",
    recompute: bool | None = None,
    optimizer_slots: int = 1,
    optimizer_state: OptimizerState = "whole",
) -> SearchResult:
    """The best plan for `ranks` devices of a described cluster, from its data sheet: nothing is measured or started.

    Without `ranks` their number is a choice: the plan is for as many of the cluster's as make the step shortest.

    `example`, `loss`, `target`, `factors` and `optimizer_state` are as for `parallelize`; `optimizer_slots`: tensors
    that the optimizer remembers of each parameter, 2 of Adam.

    `memory`: bytes that a rank may hold at most; the device's own unless given. `recompute`: whether steps compute
    activations a second time; None: where that keeps the limit and no plan without it is as quick.

    A memory that no plan keeps to, a pin that matches no layer and an unknown cluster are an `InputError`.
    """
    described = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    described = described.first(ranks or described.ranks)
    captured = capture_modes(model, example, loss, target)
    limit = memory or described.device.memory

    def on(some: int) -> CostModel:
        return cost_model(
            captured,
            Analytic(described.first(some)),
            some,
            io=io,
            batch_norm=batch_norm,
            factors=factors_option(factors),
            recompute=recompute,
            optimizer_slots=optimizer_slots,
            optimizer_state=optimizer_state,
        )

    if ranks is None:
        return find_on_some(on, described.ranks, pins=parse_pins(pins), memory=limit)
    return find(on(ranks), pins=parse_pins(pins), memory=limit)


def parse_pins(pins: Mapping[str, str | Cut] | None) -> dict[str, Cut]:
    """Cuts from their short form."""
    return {pattern: Cut.parse(cut) if isinstance(cut, str) else cut for pattern, cut in (pins or {}).items()}


def measured_speeds(
    captured: Captured,
    transport: Transport,
    *,
    pins: Mapping[str, Cut] | None = None,
    progress: OnMeasured = lambda *_: None,
    fresh: bool = False,
) -> Timings:
    """Timings of everything that a search over this network asks for; from the cache as far as it has them."""
    key = _machine_key(transport, captured.device)
    known = cache.load_timings(key) if transport.rank == 0 and not fresh else None
    known = transport.gather_objects(known)[0]
    graph = captured.graphs[True]
    stages = stages_of(graph, transport.world, pinned_layers(graph, pins or {}))
    dtype = next((t.dtype for t in captured.states.values() if t.is_floating_point()), torch.float32)
    flowing = flowing_values(graph)
    timings = profile(stages, flowing, transport, captured.device, dtype=dtype, known=known, progress=progress)
    network = fingerprint(graph)
    if network not in timings.in_step:
        progress(0, 1, "some real steps")
        seen = _in_step(captured, transport, timings)
        timings = replace(timings, in_step={**timings.in_step, network: seen})
    if transport.rank == 0:
        cache.save_timings(key, timings)
    return timings


def timings_about(captured: Captured, ranks: int, timings: Timings) -> Timings:
    """Of what was measured on this machine, what is about this network: the cache holds kernels of others too."""
    graph = captured.graphs[True]
    tiles = tiles_to_time(stages_of(graph, ranks), flowing_values(graph), dtype_name(captured))
    return timings.only({tile[0] for tile in tiles}, {fingerprint(graph)})


def _in_step(captured: Captured, transport: Transport, timings: Timings) -> InStep:
    """What layers take in real steps: of the plan `data`, in which ranks exchange nothing meanwhile.

    Nothing where a rank would have no sample.
    """
    if captured.graphs[True].batch < transport.world:
        return InStep()
    laid = lay(
        captured, "data", transport, io="tile", batch_norm="local", seed=0, bucket_bytes=1 << 20, factors="never"
    )
    with laid.no_sync():
        steps = time_steps(laid, captured, transport)
    return in_step_of(captured, transport, timings, [("data", steps.noted())])


def in_step_of(
    captured: Captured, transport: Transport, timings: Timings, ran: Sequence[tuple[Plan | str, Noted]]
) -> InStep:
    """What real steps of some plans say, from what every rank noted of them. A collective.

    A plan ran with factors for the layers that it names; one that is but a name, with sums alone.
    """
    everyone = transport.gather_objects([noted for _, noted in ran])
    alone = cost_model(captured, Measured(replace(timings, in_step={})), transport.world, batch_norm="local")
    graph = captured.graphs[True]
    raced = [
        (resolve(plan, graph, transport.world).cuts, factors_that_ran(plan), [of_rank[number] for of_rank in everyone])
        for number, (plan, _) in enumerate(ran)
    ]
    return shown(alone, dtype_name(captured), raced)


def _machine_key(transport: Transport, device: torch.device) -> str:
    rows = transport.gather_objects((host_of_this_process(), why_not()))
    hosts = [host for host, _ in rows]
    shape, sums = [hosts.index(host) for host in hosts], sorted({reason or "memory" for _, reason in rows})
    return cache.fingerprint(here(), shape, torch.get_num_threads(), torch.__version__, device.type, sums)


def choose_plan(
    captured: Captured,
    transport: Transport,
    *,
    io: IO = "tile",
    batch_norm: Literal["exact", "local"] = "exact",
    bucket_bytes: int | None = None,
    memory: int | None = None,
    pins: Mapping[str, Cut] | None = None,
    racing: bool = True,
    fresh: bool = False,
    factors: FactorsOption = "auto",
    recompute: bool | None = None,
    optimizer_slots: int = 1,
    optimizer_state: OptimizerState = "whole",
    progress: OnMeasured = lambda *_: None,
) -> Chosen:
    """The plan to train this network with on these ranks. A collective; minutes the first time.

    `optimizer_slots`: tensors that the optimizer remembers of each parameter, whole or cut as `optimizer_state` says.
    `racing`: run the best few and the fixed strategies for some real steps and keep the fastest; `fresh`: forget what
    was measured and found before; `recompute`: as for `find_plan`, and plans race as they train. A pin that matches no
    layer and a memory that no plan keeps to are a `PlanError` on all ranks.
    """
    machine = _machine_key(transport, captured.device)
    key = cache.fingerprint(
        machine, fingerprint(captured.graphs[True]), transport.world, io,
        batch_norm, memory, sorted((k, str(v)) for k, v in (pins or {}).items()), racing, bucket_bytes, factors,
        optimizer_slots, optimizer_state, *(() if recompute is None and memory is None else (recompute,)),
    )  # fmt: skip
    before = cache.load_choice(key) if transport.rank == 0 and not fresh else None
    before = transport.gather_objects(before)[0]
    if before is not None:
        plan, about = before
        finishes = tuple(Finish(name, seconds) for name, seconds in about.get("race", {}).items())
        return Chosen(plan, None, finishes, {}, remembered=True)
    timings = measured_speeds(captured, transport, pins=pins, progress=progress, fresh=fresh)
    progress(0, 1, "searching")

    def by(timings: Timings) -> CostModel:
        return cost_model(
            captured, Measured(timings), transport.world, io=io, batch_norm=batch_norm,
            optimizer_slots=optimizer_slots, optimizer_state=optimizer_state,
            bucket_bytes=bucket_bytes, factors=factors, recompute=recompute,
        )  # fmt: skip

    def searched(timings: Timings) -> SearchResult:
        found = agree(transport, lambda: find(by(timings), pins=pins, memory=memory) if transport.rank == 0 else None)
        first: SearchResult = transport.gather_objects(found)[0]
        return first

    def run(plans: Mapping[str, Plan]) -> tuple[list[Finish], dict[str, Noted]]:
        return race(
            plans, captured, transport, batch_norm=batch_norm, bucket_bytes=bucket_bytes,
            optimizer_state=optimizer_state, progress=progress,
        )  # fmt: skip

    search = searched(timings)
    if not racing or transport.world == 1:
        if transport.rank == 0:
            cache.save_choice(key, search.plan, {"race": {}})
        return Chosen(search.plan, search, (), {}, remembered=False)
    entrants = racers(search, memory)
    finishes_first, notes = run(entrants)
    progress(0, 1, "searching again")
    timings = _corrected(captured, transport, timings, by, entrants, finishes_first, notes)
    if transport.rank == 0:
        cache.save_timings(machine, timings)
    search = searched(timings)
    times = {finish.name: finish.seconds for finish in finishes_first}
    more = newcomers(search, entrants, memory)
    if more:
        winner = finishes_first[0].name
        second, _ = run({winner: entrants[winner], **more})
        times |= {finish.name: finish.seconds for finish in second}
        entrants = {**entrants, **more}
        best = second[0].name
    else:
        best = finishes_first[0].name
    plan = entrants[best]
    ordered = sorted(times.items(), key=lambda item: (item[0] != best, item[1]))
    if transport.rank == 0:
        cache.save_choice(key, plan, {"race": dict(ordered)})
    finishes = tuple(Finish(name, seconds) for name, seconds in ordered)
    return Chosen(plan, search, finishes, entrants, remembered=False)


def _corrected(
    captured: Captured,
    transport: Transport,
    timings: Timings,
    by: Callable[[Timings], CostModel],
    entrants: Mapping[str, Plan],
    finishes: Sequence[Finish],
    notes: Mapping[str, Noted],
) -> Timings:
    """Timings as a race showed them: first its kernels, then links, which must explain what is left. A collective."""
    network = fingerprint(captured.graphs[True])
    ran = in_step_of(captured, transport, timings, [(entrants[name], notes[name]) for name in entrants])
    before = timings.in_step.get(network, InStep())
    seen = replace(before, factors={**before.factors, **ran.factors}) if before.factors else ran
    timings = replace(timings, in_step={**timings.in_step, network: seen})
    cluster = timings.cluster
    if transport.rank == 0:
        ran_plans = [entrants[finish.name] for finish in finishes]
        plans = [(dict(plan.layers), factors_that_ran(plan), plan.recompute) for plan in ran_plans]
        cluster = corrected_cluster(by(timings), plans, [finish.seconds for finish in finishes])
    return replace(timings, cluster=transport.gather_objects(cluster)[0])


def factors_that_ran(plan: Plan | str) -> FactorsOption:
    """The layers that a plan names: with others nothing was found from factors."""
    named = planned_factors(plan)
    return "never" if named == "auto" else named


def newcomers(search: SearchResult, raced: Mapping[str, Plan], memory: int | None) -> dict[str, Plan]:
    """Optima of a search after a race that did not run in it, by names of their own."""
    before = {(plan.layers, plan.recompute) for plan in raced.values()}
    fresh = [
        plan
        for name, plan in racers(search, memory).items()
        if name.startswith(AUTO) and (plan.layers, plan.recompute) not in before
    ]
    named = {f"again-{number}" if number > 1 else "again": plan for number, plan in enumerate(fresh, start=1)}
    return {name: replace(plan, name=name) for name, plan in named.items()}


def price_from_cache(
    captured: Captured,
    cuts: Mapping[str, Cut],
    transport: Transport,
    name: str,
    *,
    io: IO,
    batch_norm: Literal["exact", "local"],
    bucket_bytes: int | None,
    factors: FactorsOption,
    recompute: bool,
    optimizer_slots: int = 1,
    optimizer_state: OptimizerState = "whole",
) -> Price | None:
    """What a plan is predicted to cost here; None where this network was not profiled on this machine before.

    A collective; measures nothing.
    """
    key = _machine_key(transport, captured.device)

    def priced() -> Price | None:
        timings = cache.load_timings(key) if transport.rank == 0 else None
        if timings is None or fingerprint(captured.graphs[True]) not in timings.in_step:
            return None
        model = cost_model(
            captured,
            Measured(timings),
            transport.world,
            io=io,
            batch_norm=batch_norm,
            bucket_bytes=bucket_bytes,
            factors=factors,
            recompute=recompute,
            optimizer_slots=optimizer_slots,
            optimizer_state=optimizer_state,
        )
        try:
            return price(model, cuts, name, trace=True)
        except UnmeasuredError:  # of a network that was profiled under pins, say
            return None

    found: Price | None = transport.gather_objects(priced())[0]
    return found


def dtype_name(captured: Captured) -> str:
    """The type that the network trains in, as timings name it."""
    dtype = next((t.dtype for t in captured.states.values() if t.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def racers(search: SearchResult, memory: int | None) -> dict[str, Plan]:
    """Who runs: the best optima of the search, and the fixed strategies that are not hopeless, by name."""
    limit = HOPELESS * search.price.seconds
    chosen: dict[str, Plan] = {}
    seen: list[tuple[Mapping[str, Cut], bool]] = []
    for number, candidate in enumerate(search.candidates[:RACED]):
        if memory is None or candidate.peak <= memory:
            name = AUTO if not number else f"{AUTO}-{number + 1}"
            chosen[name] = candidate.plan(name)
            seen.append((candidate.cuts, candidate.recompute))
    for candidate in search.fixed:
        way, fits = (candidate.cuts, candidate.recompute), memory is None or candidate.peak <= memory
        if candidate.seconds <= limit and fits and way not in seen:
            chosen[candidate.name] = candidate.plan(candidate.name)
            seen.append(way)
    return chosen
