"""What one device makes of a network and a batch: the plain eager module, trained for a few steps."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import ModelError

Loss = Callable[[Tensor, Tensor], Tensor]
Draws = Callable[[bool, int], AbstractContextManager[None]]
"""(whether the network trains, number of the training pass) -> within, the module draws as a plan does."""

STRIDE = 1e-4
"""A first step's length over the length of all parameters. Longer ones make some networks chaotic, and then nothing
can be said of what comes after them.
"""


@dataclass(frozen=True)
class OneDevice:
    """Everything that a plan is compared with."""

    x: Tensor
    y: Tensor
    loss: Loss
    output: Tensor
    loss_value: float
    grads: Mapping[str, Tensor]
    """Of parameters, after the first backward pass."""
    x_grad: Tensor | None
    """None where the input has no gradient, being whole numbers."""
    buffers: Mapping[str, Tensor]
    """After the first forward pass."""
    steps: int
    rate: float
    after: Mapping[str, Tensor]
    """The state dict after all steps."""
    evaluated: Tensor | None
    """The output in evaluation after all steps; None where there were none."""


def optimizer_of(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.SGD:
    """The optimizer that both sides use."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3)


def run_one_device(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    steps: int,
    rate: float | None = None,
    draws: Draws | None = None,
) -> OneDevice:
    """Train a copy of `model` for `steps` steps on one batch. Steps 0: one pass forward and back, and no evaluation.

    The learning rate makes the steps short unless it is given.
    Numbers that are not finite are a `ModelError`: nothing can be compared with them.
    """
    eager = deepcopy(model)
    leaf = x.clone().requires_grad_(x.is_floating_point())
    drawing = draws or (lambda _training, _step: nullcontext())
    with drawing(True, 1):
        output = eager(leaf)
    value = loss(output, y)
    torch.autograd.backward(value)
    grads = {name: p.grad.clone() for name, p in eager.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in eager.named_buffers()}
    rate = _short(eager, grads) if rate is None else rate
    optimizer = optimizer_of(eager.parameters(), rate)
    for step in range(1, steps + 1):
        if step > 1:
            optimizer.zero_grad()
            with drawing(True, step):
                scores = eager(x)
            torch.autograd.backward(loss(scores, y))
        optimizer.step()
    after = {name: tensor.clone() for name, tensor in eager.state_dict().items()}
    evaluated = None
    if steps:
        with drawing(False, steps), torch.no_grad():
            evaluated = eager.eval()(x)
    made = OneDevice(
        x, y, loss, output.detach(), value.item(), grads, leaf.grad, buffers, steps, rate, after, evaluated
    )
    _check_finite(made)
    return made


def _short(model: nn.Module, grads: Mapping[str, Tensor]) -> float:
    parameters, slope = _length(p for p in model.parameters() if p.grad is not None), _length(grads.values())
    return STRIDE * parameters / slope if slope > 0 else STRIDE


def _length(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(tensor.detach()).item() for tensor in tensors))


def shaken(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters differ from the model's in their last bit, up or down at random."""
    copy, draw = deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point():
                up = torch.rand(parameter.shape, generator=draw).lt(0.5).to(parameter)
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * up - 1))
    return copy


def _check_finite(made: OneDevice) -> None:
    tensors = {
        "output": made.output,
        **{f"gradient of {name!r}": grad for name, grad in made.grads.items()},
        **{f"{name!r} after {made.steps} steps": tensor for name, tensor in made.after.items()},
        **({} if made.evaluated is None else {"output in evaluation": made.evaluated}),
    }
    for what, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(
                f"one device's own {what} is not finite, so nothing can be compared with it.",
                "Give smaller data, fewer steps, or another seed.",
            )


def module_outputs(model: nn.Module, x: Tensor, drawing: AbstractContextManager[None]) -> dict[str, Tensor]:
    """What every module that is called once gives in training, by its path. Costs a forward pass."""
    outputs_of: dict[str, list[Tensor]] = {}

    def note(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                outputs_of.setdefault(path, []).append(
                    output.detach().clone()
                )  # a later operator may change it in place

        return hook

    eager = deepcopy(model)
    for path, module in eager.named_modules():
        module.register_forward_hook(note(path))
    with drawing, torch.no_grad():
        eager(x)
    return {path: outputs[0] for path, outputs in outputs_of.items() if len(outputs) == 1}
