"""From an nn.Module to its graphs and tensors, and from these to one rank's part of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.capturing import capture_with_states
from shoal.execution.engine import Engine
from shoal.execution.loss import LossTail, join_loss
from shoal.execution.module import ParallelModule
from shoal.graph import LayerGraph
from shoal.lowering.boundary import IO, Boundary
from shoal.plan import Plan
from shoal.planning import Resolved, resolve
from shoal.transport import Transport

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Captured:
    """A network as it is in both modes, with all its tensors: everything that laying it over ranks needs."""

    model: nn.Module
    graphs: Mapping[bool, LayerGraph]
    """By whether the network trains."""
    states: Mapping[str, Tensor]
    tail: LossTail | None

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next((tensor.device for tensor in self.states.values()), torch.device("cpu"))


def lay(
    captured: Captured,
    plan: str | Path | Plan,
    transport: Transport,
    *,
    io: IO = "share",
    batch_norm: Literal["exact", "local"] = "exact",
    seed: int | None = None,
    bucket_bytes: int | None = None,
    recompute: bool = False,
) -> ParallelModule:
    """Lay a captured network over the ranks of `transport`; `parallelize` without the capture."""
    names = [layer.name for graph in captured.graphs.values() for layer in graph.layers]
    resolved = {mode: resolve(plan, graph, transport.world, names) for mode, graph in captured.graphs.items()}
    if transport.rank == 0:
        _announce(resolved[True])
    if seed is None:
        seed = int(transport.gather_numbers([float(torch.initial_seed() % 2**52)])[0][0])
    return ParallelModule(
        captured.model,
        captured.graphs,
        resolved,
        captured.states,
        engine=Engine(transport, captured.device, batch_norm == "local", seed, recompute),
        boundary=Boundary(io, transport.world),
        tail=captured.tail,
        bucket_bytes=bucket_bytes,
    )


def capture_modes(
    model: nn.Module,
    example: Tensor | tuple[int, ...],
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
) -> Captured:
    """The graphs of training (with the user's own flags) and of evaluation, all tensors, and the loss.

    Both now, because the original module may be gone when evaluation begins. It is left as it was.
    """
    x = _example(example, model)
    flags = {name: module.training for name, module in model.named_modules()}
    tail: LossTail | None = None
    try:
        if not model.training:
            model.train()
        training, states = capture_with_states(model, x)
        if loss is not None:
            tail = join_loss(training, loss, target, x.device)
            training, states = tail.graph, {**states, **tail.states}
        evaluation, its_states = capture_with_states(model.eval(), x)
    finally:
        for name, module in model.named_modules():
            module.training = flags[name]
    specs = {**evaluation.states, **training.states}  # constants of one mode are known in both
    graphs = {True: replace(training, states=specs), False: replace(evaluation, states=specs)}
    return Captured(model, graphs, {**its_states, **states}, tail)


def _example(example: Tensor | tuple[int, ...], model: nn.Module) -> Tensor:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(example, Tensor):
        return example.detach().to(device)
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return torch.zeros(tuple(example), dtype=floats[0] if floats else torch.float32, device=device)


def _announce(resolved: Resolved) -> None:
    if resolved.smaller:
        some = ", ".join(f"{name} {found}" for name, found in list(resolved.smaller.items())[:4])
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
