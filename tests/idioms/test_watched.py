"""What a script changes after parallelize in things that the network's code reads: it counts, or is refused."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

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
    rank,
    refused,
    same_grads,
)
from tests.idioms.test_tensors import Parts


class Kind(Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclass
class Options:
    scale: float = 1.0
    more: dict[str, Any] = field(default_factory=lambda: {"shifts": [0.0, 0.0]})
    rank: int = -1


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def times(value: Tensor, by: float = 1.0) -> Tensor:
    return value * by


class Watched(Parts):
    """Reads things of every kind."""

    width = 1.0
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"scale": 1.0, "inner": {"shift": 0.0}}
        self.steps = [1.0, 1.0]
        self.recent = deque([1.0])
        self.chosen = {"a"}
        self.options = Options()
        self.space = SimpleNamespace(bias=0.0)
        self.slotted = Slotted()
        self.kind = Kind.PLAIN
        self.array = numpy.ones(4)
        self.table = torch.ones(4, dtype=torch.float64)
        self.act: Callable[[Tensor], Tensor] = F.relu
        self.call: Callable[[Tensor], Tensor] = times
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.scores(self.maps(x))) * self.settings["scale"] + self.settings["inner"]["shift"]
        for step in self.steps:
            y = y * step
        if "b" in self.chosen:
            y = y + 5
        if self.kind is Kind.DOUBLE:
            y = y * 2
        y = y * self.options.scale + self.options.more["shifts"][1] + self.space.bias
        y = y * torch.from_numpy(self.array) * self.table * self.slotted.gain * self.recent[-1]
        return self.call(y) * self.width


def _doubled(self: Watched, x: Tensor) -> Tensor:
    result: Tensor = 2 * Watched.forward(self, x)
    return result


def everything_that_is_read(plan: AnyPlan) -> None:
    """Containers, objects, arrays, tensors, functions and forward itself: each counts from the next pass on."""
    changes: list[Callable[[Any], object]] = [
        lambda net: net.settings.update(scale=3.0),
        lambda net: net.settings["inner"].update(shift=0.5),
        lambda net: net.steps.append(2.0),
        lambda net: net.recent.append(0.5),
        lambda net: net.chosen.add("b"),
        lambda net: setattr(net.options, "scale", 0.25),
        lambda net: net.options.more["shifts"].__setitem__(1, 7.0),
        lambda net: setattr(net.space, "bias", -1.0),
        lambda net: setattr(net.slotted, "gain", 4.0),
        lambda net: setattr(net, "kind", Kind.DOUBLE),
        lambda net: net.array.__setitem__(2, 9.0),
        lambda net: net.table.mul_(3.0),
        lambda net: setattr(net, "table", torch.arange(4.0, dtype=torch.float64)),
        lambda net: setattr(net, "act", torch.tanh),
        lambda net: setattr(net, "act", lambda value: value + 1),
        lambda net: setattr(net, "call", lambda value, by=3.0: times(value, by)),
        lambda net: setattr(net, "forward", MethodType(_doubled, net)),
    ]
    reference, model = both(plan, Watched)
    x, y = batch()
    close(model(mine(x)), mine(reference(x)))
    before = reference(x)
    for number, change in enumerate(changes):
        change(reference)
        change(model.module)
        expected = reference(x)
        assert not torch.equal(expected, before), f"change {number} changes nothing"
        close(model(mine(x)), mine(expected))
        before = expected
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


FACTOR = 1.0
HOLDER: dict[str, Any] = {"factor": 1.0}


def scaled(value: Tensor) -> Tensor:
    result: Tensor = value * FACTOR * HOLDER["factor"]
    return result


class WithGlobals(Parts):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.scores(self.maps(x)))

    def finish(self, value: Tensor) -> Tensor:
        return scaled(value) * self.gain


def _tripled(self: WithGlobals, value: Tensor) -> Tensor:
    return 3 * self.gain * value


def classes_and_globals(plan: AnyPlan) -> None:
    """Class attributes, methods of classes and globals, also of functions that forward calls."""
    global FACTOR
    plain, changes = WithGlobals.finish, 0
    reference, model = both(plan, WithGlobals)
    x, _ = batch()
    before = reference(x)
    try:
        for changes in range(4):
            if changes == 0:
                FACTOR = 2.0
            elif changes == 1:
                HOLDER["factor"] = 3.0
            elif changes == 2:
                WithGlobals.gain = 5.0
            else:
                WithGlobals.finish = _tripled  # type: ignore[method-assign]
            expected = reference(x)
            assert not torch.equal(expected, before)
            close(model(mine(x)), mine(expected))
            before = expected
    finally:
        FACTOR, HOLDER["factor"], WithGlobals.gain = 1.0, 1.0, 1.0
        WithGlobals.finish = plain  # type: ignore[method-assign]


def _captures(model: Any) -> int:
    return len(model._caller.variants)


def captured_when_it_counts(plan: AnyPlan) -> None:
    """A setting that comes back finds its capture again; what no code reads costs none, and may differ by rank."""
    net = built(Watched)
    kept = net.settings
    net.options.rank = rank()
    model: Any = parallel(net, plan)
    x, _ = batch()
    model(mine(x))
    first = _captures(model)
    for step in range(3):
        model.module.history.append(float(step))
        model.module.options.rank = rank() + step
        model(mine(x))
    assert _captures(model) == first
    for _ in range(2):
        for scale in (2.0, 1.0):
            kept["scale"] = scale
            model(mine(x))
    assert _captures(model) == first + 1
    for _ in range(2):
        for act in (F.gelu, F.relu):
            model.act = act
            model(mine(x))
    assert _captures(model) == first + 2
    for _ in range(2):
        for value in (0.5, 1.0):
            model.module.table.fill_(value)
            model(mine(x))
    assert _captures(model) == first + 3


def settings_of_one_rank(plan: AnyPlan) -> None:
    """A change on one rank alone is refused on all, by name; when it is taken back, the network goes on."""
    reference, model = both(plan, Watched)
    x, _ = batch()
    if rank() == 0:
        model.settings["scale"] = 2.0
    refused(RunError, "settings['scale']=2.0 against settings['scale']=1.0", lambda: model(mine(x)))
    model.settings["scale"] = 1.0
    if rank() == 1:
        model.options.more["shifts"][0] = 2.0
    refused(RunError, "options.more['shifts']=list of 0.0, 0.0 against", lambda: model(mine(x)))
    model.options.more["shifts"][0] = 0.0
    if rank() == 1:
        model.act = F.gelu
    refused(RunError, "act=torch.nn.functional.relu against act=", lambda: model(mine(x)))
    model.act = F.relu
    if rank() == 1:
        model.table[1] = 0.0
    refused(RunError, "table=a tensor torch.float64 (4,)", lambda: model(mine(x)))
    model.table[1] = 1.0
    close(model(mine(x)), mine(reference(x)))


def hooks_on_all_modules(plan: AnyPlan) -> None:
    """Hooks of torch's on all modules there are."""
    reference, model = both(plan)
    x, _ = batch()
    for register in (torch_modules.register_module_forward_hook, torch_modules.register_module_full_backward_hook):
        handle = register(lambda *_: None)
        refused(RunError, "there is a hook on all modules", lambda: model(mine(x)))
        handle.remove()
    close(model(mine(x)), mine(reference(x)))


def parts_added(plan: AnyPlan) -> None:
    """A module, parameter or buffer that is added later nobody laid over the ranks."""
    reference, model = both(plan)
    x, _ = batch()
    parts: dict[str, Any] = {
        "extra": nn.Linear(2, 2), "scale": nn.Parameter(torch.ones(1)), "mask": nn.Buffer(torch.ones(1)),
    }  # fmt: skip
    for name, part in parts.items():
        setattr(model.module.norm, name, part)
        refused(RunError, f"'norm.{name}' was not there when the network was laid over", lambda: model(mine(x)))
        delattr(model.module.norm, name)
    mean, model.module.norm.running_mean = model.module.norm.running_mean, None
    refused(RunError, "buffer 'norm.running_mean' is gone, which was there", lambda: model(mine(x)))
    model.module.norm.running_mean = mean
    close(model(mine(x)), mine(reference(x)))


# The loss

SMOOTHING = 0.0


def smooth_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, label_smoothing=SMOOTHING)


def _beside(plan: AnyPlan, make: Callable[[], Any], changes: list[Callable[[Any], object]]) -> None:
    theirs, ours = make(), make()
    reference, model = built(Parts2), parallel(built(Parts2), plan, loss=ours)
    x, y = batch()
    for change in [lambda _: None, *changes]:
        change(theirs)
        change(ours)
        expected = theirs(reference(x), y)
        expected.backward()
        loss = model(mine(x), mine(y))
        loss.backward()
        same_grads(model, reference)


class Parts2(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x))


def changes_of_the_loss(plan: AnyPlan) -> None:
    """Attributes and tensors of a loss module, globals and closures of a loss function count too."""
    global SMOOTHING
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    _beside(
        plan,
        lambda: nn.CrossEntropyLoss(weight=weight.clone()),
        [
            lambda loss: setattr(loss, "label_smoothing", 0.2),
            lambda loss: loss.weight.mul_(torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=torch.float64)),
            lambda loss: setattr(loss, "weight", weight.flip(0)),
        ],
    )
    held = {"weight": 1.0}
    model = parallel(built(Parts2), plan, loss=lambda scores, target: smooth_loss(scores, target) * held["weight"])
    reference = built(Parts2)
    x, y = batch()
    try:
        for smoothing, scale in ((0.0, 1.0), (0.3, 1.0), (0.3, 2.0)):
            SMOOTHING, held["weight"] = smoothing, scale
            (smooth_loss(reference(x), y) * scale).backward()  # type: ignore[no-untyped-call]
            model(mine(x), mine(y)).backward()
            same_grads(model, reference)
        if rank() == 1:
            held["weight"] = 3.0
        refused(RunError, "'held'['weight']=2.0 against", lambda: model(mine(x), mine(y)))
    finally:
        SMOOTHING = 0.0


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores / self.temperature, target)


class WithForeignParameter(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.outside = [nn.Parameter(torch.ones(4, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.maps(x)) * self.outside[0]


def parameters_outside(plan: AnyPlan) -> None:
    """Parameters of the loss, or used without being registered, would get no gradient; frozen ones are constants."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def scaled_loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target) * scale

    for loss, text in ((Tempered(), "a parameter that learns, 'loss.temperature'"), (scaled_loss, "(return F.cross")):
        refused(CaptureError, text, lambda loss=loss: parallel(built(Parts2), plan, loss=loss))  # type: ignore[misc]
    refused(CaptureError, "a tensor that learns is used at", lambda: parallel(built(WithForeignParameter), plan))

    def frozen() -> Any:
        net = built(WithForeignParameter)
        net.outside[0].requires_grad_(False)
        return net

    reference: Any = frozen()
    model: Any = parallel(frozen(), plan)
    x, _ = batch()
    for net in (reference, model.module):
        net.outside[0].mul_(3.0)
    close(model(mine(x)), mine(reference(x)))


# What all ranks must have alike


class Shared(Parts):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.scores(self.maps(x)) + shift


def shared_inputs_that_differ(plan: AnyPlan) -> None:
    """An input without samples is the same on all ranks, or refused; so is the batch with io="whole"."""
    x, _ = batch()
    reference, model = built(Shared), parallel(built(Shared), plan, (x, torch.zeros(4, dtype=torch.float64)))
    shift = torch.arange(4.0, dtype=torch.float64)
    close(model(mine(x), shift), mine(reference(x, shift)))
    refused(RunError, "passed input 'shift', of which all must have the same,", lambda: model(mine(x), shift + rank()))
    whole = parallel(built(Parts2), plan, io="whole")
    close(whole(x), built(Parts2)(x))
    other, _ = batch(seed=rank())
    refused(RunError, "passed input 'x', of which all must have the same,", lambda: whole(other))
    large, _ = batch(size=(96, 64))
    close(whole(large), built(Parts2)(large))
    other, _ = batch(seed=rank(), size=(96, 64))
    refused(RunError, "passed input 'x', of which all must have the same,", lambda: whole(other))


def buffers_that_differ(plan: AnyPlan) -> None:
    """A buffer that is changed on one rank alone, or otherwise on each, is refused; changed on all it counts."""
    reference, model = both(plan)
    x, y = batch()
    for _ in range(2):
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
    with torch.no_grad():
        for net in (reference, model):
            net.norm.running_var.mul_(2.0)
            net.norm.running_mean = net.norm.running_mean + 1.0
            net.eval()
        close(model(mine(x)), mine(reference(x)))
        before = model.norm.running_mean.clone()
        if rank() == 1:
            model.norm.running_mean.fill_(7.0)
        refused(RunError, "changed the buffers [] against ['norm.running_mean", lambda: model(mine(x)))
        model.norm.running_mean.copy_(before)
        close(model(mine(x)), mine(reference(x)))
        model.norm.running_mean = torch.zeros(5)
        refused(RunError, "buffer 'norm.running_mean' has the shape (5,)", lambda: model(mine(x)))
        model.norm.running_mean = before
        close(model(mine(x)), mine(reference(x)))
        if not model._states.is_cut("norm.running_mean"):
            model.norm.running_mean.fill_(float(rank()))
            refused(RunError, "changed the buffers ['norm.running_mean", lambda: model(mine(x)))
    local: Any = parallel(built(), plan, batch_norm="local")
    for _ in range(2):
        local(mine(x))
        local.norm.running_mean.mul_(0.5)  # of this rank's own statistics


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_watched(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
