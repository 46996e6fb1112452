"""From an nn.Module to its graphs and tensors, and from these to one rank's part of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.building import Draft
from shoal.building import draft as make_draft
from shoal.capturing.signature import Call, Returned, single
from shoal.execution.calling import Laying, compare_graphs
from shoal.execution.engine import Engine
from shoal.execution.loss import Loss, LossTail
from shoal.execution.module import ParallelModule
from shoal.execution.torch_tools import tell_torch
from shoal.execution.tree import Tree, copied
from shoal.execution.variants import Form, capture_form, example_call
from shoal.graph import LayerGraph
from shoal.lowering.boundary import IO, Boundary
from shoal.lowering.owners import OptimizerState
from shoal.plan import FactorsOption, Plan, planned_factors, planned_recompute
from shoal.planning import Resolved, check, resolve
from shoal.planning.factors import check_factors
from shoal.transport import Transport
from shoal.transport.agreement import agree

log = logging.getLogger("shoal")

_unseeded = count()
"""Numbers for networks that were given no seed."""


@dataclass(frozen=True)
class Captured:
    """A network as it is in both modes, with all its tensors: everything that laying it over ranks needs."""

    model: nn.Module
    graphs: Mapping[bool, LayerGraph]
    """By whether the network trains."""
    states: Mapping[str, Tensor]
    tail: LossTail | None
    returned: Mapping[bool, Returned] | None = None
    """What the network returns in each mode; None: one tensor."""
    call: Call | None = None
    """What it was called with; None: one tensor for each input."""
    loss: Loss | None = None
    target: Any = None
    asked: Mapping[str, str] = field(default_factory=dict)
    """What the network asks about its call, and where."""

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next((tensor.device for tensor in self.states.values()), torch.device("cpu"))

    def form(self, *, training: bool) -> Form:
        """The network in one mode."""
        graph = self.graphs[training]
        returned = single() if self.returned is None else self.returned[training]
        states = {name: self.states[name] for name in graph.states}
        return Form(graph, returned, states, self.tail if training else None, self.asked)


def lay(
    captured: Captured,
    plan: str | Path | Plan,
    transport: Transport,
    *,
    io: IO = "share",
    batch_norm: Literal["exact", "local"] = "exact",
    seed: int | None = None,
    bucket_bytes: int | None = None,
    recompute: bool | None = None,
    factors: FactorsOption = "auto",
    optimizer_state: OptimizerState = "whole",
    in_place: bool = False,
    draft: Draft | None = None,
) -> ParallelModule:
    """Lay a captured network over the ranks of `transport`; `parallelize` without the capture.

    `in_place`: the module itself becomes this rank's part, with rank 0's weights; else a copy of it, with its own.
    `draft`: of a network that is not built yet; then each rank builds its own part. `recompute`: as the plan says, if
    None; where a plan that recomputes is laid without, rank 0 says so.
    """

    def resolved_plan() -> tuple[str | Plan, dict[bool, Resolved]]:
        checked = check(plan, transport.world)
        check_factors(planned_factors(checked, factors), *captured.graphs.values())
        return checked, {mode: resolve(checked, g, transport.world, names) for mode, g in captured.graphs.items()}

    names = tuple(layer.name for graph in captured.graphs.values() for layer in graph.layers)
    checked, resolved = agree(transport, resolved_plan)
    if transport.rank == 0:
        _announce(resolved[True])
        if isinstance(checked, Plan) and checked.recompute and recompute is False:
            log.warning("plan %r recomputes, to need less memory; it is laid without that, as asked", checked.name)
    if seed is None:  # each network its own, or two of one architecture would draw the same masks
        seed = int(transport.gather_numbers([float((torch.initial_seed() + next(_unseeded)) % 2**52)])[0][0])
    laid = ParallelModule(
        captured.model if in_place else copied(captured.model),
        {mode: captured.form(training=mode) for mode in (True, False)},
        resolved,
        captured.call,
        Laying(checked, names, captured.loss, captured.target),
        engine=Engine(transport, captured.device, batch_norm == "local", seed, planned_recompute(checked, recompute)),
        boundary=Boundary(io, transport.world),
        bucket_bytes=bucket_bytes,
        factors=planned_factors(checked, factors),
        optimizer_state=optimizer_state,
        in_place=in_place,
        draft=draft,
    )
    if laid.cuts_parameters:
        tell_torch(laid)
        if in_place:
            laid._states.mark_cut()
    return laid


def draft_on_all(transport: Transport, source: nn.Module | Callable[[], nn.Module]) -> Draft:
    """What a function makes, or a module on the `meta` device is to become, with rank 0's random numbers. A collective.

    Rank 0's generator goes on as if it had built the network whole; the others' stay where they are.
    """
    states = transport.gather_objects(torch.get_rng_state() if transport.rank == 0 else None, "parallelize")
    if transport.rank == 0:
        return agree(transport, lambda: make_draft(source), "parallelize")
    with torch.random.fork_rng([]):
        torch.set_rng_state(states[0])
        return agree(transport, lambda: make_draft(source), "parallelize")


def capture_on_all(
    transport: Transport,
    model: nn.Module,
    example: Any,
    loss: Loss | None = None,
    target: Any = None,
    on_captured: Callable[[], None] = lambda: None,
) -> Captured:
    """`capture_modes` on all ranks. What one finds wrong all say, and different networks are refused.

    `on_captured`: called when this rank is done, before it waits for the others.
    """

    def attempt() -> Captured:
        captured = capture_modes(model, example, loss, target)
        on_captured()
        return captured

    captured = agree(transport, attempt, "parallelize")
    for graph in captured.graphs.values():
        compare_graphs(graph, transport)
    return captured


def capture_modes(model: nn.Module, example: Any, loss: Loss | None = None, target: Any = None) -> Captured:
    """The graphs of training (with the user's own flags) and of evaluation, all tensors, and the loss.

    The module is left as it was. One on the `meta` device is captured as if it were on the CPU.
    """
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = floats[0] if floats else torch.float32
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        with Tree(model).whole({}) as fakes:
            call = example_call(model, example, torch.device("cpu"), dtype)
            with fakes:
                call = replace(call, tensors=tuple(map(torch.empty_like, call.tensors)))
            return _both_modes(model, call, loss, target)
    return _both_modes(model, example_call(model, example, device, dtype), loss, target)


def _both_modes(model: nn.Module, call: Call, loss: Loss | None, target: Any) -> Captured:
    flags = {name: module.training for name, module in model.named_modules()}
    try:
        if not model.training:
            model.train()
        training = capture_form(model, call, loss, target)
        evaluation = capture_form(model.eval(), call, loss, target)
    finally:
        for name, module in model.named_modules():
            module.training = flags[name]
    return Captured(
        model,
        {True: training.graph, False: evaluation.graph},
        {**evaluation.states, **training.states},
        training.tail,
        {True: training.returned, False: evaluation.returned},
        call,
        loss,
        target,
        {**evaluation.asked, **training.asked},
    )


def _announce(resolved: Resolved) -> None:
    if resolved.smaller:
        some = ", ".join(f"{name} {smaller}" for name, smaller in list(resolved.smaller.items())[:4])
        log.warning(
            "plan %r: %d of %d layers are too small for it and take the largest cut that fits (%s%s)",
            resolved.name,
            len(resolved.smaller),
            len(resolved.cuts),
            some,
            ", ..." if len(resolved.smaller) > 4 else "",
        )
    if resolved.whole:
        kinds = ", ".join(sorted({op.split(".")[1] for op in resolved.whole.values()}))
        log.warning("no rule for %s: %d layers run whole on every rank", kinds, len(resolved.whole))
