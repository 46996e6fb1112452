"""One device against many ranks: what is compared, and how closely.

Runs inside the ranks' processes. Every rank has the whole network as an ordinary eager module, computes what one
device computes, and compares its own part of the parallel run with it.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import full_state_dict
from shoal.execution.module import ParallelModule
from shoal.execution.parallelize import Captured, capture_modes, lay
from shoal.partition import Box, slices, whole
from shoal.traffic import Sent
from shoal.transport import Transport

TOLERANCE = 1e-9
STEPS = 3
Build = Callable[..., nn.Module]


@dataclass(frozen=True)
class Subject:
    """A network, its batch, and everything one device makes of them."""

    model: nn.Module
    captured: Captured
    x: Tensor
    y: Tensor
    output: Tensor
    loss: float
    grads: Mapping[str, Tensor]
    x_grad: Tensor
    buffers: Mapping[str, Tensor]
    after_steps: Mapping[str, Tensor]
    evaluated: Tensor


def _optimizer(parameters: Any, rate: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3)


@cache
def subject(
    build: Build, arguments: tuple[tuple[str, Any], ...], shape: tuple[int, ...], classes: int, rate: float
) -> Subject:
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
    eager = deepcopy(model)
    leaf = x.clone().requires_grad_()
    output = eager(leaf)
    y = torch.randint(0, classes, (shape[0], *output.shape[2:]))
    loss = F.cross_entropy(output, y)
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in eager.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in eager.named_buffers()}
    optimizer = _optimizer(eager.parameters(), rate)
    optimizer.step()
    for _ in range(STEPS - 1):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(eager(x), y))
        optimizer.step()
    after = {name: tensor.clone() for name, tensor in eager.state_dict().items()}
    evaluated = eager.eval()(x).detach()
    return Subject(model, captured, x, y, output.detach(), loss.item(), grads, leaf.grad, buffers, after, evaluated)


def apart(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Largest difference, relative to the tensor's own size or, for tensors that are nearly zero, the floor."""
    if not ours.numel():
        return 0.0
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return ((ours - theirs).abs().max() / max(theirs.abs().max().item(), floor)).item()


def largest(tensors: Mapping[str, Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors.values() if t.numel()), default=1.0)


def compare_plan(
    build: Build,
    arguments: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    plan: Any,
    *,
    io: str = "share",
    steps: int = STEPS,
    shares: tuple[int, ...] | None = None,
    rate: float = 0.05,
    recompute: bool = False,
) -> dict[str, Any]:
    """Lay the network under a plan on this world, train it, and compare. Returns the largest differences."""
    one = subject(build, tuple(sorted(arguments.items())), shape, classes, rate)
    transport = Transport()
    cuts = plan(one.captured, transport.world) if callable(plan) else plan
    model = lay(one.captured, cuts, transport, io=io, recompute=recompute)  # type: ignore[arg-type]
    rows = _my_rows(model, shape[0], io, transport, shares)
    x = one.x[rows].clone().requires_grad_()
    result = _result_rows(model, rows, io)
    y = one.y[result[:1] + result[2:]]

    before = model.counted
    output = model(x)
    loss = F.cross_entropy(output, y) if y.numel() else output.sum()
    torch.autograd.backward(loss)
    sent = _difference(model.counted, before)
    expected = model.predicted(input_grad=True)
    if shares is None:
        assert sent == expected, _first_difference(sent, expected)

    states = model._states
    found = {
        "output": apart(output.detach(), one.output[result], 1e-3 * one.output.abs().max().item()),
        "x_grad": apart(_grad(x), one.x_grad[rows], 1e-3 * one.x_grad.abs().max().item()),
    }
    if y.numel():
        expected_loss = F.cross_entropy(one.output[result], y)
        found["loss"] = apart(loss.detach(), expected_loss, 1e-3 * one.loss)
    floor = 1e-3 * largest(one.grads)
    buffer_floor = 1e-3 * largest({n: b.double() for n, b in one.buffers.items()})
    for name, layout in states.layouts.items():
        box = layout[transport.rank]
        if box is None:
            continue
        if name in one.grads:
            found[f"grad {name}"] = apart(_grad(states[name]), _part(one.grads[name], box), floor)
        elif name in one.buffers:
            found[f"buffer {name}"] = apart(states[name].double(), _part(one.buffers[name], box).double(), buffer_floor)
    if steps > 1:
        found |= _after_steps(model, one, x.detach(), y, result, rate)
    worst = max(found, key=lambda key: found[key])
    assert found[worst] <= TOLERANCE, f"{worst} differs by {found[worst]:.2e} (relative)"
    return {"worst": worst, "by": found[worst], "sent": sum((s for s in sent.values()), Sent())}


def _after_steps(
    model: ParallelModule, one: Subject, x: Tensor, y: Tensor, result: tuple[slice, ...], rate: float
) -> dict[str, float]:
    """Further optimizer steps, then the whole state and an evaluation."""
    optimizer = _optimizer(model.parameters(), rate)
    optimizer.step()
    for _ in range(STEPS - 1):
        optimizer.zero_grad()
        output = model(x)
        torch.autograd.backward(F.cross_entropy(output, y) if y.numel() else output.sum())
        optimizer.step()
    full = full_state_dict(model)
    assert list(full) == list(one.after_steps)
    floor = 1e-3 * largest({n: t.double() for n, t in one.after_steps.items()})
    with torch.no_grad():
        evaluated = apart(model.eval()(x), one.evaluated[result], 1e-3 * one.evaluated.abs().max().item())
    return {"evaluation": evaluated} | {
        f"after {name}": apart(full[name].double(), t.double(), floor) for name, t in one.after_steps.items()
    }


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[slices(box, whole(tensor.shape))]


def _my_rows(
    model: ParallelModule, batch: int, io: str, transport: Transport, shares: tuple[int, ...] | None
) -> tuple[slice, ...]:
    if io == "whole":
        return (slice(None),)
    if io == "tile":
        box = model.input_box
        return (slice(0, 0),) if box is None else tuple(slice(span.start, span.stop) for span in box)
    sizes = shares or tuple(
        batch // transport.world + (rank < batch % transport.world) for rank in range(transport.world)
    )
    start = sum(sizes[: transport.rank])
    return (slice(start, start + sizes[transport.rank]),)


def _result_rows(model: ParallelModule, rows: tuple[slice, ...], io: str) -> tuple[slice, ...]:
    if io != "tile":
        return rows
    box = model.output_box
    return (slice(0, 0),) if box is None else tuple(slice(span.start, span.stop) for span in box)


def _difference(after: Mapping[str, Sent], before: Mapping[str, Sent]) -> dict[str, Sent]:
    return {
        label: Sent(sent.bytes - before.get(label, Sent()).bytes, sent.messages - before.get(label, Sent()).messages)
        for label, sent in after.items()
        if sent != before.get(label)
    }


def _first_difference(sent: Mapping[str, Sent], expected: Mapping[str, Sent]) -> str:
    labels = [label for label in {*sent, *expected} if sent.get(label) != expected.get(label)]
    return "; ".join(
        f"{label}: sent {sent.get(label)}, predicted {expected.get(label)}" for label in sorted(labels)[:3]
    )
