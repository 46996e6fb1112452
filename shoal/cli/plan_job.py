"""From settings to a plan and its price: from a cluster's data sheet, from timings, or on ranks that measure.

What can be found wrong without ranks is found before they are started.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from shoal import zoo
from shoal.cluster import Cluster
from shoal.config import NetworkConfig, PlanConfig, PricedConfig, ProfileConfig
from shoal.errors import ConfigError, InputError
from shoal.execution.laying import Captured, capture_modes
from shoal.finding.auto import Chosen, choose_plan, cost_model, measured_speeds, parse_pins, racers, timings_about
from shoal.finding.race import Finish
from shoal.graph import LayerGraph
from shoal.launching import joined, run, surrounding
from shoal.machine import threads_each
from shoal.partition import Cut
from shoal.plan import Plan, factors_option, planned_factors
from shoal.planning.costs import CostModel
from shoal.planning.factors import check_factors
from shoal.planning.fewer import find_on_some
from shoal.planning.find import SearchResult, find, pinned_layers
from shoal.planning.price import Price, price
from shoal.planning.resolve import refuse_laps, resolve
from shoal.planning.why import Alternative, explained
from shoal.profiling.measured import Analytic, Measured
from shoal.profiling.profile import OnMeasured
from shoal.simulating.speeds import Speeds
from shoal.timings import Timings
from shoal.transport import Transport

Result = TypeVar("Result")


@dataclass(frozen=True)
class Report:
    """A plan, what it costs, and how it was found. Survives pickling."""

    plan: Plan
    price: Price
    why: Mapping[str, Alternative | None]
    search: SearchResult
    entrants: Mapping[str, Price]
    """What was or would be raced, by name."""
    race: tuple[Finish, ...] = ()
    remembered: bool = False


def capture(config: NetworkConfig) -> Captured:
    """The network with the loss that training gives it; no weight of it matters here."""
    shape = config.input or _published(config.model)
    model = zoo.build(config.model, input=shape, classes=config.classes, options=config.model_options)
    return capture_modes(model, (config.batch, *shape), F.cross_entropy)


def _published(model: str) -> tuple[int, ...]:
    if ":" in model:
        raise ConfigError(f"the shape of a sample for the model {model!r} is not known.", "Give it with --input C,H,W.")
    if model not in zoo.names():
        zoo.build(model)  # which says that there is no such network
    shape: tuple[int, ...] = inspect.signature(getattr(zoo, model)).parameters["input"].default
    return shape


def described(config: PlanConfig) -> tuple[Captured, Report]:
    """The best plan by a data sheet or by timings. No process is started."""
    asked = config.workers if config.tells("workers") else None
    pins, factors = parse_pins(config.pins), factors_option(config.factors)
    speeds = load_speeds(config.cluster, config.timings, asked)
    captured = capture(config)
    check_factors(factors, *captured.graphs.values())
    cluster = speeds.cluster
    check_pins(pins, captured.graphs[True], cluster.ranks)

    def on(ranks: int) -> CostModel:
        some = Analytic(cluster.first(ranks)) if isinstance(speeds, Analytic) else speeds
        return cost_model(
            captured, some, ranks, batch_norm=config.batch_norm, factors=factors, recompute=config.recompute,
            optimizer_slots=config.optimizer_slots, optimizer_state=config.optimizer_state,
        )  # fmt: skip

    memory = config.memory or (cluster.device.memory if isinstance(speeds, Analytic) else None)
    if asked is None and isinstance(speeds, Analytic):
        search = find_on_some(on, cluster.ranks, pins=pins, memory=memory)
    else:
        search = find(on(cluster.ranks), pins=pins, memory=memory)
    chosen = Chosen(search.plan, search, (), {}, remembered=False)
    return captured, _report(on(search.plan.ranks), chosen, search, memory, pins)


def measured(config: PlanConfig, progress: OnMeasured) -> tuple[Captured, Report]:
    """The best plan on this machine. Starts `workers` ranks, or joins the world that the environment describes."""
    pins = parse_pins(config.pins)
    captured = capture(config)
    check_factors(factors_option(config.factors), *captured.graphs.values())
    world = surrounding()
    ranks = world.size if world is not None and world.size > 1 else config.workers
    check_pins(pins, captured.graphs[True], ranks)
    return captured, _on_ranks(_choose, config, progress)


def profiled(config: ProfileConfig, progress: OnMeasured) -> Timings:
    """Timings of all that a search over this network asks for, on ranks as `measured` has them."""
    capture(config)
    return _on_ranks(_profile, config, progress)


def _on_ranks(function: Callable[..., Result], config: ProfileConfig, progress: OnMeasured) -> Result:
    world = surrounding()
    if world is not None and world.size > 1:
        asked = config.workers if config.tells("workers") else None
        world.workers(asked)
        with joined(world, timeout=config.timeout):
            torch.set_num_threads(threads_each(config.threads, world.local_size or world.size))
            return function(config, progress)
    threads = threads_each(config.threads, config.workers)
    of_ranks = run(function, config, progress, workers=config.workers, threads=threads, timeout=config.timeout)
    return of_ranks[0]


def _choose(config: PlanConfig, progress: OnMeasured) -> Report:
    """On a rank. A collective."""
    captured, transport, pins = capture(config), Transport(), parse_pins(config.pins)
    tell, factors = progress if transport.rank == 0 else _silent, factors_option(config.factors)
    chosen = choose_plan(
        captured, transport, batch_norm=config.batch_norm, memory=config.memory, pins=pins, racing=config.race,
        fresh=config.fresh, factors=factors, recompute=config.recompute, optimizer_slots=config.optimizer_slots,
        optimizer_state=config.optimizer_state, progress=tell,
    )  # fmt: skip
    timings = measured_speeds(captured, transport, pins=pins)  # all from the cache now
    model = cost_model(
        captured, Measured(timings), transport.world, batch_norm=config.batch_norm, factors=factors,
        recompute=config.recompute,
        optimizer_slots=config.optimizer_slots, optimizer_state=config.optimizer_state,
    )  # fmt: skip
    report: Report | None = None
    if transport.rank == 0:
        search = chosen.search or find(model, pins=pins, memory=config.memory)
        report = _report(model, chosen, search, config.memory, pins)
    told: Report = transport.gather_objects(report)[0]
    tell(1, 1, "")
    return told


def _profile(config: ProfileConfig, progress: OnMeasured) -> Timings:
    """On a rank. A collective."""
    captured, transport = capture(config), Transport()
    tell = progress if transport.rank == 0 else _silent
    timings = measured_speeds(captured, transport, progress=tell, fresh=config.fresh)
    tell(1, 1, "")
    return timings_about(captured, transport.world, timings)


def _silent(done: int, total: int, what: str) -> None:
    """Of several ranks one tells."""


def _report(
    model: CostModel, chosen: Chosen, search: SearchResult, memory: int | None, pins: Mapping[str, Cut]
) -> Report:
    by_cuts = [*search.candidates, *search.fixed]

    def priced(plan: Plan) -> Price:
        cuts, recompute = dict(plan.layers), plan.recompute
        known = next((one for one in by_cuts if one.cuts == cuts and one.recompute == recompute), None)
        return known or price(model, cuts, plan.name, recompute=recompute)

    plan, mine = chosen.plan, priced(chosen.plan)
    cuts = dict(plan.layers)
    entrants = chosen.entrants
    if not chosen.race:
        entrants = racers(search, memory)
    return Report(
        plan=plan,
        price=mine,
        why=search.why if search.price.cuts == cuts else explained(model, cuts, pinned_layers(model.graph, pins)),
        search=search,
        entrants={name: priced(entrant) for name, entrant in entrants.items()},
        race=chosen.race,
        remembered=chosen.remembered,
    )


def check_pins(pins: Mapping[str, Cut], graph: LayerGraph, ranks: int) -> None:
    """A pin that matches no layer, or that does not fit the layers it matches, is a `PlanError`."""
    pinned = pinned_layers(graph, pins)
    if pinned:
        resolve(Plan(name="of the pins", ranks=ranks, layers=tuple(pinned.items())), graph, ranks)


@dataclass(frozen=True)
class Priced:
    """A plan file under a cost model."""

    graph: LayerGraph
    price: Price
    model: CostModel


def priced(config: PricedConfig, *plans: Plan, trace: bool = False) -> list[Priced]:
    """Each plan's price, with its trace where that is asked for.

    A plan that does not fit the network or the cluster is an `InputError`.
    """
    captured = capture(config)
    graph = captured.graphs[True]
    also = [layer.name for layer in captured.graphs[False].layers]
    plans_priced = []
    for plan in plans:
        refuse_laps(plan)
        speeds = load_speeds(config.cluster, config.timings, plan.ranks)
        factors = planned_factors(plan)
        check_factors(factors, *captured.graphs.values())
        model = cost_model(
            captured, speeds, plan.ranks, batch_norm=config.batch_norm, factors=factors, recompute=plan.recompute
        )
        cuts = resolve(plan, graph, plan.ranks, also).cuts
        plans_priced.append(Priced(graph, price(model, cuts, plan.name, trace=trace), model))
    return plans_priced


def load_speeds(cluster: str | None, timings: Path | None, ranks: int | None) -> Speeds:
    """The data sheet of a cluster, all of it or its first ranks; or timings, which are for one number of ranks."""
    if timings is None:
        assert cluster is not None
        known = Cluster.load(cluster)
        return Analytic(known.first(ranks or known.ranks))
    measured = Timings.load(timings)
    if ranks not in (None, measured.ranks):
        raise InputError(
            f"timings {str(timings)!r} were measured with {measured.ranks} ranks; {ranks} are asked for.",
            f"Measure with `shoal profile --workers {ranks}`, or use {measured.ranks} ranks.",
        )
    return Measured(measured)
