"""One device against many ranks, as `shoal.verify` compares them, for any plan, way in and out, and shares.

Runs inside the ranks' processes. Every rank has the whole network as an ordinary eager module, computes what one
device computes, and compares its own part of the parallel run with it. The bytes that a step sends are compared too.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from shoal.execution.laying import Captured, capture_modes, lay
from shoal.lowering import owners
from shoal.lowering.owners import OptimizerState
from shoal.traffic import Sent
from shoal.transport import Transport
from shoal.verifying.compare import compare
from shoal.verifying.one_device import OneDevice, run_one_device

TOLERANCE = 1e-9
STEPS = 3
Build = Callable[..., nn.Module]


@lru_cache(maxsize=2)  # large networks: two and their references are a gigabyte
def subject(
    build: Build, arguments: tuple[tuple[str, Any], ...], shape: tuple[int, ...], classes: int, rate: float
) -> tuple[Captured, OneDevice]:
    """Build, capture and run one device's reference; kept for the next plan of the same network."""
    torch.manual_seed(1)
    model = build(**dict(arguments)).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # what dropout does under a plan is tested on its own
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.9  # statistics near the batch's: else an evaluation so soon is ill-conditioned
    x = torch.randn(shape, dtype=torch.float64)
    captured = capture_modes(deepcopy(model), x)
    output = captured.graphs[True].specs[captured.graphs[True].output].shape
    y = torch.randint(0, classes, (output[0], *output[2:]))
    return captured, run_one_device(model, x, y, F.cross_entropy, steps=STEPS, rate=rate)


def compare_plan(
    build: Build,
    arguments: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    plan: Any,
    *,
    io: Any = "share",
    steps: int = STEPS,
    shares: tuple[int, ...] | None = None,
    rate: float = 0.05,
    recompute: bool = False,
    optimizer_state: OptimizerState = "whole",
) -> dict[str, Any]:
    """Lay the network under a plan on this world, train it, and compare. Returns the largest difference.

    With fewer than all steps, outputs, gradients and buffers of the first pass alone.
    """
    captured, one = subject(build, tuple(sorted(arguments.items())), shape, classes, rate)
    transport = Transport()
    cuts = plan(captured, transport.world) if callable(plan) else plan
    with patch.object(owners, "LEAST_ELEMENTS", 1):  # if the state is cut, that of small parameters too
        model = lay(captured, cuts, transport, io=io, recompute=recompute, optimizer_state=optimizer_state)
    found, sent = compare(one, model, transport, io=io, shares=shares, steps=None if steps == STEPS else 0)
    if shares is None:
        expected = model.predicted(input_grad=True)
        assert sent == expected, _first_difference(sent, expected)
    worst = max(found, key=lambda key: found[key])
    assert found[worst] <= TOLERANCE, f"{' '.join(worst)} differs by {found[worst]:.2e} (relative)"
    return {"worst": worst, "by": found[worst], "sent": sum((s for s in sent.values()), Sent())}


def _first_difference(sent: Mapping[str, Sent], expected: Mapping[str, Sent]) -> str:
    labels = [label for label in {*sent, *expected} if sent.get(label) != expected.get(label)]
    return "; ".join(
        f"{label}: sent {sent.get(label)}, predicted {expected.get(label)}" for label in sorted(labels)[:3]
    )
