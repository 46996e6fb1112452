"""Is a captured network, laid over ranks, what the module itself is? Outputs, gradients and buffers are compared."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.capturing import capture_with_states
from shoal.capturing.functional import operator_of
from shoal.execution import ParallelModule, full_state_dict
from shoal.execution.laying import Captured, lay
from shoal.graph import LayerGraph, State, Value
from shoal.partition import slices, whole
from shoal.transport import Transport
from shoal.transport.memory import run_ranks

ONE_RANK = ((1, "data"),)
EVERY_PLAN = ((1, "data"), (2, "data"), (2, "model"), (3, "spatial"))


class Net(nn.Module):
    """A convolution, a batch norm and a head to try things on; `forward` is the function that a test brings."""

    def __init__(self, function: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.gain = nn.Parameter(torch.full((4, 1, 1), 1.5))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.linspace(-1, 1, 4).view(4, 1, 1))
        self.register_buffer("hidden", torch.linspace(1, 2, 4).view(4, 1, 1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.function = function

    table: Tensor
    hidden: Tensor
    calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self, x)
        return result


def net(function: Callable[[Net, Tensor], Any]) -> Net:
    """The same weights for everybody."""
    torch.manual_seed(0)
    return Net(function).double()


def images(batch: int = 4, channels: int = 3, size: int = 6) -> Tensor:
    """A batch of noise."""
    return torch.randn(batch, channels, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Step:
    """What one forward and backward pass leaves behind."""

    output: Tensor
    input_grad: Tensor | None
    grads: Mapping[str, Tensor | None]
    states: Mapping[str, Tensor]


def eager_step(model: nn.Module, x: Tensor) -> Step:
    """The pass on the module itself, or rather on a copy of it."""
    model = copy.deepcopy(model)
    leaf = x.clone().requires_grad_(x.is_floating_point())
    output = model(leaf * 1 if x.is_floating_point() else leaf)
    if output.requires_grad:
        torch.autograd.backward(_loss(output))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(output.detach(), leaf.grad, grads, model.state_dict())


def _loss(output: Tensor) -> Tensor:
    """Some number that every element of the output has a different say in."""
    weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).to(output.dtype).view(output.shape)
    return (output * weights).sum()


def laid_step(captured: Captured, x: Tensor, world: int, plan: str) -> Step:
    """The pass on ranks, put together again."""

    def one_rank(transport: Transport) -> tuple[Step, ParallelModule]:
        model = lay(captured, plan, transport, io="whole", seed=0, bucket_bytes=1 << 16)
        assert model.training == captured.model.training
        leaf = x.clone().requires_grad_(x.is_floating_point())
        output = model(leaf)
        if output.requires_grad:
            torch.autograd.backward(_loss(output))
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        return Step(output.detach(), leaf.grad, grads, full_state_dict(model)), model

    ranks = run_ranks(world, one_rank)
    first, model = ranks[0]
    for step, _ in ranks[1:]:
        torch.testing.assert_close(step.output, first.output, rtol=0, atol=0)
    grads = {name: _joined(name, [step for step, _ in ranks], model) for name in first.grads}
    return Step(first.output, first.input_grad, grads, first.states)


def _joined(name: str, steps: Sequence[Step], model: ParallelModule) -> Tensor | None:
    shape, layout = model._states.shapes[name], model._states.layouts[name]
    found = [(box, grad) for box, step in zip(layout, steps, strict=True) if (grad := step.grads[name]) is not None]
    if not found:
        return None
    full = torch.full(shape, float("nan"), dtype=found[0][1].dtype)
    for box, grad in found:
        if box is not None:
            full[slices(box, whole(shape))] = grad
    return full


def capture_one(model: nn.Module, x: Tensor) -> Captured:
    """A captured network in the mode it is in, which stands for both."""
    graph, states = capture_with_states(model, x)
    return Captured(model, {True: graph, False: graph}, states, None)


def assert_same_step(found: Step, wanted: Step, what: str, tolerance: float = 1e-9) -> None:
    """Equal up to the order of additions; a gradient that one side does not have, the other must not have."""

    def close(name: str, one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {name}: {text}"
        )

    close("output", found.output, wanted.output)
    zero = torch.zeros(())
    if wanted.input_grad is not None or (found.input_grad is not None and found.input_grad.any()):
        assert found.input_grad is not None, what
        close("input gradient", found.input_grad, zero if wanted.input_grad is None else wanted.input_grad)
    for name, grad in wanted.grads.items():
        other = found.grads[name]
        assert (grad is None) == (other is None), f"{what}: gradient of {name} is {other}, not {grad}"
        if grad is not None and other is not None:
            close(f"gradient of {name}", other, grad)
    assert list(found.states) == list(wanted.states), what
    for name, state in wanted.states.items():
        close(name, found.states[name], state)


def assert_captured(
    model: nn.Module, x: Tensor, runs: Sequence[tuple[int, str]] = EVERY_PLAN, tolerance: float = 1e-9
) -> Captured:
    """The network, captured and laid, does what it does by itself: on one rank and on several."""
    wanted = eager_step(model, x)
    captured = capture_one(model, x)
    for world, plan in runs:
        found = laid_step(captured, x, world, plan)
        assert_same_step(found, wanted, f"{world} ranks, plan {plan}", tolerance)
    return captured


def run_graph(graph: LayerGraph, states: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """The captured graph by itself: each layer's operator, one after the other."""
    tensors: dict[Value | State, Tensor] = {State(name): state for name, state in states.items()}
    tensors |= dict(zip(map(Value, graph.inputs), inputs, strict=True))

    def real(value: Any) -> Any:
        if isinstance(value, Value | State):
            return tensors[value]
        return [real(item) for item in value] if isinstance(value, tuple) else value

    for layer in graph.layers:
        result = operator_of(layer)(**{name: real(value) for name, value in layer.arguments.items()})
        picked = result if layer.result is None else result[layer.result]
        assert tuple(picked.shape) == layer.output.shape, layer.name
        tensors[Value(layer.name)] = picked.to(getattr(torch, layer.output.dtype))
    return tensors[Value(graph.output)]


class Guided(torch.autograd.Function):
    """Guided backpropagation: its backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (grad > 0) * (x > 0)
