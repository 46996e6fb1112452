"""A step of a paper, simulated: its network, plan and cluster, under what is taken for granted."""

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch.nn.functional as F

from shoal import zoo
from shoal.cluster import Cluster, Efficiency, Tile
from shoal.execution.laying import Captured, capture_modes
from shoal.finding.auto import cost_model
from shoal.operators.registry import axes_of
from shoal.paper import Step
from shoal.partition import DIMS, Cut
from shoal.planning.assumed import Assumed
from shoal.planning.costs import CostModel
from shoal.planning.elimination import minimise
from shoal.planning.find import complete, find, pinned_layers
from shoal.planning.price import price, tasks_of
from shoal.planning.resolve import resolve
from shoal.planning.stages import Stage, stages_of
from shoal.profiling.measured import Analytic
from shoal.simulating.durations import Durations, sent_bytes
from shoal.simulating.what_if import Change

EFFICIENCY = Efficiency(peak_fraction=0.7, half=2e8, launch=5e-6, tile=Tile(rows=128, columns=32))
"""Of every paper's devices: that of the preset p100-4x4, so that none is fitted to its paper."""
LAYER_WISE = "layer-wise"


@dataclass(frozen=True)
class Outcome:
    """What a step takes."""

    seconds: float
    samples: int
    bytes: int
    """Sent by all devices."""
    cuts: Mapping[str, Cut]
    kernels: Mapping[str, float]
    """By layer: forward and backward on the busiest device."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


@dataclass
class Steps:
    """Simulates steps; each, and each network that was captured, once."""

    _outcomes: dict[Step, Outcome] = field(default_factory=dict)
    _captured: dict[tuple[str, int], Captured] = field(default_factory=dict)

    def outcome(self, step: Step) -> Outcome:
        """What a step takes. Seconds for a search over a large network on many devices."""
        if step not in self._outcomes:
            self._outcomes[step] = self._played(step) if step.way.overlap else self._added_up(step)
        return self._outcomes[step]

    def parameter_bytes(self, step: Step) -> int:
        """Of all that learns."""
        return sum(parameter.nbytes for parameter in self._capture(step).model.parameters())

    def search_seconds(self, step: Step) -> float:
        """Of a whole search on this machine, capture not included."""
        model = self._model(step)
        begun = time.perf_counter()
        find(model)
        return time.perf_counter() - begun

    def _capture(self, step: Step) -> Captured:
        key = step.network, step.samples
        if key not in self._captured:
            shape = inspect.signature(getattr(zoo, step.network)).parameters["input"].default
            model = zoo.build(step.network, input=shape)
            self._captured[key] = capture_modes(model, (step.samples, *shape), F.cross_entropy)
        return self._captured[key]

    def _model(self, step: Step) -> CostModel:
        model = cost_model(self._capture(step), Analytic(cluster_of(step)), step.ranks, batch_norm="local")
        return replace(model, assumed=Assumed(step.way.servers, step.way.one_by_one), factors="never")

    def _played(self, step: Step) -> Outcome:
        model = self._model(step)
        if step.plan == LAYER_WISE:
            found = find(model, pins=_pins(step)).price
            return _outcome(model, step, found.seconds, found.cuts)
        cuts = resolve(step.plan, model.graph, step.ranks).cuts
        return _outcome(model, step, price(model, cuts, step.plan).seconds, cuts)

    def _added_up(self, step: Step) -> Outcome:
        """The least sum, exactly, over the stages' choices; a named strategy leaves every stage one."""
        model = self._model(step)
        letters = "nchw" if step.way.equal else DIMS
        if step.plan == LAYER_WISE:
            pinned = pinned_layers(model.graph, _pins(step))
            stages = stages_of(model.graph, step.ranks, pinned, letters, model.per_host)
            stages = tuple(map(_equal_cuts, stages)) if step.way.equal else stages
        else:
            stages = stages_of(model.graph, step.ranks, resolve(step.plan, model.graph, step.ranks).cuts)
        tables = model.tables(stages)
        solution = minimise([len(stage.choices) for stage in stages], tables.factors(1.0))
        cuts = complete(tables.cuts(solution.choice), model.graph)
        return _outcome(model, step, solution.cost + model.speeds.step_overhead, cuts)


def cluster_of(step: Step) -> Cluster:
    """The devices of a step, all with the same efficiency unless the preset's own is asked for."""
    cluster = Cluster.load(step.cluster) if isinstance(step.cluster, str) else step.cluster
    resized = Change(bandwidth=step.bandwidth).of(cluster, step.ranks)
    if step.fitted:
        return resized
    return resized.model_copy(update={"device": resized.device.model_copy(update={"efficiency": EFFICIENCY})})


def matching(patterns: tuple[str, ...], names: Mapping[str, object]) -> list[str]:
    """Names that one of the patterns fits, in the network's order; at least one."""
    fitting = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert fitting, f"{patterns} fit no layer"
    return fitting


def _pins(step: Step) -> dict[str, Cut]:
    return {layers: Cut.parse(cut) for layers, cut in step.pins}


def _equal_cuts(stage: Stage) -> Stage:
    """The same stage with those of its choices that give all devices as much; a pinned one is taken as it is."""
    if len(stage.choices) == 1:
        return stage
    equal = tuple(
        choice
        for choice in stage.choices
        if all(
            axis.size % cut.degree(axis.letter) == 0
            for op, cut in zip(stage.ops, choice, strict=True)
            for axis in axes_of(op)
        )
    )
    return replace(stage, choices=equal)


def _outcome(model: CostModel, step: Step, seconds: float, cuts: Mapping[str, Cut]) -> Outcome:
    tasks = tasks_of(model, cuts)
    durations = Durations(tasks, model.speeds, model.kernels, model.adding)
    kernels: dict[str, float] = {}
    for task in tasks.tasks:
        if task.kind in ("forward", "input gradient", "weight gradient"):
            kernels[task.label] = kernels.get(task.label, 0.0) + float(durations.compute(task).max())
    return Outcome(seconds, step.samples, sum(sent_bytes(tasks.tasks, durations)), cuts, kernels)
