"""What a network's own code does: followed as it is, or refused by its place before anything runs."""

# mypy: disable-error-code="no-untyped-call"

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import CaptureError, RunError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    batch,
    both,
    built,
    cases_of,
    learn,
    mine,
    name_of,
    parallel,
    refused,
    same_grads,
    same_states,
)
from tests.idioms.test_tensors import Parts


class Reversed(torch.autograd.Function):
    """Gradient reversal (DANN); straight-through estimators are of the same kind."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:
        return -grad


class WithFunction(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(Reversed.apply(self.maps(x)))


def custom_function(plan: AnyPlan) -> None:
    """A torch.autograd.Function inside keeps its own backward."""
    train_beside(plan, WithFunction)


def train_beside(plan: AnyPlan, kind: Callable[..., nn.Module]) -> None:
    """Two passes beside one device."""
    reference, model = both(plan, kind)
    for seed in (1, 2):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)


class Blocks(Parts):
    """Parts under torch.no_grad and torch.inference_mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.maps(x)
        with torch.inference_mode():
            more = self.b(self.a(x))
        return self.scores(self.a(x) + fixed + more.clone())


def blocks_without_gradients(plan: AnyPlan) -> None:
    """torch.no_grad() and torch.inference_mode() inside let no gradient through."""
    train_beside(plan, Blocks)


class Checkpointed(Parts):
    def forward(self, x: Tensor) -> Tensor:
        maps = checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True)
        return self.scores(checkpoint(torch.tanh, maps, use_reentrant=False))


class CheckpointedInEvaluation(Parts):
    """On one device `a` learns nothing in evaluation: nothing that goes into the checkpoint has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.a(x) if self.training else checkpoint(self.a, x, use_reentrant=True)
        return self.scores(torch.tanh(self.b(maps)))


class CheckpointedNorm(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(checkpoint(self.norm, self.b(self.a(x)), use_reentrant=False))


def checkpoint_inside(plan: AnyPlan) -> None:
    """torch.utils.checkpoint inside: the same gradients; with batch norm in it refused, as it counts batches twice."""
    train_beside(plan, Checkpointed)
    reference, model = both(plan, Checkpointed)
    x, y = batch()
    learn(reference.eval(), x, y)
    learn(model.eval(), mine(x), mine(y))
    same_grads(model, reference)
    refuse(plan, CheckpointedInEvaluation, "calls torch.utils.checkpoint with use_reentrant=True on tensors without")
    refuse(plan, CheckpointedNorm, "module 'norm' keeps running statistics inside of torch.utils.checkpoint")


def refuse(plan: AnyPlan, kind: Callable[..., nn.Module], text: str) -> None:
    refused(CaptureError, text, lambda: parallel(built(kind), plan))


class TensorHook(Parts):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        if maps.requires_grad:
            maps.register_hook(lambda grad: grad * 100)
        return self.scores(maps)


class ModuleHooks(Parts):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        if backward:
            self.b.register_full_backward_hook(lambda _module, grads, _results: grads)
        else:
            self.b.register_forward_hook(lambda _module, _args, result: result * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x))


def hooks_before(plan: AnyPlan) -> None:
    """Hooks that are there before parallelize, or put on a tensor in forward, are refused by their place."""
    refuse(plan, TensorHook, "the network puts a hook on a tensor at")
    refuse(plan, lambda: ModuleHooks(backward=True), "module 'b' has a backward hook")
    refuse(plan, lambda: ModuleHooks(backward=False), "module 'b' has a forward hook")


class Counting(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.scores(self.maps(x)) * self.passes


class Drawing(Parts):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x)) * self.draw()


class DrawingTensors(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x) + torch.randn((), dtype=x.dtype))


def python_state(plan: AnyPlan) -> None:
    """A counter or a schedule in forward, and random numbers that are not torch's, would be frozen: refused."""
    refuse(plan, Counting, "the network Counting changes its 'passes' in its forward pass")
    for draw in (random.random, lambda: float(numpy.random.rand())):  # noqa: NPY002
        refuse(plan, lambda draw=draw: Drawing(draw), "draws random numbers with Python, numpy or a seed of its own")
    refuse(plan, DrawingTensors, "draws random numbers by aten.randn.default, which ranks would draw differently")


class OfTheRank(Parts):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        return self.scores(maps if dist.get_rank() == 0 else maps * 2)


def networks_that_differ(plan: AnyPlan) -> None:
    """Code that does other things on other ranks."""
    refused(RunError, "rank 0 and rank 1 have different networks", lambda: parallel(built(OfTheRank), plan))


class OfTheValues(Parts):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        return self.scores(maps) if float(maps.detach().mean()) > 0 else self.scores(maps * 2)


def branch_on_values(plan: AnyPlan) -> None:
    """A branch on the values of a tensor is refused with its line."""
    refuse(plan, OfTheValues, "what it does next depends on the values of a tensor")


class Recurrent(Parts):
    """Reads its maps row by row."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rows = kind(6, 3, bidirectional=True, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.rows(self.maps(x).mean(3).transpose(1, 2))
        scores: Tensor = self.head(rows.mean(1))
        return scores


def recurrent(plan: AnyPlan) -> None:
    """nn.LSTM, nn.GRU and nn.RNN: whole on every rank; with dropout between their layers refused."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        train_beside(plan, partial(Recurrent, kind, num_layers=2))
    text = "draws random numbers by aten.lstm.input, which ranks would draw differently"
    refuse(plan, partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.5), text)


class Words(Parts):
    """Adds what it knows of some words to its scores."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        known: Tensor = self.words((x[:, 0, 0] > 0).long()).mean(1)
        return self.scores(self.maps(x)) + known


def sparse_gradients(plan: AnyPlan) -> None:
    """nn.Embedding as it is; with sparse=True refused."""
    train_beside(plan, partial(Words, False))
    refuse(plan, partial(Words, True), "layer 'words' asks for sparse gradients (sparse=True), which ranks cannot sum")


class ChangesInput(Parts):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.own else x
        x += 1
        return self.scores(self.maps(x))


def changed_input(plan: AnyPlan) -> None:
    """A network that changes its input in place, for its caller to see, is refused; a clone of it may be changed."""
    train_beside(plan, partial(ChangesInput, True))
    refuse(plan, partial(ChangesInput, False), "the network changes its input 'x' in place")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_capture(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
