"""What a network's code can read: found by names, watched in every pass, told in the same words by every process."""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.capturing import capture
from shoal.capturing.sight import Sight, differing

LIMIT = 3.0
NAMES = {"one", "two", "three", "four"}


def limited(value: Tensor) -> Tensor:
    return value.clamp(max=LIMIT)


class Words(dict[str, float]):
    def half(self, name: str) -> float:
        return self[name] / self.divisor

    divisor = 2.0


class Config:
    """Settings with a method that reads one by another name."""

    def __init__(self) -> None:
        self.hidden, self.unread = 2.0, 0

    def factor(self) -> float:
        return self.hidden


class Reading(nn.Module):
    flags: Any = frozenset({"left", "right"})

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.config = Config()
        self.table: dict[str, Any] = {"weights": [1.0, 2.0], "rows": {0: torch.ones(3)}}
        self.log: list[float] = []
        self.words = Words(top=2.0)
        self.loop = SimpleNamespace(step=1.0)
        self.loop.back = self.loop
        self.hooked: Callable[[float], float] = lambda value: value * self.loop.step

    def forward(self, x: Tensor) -> Tensor:
        y = limited(self.layer(x)) * self.config.factor() + self.table["rows"][0] * self.table["weights"][1]
        result: Tensor = y * self.words.half("top") * self.hooked(self.loop.back.step) * len(NAMES & self.flags | NAMES)
        return result


class ByAnyName(Reading):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "sc" + "ale", 1.0)


def _set_limit(value: float) -> Callable[[Reading], object]:
    return lambda _: globals().__setitem__("LIMIT", value)


COUNTING: dict[str, tuple[Callable[[Reading], object], str]] = {
    "global": (_set_limit(4.0), "global tests.unit.test_sight.LIMIT"),
    "object": (lambda net: setattr(net.config, "hidden", 3.0), "config.hidden"),
    "list": (lambda net: net.table["weights"].append(3.0), "table['weights']"),
    "tensor": (lambda net: net.table["rows"][0].mul_(2), "table['rows'][0]"),
    "learning": (lambda net: net.table["rows"][0].requires_grad_(), "table['rows'][0]"),
    "attribute of a dict": (lambda net: setattr(net.words, "divisor", 4.0), "words.divisor"),
    "item of a dict": (lambda net: net.words.update(top=3.0), "words['top']"),
    "type": (lambda net: net.table["weights"].__setitem__(0, True), "table['weights']"),
    "cycle": (lambda net: setattr(net.loop, "step", 2.0), "loop.step"),
    "closure": (lambda net: setattr(net, "hooked", lambda value: value * 2), "hooked"),
    "class": (lambda net: setattr(net, "__class__", ByAnyName), "__class__"),
}


@pytest.mark.parametrize("case", COUNTING)
def test_what_code_reads_counts(case: str) -> None:
    change, label = COUNTING[case]
    net = Reading()
    sight = Sight(net)
    mark, said = sight.now()
    assert sight.now()[0] == mark
    try:
        change(net)
        changed, then = sight.now()
    finally:
        _set_limit(3.0)(net)
    assert changed != mark
    found = differing(said, then)
    assert found is not None
    assert found[0] == label


def test_what_no_code_reads_does_not_count() -> None:
    net = Reading()
    sight = Sight(net)
    mark, _ = sight.now()
    net.log.append(1.0)
    net.config.unread = 5
    assert sight.now()[0] == mark
    net.config.hidden = float("2.0")
    assert sight.now()[0] == mark, "an equal number is the same"


step = 0.0


class OfStep(nn.Module):
    """With an attribute whose name is that of a global, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SimpleNamespace(step=2.0)
        short_lived = Config()
        self.gone: Any = weakref.proxy(short_lived)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.inner.step if self.gone is not None else x
        return result


def test_globals_count_where_they_are_read_as_such() -> None:
    sight = Sight(OfStep())
    mark, _ = sight.now()
    try:
        globals()["step"] = 1.0
        assert sight.now()[0] == mark
    finally:
        globals()["step"] = 0.0


own_module: Any = ModuleType("own_module")
own_module.first, own_module.second, own_module.unread = 1.0, 2.0, 3.0


class OfModule(nn.Module):
    """Two methods read different globals of one Python module."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.more(x) * own_module.first
        return result

    def more(self, x: Tensor) -> Tensor:
        result: Tensor = x + own_module.second
        return result


def test_globals_of_other_modules_count_by_their_names() -> None:
    sight = Sight(OfModule())
    mark, _ = sight.now()
    own_module.unread = 4.0
    assert sight.now()[0] == mark
    for name in ("first", "second"):
        setattr(own_module, name, 9.0)
        changed, _ = sight.now()
        assert changed != mark
        mark = changed


def test_where_names_are_looked_up_every_one_counts() -> None:
    net = ByAnyName()
    sight = Sight(net)
    mark, _ = sight.now()
    net.log.append(1.0)
    assert sight.now()[0] != mark


def test_a_loss_is_watched_too() -> None:
    held = {"weight": 1.0}
    loss: Any = nn.CrossEntropyLoss(weight=torch.ones(3))

    smoothed = partial(F.cross_entropy, label_smoothing=0.1)

    def own(scores: Tensor, target: Tensor) -> Tensor:
        return (scores - target).sum() * held["weight"]

    for sight, change in (
        (Sight(Reading(), own), lambda: held.update(weight=2)),
        (Sight(Reading(), loss), lambda: setattr(loss, "label_smoothing", 0.1)),
        (Sight(Reading(), loss), lambda: loss.weight.mul_(2)),
        (Sight(Reading(), smoothed), lambda: smoothed.keywords.update(label_smoothing=0.3)),
    ):
        mark, _ = sight.now()
        change()
        assert sight.now()[0] != mark


def test_a_capture_leaves_every_attribute_the_object_that_it_was() -> None:
    net = Reading()
    table, inner, sight = net.table, net.table["weights"], Sight(net)
    mark, _ = sight.now()
    capture(net, torch.zeros(2, 3))
    assert net.table is table
    assert net.table["weights"] is inner
    assert sight.now()[0] == mark


def test_every_process_says_the_same() -> None:
    code = "import torch; torch.manual_seed(0)\nfrom tests.unit.test_sight import Reading, Sight\n"
    code += "print(Sight(Reading()).now()[1])"
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert "config.hidden" in said[0]
