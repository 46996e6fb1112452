"""docs/from_ddp.md: every row is backed by a case, every case stands in a row, and refusals are told as they are."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.idioms.kit import Case, cases_of, name_of

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "from_ddp.md"


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables, without heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "idiom"]


def known() -> dict[str, Case]:
    """Every case, by topic and name."""
    files = sorted(path.stem for path in HERE.glob("test_*.py") if path.stem != Path(__file__).stem)
    modules = [import_module(f"tests.idioms.{file}") for file in files]
    return {
        f"{module.__name__.rpartition('test_')[2]}.{name_of(case)}": case
        for module in modules
        for case in cases_of(vars(module))
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_has_its_test(row: list[str]) -> None:
    assert len(row) == 4, row
    _, answer, call, tests = row
    assert answer in ("as DDP", "own call", "refused")
    names = re.findall(r"`([\w.]+)`", tests)
    assert names
    sources = "".join(inspect.getsource(known()[name]) for name in names)
    for message in re.findall(r'"([^"]+)"', call) if answer == "refused" else []:
        assert message in sources.replace('"\n        "', ""), f"no test asserts {message!r}"


def test_every_case_has_its_row() -> None:
    named = {name for row in rows() for name in re.findall(r"`([\w.]+)`", row[3])}
    assert sorted(set(known()) - named) == []
