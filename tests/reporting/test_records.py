"""Folders are read as they are: finished, going on, damaged, failed; only a path that has no run is refused."""

import json
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.reporting.records import read_run, read_study
from tests.reporting.folders import write_comparison, write_run


def test_a_finished_run_is_read_with_all_its_files(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", cut="c2", predicted=0.01, traced=True, seed=3))
    assert (run.state, run.problems, run.seed, run.clock) == ("finished", (), 3, "training")
    assert [point.step for point in run.tests] == [10, 20, 30, 40, 50, 60]
    assert [point.seconds for point in run.steps] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert run.steps[0].samples == 640
    assert run.outline is not None
    assert run.trace is not None
    assert run.result is not None


def test_time_between_tests_is_shared_out_and_beyond_them_the_steps_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", finished=False)
    step = {"event": "steps", "loss": 1.0, "lr": 0.1, "samples_per_sec": 64.0, "step_time_ms": 1000.0}
    test = {"event": "test", "test_loss": 1.0, "test_accuracy": 0.5}
    lines = [
        {**step, "step": 5},
        {**test, "step": 10, "wall_seconds": 20.0},
        {**step, "step": 12},
        {**step, "step": 14},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.clock == "wall"  # no test says what training alone took
    assert [point.seconds for point in run.steps] == [10.0, 22.0, 24.0]
    assert [point.samples for point in run.steps] == [5 * 64, 12 * 64, 14 * 64]


def test_a_run_that_goes_on_is_named_so(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", finished=False))
    assert (run.state, run.result) == ("unfinished", None)
    assert "after step 60" in run.why
    assert run.problems == ()


def test_what_is_damaged_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", cut="c2", traced=True)
    (folder / "outline.json").write_text('{"plan": "x"')
    (folder / "trace.json").write_text("[]")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "steps", "st')
    run = read_run(folder)
    assert run.state == "finished"
    assert len(run.tests) == 6
    told = " ".join(run.problems)
    assert all(name in told for name in ("outline.json", "trace.json", "metrics.jsonl"))
    assert "1 line is not whole" in told
    (folder / "result.json").write_text('{"schema": "shoal.result/1"}')
    (folder / "config.yaml").write_text("- [")
    run = read_run(folder)
    assert run.state == "unreadable"
    assert "config.yaml" in " ".join(run.problems)


def test_a_comparison_has_its_cells_whatever_became_of_them(tmp_path: Path) -> None:
    study = read_study([write_comparison(tmp_path / "cmp")])
    assert study.strategies == ("owt", "data", "ddp", "downpour", "spatial", "local")
    assert {run.state for run in study.of("owt")} == {"finished"}
    (failed,), (waiting,) = study.of("spatial"), study.of("local")
    assert (failed.state, failed.why) == ("failed", "rank 1 <b>died</b>.")
    assert waiting.state == "waiting"
    assert study.command is not None
    assert len(study.turns["owt"]) == 8


def test_runs_beside_each_other_share_a_strategy_where_only_seeds_differ(tmp_path: Path) -> None:
    for name, how in {
        "a": {"seed": 0},
        "b": {"seed": 1},
        "c": {"strategy": "owt", "settings": {"plan": "owt"}},
        "d": {"replicas": 2},
    }.items():
        write_run(tmp_path / name, **how)  # type: ignore[arg-type]
    every = read_study([tmp_path])
    assert [entry.strategy for entry in every.runs] == ["data", "data", "owt", "downpour"]
    write_run(tmp_path / "e", settings={"lr": 0.5})
    assert read_study([tmp_path / "a", tmp_path / "e"]).strategies == ("a", "e")  # both `data`, and not alike


@pytest.mark.parametrize("what", ["nothing", "empty", "file"])
def test_a_path_without_a_run_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("")
    with pytest.raises(InputError, match=what):
        read_study([path])
