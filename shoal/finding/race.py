"""Race: run plans for a few real steps each and see which is fastest. A collective: all ranks call it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.diary import Diary, now
from shoal.execution.laying import Captured, lay
from shoal.execution.module import ParallelModule
from shoal.graph import LayerGraph
from shoal.lowering.owners import OptimizerState
from shoal.partition import Box
from shoal.plan import Plan
from shoal.profiling.in_step import Noted, noted
from shoal.transport import Transport

ROUNDS = 3
"""Every plan runs so many times, in turns, so that a slow minute of the machine meets all of them."""
STEPS = 3
"""Timed steps per turn."""
LONG = 3.0
"""A step of so many seconds is not repeated within a turn."""


@dataclass(frozen=True)
class Steps:
    """Some real steps of one plan."""

    seconds: list[float] = field(default_factory=list)
    """The slowest rank's."""
    diary: Diary = field(default_factory=Diary)
    """What this rank did, layer by layer."""
    begun: dict[int, int] = field(default_factory=dict)
    """When each step began, by its number, in the diary's nanoseconds."""

    def noted(self) -> Noted:
        """What this rank's layers took."""
        return noted(self.diary.events, self.begun)


@dataclass(frozen=True)
class Finish:
    """One plan's result."""

    name: str
    seconds: float
    """Median step of the slowest rank."""


def race(
    plans: Mapping[str, Plan | str],
    captured: Captured,
    transport: Transport,
    *,
    batch_norm: Literal["exact", "local"] = "exact",
    bucket_bytes: int | None = None,
    optimizer_state: OptimizerState = "whole",
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> tuple[list[Finish], dict[str, Noted]]:
    """(median step of every plan on random data, fastest first; by plan what this rank's layers took).

    The network itself is left as it was.
    """
    steps = {name: Steps() for name in plans}
    order = list(plans)
    for turn in range(ROUNDS):
        for place, name in enumerate(order if turn % 2 == 0 else reversed(order)):
            progress(turn * len(order) + place, ROUNDS * len(order), name)
            model = lay(
                captured, plans[name], transport, io="tile", batch_norm=batch_norm, seed=0, bucket_bytes=bucket_bytes,
                optimizer_state=optimizer_state,
            )  # fmt: skip
            time_steps(model, captured, transport, steps[name])
            del model
    progress(ROUNDS * len(order), ROUNDS * len(order), "")
    finishes = [Finish(name, median(each.seconds)) for name, each in steps.items()]
    return sorted(finishes, key=lambda finish: finish.seconds), {name: each.noted() for name, each in steps.items()}


def time_steps(model: ParallelModule, captured: Captured, transport: Transport, into: Steps | None = None) -> Steps:
    """A few training steps on random tiles, after one that is not counted; after those that are in `into`.

    A collective. Weights stay as they are; batch norm's statistics do not.
    """
    graph = captured.graphs[True]
    device = captured.device
    args, kwargs = example_of(model, captured, graph)
    parameters = [p for p in model.parameters() if p.numel()]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9, fused=True) if parameters else None
    steps = into or Steps()
    first = len(steps.seconds)
    for step in range(first, first + 1 + STEPS):
        transport.gather_numbers([0.0])
        transport.diary = Diary() if step == first else steps.diary  # the first makes buffers and optimizer state
        transport.diary.begin_step(step)
        start = now()
        results = pytree.tree_leaves(model(*args, **kwargs))
        torch.autograd.backward(
            [result.sum() for result in results if isinstance(result, Tensor) and result.requires_grad]
        )
        if optimizer is not None:
            updating = now()
            optimizer.step()
            transport.diary.note("update", "", updating)
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = (now() - start) * 1e-9
        transport.diary = None
        slowest = max(row[0] for row in transport.gather_numbers([taken]))
        if step > first:
            steps.begun[step] = start
            steps.seconds.append(slowest)
            if slowest > LONG:
                break
    return steps


def example_of(model: ParallelModule, captured: Captured, graph: LayerGraph) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tiles in the form of the call that was captured, and of the loss's targets."""
    names = [name for name in graph.inputs if name not in graph.targets]
    boxes = model.input_box if len(names) > 1 else (model.input_box,)
    tiles = [_random(box, graph.inputs[name].dtype, captured.device) for name, box in zip(names, boxes, strict=True)]
    args, kwargs = (tuple(tiles), {}) if captured.call is None else captured.call.arguments(tiles)
    if not graph.targets:
        return args, kwargs
    targets = iter(_random(model.output_box, graph.inputs[name].dtype, captured.device) for name in graph.targets)
    like = torch.empty(0) if captured.target is None else captured.target
    target = pytree.tree_map(lambda leaf: next(targets) if isinstance(leaf, Tensor) else leaf, like)
    return args, {**kwargs, "target": target}


def _random(box: Box | None, dtype: str, device: torch.device) -> Tensor:
    shape: Sequence[int] = [0] if box is None else [len(span) for span in box]
    kind = getattr(torch, dtype.removeprefix("torch."))
    if kind.is_floating_point:  # alike on all ranks, as an input must be that none of them cuts
        return torch.rand(shape, dtype=kind, generator=torch.Generator().manual_seed(0)).to(device)
    return torch.zeros(shape, dtype=kind, device=device)
