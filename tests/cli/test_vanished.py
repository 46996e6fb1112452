"""Runs whose folder is removed under them, or that are asked to end before there is one."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.training.run_folder import RunFolder
from tests.cli.commands import begin
from tests.cli.test_elastic import IN_FLOAT64, SETTINGS
from tests.cli.test_kills import kill_all, wait_for

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(200),
]


@pytest.mark.parametrize("then", ["it writes a line", "it is stopped"])
@pytest.mark.parametrize(
    "kind",
    [
        ["--restarts", "2", "--workers", "1"],
        pytest.param(["--replicas", "2"], marks=pytest.mark.thorough),
        pytest.param(["--replicas", "2", "--restarts", "2"], marks=pytest.mark.thorough),
    ],
    ids="".join,
)
def test_a_run_whose_folder_vanishes_ends_with_its_name(kind: list[str], then: str, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(IN_FLOAT64)
    settings = [*SETTINGS, "--data", tiny, "--epochs", "200000", *kind, "--out", "run", "--checkpoint-every", "1epoch"]
    run, out = begin(tmp_path, "shoal", *settings), tmp_path / "run"
    try:
        wait_for(lambda: RunFolder(out).can_go_on, run)
        family = psutil.Process(run.pid).children(recursive=True)
        everybody = [psutil.Process(run.pid), *family]
        for process in everybody:  # so that all this is one moment for them
            process.suspend()
        out.rename(tmp_path / "away")
        shutil.rmtree(tmp_path / "away")
        if then == "it is stopped":
            run.send_signal(signal.SIGINT)
        for process in everybody:
            process.resume()
        printed = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 1, printed
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert "the run's folder 'run' is gone" in printed[1]
    assert "whole" not in printed[1]
    assert "Traceback" not in printed[1]
    assert "restarts are left" not in printed[0]


def test_sigterm_while_a_run_loads_is_told_as_ctrl_c_is(tiny: str, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "shoal", "train", "--data", tiny, "--epochs", "100000"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("loading ")
        run.send_signal(signal.SIGTERM)
        printed = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            kill_all(run)
    assert run.returncode == 130, printed
    assert "shoal: interrupted.\n" in printed[1]
    assert "Traceback" not in printed[1]
