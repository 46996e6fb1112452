"""`shoal trace`: a table of recorded steps, Perfetto's page, and what is refused."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli import trace as trace_command
from shoal.timeline import Slice, Trace
from tests.cli.conftest import Shoal
from tests.tracing.pages import served

TRACE = Trace(
    title="a net, plan data",
    origin="measured",
    ranks=("rank 0", "rank 1"),
    slices=(
        Slice("step", 0, "step 6", 0.0, 0.5, "steps", 6),
        Slice("data", 0, "batch", 0.0, 0.1, "compute", 6),
        Slice("forward", 0, "pass", 0.1, 0.4, "compute", 6),
        Slice("wait", 0, "conv1", 0.2, 0.3, "compute", 6, peers=(1,)),
        Slice("step", 1, "step 6", 0.0, 0.5, "steps", 6),
        Slice("forward", 1, "pass", 0.0, 0.5, "compute", 6),
    ),
)


def test_a_table_says_where_steps_go(shoal_here: Shoal, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    TRACE.save(run / "trace.json")
    by_folder, by_file = shoal_here("trace", "show", "run"), shoal_here("trace", "show", "run/trace.json")
    assert by_folder.returncode == 0
    assert by_folder.stdout == by_file.stdout
    title, of_what, head, first, second, late = by_folder.stdout.splitlines()
    assert title == "a net, plan data"
    assert of_what == "measured, step 6; mean milliseconds of a step"
    assert head.split() == ["rank", "step", "data", "forward", "wait", "rest"]
    assert first.split() == ["rank", "0", "500.00", "100.00", "200.00", "100.00", "100.00"]
    assert second.split() == ["rank", "1", "500.00", "0.00", "500.00", "0.00", "0.00"]
    assert late == "Waited for most: rank 1, 100.0 ms of the others' time in a step."
    assert all(len(line) <= 80 for line in by_folder.stdout.splitlines())


def test_the_same_numbers_as_json(shoal_here: Shoal, tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    (told,) = json.loads(shoal_here("trace", "show", "trace.json", "--json").stdout)
    assert [rank["name"] for rank in told["ranks"]] == ["rank 0", "rank 1"]
    assert told["ranks"][0]["wait"] == pytest.approx(0.1)


@pytest.mark.parametrize("command", ["show", "open"])
def test_what_is_no_trace_is_refused_by_name(command: str, shoal_here: Shoal, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    for name, words in (
        ("empty", "the run in 'empty' has no trace."),
        ("nowhere.json", "trace 'nowhere.json' cannot be read"),
        ("other.json", "'other.json' is not a trace of shoal"),
    ):
        refused = shoal_here("trace", command, name)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert "--trace" in refused.stderr


def test_without_the_page_people_are_told_where_it_is(
    shoal_here: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TRACE.save(tmp_path / "trace.json")
    monkeypatch.setattr(trace_command, "PAGE", "not_installed_anywhere")
    refused = shoal_here("trace", "open", "trace.json")
    assert refused.returncode == 2
    assert "pip install 'shoal-train[trace]'" in refused.stderr
    assert "https://ui.perfetto.dev" in refused.stderr


def test_a_prediction_needs_a_run_and_speeds(shoal_here: Shoal, tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    alone = shoal_here("trace", "show", "trace.json", "--predicted")
    assert (alone.returncode, "has no config.yaml" in alone.stderr) == (2, True)
    for name in ("config.yaml", "plan.json", "inference.json"):
        (tmp_path / name).write_text("{}")
    without = shoal_here("trace", "show", "trace.json", "--predicted")
    assert (without.returncode, "--timings FILE" in without.stderr) == (2, True)
    replace(TRACE, origin="predicted").save(tmp_path / "predicted_trace.json")
    kept = shoal_here("trace", "show", "trace.json", "--predicted")
    assert (kept.returncode, "predicted, one step" in kept.stdout) == (0, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--trace", "0"], "trace = '0'"),
        (["--trace", "9-3"], "trace = '9-3'"),
        (["--trace", "recipe.yaml"], "recipe.yaml"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused(given: list[str], words: str, shoal_here: Shoal) -> None:
    refused = shoal_here("train", *given)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "a number of steps such as 10, or from-to such as 20-30" in refused.stderr


def test_trace_alone_is_ten_steps(shoal_here: Shoal) -> None:
    assert "trace: '10'" in shoal_here("train", "--trace", "--print-config").stdout
    assert "trace: null" in shoal_here("train", "--print-config").stdout


def test_a_page_is_for_this_machine_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("the page")
    with served(tmp_path, {"localtrace": b"{}"}) as address:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}/localtrace?x=1", timeout=30) as answer:
            assert answer.read() == b"{}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.read() == b"the page"
        strange = urllib.request.Request(address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(strange, timeout=30)
