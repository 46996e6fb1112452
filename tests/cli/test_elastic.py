"""Runs that go on with the workers that are left, and grow again: always the run of one device."""

import random
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from shoal.training.run_folder import RunFolder
from tests.cli.commands import begin
from tests.cli.conftest import Shoal
from tests.cli.test_kills import kill_all, rank_of, wait_for
from tests.cli.test_train import metrics_of, result_of

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(300),
]
IN_FLOAT64 = """
from torch import nn


class Wide(nn.Module):
    def __init__(self, classes, norm):
        super().__init__()
        middle = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), middle, nn.ReLU(), nn.Flatten(), nn.Linear(144, classes)).double()

    def forward(self, x):
        return self.net(x.double())


def net(classes, norm=True):
    return Wide(classes, norm)
"""
SETTINGS = ["train", "--model", "mine:net", "--batch", "12", "--lr", "0.002", "--log-every", "1", "--threads", "1"]
SETTINGS += ["--eval-every", "500"]


def losses_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics_of(folder) if line["event"] == "steps"}


def assert_same_run(one: Path, many: Path, *, lines_lost: int) -> None:
    ours, theirs = losses_of(many), losses_of(one)
    assert ours.keys() <= theirs.keys()
    assert len(theirs) - len(ours) <= lines_lost
    for step, loss in ours.items():
        assert loss == pytest.approx(theirs[step], rel=1e-9), step
    weights, expected = (load_file(folder / "model.safetensors") for folder in (many, one))
    for name, tensor in expected.items():
        assert (weights[name] - tensor).abs().max() < 1e-9, name
    counts = ("steps", "samples", "samples_left_out", "samples_repeated")
    assert {name: result_of(many)[name] for name in counts} == {name: result_of(one)[name] for name in counts}


def test_a_run_shrinks_and_grows_and_stays_the_run_of_one_device(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    settings = [*SETTINGS, "--data", tiny, "--epochs", "250", "--checkpoint-every", "500epochs"]
    one, many = tmp_path / "one", tmp_path / "many"
    assert shoal(*settings, "--out", "one").returncode == 0
    run = begin(tmp_path, "shoal", *settings, "--out", "many", "--elastic", "2:3:0.5")
    try:
        wait_for(lambda: many.exists() and len(losses_of(many)) > 20, run)
        victim = random.randrange(3)
        family = psutil.Process(run.pid).children(recursive=True)
        rank_of(run, victim).kill()
        printed = run.communicate(timeout=200)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    assert psutil.wait_procs(family, timeout=10)[1] == []
    shrunk, grown = result_of(many)["went_on"]
    assert (shrunk["lost"], shrunk["workers_before"], shrunk["workers_after"]) == ([victim], 3, 2)
    assert (grown["lost"], grown["workers_before"], grown["workers_after"]) == ([], 2, 3)
    assert shrunk["samples_again"] == 0, "the survivors had all of it"
    assert shrunk["seconds_to_notice"] >= 0
    assert shrunk["seconds_to_go_on"] > 0
    assert grown["step"] > shrunk["step"] >= 20
    assert f"Going on with 2 workers after step {shrunk['step']}." in printed[0]
    assert f"Going on with 3 workers after step {grown['step']}." in printed[0]
    assert result_of(many)["workers"] == 3
    assert_same_run(one, many, lines_lost=1)


@pytest.mark.parametrize(
    "kind",
    [
        ["--exchange", "allreduce"],
        pytest.param(["--exchange", "sync"], marks=pytest.mark.thorough),
        pytest.param(["--plan", "model"], marks=pytest.mark.thorough),
    ],
    ids=lambda kind: kind[1],
)
def test_without_the_whole_state_it_goes_on_from_a_checkpoint(
    kind: list[str], shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    settings = [*SETTINGS, "--model-options", "norm=false", "--data", tiny, "--epochs", "40"]
    one, many = tmp_path / "one", tmp_path / "many"
    assert shoal(*settings, "--out", "one").returncode == 0
    settings += [*kind, "--checkpoint-every", "5steps", "--elastic", "1:3:600", "--out", "many"]
    run = begin(tmp_path, "shoal", *settings)
    try:
        wait_for(lambda: many.exists() and len(losses_of(many)) > 12, run)
        time.sleep(random.uniform(0, 0.1))
        rank_of(run, 2).kill()
        printed = run.communicate(timeout=200)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    (shrunk,) = RunFolder(many).went_on
    assert (shrunk.lost, shrunk.workers_after) == ([2], 2)
    assert shrunk.step % 5 == 0
    assert shrunk.checkpoint == f"step-{shrunk.step:08d}"
    assert shrunk.samples_again is not None
    assert 0 <= shrunk.samples_again // 12 <= 10
    assert_same_run(one, many, lines_lost=0)


@pytest.mark.parametrize(
    "kind",
    [
        ["--exchange", "allreduce", "--elastic", "1:2:600"],
        pytest.param(["--exchange", "allreduce", "--restarts", "1", "--replicas", "2"], marks=pytest.mark.thorough),
        pytest.param(["--exchange", "sync", "--elastic", "1:2:600"], marks=pytest.mark.thorough),
        pytest.param(["--plan", "model", "--elastic", "1:2:600"], marks=pytest.mark.thorough),
        pytest.param(["--plan", "spatial", "--elastic", "1:2:600"], marks=pytest.mark.thorough),
    ],
    ids=lambda kind: f"{kind[1]}{kind[2]}",
)
def test_a_frozen_worker_is_the_lost_one_and_the_run_goes_on(
    kind: list[str], shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    """Whoever waits for it is the first to end, and is not lost."""
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    settings = [*SETTINGS, "--model-options", "norm=false", "--data", tiny, "--epochs", "80"]
    one, many = tmp_path / "one", tmp_path / "many"
    assert shoal(*settings, "--out", "one").returncode == 0
    heartbeat = ["--exchange-options", "heartbeat=0.5"] if "--exchange" in kind else []
    settings += [*kind, *heartbeat, "--checkpoint-every", "5steps", "--timeout", "6", "--out", "many"]
    run = begin(tmp_path, "shoal", *settings)
    try:
        wait_for(lambda: (many / "metrics.jsonl").exists() and len(losses_of(many)) > 12, run)
        victim = rank_of(run, 1)
        victim.suspend()
        family = psutil.Process(run.pid).children(recursive=True)
        wait_for(lambda: victim.status() == psutil.STATUS_STOPPED, run)
        wait_for(lambda: RunFolder(many).restarts > 0, run)
        assert not victim.is_running(), "the frozen one is left"
        printed = run.communicate(timeout=200)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    assert psutil.wait_procs(family, timeout=10)[1] == []
    (change,) = RunFolder(many).went_on
    assert (change.lost, change.workers_after) == ([1], 2 if "--restarts" in kind else 1)
    assert change.seconds_to_notice is not None
    assert change.seconds_to_notice > 3
    assert re.search(r"(rank|replica) 1 (gives no sign of life|gave no sign of life|did not answer)", change.why)
    assert "replica 0 was lost" not in printed[0]
    assert "Traceback" not in "".join(printed)
    assert_same_run(one, many, lines_lost=0)
