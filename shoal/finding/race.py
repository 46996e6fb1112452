"""Race: run plans for a few real steps each and see which is fastest. A collective: all ranks call it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from shoal.execution.laying import Captured, lay
from shoal.execution.module import ParallelModule
from shoal.partition import Box
from shoal.plan import Plan
from shoal.transport import Transport

ROUNDS = 3
"""Every plan runs so many times, in turns, so that a slow minute of the machine meets all of them."""
STEPS = 3
"""Timed steps per turn."""
LONG = 3.0
"""A step of so many seconds is not repeated within a turn."""


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
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Finish]:
    """Median step of every plan on random data, fastest first. The network itself is left as it was."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    order = list(plans)
    for turn in range(ROUNDS):
        for place, name in enumerate(order if turn % 2 == 0 else reversed(order)):
            progress(turn * len(order) + place, ROUNDS * len(order), name)
            model = lay(
                captured, plans[name], transport, io="tile", batch_norm=batch_norm, seed=0, bucket_bytes=bucket_bytes
            )
            times[name] += time_steps(model, captured, transport)
            del model
    progress(ROUNDS * len(order), ROUNDS * len(order), "")
    return sorted((Finish(name, median(found)) for name, found in times.items()), key=lambda one: one.seconds)


def time_steps(model: ParallelModule, captured: Captured, transport: Transport, *, slowest: bool = True) -> list[float]:
    """Seconds of a few training steps on random tiles, after one that is not counted: the slowest rank's, or the mean.

    A collective. Weights stay as they are; batch norm's statistics do not.
    """
    graph = captured.graphs[True]
    first, *rest = graph.inputs.items()
    device = captured.device
    x = _random(model.input_box, first[1].dtype, device)
    y = _random(model.output_box, rest[0][1].dtype, device) if captured.tail is not None and rest else None
    parameters = [p for p in model.parameters() if p.numel()]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9, fused=True) if parameters else None
    found = []
    for step in range(1 + STEPS):
        transport.gather_numbers([0.0])
        start = time.perf_counter()
        out = model(x) if y is None else model(x, y)
        out.sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        everyone = [row[0] for row in transport.gather_numbers([time.perf_counter() - start])]
        if step:  # the first makes buffers and optimizer state
            found.append(max(everyone) if slowest else sum(everyone) / len(everyone))
            if max(everyone) > LONG:
                break
    return found


def _random(box: Box | None, dtype: str, device: torch.device) -> Tensor:
    shape: Sequence[int] = [0] if box is None else [len(span) for span in box]
    kind = getattr(torch, dtype.removeprefix("torch."))
    if kind.is_floating_point:
        return torch.rand(shape, dtype=kind, device=device)
    return torch.zeros(shape, dtype=kind, device=device)
