"""docs/operators.md says what the rules say, and every cell of it is run."""

from collections.abc import Iterator

import pytest
import torch

from scripts.operator_table import FILE, render
from shoal.operators.registry import WHOLE, words_with_rules
from shoal.partition import Cut
from tests.unit.operator_cases import EXAMPLES, WITHOUT_RULE, Example, quick_ranks


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick_ranks():
        yield


CELLS = [(example, axis.letter) for example in EXAMPLES for axis in example.axes]


def test_the_file_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "python -m scripts.operator_table"


def test_every_operator_with_a_rule_is_in_the_table() -> None:
    assert {example.word for example in EXAMPLES} == words_with_rules()
    assert all(hasattr(torch.ops.aten, word) for word in words_with_rules())


def test_operators_stand_where_they_belong() -> None:
    assert [example.op for example in EXAMPLES if example.rule is WHOLE or not example.axes] == []
    assert [example.op for example in WITHOUT_RULE if example.rule is not WHOLE] == []


@pytest.mark.parametrize(("example", "letter"), CELLS, ids=[f"{e.op}{e.note and '*'}-{letter}" for e, letter in CELLS])
def test_every_cell_is_exact(example: Example, letter: str) -> None:
    """Cut along that axis alone, on more ranks than there are parts."""
    example.agrees(Cut.of(**{letter: 2}), 3)


@pytest.mark.parametrize("example", WITHOUT_RULE, ids=lambda example: example.op)
def test_operators_without_a_rule_are_exact(example: Example) -> None:
    example.agrees(Cut(), 3)
