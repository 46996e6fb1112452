"""Cases for `shoal.verify` that run inside the ranks: sound networks, and rules broken on purpose."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.config import VerifyConfig
from shoal.execution.autograd_node import Request
from shoal.execution.laying import Captured, capture_modes
from shoal.execution.passes import Passes
from shoal.execution.tape import Tape
from shoal.graph import Layer
from shoal.operators.base import Call, Op, Rule
from shoal.operators.norms import BatchNorm
from shoal.operators.products import Linear
from shoal.operators.windows import Convolution
from shoal.verdict import Verdict
from shoal.verifying import from_settings


class Net(nn.Module):
    """Small, with what makes blaming hard: a value of several readers, batch norm, dropout, a tied weight."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.side = nn.Conv2d(8, 8, 1)
        self.tied = nn.Conv2d(8, 8, 1)
        self.tied.weight = self.side.weight
        self.unused = nn.Linear(2, 2)
        self.drop2d = nn.Dropout2d(dropout)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.conv3(F.relu(self.bn2(self.conv2(x)))) + self.side(x) + x
        x = self.drop2d(self.tied(F.relu(x)))
        scores: Tensor = self.fc(self.drop(x.mean((2, 3))))
        return scores


SHAPE = (4, 3, 13, 11)


def network(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def verdict(plan: str, **options: Any) -> Verdict:
    """Of the small network; it must be left as it was."""
    net = network().eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = shoal.verify(net, SHAPE, plan, **options)
    assert not net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in net.parameters())
    return found


def of_command(**settings: Any) -> Verdict:
    """What `shoal verify` with these settings finds on the ranks that there are."""
    return from_settings.on_rank(VerifyConfig(workers=torch.distributed.get_world_size(), **settings), None)


# Rules broken on purpose, where the layer of this name is cut


class _Wrong(torch.autograd.Function):
    """Passes a tensor on, and back a gradient that is a little too large."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.001


def _wrong(tensor: Tensor) -> Tensor:
    result: Tensor = _Wrong.apply(tensor)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def _run_changed(rule: type[Rule], layer: str, change: Callable[[Call], Call]) -> Iterator[None]:
    run = rule.run

    def changed(self: Rule, call: Call) -> Tensor:
        return run(self, change(call) if call.cut and call.op.layer.name == layer else call)

    with mock.patch.object(rule, "run", changed):
        yield


def _with(call: Call, **tensors: Tensor) -> Call:
    return replace(call, tensors={**call.tensors, **tensors})


def shifted_halo(layer: str) -> Any:
    """A convolution reads its tile one row off."""
    return _run_changed(Convolution, layer, lambda call: _with(call, input=call.tensors["input"].roll(1, 2)))


def wrong_input_gradient(layer: str) -> Any:
    return _run_changed(Convolution, layer, lambda call: _with(call, input=_wrong(call.tensors["input"])))


def wrong_parameter_gradient(layer: str) -> Any:
    return _run_changed(Convolution, layer, lambda call: _with(call, weight=_wrong(call.tensors["weight"])))


def wrong_product(layer: str) -> Any:
    """A linear layer whose backward is wrong in its input alone."""
    return _run_changed(Linear, layer, lambda call: _with(call, input=_wrong(call.tensors["input"])))


@contextmanager
def sum_left_out(layer: str) -> Iterator[None]:
    """Batch norm takes the statistics of its own part."""
    over = BatchNorm.over

    def changed(self: BatchNorm, op: Op, cut: frozenset[str], *, local: bool) -> str:
        return "" if op.layer.name == layer else over(self, op, cut, local=local)

    with mock.patch.object(BatchNorm, "over", changed):
        yield


def wrong_statistics(layer: str) -> Any:
    """Batch norm in training leaves other running statistics; its output is right."""

    def change(call: Call) -> Call:
        if call.op["training"]:
            call.tensors["running_mean"].data.add_(0.01)
        return call

    return _run_changed(BatchNorm, layer, change)


def wrong_evaluation(layer: str) -> Any:
    def change(call: Call) -> Call:
        return call if call.op["training"] else _with(call, input=call.tensors["input"] * 1.001)

    return _run_changed(BatchNorm, layer, change)


@contextmanager
def wrong_capture(layer: str, modes: tuple[bool, ...] = (True, False)) -> Iterator[None]:
    """The captured network forgets a bias."""

    def misread(one: Layer) -> Layer:
        return replace(one, arguments={**one.arguments, "bias": None}) if one.name == layer else one

    def capture(*args: Any) -> Captured:
        captured = capture_modes(*args)
        graphs = {
            mode: replace(graph, layers=tuple(map(misread, graph.layers))) if mode in modes else graph
            for mode, graph in captured.graphs.items()
        }
        return replace(captured, graphs=graphs)

    with mock.patch("shoal.verifying.verify.capture_modes", capture):
        yield


def wrong_capture_of_evaluation(layer: str) -> Any:
    return wrong_capture(layer, (False,))


@contextmanager
def second_step_forgotten(_layer: str) -> Iterator[None]:
    """Gradients of all passes but the first stay each rank's own."""
    backward = Passes.backward

    def changed(self: Passes, tape: Tape, request: Request, *args: Any) -> Any:
        return backward(
            self, tape, replace(request, sync=self.training_passes == 1 or self.transport.world == 1), *args
        )

    with mock.patch.object(Passes, "backward", changed):
        yield


BREAKAGES: dict[str, Callable[[str], Any]] = {
    one.__name__: one
    for one in (
        *(shifted_halo, wrong_input_gradient, wrong_parameter_gradient, wrong_product),
        *(sum_left_out, wrong_statistics, wrong_evaluation, second_step_forgotten),
        *(wrong_capture, wrong_capture_of_evaluation),
    )
}


def broken(breakage: str, layer: str, plan: str, **options: Any) -> Verdict:
    with BREAKAGES[breakage](layer):
        return verdict(plan, **options)


def refusals() -> list[str]:
    """What cannot be verified: each a clear message, and the ranks can go on."""
    messages = []

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, x

    class Exploding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1e308 * 1e308

    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 13 * 11, 5))
    attempts: list[Callable[[], object]] = [
        lambda: shoal.verify(network(), SHAPE, "3x5"),
        lambda: shoal.verify(network(), SHAPE, dtype=torch.float16),
        lambda: shoal.verify(network(), (4, 2, 13, 11)),
        lambda: shoal.verify(Two(), SHAPE),
        lambda: shoal.verify(Noisy(), SHAPE),
        lambda: shoal.verify(nn.Sequential(nn.Flatten(), Exploding(3 * 13 * 11, 5)), SHAPE),
        lambda: shoal.verify(network(), SHAPE, workers=3),
        lambda: shoal.verify(_seeded(torch.distributed.get_rank(), flat), SHAPE),
        lambda: shoal.verify(network(), SHAPE, steps=0),
    ]
    for attempt in attempts:
        try:
            attempt()
        except shoal.errors.InputError as error:
            messages.append(str(error))
    return messages


def _seeded(seed: int, net: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net
