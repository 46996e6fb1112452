"""What is said of runs follows from their numbers, and is not said where the numbers do not bear it."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.reporting.figures import Spread, figures_of, scaling_of, target_of
from shoal.reporting.plan_difference import difference_of
from shoal.reporting.records import Study, StudyRun, read_run, read_study
from shoal.reporting.verdict import headline, reasons
from shoal.reporting.waits import waits_of
from tests.reporting.folders import outline, trace, write_comparison, write_run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([write_comparison(tmp_path_factory.mktemp("verdict") / "cmp")])


def test_the_target_is_what_all_finished_runs_reach(study: Study) -> None:
    best = [max(point.accuracy for point in entry.run.tests) for entry in study.runs if entry.run.tests]
    target = target_of(study)
    assert target == 0.94
    assert target <= min(best) < target + 0.01
    assert target_of(replace(study, target=0.5)) == 0.5
    assert target_of(replace(study, runs=study.runs[-1:])) is None


def test_figures_are_medians_with_their_range(study: Study) -> None:
    owt = figures_of(study)[0]
    assert (owt.name, owt.asked, owt.finished, owt.reached) == ("owt", 2, 2, 2)
    assert owt.to_target is not None
    assert owt.to_target.values == pytest.approx([50 / 180, 50 / (180 * 0.97)])  # the fifth test of each seed
    assert owt.to_target.median == pytest.approx(sum(owt.to_target.values) / 2)
    assert owt.samples_to_target == Spread((3200, 3200))
    assert owt.in_turns
    assert owt.step_seconds is not None
    assert owt.step_seconds.median == pytest.approx(0.0056)
    assert owt.prediction_error == pytest.approx(0.0055 / 0.0056 - 1)
    assert owt.memory == (300 << 20, 310 << 20)
    ddp = figures_of(study)[2]
    assert (ddp.bytes_counted, ddp.bytes_predicted, ddp.step_seconds_predicted) == (None, None, None)


def test_the_headline_names_the_fastest_the_next_and_ddp(study: Study) -> None:
    assert headline(study) == "owt reaches 94% in 282.1 ms, 1.8 times as fast as data and 2.0 times as fast as ddp."
    told = reasons(study)
    assert "A step takes 5.6 ms with owt and 10.1 ms with data, timed in turns." in told
    assert "owt and data see as many samples until the target: 3,200." in told
    assert "data sends 367.6 KiB per step, owt 58.6 KiB." in told
    assert "spatial: 1 of 1 run did not finish; see below." in told
    assert len(told) == len(set(told))


def test_strategies_whose_seeds_overlap_are_called_level(tmp_path: Path) -> None:
    runs = []
    for strategy, paces in {"a": (100.0, 60.0), "b": (95.0, 58.0)}.items():
        for seed, pace in enumerate(paces):
            folder = write_run(tmp_path / f"{strategy}{seed}", seed=seed, pace=pace, strategy=strategy)
            runs.append(StudyRun(strategy, read_run(folder)))
    assert "level with b" in headline(Study("x", tuple(runs)))


def test_a_strategy_that_does_not_always_arrive_is_no_winner(tmp_path: Path) -> None:
    fast = [
        StudyRun("fast", read_run(write_run(tmp_path / "f0", pace=500.0))),
        StudyRun("fast", read_run(write_run(tmp_path / "f1", pace=500.0, accuracy=0.5, seed=1))),
    ]
    slow = StudyRun("slow", read_run(write_run(tmp_path / "s", pace=10.0)))
    study = Study("x", (*fast, slow), target=0.9)
    assert headline(study).startswith("slow reaches 90% in 4.0 s, the only strategy to get there")
    assert "fast reaches 90% with 1 of 2 seeds." in reasons(study)


def test_unfinished_runs_are_no_numbers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", finished=False))
    assert headline(Study("x", (StudyRun("a", run),))).startswith("The run a is not finished")
    both = Study("x", (StudyRun("a", run), StudyRun("b", run)))
    assert headline(both) == "No run of 2 has finished yet."
    assert all(each.samples_per_second is None for each in figures_of(both))


def test_speedup_is_beside_ddp_unless_there_is_a_baseline(study: Study) -> None:
    figures = figures_of(study)
    by_name = {each.name: each for each in scaling_of(study, figures)}
    assert by_name["ddp"].beside == "ddp"
    assert by_name["ddp"].speedup.median == pytest.approx(1.0)
    assert by_name["owt"].speedup.median == pytest.approx(2.0)
    assert by_name["owt"].efficiency == pytest.approx(2.0)  # as many workers
    assert scaling_of(replace(study, baseline="data"), figures)[0].beside == "data"


def test_two_plans_differ_where_they_cut_or_send_differently() -> None:
    told = difference_of(outline("data", "n2"), outline("owt", "c2"), ("data", "owt"))
    assert (told.compared, told.cut_differently) == (2, 1)
    (stage,) = told.stages
    assert (stage.name, stage.cuts, stage.bytes) == ("fc", ("n2", "c2"), (376_400, 60_000))
    assert told.bytes == (377_648, 61_248)
    assert difference_of(outline("a", "n2"), outline("b", "n2"), ("a", "b")).stages == ()


def test_who_waits_and_who_is_late() -> None:
    first, second = waits_of(trace())
    assert (first.rank, second.rank) == ("rank 0", "rank 1")
    assert first.share == pytest.approx(0.3)
    assert second.share == pytest.approx(0.1)
    assert (first.late, second.late, second.steps) == (0, 3, 3)
    assert waits_of(replace(trace(), slices=())) == []
