"""Processes that are forked from a helper: nobody should see a difference to spawned ones but the time."""

import multiprocessing as mp
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from shoal import machine
from shoal.launching import forked, run
from tests.launching import jobs
from tests.launching.test_run import parent

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are spawned"),
    pytest.mark.timeout(120),
]


@pytest.fixture(autouse=True, scope="module")
def _helper_of_our_own() -> Iterator[None]:
    """Other tests of this process may have one, with other variables around it.

    It is put aside and not ended: processes that those tests keep are forked from it, and it ends after they do.
    """
    server, theirs = vars(forkserver._forkserver), forked._loaded_with
    aside = dict(server)
    server.update(vars(forkserver.ForkServer()))
    forked._loaded_with = None
    yield
    forked._end_helper()
    server.update(aside)
    forked._loaded_with = theirs


def test_the_surroundings_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    run(jobs.surroundings, "MY_SETTING", workers=1)  # the helper runs from now on at the latest
    monkeypatch.setenv("MY_SETTING", "new")
    monkeypatch.delenv("HOME", raising=False)
    cores = os.sched_getaffinity(0)
    fewer = {max(cores)}
    os.sched_setaffinity(0, fewer)
    try:
        (seen,) = run(jobs.surroundings, "MY_SETTING", workers=1)
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == jobs.Seen(setting="new", home=None, cores=fewer, name="shoal rank 0", forked=True)


def test_what_libraries_read_while_they_load_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    run(jobs.surroundings, "OMP_DYNAMIC", workers=1)
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    (seen,) = run(jobs.surroundings, "OMP_DYNAMIC", workers=1)
    assert (seen.setting, seen.forked, seen.name) == ("false", False, "shoal rank 0")


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES"]
)
def test_such_variables_are_known(name: str) -> None:
    assert forked._is_read_while_loading(name)


def test_on_a_host_with_gpus_processes_are_spawned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "GPU_FILES", (tmp_path,))
    (seen,) = run(jobs.surroundings, "HOME", workers=1)
    assert not seen.forked


def test_a_helper_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run(jobs.where, workers=1)  # there is one now, as if the user's own
    monkeypatch.setattr(forked, "_loaded_with", None)
    (seen,) = run(jobs.surroundings, "HOME", workers=1)
    assert not seen.forked
    assert forked._loaded_with is None


@pytest.mark.parametrize("name", ["HOME", "PYTEST_CURRENT_TEST", "SHOAL_DATA", "TMPDIR"])
def test_others_change_without_a_new_helper(name: str) -> None:
    assert not forked._is_read_while_loading(name)


def test_what_ranks_print_goes_where_this_process_prints_now(capfd: pytest.CaptureFixture[str]) -> None:
    run(jobs.surroundings, "HOME", workers=1)
    capfd.readouterr()
    run(jobs.say, "hello", workers=1)
    assert capfd.readouterr() == ("hello\n", "and to stderr: hello\n")


def test_a_closed_stream_stays_closed(tmp_path: Path) -> None:
    script = "import os; os.close(1)\nfrom shoal.launching import run\nfrom tests.launching import jobs\n"
    script += "if __name__ == '__main__': assert run(jobs.where, workers=1)\n"
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, check=True, timeout=60)


def test_ranks_have_the_shoal_that_their_program_found(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for name in ("shoal", "tests"):
        (tmp_path / name).symlink_to(root / name)
    script = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom shoal.launching import run\n"
    script += "from tests.launching import jobs\nprint(*run(jobs.home_of_shoal, workers=1))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    assert ran.stdout.strip() == str(tmp_path / "shoal")


def test_ranks_draw_numbers_of_their_own() -> None:
    own, others = run(jobs.draws, workers=2)
    assert own[0] != others[0]
    assert own[1] != others[1]
    assert random.random() not in (own[0], others[0])


def test_a_helper_that_is_killed_takes_its_ranks_with_it(tmp_path: Path) -> None:
    launcher = parent("sleep_forever", str(tmp_path), loads=True)
    family = psutil.Process(launcher.pid).children(recursive=True)
    (helper,) = {rank.parent() for rank in family if rank.name().startswith("shoal rank")}
    assert helper is not None
    assert helper.pid != launcher.pid
    helper.kill()
    printed = launcher.communicate(timeout=60)[1]
    assert re.search(r"DiedError: rank \d .*", printed)
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_a_rank_that_starts_others_has_them_forked_from_the_same_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "inner")
    ((same_helper, seen),) = run(jobs.conduct, str(tmp_path), workers=1)
    assert same_helper
    assert (seen.setting, seen.name, seen.forked) == ("inner", "shoal rank 0", True)


def test_ranks_of_a_rank_end_when_it_is_killed(tmp_path: Path) -> None:
    """Their parent in the system's table is the helper, which lives on."""
    launcher = parent("conduct_forever", str(tmp_path), workers=1, loads=True)
    family = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("rank*")]
    assert len(family) == 2
    os.kill(int((tmp_path / "conductor").read_text()), signal.SIGKILL)
    assert "DiedError: rank 0" in launcher.communicate(timeout=60)[1]
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_other_processes_that_are_forked_from_the_helper_can_be_ended() -> None:
    """The user's own program may start processes this way, too, after us."""
    run(jobs.where, workers=1)
    process = mp.get_context("forkserver").Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM


def test_the_helper_ends_with_its_launcher_and_not_later() -> None:
    script = "from multiprocessing import forkserver\nfrom shoal.launching import run\n"
    script += "from tests.launching import jobs\nrun(jobs.where, workers=1)\n"
    script += "print(forkserver._forkserver._forkserver_pid)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not psutil.pid_exists(int(ended.stdout))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_a_stop_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    """As a Ctrl-C on the terminal, its end, and many a service manager send it: the helper must not die of it."""
    launcher = parent("wait_for_stop", str(tmp_path), loads=True)
    family = psutil.Process(launcher.pid).children(recursive=True)
    os.killpg(launcher.pid, number)
    assert launcher.communicate(timeout=60) == ("stopped after step 3.\n", "")
    assert launcher.returncode == 130
    assert (tmp_path / "fired").exists()  # rank 0 had its time
    assert not psutil.wait_procs(family, timeout=10)[1]
