"""`shoal train --replicas R --exchange NAME`: it trains, and goes on when a replica is killed, frozen or late."""

import fcntl
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shoal.exchanges import EXCHANGE_NAMES, parse_exchange
from shoal.exchanging.compression import make_codec
from shoal.replicas.journal import EVENTS
from shoal.training.run_folder import RunFolder
from tests.cli.commands import Begun, begin
from tests.cli.conftest import Shoal
from tests.cli.test_elastic import IN_FLOAT64, assert_same_run
from tests.cli.test_train import metrics_of, result_of
from tests.replicas.worlds import free_port

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(300),
]

NET = """
from torch import nn

def net(input, classes):
    return nn.Sequential(
        nn.Conv2d(input[0], 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, classes)
    )
"""
SETTINGS = [
    "--model",
    "mine:net",
    "--batch",
    "8",
    "--log-every",
    "5",
    "--threads",
    "1",
    "--lr",
    "0.02",
    "--momentum",
    "0.5",
]
thorough = partial(pytest.param, marks=pytest.mark.thorough)
"""Cases that differ little from others."""
GROUPS = ["--replicas", "2", "--workers", "4", "--plan"]
LONG = ["--epochs", "4000", "--eval-every", "1000", "--checkpoint-every", "1000"]
SAVING = ["--epochs", "4000", "--eval-every", "50", "--checkpoint-every", "50"]


@pytest.fixture
def mine(tmp_path: Path, tiny: str) -> list[str]:
    (tmp_path / "mine.py").write_text(NET)
    return ["--data", tiny, *SETTINGS]


def test_one_replica_of_every_exchange_is_plain_training_to_the_bit(
    shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    runs = {
        "plain": [],
        "allreduce": ["--exchange", "allreduce"],
        "backup": ["--exchange", "backup", "--exchange-options", "backups=0"],
        "sync": ["--exchange", "sync", "--exchange-options", "shards=2"],
        "downpour": ["--exchange", "downpour"],
        "periods": ["--exchange", "downpour", "--exchange-options", "n_sync=3,servers=processes,shards=2"],
        "softsync": ["--exchange", "softsync"],
        "hogwild": ["--exchange", "hogwild"],
        "local": ["--exchange", "local", "--exchange-options", "period=3"],
        "once": ["--exchange", "local", "--exchange-options", "average=once"],
        "gossip": ["--exchange", "gossip"],
    }
    for name, options in runs.items():
        run = shoal("train", *mine, "--epochs", "2", *options, "--out", name)
        assert run.returncode == 0, run.stderr
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    for name in runs:
        weights = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name
        accuracies = [line["test_accuracy"] for line in metrics_of(tmp_path / name) if line["event"] == "test"]
        assert accuracies == [
            line["test_accuracy"] for line in metrics_of(tmp_path / "plain") if line["event"] == "test"
        ]


def test_two_replicas_in_step_are_one_with_the_whole_batch(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    two, groups = ["--replicas", "2"], ["--replicas", "2", "--workers", "4"]
    sync = ["--exchange", "sync", "--exchange-options"]
    runs = {
        "one": [],
        "two": two,
        "groups": groups,
        "sync": [*two, *sync, "shards=2"],
        "sync-groups": [*groups, *sync, "servers=threads"],
    }
    for name, options in runs.items():
        run = shoal("train", *mine, "--epochs", "2", "--eval-steps", "7", *options, "--out", name)
        assert run.returncode == 0, run.stderr
        tested = [line["step"] for line in metrics_of(tmp_path / name) if line["event"] == "test"]
        assert tested == [7, 10, 14, 20]
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for name in list(runs)[1:]:
        weights = load_file(tmp_path / name / "model.safetensors")
        for key in expected:
            torch.testing.assert_close(weights[key], expected[key], rtol=2e-3, atol=2e-5)
        result = result_of(tmp_path / name)
        exchange = "sync" if name.startswith("sync") else "allreduce"
        assert (result["exchange"], result["replicas"], result["samples"]) == (exchange, 2, 160)
        sent = result["bytes_per_step"]
        if exchange == "allreduce":
            assert sent["predicted"] == sent["counted"] > 0
        else:  # what is fetched to begin with, to test and to save, comes on top of the steps
            assert 0 < sent["predicted"] <= sent["counted"] <= 1.5 * sent["predicted"]


UNEVEN = ["train", "--model", "mine:net", "--model-options", "norm=false", "--lr", "0.02", "--momentum", "0.5"]
UNEVEN += ["--threads", "1", "--log-every", "1", "--epochs", "2", "--last-batch", "keep"]


def test_the_smaller_last_step_of_replicas_in_step_is_one_devices(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    """80 samples in steps of 24 leave 8, which are too few for all replicas."""
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    runs = {
        "one": ["--batch", "24"],
        "replicas": ["--batch", "12", "--accumulate", "2", "--replicas", "3"],
        "sync": ["--batch", "24", "--replicas", "2", "--exchange", "sync"],
        "groups": ["--batch", "24", *GROUPS, "model"],
        "alone": ["--batch", "24", "--exchange", "downpour"],
    }
    for name, options in runs.items():
        run = shoal(*UNEVEN, "--data", tiny, *options, "--out", name)
        assert run.returncode == 0, run.stderr
        assert [result_of(tmp_path / name)[what] for what in ("samples", "samples_left_out")] == [160, 0]
        seen = [line["samples"] for line in metrics_of(tmp_path / name) if line["event"] == "steps"]
        assert seen == [24, 48, 72, 80, 104, 128, 152, 160]
        assert_same_run(tmp_path / "one", tmp_path / name, lines_lost=0)


@pytest.mark.parametrize(
    "name",
    [*map(thorough, sorted({*EXCHANGE_NAMES} - {"allreduce", "sync", "downpour", "local"})), "downpour", "local"],
)
def test_every_exchange_trains_on_every_sample_of_an_uneven_epoch(
    name: str, shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    run = shoal(*UNEVEN, "--data", tiny, "--batch", "24", "--replicas", "2", "--exchange", name, "--out", "o")
    assert run.returncode == 0, run.stderr
    result = result_of(tmp_path / "o")
    each = 24 // parse_exchange(name, {}).among(2).parts_of_batch(2)
    counts = [result[what] for what in ("steps", "samples", "samples_left_out", "samples_repeated")]
    assert counts == [2 * -(-80 // each), 160, 0, 0]


@pytest.mark.parametrize(
    ("exchange", "options", "workers"),
    [
        ("allreduce", "compress=int8", "2"),
        ("allreduce", "compress=sign", "4"),
        ("sync", "compress=bf16", "2"),
        ("downpour", "compress=topk,density=0.1", "2"),
        ("downpour", "compress=sign,n_sync=1,servers=threads,shards=1", "2"),
    ],
)
def test_compressed_replicas_learn_and_send_what_was_predicted(
    shoal: Shoal, mine: list[str], tmp_path: Path, exchange: str, options: str, workers: str
) -> None:
    chosen = ["--replicas", "2", "--workers", workers, "--exchange", exchange, "--exchange-options", options]
    run = shoal("train", *mine, "--epochs", "6", *chosen, "--out", "run")
    assert run.returncode == 0, run.stderr
    result = result_of(tmp_path / "run")
    assert result["test_accuracy"] > 0.5
    name = options.split(",")[0].removeprefix("compress=")
    assert result["exchanged"]["options"]["compress"] == name
    where = "threads" if "threads" in options else "processes"
    assert result["exchanged"]["servers"] == ("none" if exchange == "allreduce" else where)
    sent = result["bytes_per_step"]
    parameters = sum(weight.numel() for weight in load_file(tmp_path / "run" / "model.safetensors").values())
    if exchange != "allreduce":  # weights come back whole, and some are fetched to begin with, to test and to save
        pushed = make_codec(name, 0.1).nbytes(parameters, torch.float32)  # type: ignore[arg-type]
        assert sent["predicted"] == pushed + 4 * parameters
        assert sent["predicted"] <= sent["counted"] <= 1.5 * sent["predicted"]
    elif workers == "2":
        assert sent["predicted"] == sent["counted"] == parameters + 4 * -(-parameters // 512)
    else:  # a replica of two workers has a block that is not full on each, and bytes that are not
        assert sent["predicted"] <= sent["counted"] <= sent["predicted"] + 5


def test_compression_in_shared_memory_is_refused(shoal: Shoal, mine: list[str]) -> None:
    options = ["--exchange", "downpour", "--exchange-options", "compress=int8,servers=direct"]
    run = shoal("train", *mine, "--replicas", "2", *options, "--out", "run")
    assert run.returncode == 2
    assert "in shared memory nothing is sent" in run.stderr
    assert "servers=processes" in run.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "2", "--exchange", "downpour"],
        ["--replicas", "2", "--exchange", "downpour", "--exchange-options", "servers=threads,n_sync=2"],
        ["--replicas", "2", "--exchange", "dasgd", "--exchange-options", "servers=processes,density=0.1"],
        thorough(["--replicas", "2", "--exchange", "downpour", "--exchange-options", "overlap=true,n_push=2"]),
        ["--replicas", "3", "--exchange", "backup"],
        [*GROUPS, "data", "--exchange", "downpour", "--exchange-options", "overlap=true,servers=processes"],
        thorough([*GROUPS, "data", "--exchange", "downpour", "--exchange-options", "max_staleness=0"]),
        [*GROUPS, "model", "--exchange", "dasgd"],
        thorough([*GROUPS, "data", "--exchange", "backup", "--exchange-options", "backups=0"]),
        ["--replicas", "2", "--exchange", "softsync"],
        ["--replicas", "2", "--exchange", "hogwild"],
        ["--replicas", "2", "--exchange", "easgd", "--exchange-options", "servers=threads"],
        ["--replicas", "2", "--exchange", "local", "--exchange-options", "average=once"],
        thorough(["--replicas", "2", "--exchange", "gossip", "--exchange-options", "mode=push"]),
        thorough([*GROUPS, "data", "--exchange", "softsync", "--exchange-options", "servers=processes"]),
        thorough([*GROUPS, "model", "--exchange", "hogwild"]),
        thorough([*GROUPS, "model", "--exchange", "easgd"]),
        [*GROUPS, "data", "--exchange", "admm"],
        thorough([*GROUPS, "data", "--exchange", "local", "--exchange-options", "period=3"]),
        thorough([*GROUPS, "model", "--exchange", "gossip"]),
        thorough([*GROUPS, "data", "--exchange", "gossip", "--exchange-options", "period=1,mode=push"]),
        [*GROUPS, "data", "--exchange", "gossip", "--exchange-options", "period=1,mode=push,compress=int8"],
        ["--replicas", "2", "--exchange", "gossip", "--exchange-options", "mode=pair,compress=topk,density=0.1"],
        thorough([*GROUPS, "model", "--exchange", "local", "--exchange-options", "compress=sign,period=3"]),
    ],
    ids=lambda options: "-".join(word for word in options if not word.startswith("--")),
)
def test_replicas_share_one_budget_of_samples(
    shoal: Shoal, mine: list[str], tmp_path: Path, options: list[str]
) -> None:
    run = shoal("train", *mine, "--epochs", "3", "--lr", "0.04", *options, "--out", "run")
    assert run.returncode == 0, run.stderr
    result = result_of(tmp_path / "run")
    assert result["samples"] == 240
    assert result["exchanged"]["repeated"] == 0
    each = result["exchanged"]["replicas"].values()
    share = 4  # samples of a replica's batch: 8 over two that count
    assert sum(report["steps"] - report["dropped"] for report in each) * share == 240
    assert sum(result["staleness"]["histogram"].values()) == sum(report["updates"] for report in each)
    assert len([line for line in metrics_of(tmp_path / "run") if line["event"] == "test"]) == 3
    assert result["test_accuracy"] > 0.5
    assert (tmp_path / "run" / "plan.json").exists()
    words = {"data": "every layer by sample (n2)", "model": "every layer by channel (c2)"}
    cut = next((words[word] for word in options if word in words), None)
    assert result["plan_in_words"] == cut
    assert ("plan  " in run.stdout) == (cut is not None)
    assert not (tmp_path / "run" / "meeting.json").exists()
    assert not left_behind()


def left_behind() -> list[Path]:
    """Folders of shared weights whose run is over."""
    folders = []
    for alive in Path("/dev/shm").glob("shoal-shared-*/alive"):
        with suppress(BlockingIOError, FileNotFoundError), alive.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folders.append(alive.parent)
    return folders


def ranks_of(run: Begun) -> list[psutil.Process]:
    """The processes that train, in the order of their start."""
    family = psutil.Process(run.pid).children(recursive=True)
    return sorted(
        (child for child in family if child.name().startswith("shoal rank")),
        key=lambda one: int(one.name().split()[-1]),
    )


def servers_of(run: Begun) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(run.pid).children(recursive=True) if child.name().startswith("shoal server")
    ]


def wait_for(condition: Callable[[], Any], run: Begun, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise AssertionError(f"the run ended early: {run.communicate()}")
        outcome = condition()
        if outcome:
            return outcome
        time.sleep(0.05)
    raise AssertionError("nothing happened")


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    assert event in EVENTS
    if not (folder / "metrics.jsonl").exists():
        return []
    whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]


def under_way(folder: Path, replicas: list[int]) -> Callable[[], bool]:
    return lambda: any(line["active"] == replicas for line in lines(folder, "steps")[-1:])


def end(run: Begun) -> tuple[str, str]:
    """Ask the run to stop; no process of it is left."""
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=5)  # the interpreter's own helper ends a moment later
    assert not alive
    return printed


EXCHANGES = [  # the same faults at random moments, in every mode: tests/exchanging/test_random_faults.py
    ["2", "downpour"],
    thorough(["2", "downpour", "servers=processes,shards=2"]),
    thorough(["2", "dasgd", "servers=processes,density=0.1"]),
    ["2", "backup", "backups=0,shards=2"],
    ["4", "downpour", "servers=processes"],
    thorough(["2", "softsync"]),
    thorough(["2", "hogwild"]),
    thorough(["2", "easgd"]),
    thorough(["2", "admm", "delay=4,shards=2"]),
    ["2", "gossip"],
    thorough(["2", "local"]),
    thorough(["2", "local", "compress=sign"]),
    thorough(["2", "downpour", "compress=int8,n_sync=3"]),
    thorough(["2", "gossip", "mode=pair,compress=int8"]),
    thorough(["4", "local", "period=3"]),
    thorough(["4", "gossip", "period=1,mode=push"]),
]


@pytest.mark.parametrize("options", EXCHANGES, ids="-".join)
def test_the_others_go_on_when_a_replica_freezes_and_when_it_is_killed_and_the_run_after_a_stop(
    shoal: Shoal, mine: list[str], tmp_path: Path, options: list[str]
) -> None:
    workers, name, *more = options
    chosen = ["--workers", workers, "--exchange", name, "--exchange-options", ",".join(["heartbeat=1", *more])]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "2", *chosen, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        victim = ranks_of(run)[-1]
        victim.suspend()
        assert wait_for(lambda: victim.status() == psutil.STATUS_STOPPED, run)
        wait_for(lambda: lines(out, "frozen"), run)
        goes_on(out, run)
        if not lines(out, "lost"):  # one that is frozen inside an update of shared weights has to be ended
            victim.resume()
            wait_for(lambda: lines(out, "back"), run)
            wait_for(under_way(out, [0, 1]), run)
            victim.kill()
            wait_for(lambda: lines(out, "lost"), run)
        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [0]
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
    assert "replica 1 was lost" in printed[0]
    assert "shoal train --resume run" in printed[1]
    if not more or name in ("backup", "admm") or "compress" in more[0]:  # the others are saved and read alike
        goes_on_after_a_stop(shoal, out, 20)


def test_a_gradient_of_a_group_that_is_too_stale_is_told_as_dropped(mine: list[str], tmp_path: Path) -> None:
    options = [*GROUPS, "data", "--exchange", "downpour", "--exchange-options", "max_staleness=0"]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, *options, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        wait_for(lambda: lines(out, "steps")[-1]["dropped"] > 0, run)  # two that train at once are in each other's way
        end(run)
    finally:
        run.kill()
        run.wait()


HANGING = """
import os, time
from torch import nn

class Hanging(nn.Module):
    def forward(self, x):
        if os.path.exists("hangs") and open("hangs").read() == str(os.getpid()):
            time.sleep(1000)
        return x

def net(input, classes):
    return nn.Sequential(Hanging(), nn.Flatten(), nn.Linear(64, classes))
"""


HANGING_IN = [["downpour"], ["backup", "backups=0"], thorough(["admm", "least=2"]), thorough(["local", "period=2"])]


@pytest.mark.parametrize("options", HANGING_IN, ids=lambda options: options[0])
def test_a_worker_that_hangs_is_told_of_and_its_batch_goes_to_another(
    mine: list[str], tmp_path: Path, options: list[str]
) -> None:
    """Its main thread sleeps in forward; the thread of its pulse lives on."""
    (tmp_path / "mine.py").write_text(HANGING)
    name, *more = options
    chosen = ["--replicas", "2", "--exchange", name, "--exchange-options", ",".join(["heartbeat=1", *more])]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, *chosen, "--out", "run")
    out = tmp_path / "run"
    try:
        # A first step may take long, and is waited for as long as `--timeout`: so it must have been made.
        wait_for(lambda: [line for line in lines(out, "steps") if "1" in line["updates"]], run)
        (tmp_path / "written").write_text(str(ranks_of(run)[1].pid))
        (tmp_path / "written").rename(tmp_path / "hangs")
        wait_for(lambda: [line for line in lines(out, "frozen") if line["replica"] == 1], run)
        wait_for(under_way(out, [0]), run)
        goes_on(out, run)
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
    assert "replica 1 gives no sign of life" in printed[0]


def test_nothing_stays_of_a_run_whose_launcher_is_killed(mine: list[str], tmp_path: Path) -> None:
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "2", "--exchange", "downpour", "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        shared = Path(json.loads((out / "meeting.json").read_text())["shared"])
        assert shared.is_dir()
        family = psutil.Process(run.pid).children(recursive=True)
        assert len(family) >= 3  # two replicas, and who watches over the folder
    finally:
        run.kill()
        run.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not shared.exists()


def test_the_end_of_the_terminal_stops_a_run_in_good_order(mine: list[str], tmp_path: Path) -> None:
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "2", "--exchange", "downpour", "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        shared = Path(json.loads((out / "meeting.json").read_text())["shared"])
        run.send_signal(signal.SIGHUP)
        printed = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 130, printed
    assert RunFolder(out).can_go_on
    assert not shared.exists()


def test_one_replica_that_is_preempted_leaves_and_the_others_go_on(mine: list[str], tmp_path: Path) -> None:
    options = ["--replicas", "2", "--exchange", "downpour", "--exchange-options", "n_sync=3"]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, *options, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        victim = ranks_of(run)[1]
        victim.terminate()
        wait_for(lambda: lines(out, "left"), run)
        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [0]
        assert not lines(out, "lost")
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
    assert "shoal train --resume run" in printed[1]


def test_a_run_goes_on_with_a_replica_that_joined_when_those_that_it_began_with_are_gone(
    shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "1", "--exchange", "downpour", "--out", "run")
    out = tmp_path / "run"
    late = None
    try:
        wait_for(under_way(out, [0]), run)
        late = begin(tmp_path, "shoal", "train", "--join", "run")
        wait_for(under_way(out, [0, 1]), run)
        ranks_of(run)[0].kill()
        wait_for(lambda: lines(out, "lost"), run)
        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [1]
        printed = end(run)
        assert late.communicate(timeout=30)[1] == ""
    finally:
        for process in (run, late):
            if process is not None:
                process.kill()
                process.wait()
    assert run.returncode == 130, printed
    steps = RunFolder(out).checkpoints.all()[-1].steps
    again = shoal("train", "--resume", "run", "--epochs", str(steps // 10 + 2))
    assert again.returncode == 0, again.stderr


def test_a_folder_belongs_to_one_run_of_replicas(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    options = ["--replicas", "2", "--exchange", "downpour", "--out", "run"]
    run = begin(tmp_path, "shoal", "train", *mine, *SAVING, *options)
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        wait_for(lambda: RunFolder(out).can_go_on, run)
        again = shoal("train", *mine, *SAVING, *options)
        resumed = shoal("train", "--resume", "run")
        goes_on(out, run)
        end(run)
    finally:
        run.kill()
        run.wait()
    assert (again.returncode, resumed.returncode) == (2, 2)
    assert f"--out 'run': another run is under way there (process {run.pid}" in again.stderr
    assert f"--resume 'run': that run is still under way (process {run.pid}" in resumed.stderr


def goes_on(out: Path, run: Begun) -> None:
    before = lines(out, "steps")[-1]["step"]
    wait_for(lambda: lines(out, "steps")[-1]["step"] > before + 50, run)


@pytest.mark.parametrize(
    "options",
    [
        ["downpour"],
        thorough(["dasgd", "servers=processes,density=0.1"]),
        thorough(["backup", "backups=0"]),
        thorough(["softsync"]),
        thorough(["hogwild"]),
        thorough(["easgd"]),
        thorough(["admm"]),
        ["gossip"],
        ["local"],
        thorough(["local", "average=once"]),
    ],
    ids="-".join,
)
def test_a_replica_joins_a_run_under_way_and_leaves_it(mine: list[str], tmp_path: Path, options: list[str]) -> None:
    name, *more = options
    chosen = ["--exchange", name, *(["--exchange-options", *more] if more else [])]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "1", *chosen, "--out", "run")
    out = tmp_path / "run"
    late = None
    try:
        wait_for(under_way(out, [0]), run)
        late = begin(tmp_path, "shoal", "train", "--join", "run")
        wait_for(under_way(out, [0, 1]), run)
        assert [line["replica"] for line in lines(out, "joined")] == [0, 1]
        wait_for(lambda: lines(out, "steps")[-1]["updates"].get("1"), run)  # it has begun
        goes_on(out, run)
        end(run)
        assert late.communicate(timeout=30)[1] == ""
        assert late.returncode == 0
    finally:
        for process in (run, late):
            if process is not None:
                process.kill()
                process.wait()


def broken(folder: Path, options: list[str], break_it: Callable[[Begun], None]) -> tuple[str, str]:
    """What a run printed that `break_it` ended after its first checkpoint; no process of it is left."""
    run = begin(folder, "shoal", "train", *options, *SAVING, "--replicas", "2", "--out", "run")
    try:
        wait_for(lambda: RunFolder(folder / "run").can_go_on, run)
        family = psutil.Process(run.pid).children(recursive=True)
        break_it(run)
        printed = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 1
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    return printed


def goes_on_from_its_checkpoint(shoal: Shoal, out: Path) -> None:
    epochs = max(line["epoch"] for line in lines(out, "test")) + 1
    again = shoal("train", "--resume", out.name, "--epochs", str(epochs))
    assert again.returncode == 0, again.stderr
    assert result_of(out)["samples"] == epochs * 80


def test_a_server_that_dies_ends_the_run_which_goes_on_from_its_checkpoint(
    shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    options = ["--exchange", "downpour", "--exchange-options", "servers=processes"]

    def kill_the_server(run: Begun) -> None:
        (server,) = servers_of(run)
        server.kill()

    printed = broken(tmp_path, [*mine, *options], kill_the_server)
    assert "server 0 was lost" in printed[1]
    goes_on_from_its_checkpoint(shoal, tmp_path / "run")


def test_a_server_that_freezes_is_told_of_and_goes_on_when_it_wakes(mine: list[str], tmp_path: Path) -> None:
    options = ["--replicas", "2", "--exchange", "downpour", "--exchange-options", "servers=processes,heartbeat=1"]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, *options, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        (server,) = servers_of(run)
        server.suspend()
        assert wait_for(lambda: server.status() == psutil.STATUS_STOPPED, run)
        assert wait_for(lambda: lines(out, "server_frozen"), run)[0]["server"] == 0
        server.resume()
        wait_for(lambda: lines(out, "server_back"), run)
        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [0, 1]
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert "server 0 gives no sign of life" in printed[0]


@pytest.mark.parametrize("compress", [thorough("none"), "sign"])
def test_allreduce_takes_no_replica_late_ends_when_one_is_killed_and_can_go_on(
    shoal: Shoal, mine: list[str], tmp_path: Path, compress: str
) -> None:
    refused = []

    def join_then_kill(run: Begun) -> None:
        refused.append(shoal("train", "--join", "run"))
        ranks_of(run)[1].kill()

    printed = broken(tmp_path, [*mine, "--exchange-options", f"compress={compress}"], join_then_kill)
    assert refused[0].returncode == 2
    assert "with allreduce no replica can join later." in refused[0].stderr
    assert "rank 1 was killed by signal SIGKILL" in printed[1]
    assert "go on with its batches" not in printed[0]
    goes_on_from_its_checkpoint(shoal, tmp_path / "run")


def test_allreduce_tells_of_a_frozen_replica_waits_for_it_and_ends_if_it_never_wakes(
    shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def freeze_twice(run: Begun) -> None:
        victim = ranks_of(run)[1]
        victim.suspend()
        wait_for(lambda: lines(out, "frozen"), run)
        victim.resume()
        wait_for(lambda: lines(out, "back"), run)
        goes_on(out, run)
        victim.suspend()
        wait_for(lambda: len(lines(out, "frozen")) == 2, run)

    printed = broken(
        tmp_path,
        [*mine, "--exchange", "allreduce", "--exchange-options", "heartbeat=1", "--timeout", "10"],
        freeze_twice,
    )
    assert "replica 1 gives no sign of life; the others wait for it, 10 s at most" in printed[0]
    # Whoever waited says so: another replica in the sum of gradients, or the conductor between two batches.
    waited = "rank 1 did not answer within 10 seconds|replica 1 gave no sign of life for 10|"
    assert re.search(waited + "replica 1 gives no sign of life, and others have waited for it in vain", printed[1])
    goes_on_from_its_checkpoint(shoal, out)


def goes_on_after_a_stop(shoal: Shoal, out: Path, steps_per_epoch: int) -> str:
    """To the end of the next epoch but one; how many epochs that makes.

    On a busy machine one replica may have trained to the end before the other begins: then further, until both have.
    """
    epochs, more = RunFolder(out).checkpoints.all()[-1].steps // steps_per_epoch, 2
    while True:
        joined = len(lines(out, "joined"))
        epochs += more
        again = shoal("train", "--resume", out.name, "--epochs", str(epochs))
        assert again.returncode == 0, again.stderr
        result = result_of(out)
        assert result["samples"] == epochs * 80
        # Of all parts; what was in flight at the stop may have been trained on twice.
        assert sum(report["steps"] for report in result["exchanged"]["replicas"].values()) * 4 >= result["samples"]
        now = len(lines(out, "joined"))
        assert [event["what"] for event in result["exchanged"]["events"]].count("joined") == now
        if now - joined == 2:
            return str(epochs)
        assert (now - joined, more <= 2000) == (1, True), "the other replica never trains"
        more *= 10


GROUPS_THAT_GO_ON = [
    thorough(["downpour", "compress=int8,servers=processes"]),
    thorough(["dasgd", "servers=processes,density=0.1"]),
    thorough(["softsync", "heartbeat=5"]),
    thorough(["hogwild", "heartbeat=5"]),
    thorough(["easgd", "period=2"]),
    thorough(["admm", "period=2"]),
    ["gossip", "mode=pair,compress=int8"],
    thorough(["gossip", "period=1,mode=push"]),
    thorough(["local", "period=3"]),
    thorough(["local", "compress=sign"]),
    thorough(["sync", "shards=2"]),
    thorough(["backup", "backups=0"]),
    thorough(["allreduce", "compress=sign"]),
]


@pytest.mark.parametrize("chosen", GROUPS_THAT_GO_ON, ids="-".join)
def test_replicas_of_several_workers_go_on_after_a_stop(
    shoal: Shoal, mine: list[str], tmp_path: Path, chosen: list[str]
) -> None:
    options = [*GROUPS, "model", "--exchange", chosen[0], "--exchange-options", chosen[1]]
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, *options, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        goes_on(out, run)
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
    goes_on_after_a_stop(shoal, out, 10 if chosen[0] in ("allreduce", "sync") else 20)


@pytest.mark.parametrize(
    "chosen", [thorough(["allreduce", "compress=none"]), ["allreduce", "compress=sign"]], ids="-".join
)
def test_what_is_in_step_goes_on_as_if_it_had_never_stopped(
    shoal: Shoal, mine: list[str], tmp_path: Path, chosen: list[str]
) -> None:
    name, told = chosen
    options = [*mine, "--replicas", "2", "--exchange", name, "--exchange-options", told, "--schedule", "constant"]
    run = begin(tmp_path, "shoal", "train", *options, *LONG, "--out", "run")
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
    assert "shoal train --resume run" in printed[1]
    epochs = goes_on_after_a_stop(shoal, out, 10)
    whole = shoal("train", *options, "--epochs", epochs, "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    weights = load_file(out / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_slow_replica_does_less_and_holds_up_nobody(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    run = shoal(
        "train",
        *mine,
        "--epochs",
        "300",
        "--replicas",
        "2",
        "--exchange",
        "downpour",
        "--slow",
        "rank=1,factor=20",
        "--out",
        "run",
    )
    assert run.returncode == 0, run.stderr
    # One may begin seconds before the other: what they did while both were there.
    both = [line["updates"] for line in metrics_of(tmp_path / "run") if line.get("updates", {}).get("1")]
    fast, slow = (both[-1][number] - both[0][number] for number in "01")
    assert fast > 2 * slow > 0


def test_after_a_warm_start_the_others_begin_with_its_weights(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    options = ["--replicas", "2", "--exchange", "downpour", "--exchange-options", "warm_start=400"]
    run = shoal("train", *mine, "--epochs", "30", *options, "--out", "run")
    assert run.returncode == 0, run.stderr
    result = result_of(tmp_path / "run")
    assert result["exchanged"]["replicas"]["1"]["updates"] > 0
    assert result["staleness"]["max"] <= 200  # batches after the warm start; a gradient of before is 400 old


def test_rates_are_made_of_one_workers_and_told_of(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    asynchronous = [*mine, "--epochs", "1", "--replicas", "2", "--exchange", "downpour", "--momentum", "0.9"]
    run = shoal("train", *asynchronous, "--out", "own")
    assert run.returncode == 0, run.stderr
    told = " ".join(run.stdout.split())
    assert "downpour with 2 replicas uses lr 0.01 instead of 0.02 and momentum 0.6 instead of 0.9" in told
    assert lines(tmp_path / "own", "steps")[0]["lr"] < 0.01
    run = shoal("train", *asynchronous, "--exchange-options", "rates=given", "--out", "given")
    assert run.returncode == 0, run.stderr
    assert "momentum 0.9 at the server" in run.stdout
    exact = shoal("train", *mine, "--epochs", "1", "--replicas", "2", "--out", "exact")
    assert "instead of" not in exact.stdout


def test_a_loss_that_is_no_number_ends_the_run(shoal: Shoal, mine: list[str]) -> None:
    run = shoal(
        "train", *mine, "--epochs", "50", "--replicas", "2", "--exchange", "downpour", "--lr", "1e20", "--out", "run"
    )
    assert run.returncode == 1
    assert "the loss of replica" in run.stderr


REFUSED = [
    (["--exchange", "downpoor"], "Did you mean 'downpour'?"),
    (["--exchange", "downpour", "--exchange-options", "n_synk=3"], "Did you mean 'n_sync'?"),
    (["--exchange", "downpour", "--exchange-options", "n_sync=0"], "n_sync = 0"),
    (["--exchange", "downpour", "--exchange-options", "n_sync=2,n_push=3"], "both say how often"),
    (["--exchange", "dasgd", "--exchange-options", "density=2"], "density = 2"),
    (["--exchange", "dasgd", "--exchange-options", "servers=threads,shards=4"], "shards = 4 with servers = 'threads'"),
    (["--exchange", "backup", "--exchange-options", "backups=2"], "backups = 2 leaves none of 2"),
    (["--workers", "3"], "replicas = 2 does not divide workers = 3"),
    (["--exchange", "allreduce", "--batch", "7"], "batch = 7 is not divided evenly"),
    (["--exchange", "downpour", "--slow", "rank=7,factor=2"], "no rank 7"),
    (["--exchange", "downpour", "--slow", "speed=2"], "rank=R,factor=F"),
    (["--exchange-options", "n_sync=2"], "'allreduce' has no option 'n_sync'"),
    (["--replicas", "1", "--exchange-options", "n_sync=2"], "for no exchange"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_options_are_refused_with_a_way_out(shoal_here: Shoal, options: list[str], message: str) -> None:
    run = shoal_here("train", "--data", "digits", "--replicas", "2", *options)
    assert run.returncode == 2
    assert message in run.stderr


def test_joining_nothing_is_refused(shoal_here: Shoal) -> None:
    run = shoal_here("train", "--join", "nowhere")
    assert run.returncode == 2
    assert "no run with replicas goes on there" in run.stderr


KINDS = [["downpour"], ["allreduce"], ["backup", "--exchange-options", "backups=0"]]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options[0])
def test_torchrun_starts_replicas_too(mine: list[str], tmp_path: Path, options: list[str]) -> None:
    """Torchrun itself the first kind; the others have its variables."""
    command = ["train", *mine, "--epochs", "2", "--replicas", "2", "--exchange", *options, "--out", "o"]
    if options == ["downpour"]:
        ranks = [begin(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal", *command)]
    else:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free_port())
        ranks = [begin(tmp_path, "shoal", *command, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"]
    printed = [rank.communicate(timeout=120) for rank in ranks]
    assert {rank.returncode for rank in ranks} == {0}, printed
    assert result_of(tmp_path / "o")["samples"] == 160


def test_under_torchrun_too_one_replica_that_is_preempted_leaves_in_good_order(mine: list[str], tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal", "train"]
    options = ["--replicas", "2", "--exchange", "downpour", "--out", "run"]
    run = begin(tmp_path, *command, *mine, *LONG, *options)
    out = tmp_path / "run"
    try:
        wait_for(under_way(out, [0, 1]), run)
        first, second = (
            next(child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == number)
            for number in "01"
        )
        second.terminate()
        wait_for(lambda: lines(out, "left"), run)
        wait_for(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, run)
        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [0]
        first.terminate()  # the conductor is there: the run stops, with a checkpoint
        printed = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert "shoal: replica 1 was asked to stop and has left; the others go on.\n" in printed[1]
    assert "shoal train --resume run" in printed[1]
    failed = printed[1].partition("FAILED")[2]
    assert re.search(r"rank\s*: 0 ", failed), printed[1]
    assert not re.search(r"rank\s*: 1 ", failed)
    assert RunFolder(out).can_go_on


def test_where_rank_0_alone_is_asked_to_stop_every_rank_ends_as_stopped(mine: list[str], tmp_path: Path) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["shoal", "train", *mine, *LONG, "--replicas", "2", "--exchange", "downpour", "--out", "run"]
    ranks = [begin(tmp_path, *command, RANK=number, LOCAL_RANK=number, **world) for number in "01"]
    try:
        wait_for(under_way(tmp_path / "run", [0, 1]), ranks[0])
        ranks[0].send_signal(signal.SIGINT)
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130], told
    assert "Go on with: shoal train --resume run" in told[0]
    assert told[1] == ""  # once is enough


@pytest.mark.parametrize("name", ["downpour", *map(thorough, ["allreduce", "dasgd", "backup", "sync"])])
def test_the_example_script_ends_with_one_accuracy_under_every_exchange(name: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "exchange_script.py"
    run = begin(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", str(script), name)
    printed = run.communicate(timeout=120)
    assert run.returncode == 0, printed[1]
    assert printed[0].count("updates") == 2
    assert len(set(re.findall(r"accuracy (\d\.\d+)", printed[0]))) == 1


def test_a_run_goes_on_with_another_exchange_and_says_what_is_lost(
    shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    epochs = ["--epochs", "100", "--checkpoint-every", "100"]  # so long that both replicas have begun
    run = shoal("train", *mine, *epochs, "--replicas", "2", "--exchange", "easgd", "--out", "run")
    assert run.returncode == 0, run.stderr
    (lost,) = (tmp_path / "run" / "checkpoints").glob("step-*/replica-1.safetensors")
    whole = lost.read_bytes()
    lost.write_bytes(whole[:100])
    go_on = ["train", "--resume", "run", "--epochs", "101"]
    run = shoal(*go_on)
    assert run.returncode == 2, run.stderr
    assert f"is damaged: replica-1.safetensors is not of {len(whole)} bytes" in run.stderr
    lost.write_bytes(whole)
    run = shoal(*go_on, "--replicas", "4", "--workers", "4", "--exchange", "admm")
    assert run.returncode == 0, run.stderr
    told = [line["text"] for line in metrics_of(tmp_path / "run") if line["event"] == "warning"]
    wanted = (
        "goes on with exchange = 'admm' (before: 'easgd'), replicas = 4 (before: 2): every replica begins with the "
        "common weights; what does not carry over is weights of their own."
    )
    assert wanted in told
    assert result_of(tmp_path / "run")["replicas"] == 4


DOUBLE = """
from torch import nn

class Double(nn.Module):
    def forward(self, x):
        return x.double()

def net(input, classes):
    return nn.Sequential(
        Double(), nn.Conv2d(input[0], 4, 3, padding=1).double(), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 64, classes).double(),
    )
"""


def test_what_averages_every_step_goes_on_exactly_for_each_other(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DOUBLE)
    settings = [*mine, "--schedule", "constant", "--checkpoint-every", "7steps"]
    run = shoal("train", *settings, "--epochs", "4", "--out", "whole")
    assert run.returncode == 0, run.stderr
    run = shoal("train", *settings, "--epochs", "1", "--out", "run")
    for epochs, (exchange, replicas) in enumerate([("allreduce", "2"), ("sync", "4"), ("none", "1")], start=2):
        assert run.returncode == 0, run.stderr
        more = ["--replicas", replicas, "--workers", replicas, "--exchange", exchange]
        run = shoal("train", "--resume", "run", *more, "--epochs", str(epochs))
    assert run.returncode == 0, run.stderr
    expected, reached = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "run"))
    for name in expected:
        torch.testing.assert_close(reached[name], expected[name], rtol=1e-9, atol=1e-9)
    result = result_of(tmp_path / "run")
    assert (result["samples"], result["samples_repeated"], result["samples_left_out"]) == (320, 0, 0)
    assert not [line for line in lines(tmp_path / "run", "warning") if "carry over" in line["text"]]


def test_what_counts_fewer_steps_is_still_the_newest(shoal: Shoal, mine: list[str], tmp_path: Path) -> None:
    """Replicas that take batches one by one count twice as many steps as those that share each: nothing is lost."""
    run = shoal("train", *mine, "--epochs", "3", "--replicas", "2", "--exchange", "easgd", "--out", "o")
    assert run.returncode == 0, run.stderr
    many = RunFolder(tmp_path / "o").checkpoints.all()[-1].steps
    run = shoal("train", "--resume", "o", "--epochs", "4", "--exchange", "allreduce")
    assert run.returncode == 0, run.stderr
    newest, damaged = RunFolder(tmp_path / "o").checkpoints.newest_whole()
    assert newest is not None
    assert not damaged
    assert newest.steps < many
    assert newest.steps == result_of(tmp_path / "o")["steps"]
    run = shoal("train", "--resume", "o", "--epochs", "5", "--exchange", "none", "--replicas", "1", "--workers", "1")
    assert run.returncode == 0, run.stderr
    assert f"going on after step {newest.steps}" in run.stderr + run.stdout
    result = result_of(tmp_path / "o")
    assert (result["samples"], result["samples_repeated"]) == (400, 0)


@pytest.mark.parametrize(
    ("before", "afterwards"),
    [
        ("gossip", ["downpour"]),
        *(
            pytest.param(name, [*EXCHANGE_NAMES, "none"], marks=[pytest.mark.thorough, pytest.mark.timeout(1200)])
            for name in EXCHANGE_NAMES
        ),
    ],
)
def test_every_exchange_goes_on_from_every_other(
    before: str, afterwards: list[str], shoal: Shoal, mine: list[str], tmp_path: Path
) -> None:
    run = shoal("train", *mine, "--epochs", "2", "--replicas", "2", "--exchange", before, "--out", "saved")
    assert run.returncode == 0, run.stderr
    for after in afterwards:
        shutil.copytree(tmp_path / "saved", tmp_path / after)
        replicas = "3" if after == "backup" else "4"  # one of them is to spare: the others share the batch
        more = [] if after == "none" else ["--replicas", replicas, "--workers", replicas]
        run = shoal("train", "--resume", after, "--epochs", "3", "--exchange", after, *more)
        assert run.returncode == 0, (after, run.stderr)
        result = result_of(tmp_path / after)
        assert (result["exchange"], result["samples"]) == (after, 240)
        told = [line["text"] for line in lines(tmp_path / after, "warning") if "carry over" in line["text"]]
        expected = parse_exchange(before, {}).hands_in
        assert len(told) == expected, (after, told)
