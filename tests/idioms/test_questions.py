"""What a network's own code asks about the call that it is in: answered as on one device, or refused."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.compiler import is_compiling, is_exporting
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
    close,
    learn,
    mine,
    name_of,
    parallel,
    refused,
    same_grads,
)
from tests.idioms.test_tensors import Parts

VARIABLE = "SHOAL_TEST_SCALE"
SCALE = ContextVar("scale", default=1.0)


class Asking(Parts):
    """Multiplies its scores by another prime for every answer."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x.double())
        answers = [
            torch.is_grad_enabled(),
            x.requires_grad,
            maps.requires_grad,
            x.dtype == torch.float32,
            x.is_contiguous(memory_format=torch.channels_last),
            torch.compiler.is_compiling(),
            torch.compiler.is_exporting(),
        ]
        scale = float(os.environ.get(VARIABLE, "1")) * SCALE.get()
        for answer, prime in zip(answers, (2, 3, 5, 7, 11, 13, 17), strict=True):
            scale *= prime if answer else 1
        return self.scores(maps) * scale


def about_the_call(plan: AnyPlan) -> None:
    """Gradients, types, strides, the environment: every answer is a variant of its own, of which none is forgotten."""
    reference, model = both(plan, Asking)
    x, y = batch()

    def same(form: Callable[[Tensor], Tensor] = torch.clone) -> None:
        close(model(form(mine(x))).detach(), mine(reference(form(x)).detach()))

    calls: list[tuple[AbstractContextManager[Any], Callable[[Tensor], Tensor]]] = [
        (nullcontext(), torch.clone),
        (torch.no_grad(), torch.clone),
        (nullcontext(), lambda t: t.clone().requires_grad_()),
        (nullcontext(), lambda t: t.float()),
        (nullcontext(), lambda t: t.contiguous(memory_format=torch.channels_last)),
        (patch.dict(os.environ, {VARIABLE: "3"}), torch.clone),
    ]
    for around, form in calls:
        with around:
            same(form)
    token = SCALE.set(5.0)
    same()
    SCALE.reset(token)
    for net in (reference, model):
        net.requires_grad_(False)
    same()
    for net in (reference, model):
        net.requires_grad_(True)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


class AskingForAutocast(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x)) * (2 if torch.is_autocast_enabled("cpu") else 1)


def about_autocast(plan: AnyPlan) -> None:
    """Refused where it is on, by the line that asks."""
    reference, model = both(plan, AskingForAutocast)
    x, _ = batch()
    close(model(mine(x)), mine(reference(x)))
    with torch.autocast("cpu", torch.bfloat16):
        refused(RunError, "whether torch.autocast is on, and was captured without it", lambda: model(mine(x)))
    close(model(mine(x)), mine(reference(x)))


class Catching(Parts):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.maps(x))
        try:
            return scores * float(scores.mean())
        except Exception:
            return scores


def caught_errors(plan: AnyPlan) -> None:
    """An error that only a capture meets must not choose the other branch."""
    refused(CaptureError, "the network catches an error of its capture at", lambda: parallel(built(Catching), plan))


class AskingByName(Parts):
    """By names of its own file: what torch has under them at the time of a capture is not what it calls."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (2 if is_grad_enabled() else 1) * (3 if is_compiling() else 1) * (5 if is_exporting() else 1)
        return self.scores(self.maps(x)) * scale


def by_imported_names(plan: AnyPlan) -> None:
    """`from torch.compiler import is_compiling`, `from torch import is_grad_enabled`."""
    reference, model = both(plan, AskingByName)
    x, y = batch()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))
    close(model(mine(x)), mine(reference(x)))


class AskingForInference(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x)) * (2 if torch.is_inference_mode_enabled() else 1)


class SwitchingOn(Parts):
    """Records gradients whatever its caller says."""

    def __init__(self, switch: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.a(x)
        with self.switch():
            maps = self.maps(x)
        return self.scores(maps + fixed)


def gradients_switched_on(plan: AnyPlan) -> None:
    """torch.enable_grad() in the network: nothing in a call with gradients, refused in one without."""
    x, y = batch()
    for switch in (torch.enable_grad, partial(torch.set_grad_enabled, True), partial(torch.inference_mode, False)):
        reference, model = both(plan, SwitchingOn, switch)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        same_grads(model, reference)
        with torch.no_grad():
            refused(CaptureError, "the network switches gradients on at", lambda net=model: net(mine(x)))  # type: ignore[misc]
        close(model(mine(x)), mine(reference(x)))
    reference, model = both(plan, AskingForInference)
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))
    text = "whether torch.inference_mode is on, and was captured without it"
    with torch.inference_mode():
        refused(RunError, text, lambda: model(mine(x)))


def _asking_loss(scores: Tensor, target: Tensor) -> Tensor:
    answers = [is_grad_enabled(), scores.requires_grad, torch.compiler.is_compiling(), VARIABLE in os.environ]
    scale = 1.0
    for answer, prime in zip(answers, (2, 3, 5, 7), strict=True):
        scale *= prime if answer else 1
    if target.is_floating_point():
        return F.mse_loss(scores[:, 0], target) * scale
    return F.cross_entropy(scores, target) * scale


def of_the_loss(plan: AnyPlan) -> None:
    """What `loss=` asks, and targets of another type."""
    x, y = batch()
    reference, model = built(), parallel(built(), plan, loss=_asking_loss)

    def same(target: Tensor, *, learns: bool) -> None:
        expected, found = _asking_loss(reference(x), target), model(mine(x), mine(target))
        total = found.detach().clone()
        torch.distributed.all_reduce(total)
        close(total / 2, expected.detach())
        if learns:
            torch.autograd.backward(expected)
            torch.autograd.backward(found)
            same_grads(model, reference)

    same(y, learns=True)
    with torch.no_grad():
        same(y, learns=False)
    with patch.dict(os.environ, {VARIABLE: "3"}):
        same(y, learns=True)
    for net in (reference, model):
        net.requires_grad_(False)
    same(y, learns=False)
    for net in (reference, model):
        net.requires_grad_(True)
    same(y.double(), learns=True)
    same(y, learns=True)


class _Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def modes_around(plan: AnyPlan) -> None:
    """What changes torch's functions, or what autograd keeps, would not see the network; save_on_cpu only moves it."""
    reference, model = both(plan)
    x, y = batch()
    with saved_tensors_hooks(lambda one: one * 2, lambda one: one):
        refused(RunError, "torch.autograd.graph.saved_tensors_hooks around a network", lambda: model(mine(x)))
    with _Doubled():
        refused(RunError, "a TorchFunctionMode (_Doubled) is around a network", lambda: model(mine(x)))
    with save_on_cpu():
        learn(model, mine(x), mine(y))
    learn(reference, x, y)
    same_grads(model, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_questions(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
