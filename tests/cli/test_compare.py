"""`shoal compare`: real runs of a small network, a run that fails, a stop and the way on."""

import json
import signal
import sys
from pathlib import Path

import pytest

from shoal.comparison import Comparison
from tests.cli.commands import begin
from tests.cli.conftest import Shoal
from tests.cli.test_train import metrics_of, result_of, stop_during_training
from tests.cli.test_workers import losses

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(400),
]

MINE = (
    "from torch import nn\n"
    "def net(classes):\n"
    "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))\n"
)
NET = ["--model", "mine:net", "--batch", "8", "--log-every", "3"]
FOR_NO_LAYER = {"schema": "shoal.plan/1", "name": "mine", "ranks": 2, "layers": {"nothing": "n2"}}


def test_strategies_beside_each_other_and_one_that_fails(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "for_no_layer.json").write_text(json.dumps(FOR_NO_LAYER))
    (tmp_path / "broken.yaml").write_text("workers: 2\nplan: ./for_no_layer.json\n")
    command = ["compare", "broken.yaml", "--plans", "data,ddp,fsdp2", "--exchanges", "none,downpour", "--rounds", "2"]
    command += ["--data", tiny, *NET, "--workers", "2", "--epochs", "2", "--out", "all"]
    run = shoal(*command)
    assert run.returncode == 1, run.stderr
    assert "names 'nothing', which matches no layer" in run.stderr
    assert "shoal compare --resume all" in run.stderr
    assert "broken, seed 0: FAILED" in run.stdout
    assert "Traceback" not in run.stderr
    table = run.stdout[run.stdout.index("strategy ") :].splitlines()
    assert max(map(len, table)) <= 80

    comparison = Comparison.load(tmp_path / "all")
    states = {cell.strategy: cell.state for cell in comparison.cells}
    good = ["one worker", "data", "downpour", "ddp", "fsdp2"]
    assert states == {**dict.fromkeys(good, "done"), "broken": "failed"}
    assert comparison.step_seconds.keys() == set(good)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in comparison.step_seconds.values())
    assert comparison.left_out == {"broken": "it failed"}
    folders = {cell.strategy: tmp_path / "all" / cell.folder for cell in comparison.cells}
    results = {name: result_of(folders[name]) for name in good}
    assert {result["samples"] for result in results.values()} == {160}
    assert losses(folders["ddp"]) == pytest.approx(losses(folders["data"]), rel=1e-4)
    assert losses(folders["fsdp2"]) == pytest.approx(losses(folders["data"]), rel=1e-4)
    assert results["ddp"]["test_loss"] == pytest.approx(results["data"]["test_loss"], rel=1e-3)
    assert results["ddp"]["bytes_per_step"] == {"predicted": None, "counted": None}
    for name in good:
        tests = [line for line in metrics_of(folders[name]) if line["event"] == "test"]
        # Of tests that fall due while a replica tests, an asynchronous run makes the last alone.
        assert len(tests) >= (2 if name == "downpour" else 5), name
        assert tests[-1]["samples"] == 160, name
        assert 0 < tests[0]["train_seconds"] < tests[-1]["train_seconds"] <= tests[-1]["wall_seconds"], name
    page = (tmp_path / "all" / "report.html").read_text()
    assert "matches no layer" in page

    finished = {name: (folders[name] / "result.json").stat().st_mtime_ns for name in good}
    again = shoal("compare", "--resume", "all", "--json")
    assert again.returncode == 1
    told = json.loads(again.stdout)
    assert [name for name, _ in told["table"]["rows"]] == list(states)
    assert finished == {name: (folders[name] / "result.json").stat().st_mtime_ns for name in good}
    other = shoal(*command, "--lr", "0.01")
    assert other.returncode == 2
    assert "holds another comparison" in other.stderr


def test_a_comparison_that_is_stopped_goes_on(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    command = ["compare", "--plans", "ddp,data", "--no-baseline", "--data", tiny, *NET, "--workers", "2"]
    command += ["--epochs", "40", "--eval-steps", "300", "--eval-every", "40", "--rounds", "0", "--out", "all"]
    process = begin(tmp_path, "shoal", *command)
    try:
        stop_during_training(process, tmp_path / "all" / "ddp-seed0" / "metrics.jsonl", signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "stopped after 0 of 2 runs" in stderr
    assert "shoal compare --resume all" in stderr
    assert not (tmp_path / "all" / "ddp-seed0" / "result.json").exists()
    before = losses(tmp_path / "all" / "ddp-seed0")

    run = shoal("compare", "--resume", "all")
    assert run.returncode == 0, run.stderr
    assert "ddp, seed 0: goes on from its checkpoint" in run.stdout
    assert "data, seed 0: starts anew" in run.stdout
    after = losses(tmp_path / "all" / "ddp-seed0")
    assert after[: len(before)] == before
    assert len(after) == len(losses(tmp_path / "all" / "data-seed0"))
    assert result_of(tmp_path / "all" / "ddp-seed0")["samples"] == 40 * 80


def test_each_strategy_takes_its_best_rate(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    command = ["compare", "--plans", "data", "--no-baseline", "--workers", "1", "--rates", "1e20,0.05"]
    run = shoal(*command, "--data", tiny, *NET, "--epochs", "1", "--out", "all")
    assert run.returncode == 0, run.stderr
    assert "data takes lr 0.05, of 1e+20: diverged, 0.05: 0." in run.stdout
    comparison = Comparison.load(tmp_path / "all")
    assert comparison.rates["data"]["1e+20"] is None
    assert comparison.cells[0].settings["lr"] == 0.05
    assert "lr: 0.05" in (tmp_path / "all" / "data-seed0" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plans", "dat"], ["there is no plan 'dat'", "Did you mean 'data'"]),
        (["--plans", "2x2", "--workers", "2"], ["plan '2x2' needs 4 ranks"]),
        (["--exchanges", "downpuor"], ["there is no exchange 'downpuor'", "Did you mean 'downpour'"]),
        (["--data", "nothing"], ["no data set is named 'nothing'"]),
        (["--seeds", "a"], ["seeds"]),
        (["--resume", "nowhere"], ["no comparison can be read from 'nowhere'"]),
        (["--resume", "nowhere", "--lr", "1"], ["takes all settings from 'nowhere', and --lr is given too"]),
        (["nowhere.yaml"], ["there is no recipe 'nowhere.yaml'"]),
        (["--plan", "data"], ["--plans"]),
    ],
)
def test_refusals(shoal_here: Shoal, arguments: list[str], named: list[str], tmp_path: Path) -> None:
    run = shoal_here("compare", *arguments)
    assert run.returncode == 2
    for text in named:
        assert text in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "runs").exists()
