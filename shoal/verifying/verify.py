"""`shoal.verify`: one network under one plan against one device, and a verdict that names the layer at fault."""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ConfigError, ModelError
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.execution.module import ParallelModule
from shoal.graph import LayerGraph
from shoal.launching import run
from shoal.operators.registry import facts_of
from shoal.partition import Cut
from shoal.plan import FactorsOption, Plan, factors_option, steps_in_laps
from shoal.planning.resolve import planned_laps, without_laps
from shoal.result import versions
from shoal.transport import MemoryTransport, Transport
from shoal.transport.memory import Hub
from shoal.verdict import Culprit, LayerDifferences, Verdict
from shoal.verifying.blame import Suspects, suspects, users_of, with_readers_apart
from shoal.verifying.compare import Seen, apart, compare, first_noise, largest, noise, over_ranks, size
from shoal.verifying.differences import Differences, Kind
from shoal.verifying.engine_masks import drawing_as
from shoal.verifying.one_device import Loss, OneDevice, module_outputs, run_one_device, shaken

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative differences that another order of additions explains, by type."""

NOISE = 30.0
"""After the steps a plan may be this many times as far from one device as one device, its weights changed by their
last bit, is from itself: some networks multiply rounding by millions in a few steps.
"""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a comparison is asked to do; travels to the ranks' processes."""

    loss: Loss | None
    target: Tensor | None
    steps: int
    tolerance: float
    dtype: torch.dtype
    seed: int
    batch_norm: Literal["exact", "local"]
    recompute: bool | None
    factors: FactorsOption
    name: str
    progress: OnProgress


def verify(
    model: nn.Module,
    example: Tensor | tuple[int, ...],
    plan: str | Path | Plan = "data",
    *,
    loss: Loss | None = None,
    target: Tensor | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    workers: int | None = None,
    batch_norm: Literal["exact", "local"] = "exact",
    recompute: bool | None = None,
    factors: Literal["auto", "always", "never"] | Sequence[str] = "auto",
    name: str | None = None,
    threads: int = 1,
    timeout: float = 120.0,
    progress: OnProgress | None = None,
) -> Verdict:
    """Train `model` under `plan` beside the plain module on one device, and compare number by number.

    example     a tensor, or the shape, of the GLOBAL batch; random numbers where it is a shape
    loss        optional: then it is laid over the ranks with the network, as in `shoal.parallelize(loss=...)`; without
                one each rank takes the cross entropy of its own share (the squared error where there are no classes)
    target      what the output is compared with; drawn where it is not given
    steps       optimizer steps on that batch, after which parameters, buffers and an evaluation are compared
    tolerance   largest relative difference that passes: 1e-9 in float64, 1e-3 in float32, unless given
    workers     without a process group: start so many processes for it, each with so many `threads`, that give up
                when one waits `timeout` seconds for another. With a process group: a collective over its ranks
    progress    is told on rank 0 what is going on, and an empty text in the end

    Compares the output, the loss, every layer's output and its gradient, the gradients of parameters and input,
    buffers, the state after the steps and an evaluation. Dropout draws on one device the masks that the plan draws.
    `model` is left as it was. Cost: every rank also runs the whole network and keeps all values of one step, so
    choose small sizes. What cannot be compared is refused as an `InputError`; a difference is no error but a verdict.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype={dtype} cannot be verified.", "Choose torch.float64 or torch.float32.")
    if steps < 1:
        raise ConfigError(f"steps={steps} does not work.", "Take at least one step.")
    settings = _Settings(
        loss=loss,
        target=target,
        steps=steps,
        tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        dtype=dtype,
        seed=seed,
        batch_norm=batch_norm,
        recompute=recompute,
        factors=factors_option(factors),
        name=name or type(model).__name__,
        progress=progress or _silent,
    )
    there = dist.is_available() and dist.is_initialized()
    if there and workers not in (None, dist.get_world_size()):
        raise ConfigError(
            f"workers={workers}, but this process is one of {dist.get_world_size()} ranks already.",
            "Leave workers out: the ranks that there are take part.",
        )
    if there or workers in (None, 1):
        return _verify_here(model, example, plan, settings)
    return _in_processes(model, example, plan, settings, workers or 1, threads, timeout)


def _silent(_stage: str) -> None:
    """Nobody asked."""


def _in_processes(
    model: nn.Module,
    example: Tensor | tuple[int, ...],
    plan: str | Path | Plan,
    settings: _Settings,
    workers: int,
    threads: int,
    timeout: float,
) -> Verdict:
    try:
        pickle.dumps((model, settings))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the network or its loss cannot be sent to other processes: {error}.",
            "Define them in a module that can be imported, or call shoal.verify on the ranks of a process group.",
        ) from None
    return run(_verify_here, model, example, plan, settings, workers=workers, threads=threads, timeout=timeout)[0]


def _verify_here(
    model: nn.Module, example: Tensor | tuple[int, ...], plan: str | Path | Plan, settings: _Settings
) -> Verdict:
    if steps_in_laps(planned_laps(plan)):
        raise ConfigError(
            "linear layers that step after every lap do not train as one device does, so nothing can be compared.",
            "Verify 'owt:b' or 'owt:c', which send the same and step once.",
        )
    transport = Transport()
    say = settings.progress if transport.rank == 0 else _silent
    say("building one device's network")
    subject = _subject(model, example, settings, in_laps=planned_laps(plan) is not None)
    _check_alike(subject, transport)
    say("running one device")
    reference = subject.one_device(subject.model)
    other = subject.one_device(shaken(subject.model, settings.seed))
    _check_steady(first_noise(reference, other), settings)
    later = max(settings.tolerance, NOISE * noise(reference, other))
    seen, alone = subject.on_one_rank(reference)
    say(f"running plan {plan if isinstance(plan, str) else getattr(plan, 'name', str(plan))!r} beside it")
    laid, mine = subject.under(plan, reference, transport, seen)
    differences = over_ranks(mine, transport, reference, seen)
    graphs = subject.captured.graphs
    fault = suspects(graphs[True], graphs[False], alone, settings.tolerance, later)
    if fault is not None:
        fault = subject.misread(fault, seen)
    else:
        fault = suspects(graphs[True], graphs[False], differences, settings.tolerance, later)
        if fault is not None:
            say("looking for the layer at fault")
            fault = subject.narrowed(fault, reference, laid.plan, transport, later)
    say("")
    return Verdict(
        model=settings.name,
        plan=laid.plan.name,
        workers=transport.world,
        input=tuple(reference.x.shape),
        dtype=str(settings.dtype).removeprefix("torch."),
        steps=settings.steps,
        tolerance=settings.tolerance,
        later_tolerance=later,
        batch_norm=settings.batch_norm,
        seed=settings.seed,
        output=differences.get(("output", "")),
        loss=differences["loss", ""],
        input_gradient=differences.get(("input gradient", "")),
        evaluation=differences.get(("later evaluation", "")),
        rows=rows(graphs[True], laid.plan, differences),
        culprit=None if fault is None else _culprit(fault, laid.plan, graphs),
        versions=versions(),
    )


@dataclass(frozen=True)
class _Subject:
    """A copy of the network in the wanted type, its batch, and its captured form."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    captured: Captured
    settings: _Settings

    def one_device(self, model: nn.Module) -> OneDevice:
        return run_one_device(
            model,
            self.x,
            self.y,
            self.loss,
            steps=self.settings.steps,
            draws=lambda training, step: drawing_as(self.captured.graphs[training], seed=self.settings.seed, step=step),
        )

    def lay(self, captured: Captured, plan: str | Path | Plan, transport: Transport) -> ParallelModule:
        how = self.settings
        return lay(
            captured,
            plan,
            transport,
            batch_norm=how.batch_norm,
            seed=how.seed,
            recompute=how.recompute,
            factors=how.factors,
        )

    def on_one_rank(
        self, reference: OneDevice, captured: Captured | None = None, *, steps: int = 0
    ) -> tuple[Seen, Differences]:
        """The captured network on one rank: the value of every layer, and its differences from the module."""
        captured = captured or self.captured
        transport, seen = MemoryTransport(Hub(), 0, 1), Seen()
        with _quiet():  # it has nothing to say that the plan's own network does not say
            alone = self.lay(captured, "data", transport)
        differences, _ = compare(reference, alone, transport, tail=captured.tail, record=seen, steps=steps)
        return seen, differences

    def under(
        self, plan: str | Path | Plan, reference: OneDevice, transport: Transport, seen: Seen
    ) -> tuple[ParallelModule, Differences]:
        """The network under the plan, and this rank's differences: first as it always runs, then layer by layer.

        Twice, because a network whose layers are watched is differentiated one by one, and otherwise in chains; linear
        layers that run in laps are watched over all samples at once.
        """
        tail = self.captured.tail
        laid = self.lay(self.captured, plan, transport)
        differences, _ = compare(reference, laid, transport, tail=tail)
        with _quiet():
            watched = self.lay(self.captured, without_laps(plan), transport)
        more, _ = compare(reference, watched, transport, tail=tail, against=seen, steps=0)
        return laid, largest(differences, more)

    def misread(self, fault: Suspects, seen: Seen) -> Suspects:
        """Where the captured network itself is not the module: the first module that has another output."""
        graph = self.captured.graphs[True]
        outputs = module_outputs(self.model, self.x, drawing_as(graph, seed=self.settings.seed, step=1))
        for layer in graph.layers:
            theirs, ours = outputs.get(layer.name), seen.values.get(layer.name)
            if theirs is not None and ours is not None and ours.shape == theirs.shape:
                difference = apart(ours, theirs, size(theirs))
                if difference > self.settings.tolerance:
                    return Suspects((layer.name,), "capture", difference)
        return replace(fault, fault="capture")

    def narrowed(
        self, fault: Suspects, reference: OneDevice, plan: Plan, transport: Transport, later: float
    ) -> Suspects:
        """A closer look at what comes after the steps, and at a value of several readers. A collective."""
        if fault.after_steps:
            graphs = self.captured.graphs
            _, alone = self.on_one_rank(reference, steps=reference.steps)
            also = suspects(graphs[True], graphs[False], alone, self.settings.tolerance, later)
            return fault if also is None else replace(also, fault="capture")
        if fault.value is None or len(fault.layers) == 1:
            return fault
        guilty = self._guilty_readers(fault.value, reference, plan, transport)
        return replace(fault, layers=guilty or fault.layers)

    def _guilty_readers(self, value: str, reference: OneDevice, plan: Plan, transport: Transport) -> tuple[str, ...]:
        """Of the layers that read a value those whose own share of its gradient is wrong."""
        graph, copies = with_readers_apart(self.captured.graphs[True], value)
        captured = replace(self.captured, graphs={**self.captured.graphs, True: graph})
        seen, _ = self.on_one_rank(reference, captured)
        with _quiet():
            laid = self.lay(captured, without_laps(plan), transport)
        mine, _ = compare(reference, laid, transport, tail=captured.tail, against=seen, steps=0)
        differences = over_ranks(mine, transport, reference, seen)
        return tuple(
            layer for copy, layer in copies.items() if differences["value gradient", copy] > self.settings.tolerance
        )


def _subject(model: nn.Module, example: Tensor | tuple[int, ...], settings: _Settings, *, in_laps: bool) -> _Subject:
    """Linear layers `in_laps` need the loss in the network, whether or not one was given."""
    copy, x, output = try_out(model, example, dtype=settings.dtype, seed=settings.seed, name=settings.name)
    loss, target = _loss_and_target(settings, output)
    inside = loss if in_laps else settings.loss
    return _Subject(copy, x, target, loss, capture_modes(copy, x, inside, target), settings)


def try_out(
    model: nn.Module, example: Tensor | tuple[int, ...], *, dtype: torch.dtype, seed: int, name: str
) -> tuple[nn.Module, Tensor, tuple[int, ...]]:
    """(a copy of `model` in training and in the wanted type, its batch, the shape of its output).

    Costs a forward pass. A network that cannot take the batch, or does not return one tensor, is a `ModelError`.
    """
    copy = deepcopy(model).to(dtype)
    if not copy.training:
        copy.train()
    if isinstance(example, Tensor):
        x = example.detach().clone()
        x = x.to(dtype) if x.is_floating_point() else x
    else:
        x = torch.randn(tuple(example), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    try:
        with torch.no_grad(), torch.random.fork_rng():
            output = deepcopy(copy)(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"the model {name!r} cannot take a batch of shape {tuple(x.shape)} in {dtype}: {reason}.",
            "Give a shape that it takes with --input, or --dtype float32 where its code needs that type.",
        ) from error
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model {name!r} returns a {type(output).__name__}, not one tensor.",
            "Verify a network that returns its scores alone.",
        )
    return copy, x, tuple(output.shape)


def _loss_and_target(settings: _Settings, output: tuple[int, ...]) -> tuple[Loss, Tensor]:
    """The user's, or class numbers for every sample or pixel, or numbers to be met where there are no classes."""
    draw = torch.Generator().manual_seed(settings.seed + 1)
    classes = len(output) > 1 and output[1] > 1
    loss = settings.loss or (F.cross_entropy if classes else F.mse_loss)
    if settings.target is not None:
        target = settings.target.detach()
        return loss, target.to(settings.dtype) if target.is_floating_point() else target
    if settings.loss is not None or classes:
        return loss, torch.randint(0, output[1], (output[0], *output[2:]), generator=draw)
    return loss, torch.randn(output, dtype=settings.dtype, generator=draw)


def _check_alike(subject: _Subject, transport: Transport) -> None:
    """Ranks with other weights or another batch would differ for no fault of the plan."""
    tensors = [*subject.model.state_dict().values(), subject.x, subject.y]
    mine = [float(sum(t.double().sum().item() for t in tensors)), float(sum(t.double().norm().item() for t in tensors))]
    rows = transport.gather_numbers(mine)
    for rank, row in enumerate(rows):
        if not all(isclose(ours, theirs, rel_tol=1e-12) for ours, theirs in zip(row, rows[0], strict=True)):
            raise ConfigError(
                f"rank {rank} passed other weights or another batch than rank 0.",
                "Seed torch alike on every rank before the network is built, and pass the whole batch on each.",
            )


def _check_steady(noise: float, settings: _Settings) -> None:
    """Refuse where one device itself is no measure: a kink such as relu's at zero flips with the last bit."""
    if noise > settings.tolerance:
        raise ModelError(
            f"in {settings.dtype} one device is {noise:.0e} from itself in the first pass when its weights change in "
            f"their last bit, more than the tolerance of {settings.tolerance:.0e}: nothing can be compared with it.",
            "Compare in float64, or give larger samples, more of them, or a larger tolerance.",
        )


def rows(graph: LayerGraph, plan: Plan, differences: Differences) -> tuple[LayerDifferences, ...]:
    """One per layer, with the states that it is the first to use; then the states that belong to no layer."""
    users, cuts = users_of(graph), dict(plan.layers)

    def home(state: str) -> str:
        module = state.rpartition(".")[0]  # batch norm's counter, which no operator reads
        return users[state][0] if state in users else module if module in graph.specs else state

    kinds: dict[Kind, str] = {"gradient": "parameter_gradient", "buffer": "buffers", "later state": "after_steps"}
    numbers: dict[str, dict[str, float]] = {}
    for (kind, name), difference in differences.items():
        if kind in kinds:
            of = numbers.setdefault(home(name), {})
            of[kinds[kind]] = max(of.get(kinds[kind], 0.0), difference)
    layers = [
        LayerDifferences(
            layer=layer.name,
            op=layer.op,
            cut=str(cuts.get(layer.name, Cut())),
            output=differences.get(("value", layer.name)),
            output_gradient=differences.get(("value gradient", layer.name)),
            **numbers.pop(layer.name, {}),
        )
        for layer in graph.layers
    ]
    return (*layers, *(LayerDifferences(layer=name, op="", cut="", **of) for name, of in numbers.items()))


def _culprit(fault: Suspects, plan: Plan, graphs: Mapping[bool, LayerGraph]) -> Culprit:
    ops = {layer.name: layer.op for graph in graphs.values() for layer in graph.layers}
    first = fault.layers[0]
    return Culprit(
        layers=fault.layers,
        op=ops.get(first, ""),
        cut=str(dict(plan.layers).get(first, Cut())),
        fault=fault.fault,
        difference=fault.difference,
        mixes_samples=facts_of(ops.get(first, "")).mixes_samples,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("shoal")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
