"""Ranks that this process starts: what they return, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.errors import ConfigError, DiedError, DivergedError, RunError
from shoal.launching import RemoteError, ranks, run, stop_signals
from shoal.launching.stopping import TOGETHER_SECONDS
from tests.cli.commands import Begun, script
from tests.launching import jobs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """Where the ranks leave their pids; afterwards none of them may live."""
    yield str(tmp_path)
    assert gone(tmp_path)


def gone(folder: Path, seconds: float = 5.0) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("rank*")]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def fired(folder: str) -> bool:
    return (Path(folder) / "fired").exists()


def test_each_rank_returns_its_result() -> None:
    assert run(jobs.add_up, 10, workers=2, threads=1, timeout=60) == [(0, 21, 1, "1"), (1, 21, 1, "1")]


def test_how_far_ranks_are_is_told_on_their_way() -> None:
    told: list[tuple[str, int, int]] = []
    run(jobs.load_slowly, workers=2, on_stage=lambda *stage: told.append(stage))
    assert [stage for stage in told if stage[0] == "have loaded"] == [("have loaded", 1, 2), ("have loaded", 2, 2)]
    assert told[0][0] == "have begun"


def test_ranks_work_where_their_parent_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(jobs.where, workers=1, timeout=60) == [tmp_path]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 failed, in layer 'conv1' on rank 1: ValueError: the weights"]),
        ("kill", ["rank 1 was killed by signal SIGKILL"]),
        ("exit", ["rank 1 ended without a word, with exit code 7"]),
        ("hang", ["rank 1 did not answer within 2 seconds", "ranks 0 and 2 waited"]),
    ],
)
def test_the_cause_is_named_and_not_who_waited_for_it(
    folder: str, how: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    monkeypatch.setattr(ranks, "SEARCH_SECONDS", 1.0)
    with pytest.raises(RunError) as caught:
        run(jobs.fail, folder, how, workers=3, timeout=2 if how == "hang" else 60)
    assert fired(folder)
    for word in words:
        assert word in caught.value.problem
    assert time.monotonic() - start < 40
    if how == "raise":
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "are too heavy" in caught.value.__cause__.trace


def test_our_own_errors_keep_their_class(folder: str) -> None:
    with pytest.raises(DivergedError) as caught:
        run(jobs.fail, folder, "diverge", workers=2, timeout=60)
    assert fired(folder)
    assert caught.value.problem == "rank 1: the loss became nan."
    assert caught.value.remedy == "Lower --lr."


def test_a_rank_that_finished_too_early_is_named(folder: str) -> None:
    with pytest.raises(RunError, match="rank 0 waited for rank 1, which had already finished"):
        run(jobs.fail, folder, "return", workers=2, timeout=2)
    assert fired(folder)


def test_a_lost_connection_is_not_blamed_though_it_was_reported_first(folder: str) -> None:
    with pytest.raises(RunError) as caught:
        run(jobs.lose_first, folder, workers=2, timeout=60)
    assert fired(folder)
    assert "rank 1 was killed by signal SIGKILL" in caught.value.problem


def test_a_loss_is_told_where_nobody_has_all_to_save_and_the_lost_one_is_frozen(folder: str) -> None:
    with pytest.raises(DiedError, match=r"rank 1 did not answer within 2 seconds; rank 0 waited") as caught:
        run(jobs.offer_a_part, folder, workers=2, timeout=2, offering=True)
    assert fired(folder)
    assert caught.value.loss is not None
    assert (caught.value.loss.lost, caught.value.loss.steps) == ((1,), 7)


def test_what_cannot_be_sent_back_is_an_error_of_its_rank() -> None:
    with pytest.raises(RunError, match="rank 0 failed"):
        run(jobs.give_what_cannot_be_sent, workers=1, timeout=60)


def test_what_cannot_be_sent_to_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        run(print, threading.Lock(), workers=2)


def parent(function: str, folder: str, *, workers: int = 2, loads: bool = False) -> Begun:
    """A launcher when two ranks work: its own, or those of its one rank.

    `loads`: it and its helper load torch, as without tests; it is in a group of its own.
    """
    code = (
        "import sys\n"
        "from shoal.errors import StoppedError\n"
        "from shoal.launching import run\n"
        "from tests.launching import jobs\n"
        "try:\n"
        f"    run(jobs.{function}, sys.argv[1], workers={workers}, timeout=60)\n"
        "except StoppedError as error:\n"
        "    print(error.problem)\n"
        "    sys.exit(130)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(131)\n"
    )
    process: Begun
    if loads:
        process = subprocess.Popen(
            [sys.executable, "-c", code, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
    else:
        (Path(folder) / "launcher.py").write_text(code)
        process = script(Path(folder), Path(folder) / "launcher.py", folder)
    deadline = time.monotonic() + 90
    while len(list(Path(folder).glob("rank*"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3)  # both are past their barrier
    return process


def test_ranks_die_with_their_parent(folder: str, tmp_path: Path) -> None:
    process = parent("sleep_forever", folder)
    assert len(list(tmp_path.glob("rank*"))) == 2
    process.kill()
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert gone(tmp_path)


def test_a_signal_is_passed_on_and_the_stop_may_take_its_time(folder: str) -> None:
    process = parent("wait_for_stop", folder)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert fired(folder)  # rank 0 was not ended because rank 1 had stopped earlier
    assert (process.returncode, stdout) == (130, "stopped after step 3.\n"), stderr
    assert stderr == ""


def test_signals_that_come_together_are_one(folder: str) -> None:
    """As `timeout` sends them, once to the command and once to its group; two kinds, which never merge on their way."""
    process = parent("wait_for_stop", folder)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "stopped after step 3.\n"), stderr


def test_a_second_signal_kills(folder: str) -> None:
    process = parent("wait_for_stop", folder)
    process.send_signal(signal.SIGINT)
    time.sleep(2 * TOGETHER_SECONDS)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert not fired(folder)
    assert process.returncode == 131, stderr
    assert stderr == ""


def test_a_signal_before_anything_can_be_stopped(folder: str) -> None:
    process = parent("sleep_forever", folder)
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 131, stderr
    assert stderr == ""


def test_the_end_of_the_terminal_asks_to_stop_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
