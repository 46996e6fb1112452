"""docs/add_an_operator.md: its example is run as it stands, and it names everything that can be said."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from shoal.operators import base, registry
from shoal.operators.base import Facts, Rule
from shoal.partition import Cut
from tests.unit.operator_cases import Example, random

PAGE = (Path(__file__).parents[2] / "docs" / "add_an_operator.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, line, case = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {**vars(base), "Mapping": Mapping, "Tensor": Tensor}
    exec(rule, names)
    entry: dict[str, Rule] = eval(f"{{{line}}}", {"views": SimpleNamespace(**names)})
    example: Example = eval(case.strip().removeprefix("yield "), {"Example": Example, "random": random})
    assert example.rule is registry.WHOLE
    for word, one in entry.items():
        monkeypatch.setitem(registry._KNOWN, word, one)
    example = replace(example)  # a graph works out the rules of its layers once
    assert example.rule in entry.values()
    assert [axis.letter for axis in example.axes] == ["n", "c", "w"]
    for axis in example.axes:
        example.agrees(Cut.of(**{axis.letter: 2}), 3)


def test_every_fact_and_method_is_named() -> None:
    own = [name for kind in (Facts, Rule) for name in vars(kind) if not name.startswith("_")]
    assert [name for name in own if f"`{name}`" not in PAGE and f"`{name}(" not in PAGE] == []
