"""Runs whose processes are killed: nothing is lost but steps since the last checkpoint; some go on by themselves."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.checkpoints.kills import differences
from shoal.training.run_folder import RunFolder
from tests.cli.commands import Begun, begin
from tests.cli.conftest import Shoal
from tests.cli.test_train import WITH_DROPOUT, result_of
from tests.replicas.worlds import free_port

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(300),
]
NET = ["--model", "mine:net", "--batch", "8", "--log-every", "3", "--seed", "5", "--threads", "1", "--ema", "0.9"]


def wait_for(condition: Callable[[], bool], run: Begun) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def newest(out: Path) -> int:
    checkpoints = RunFolder(out).checkpoints.all()
    return checkpoints[-1].steps if checkpoints else 0


def reached(out: Path, steps: int) -> bool:
    return newest(out) >= steps


def kill_all(run: Begun) -> None:
    """The command and all that it started, as when a machine is lost."""
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait(60)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.parametrize("workers", [[], ["--workers", "2", "--plan", "model"]], ids=["alone", "cut over two"])
def test_killed_while_it_saves_a_run_goes_on_bit_for_bit(
    workers: list[str], shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    settings = ["train", "--data", tiny, *NET, *workers, "--epochs", "12", "--eval-every", "12"]
    assert shoal(*settings, "--checkpoint-every", "12epochs", "--out", "whole").returncode == 0
    draw, out = random.Random(0), tmp_path / "struck"
    saving = [*settings, "--checkpoint-every", "1step", "--out", "struck", "--resume", "auto"]
    for _ in range(2):
        enough, run = newest(out) + 1, begin(tmp_path, "shoal", *saving)
        try:
            wait_for(partial(reached, out, enough), run)
            time.sleep(draw.uniform(0, 0.05))
        finally:
            kill_all(run)
        assert RunFolder(out).checkpoints.newest_whole()[1] == [], "a checkpoint is damaged"
    assert 0 < newest(out) < 120
    last = shoal(*saving)
    assert last.returncode == 0, last.stderr
    assert differences(tmp_path / "whole", out) == []
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def rank_of(run: Begun, number: int) -> psutil.Process:
    return next(
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if process.name() == f"shoal rank {number}"
    )


@pytest.mark.parametrize(
    "kind",
    [["--workers", "2"], pytest.param(["--replicas", "2", "--exchange", "sync"], marks=pytest.mark.thorough)],
    ids=["plan", "sync"],
)
def test_a_run_that_loses_a_worker_goes_on_by_itself(kind: list[str], tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out = tmp_path / "o"
    settings = ["train", "--data", tiny, *NET[:-2], *kind, "--epochs", "40", "--eval-every", "40", "--out", "o"]
    run = begin(tmp_path, "shoal", *settings, "--checkpoint-every", "2steps", "--restarts", "1")
    try:
        wait_for(partial(reached, out, 5), run)
        rank_of(run, 1).kill()
        printed = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    assert "Going on from the last checkpoint; 0 of the restarts are left." in printed[0]
    result = result_of(out)
    assert (result["steps"], result["samples"], result["restarts"]) == (400, 3200, 1)


@pytest.mark.parametrize(
    "exchange", ["downpour", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gossip", "local", "easgd"))]
)
def test_in_the_place_of_a_lost_replica_another_is_started_as_often_as_was_said(
    exchange: str, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out = tmp_path / "o"
    settings = ["train", "--data", tiny, *NET[:-2], "--replicas", "2", "--exchange", exchange, "--epochs", "4000"]
    run = begin(tmp_path, "shoal", *settings, "--eval-every", "4000", "--out", "o", "--restarts", "1")

    def told(event: str) -> list[int]:
        if not (out / "metrics.jsonl").exists():
            return []
        whole = (out / "metrics.jsonl").read_text().rpartition("\n")[0]
        return [line["replica"] for line in map(json.loads, whole.splitlines()) if line["event"] == event]

    try:
        wait_for(lambda: sorted(told("joined")) == [0, 1], run)
        rank_of(run, 1).kill()
        wait_for(lambda: told("lost") == [1] and told("joined")[2:] == [2], run)
        rank_of(run, 2).kill()  # the second is one too many
        wait_for(lambda: told("lost") == [1, 2], run)
        time.sleep(1)
        family = psutil.Process(run.pid).children(recursive=True)
        assert not [process for process in family if process.name() == "shoal rank 3"]
        run.send_signal(signal.SIGINT)
        printed = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 130, printed
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert told("replaced") == [1]
    assert printed[0].count("another is started in the place of replica 1 (--restarts)") == 1
    assert RunFolder(out).replaced == 1
    more = begin(tmp_path, "shoal", "train", "--resume", "o", "--epochs", str(newest(out) // 10 + 2), "--restarts", "0")
    assert (more.communicate(timeout=120), more.returncode)[1] == 0
    result = result_of(out)
    assert result["samples"] == result["steps"] * 4
    told_in_result = [(event["what"], event["who"]) for event in result["exchanged"]["events"]]
    assert told_in_result[:6] == [*told_in_result[:2], ("lost", 1), ("replaced", 1), ("joined", 2), ("lost", 2)]


def conductor_of(run: Begun) -> psutil.Process | None:
    family = psutil.Process(run.pid).children(recursive=True)
    return next((process for process in family if process.name() == "shoal conductor"), None)


@pytest.mark.parametrize(
    "kind",
    [
        ["--exchange", "downpour"],
        pytest.param(["--exchange", "local"], marks=pytest.mark.thorough),
        pytest.param(["--exchange", "allreduce"], marks=pytest.mark.thorough),
        pytest.param(["--exchange", "sync", "--exchange-options", "servers=processes"], marks=pytest.mark.thorough),
    ],
    ids=lambda kind: kind[1],
)
def test_a_run_whose_conductor_is_killed_goes_on_by_itself(kind: list[str], tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out, draw = tmp_path / "o", random.Random()
    settings = ["train", "--data", tiny, *NET[:-2], "--replicas", "2", *kind, "--epochs", "60", "--eval-every", "60"]
    run = begin(tmp_path, "shoal", *settings, "--out", "o", "--checkpoint-every", "4steps", "--restarts", "1")
    try:
        wait_for(partial(reached, out, 10), run)
        shared = json.loads((out / "meeting.json").read_text())["shared"]
        time.sleep(draw.uniform(0, 0.3))
        conductor = conductor_of(run)
        assert conductor is not None, "there is none to kill"
        family = [conductor, *conductor.children(recursive=True)]
        conductor.kill()
        assert psutil.wait_procs(family, timeout=30)[1] == [], "processes are left"
        assert shared is None or not Path(shared).exists(), "shared memory is left"
        printed = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    assert printed[0].count("the conductor was killed by signal SIGKILL.") == 1
    result = result_of(out)
    steps = 1200 if kind[1] in ("downpour", "local") else 600
    assert (result["steps"], result["samples"], result["restarts"]) == (steps, 4800, 1)
    assert result["samples_repeated"] == result["samples_left_out"] == 0


def test_torchrun_restarts_a_run(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out = tmp_path / "o"
    settings = ["train", "--data", tiny, *NET, "--epochs", "20", "--eval-every", "20", "--out", "o"]
    torchrun = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2", "-m", "shoal"]
    run = begin(
        tmp_path, "torch.distributed.run", *torchrun, *settings, "--checkpoint-every", "2steps", "--resume", "auto"
    )
    try:
        wait_for(partial(reached, out, 5), run)
        ranks = [child for child in psutil.Process(run.pid).children() if "shoal" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        printed = run.communicate(timeout=150)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 0, printed
    assert "going on with the run in o" in printed[0]
    assert result_of(out)["steps"] == 200


def test_torchrun_goes_on_with_the_nodes_that_are_left_and_with_those_that_return(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out, meeting = tmp_path / "o", f"127.0.0.1:{free_port()}"
    torchrun = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
    settings = ["-m", "shoal", "train", "--data", tiny, *NET, "--epochs", "20000", "--eval-every", "20000"]
    settings += ["--out", "o", "--checkpoint-every", "5steps", "--resume", "auto"]

    def agent(*, keeps_meeting: bool) -> "subprocess.Popen[str]":
        """One node. That which keeps the meeting must stay."""
        told = ["--rdzv-conf", f"is_host={int(keeps_meeting)},last_call_timeout=1"]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *told, *settings]
        variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (tmp_path / "printed").open("a") as printed:
            return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=printed, stderr=printed, text=True)

    def trains_on(workers: int) -> bool:
        """Whether a world of so many workers has saved."""
        last = RunFolder(out).checkpoints.all()[-1:]
        with suppress(OSError):  # a newer one takes its place
            return bool(last) and last[0].state()["ranks"] == workers
        return False

    agents = [agent(keeps_meeting=True), agent(keeps_meeting=False)]
    reached_by: list[int] = []
    try:
        wait_for(partial(trains_on, 2), agents[0])
        reached_by.append(newest(out))
        kill_all(agents.pop())
        wait_for(partial(trains_on, 1), agents[0])
        reached_by.append(newest(out))
        agents.append(agent(keeps_meeting=False))
        wait_for(partial(trains_on, 2), agents[0])
        reached_by.append(newest(out))
    finally:
        for each in agents:
            kill_all(each)
    assert reached_by == sorted(set(reached_by)), (tmp_path / "printed").read_text()
    assert RunFolder(out).checkpoints.newest_whole()[1] == []


def test_a_step_of_slurm_saves_at_its_signal_and_goes_on_when_it_is_requeued(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    out = tmp_path / "o"
    settings = ["train", "--data", tiny, *NET, "--eval-every", "20000", "--checkpoint-every", "20000epochs"]

    def step(number: int, *options: str) -> list[Begun]:
        """What srun starts: two tasks on one node."""
        told = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(number), "SLURM_STEP_NODELIST": "node1"}
        told |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
        told["MASTER_PORT"] = str(free_port())
        ranks = [{**told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        command = [*settings, "--out", "o", "--resume", "auto", *options]
        return [begin(tmp_path, "shoal", *command, **variables) for variables in ranks]

    tasks = step(0, "--epochs", "20000")
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0, tasks[0])
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
        printed = [task.communicate(timeout=60) for task in tasks]
        assert [task.returncode for task in tasks] == [130, 130], printed
        assert "shoal train --resume o" in printed[0][1]
        steps = newest(out)
        assert steps > 0
        tasks = step(1, "--epochs", str(steps // 10 + 2))
        printed = [task.communicate(timeout=100) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], printed
    assert f"going on after step {steps}" in printed[0][0]
    assert result_of(out)["steps"] == 10 * (steps // 10 + 2)
