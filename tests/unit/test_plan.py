"""Cuts and plans as values: what they mean, how they save, what they refuse."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.partition import DIMS, Cut
from shoal.plan import Plan, data_parallel

cuts = st.dictionaries(st.sampled_from(DIMS), st.integers(1, 12)).map(
    lambda degrees: Cut.parse("".join(f"{dim}{degree}" for dim, degree in degrees.items()) or "1")
)


@given(cuts)
def test_a_cut_reads_back_from_its_text(cut: Cut) -> None:
    assert Cut.parse(str(cut)) == cut


@pytest.mark.parametrize("text", ["", "n", "4", "n4 c2", "x2", "n2n2", "N2", "n0", "n-1", "n2,c2"])
def test_what_is_not_a_cut_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="cut"):
        Cut.parse(text)


@given(st.dictionaries(st.text(min_size=1), cuts))
def test_a_plan_reads_back_from_its_file(tmp_path_factory: pytest.TempPathFactory, layers: dict[str, Cut]) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = Plan(name="mine", ranks=12**6, layers=tuple(layers.items()))
    plan.save(path)
    assert Plan.load(path) == plan


def test_more_parts_than_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'fc' is cut n2c2, needing 4 ranks; the plan has 2"):
        Plan(name="mine", ranks=2, layers=(("fc", Cut.parse("n2c2")),))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read"),
        ("[]", "fields of a plan"),
        ('{"schema": "shoal.plan/9"}', "schema 'shoal.plan/9'"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": "2", "layers": {}}', "fields of a plan"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": 2, "layers": {}, "more": 1}', "fields of a plan"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": 2, "layers": {"*": "q2"}}', "'q2' is not a cut"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": 2, "layers": {"*": 4}}', "'4' is not a cut"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": true, "layers": {}}', "fields of a plan"),
        ('{"schema": "shoal.plan/1", "name": "a", "ranks": 0, "layers": {}}', "is for 0 ranks"),
        (
            '{"schema": "shoal.plan/1", "name": "a", "ranks": 2, "layers": {"*": "n4"}}',
            "needing 4 ranks; the plan has 2",
        ),
        (
            '{"schema": "shoal.plan/1", "name": "a", "ranks": 2, "layers": {"*": "n2", "*": "c2"}}',
            r"'\*' stands in it twice",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=named):
        Plan.load(path)


def test_a_pattern_that_stands_twice_is_its_last_line(tmp_path: Path) -> None:
    n2, c2 = Cut.parse("n2"), Cut.parse("c2")
    plan = Plan(name="mine", ranks=2, layers=(("*", n2), ("fc", c2), ("conv", c2), ("*", c2), ("fc", n2)))
    assert plan.layers == (("conv", c2), ("*", c2), ("fc", n2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.json' cannot be read(.|\n)*A plan is JSON"):
        Plan.load(tmp_path / "none.json")


def test_data_parallel_on_one_rank_leaves_layers_whole() -> None:
    assert data_parallel(1).layers == (("*", Cut()),)
    assert str(data_parallel(4).layers[0][1]) == "n4"
