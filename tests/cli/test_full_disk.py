"""`shoal train` into a folder whose disk is full: one clear message, exit code 1, whole files, and `--resume`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.training.run_folder import RunFolder
from tests.cli.conftest import Shoal
from tests.cli.test_train import metrics_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs to mount a small disk"),
    pytest.mark.timeout(300),
]
NET = """
from torch import nn

def net(input, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
KILOBYTES = 128
"""Size of the disk."""
ONE = pytest.param(["--workers", "1"], id="one worker")
TWO = pytest.param(["--replicas", "2", "--exchange", "downpour"], id="two replicas")
PARTS = pytest.param(["--workers", "2", "--plan", "data"], id="two workers of one replica")
IN_STEP = pytest.param(["--replicas", "2"], id="two replicas in step", marks=pytest.mark.thorough)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, so small that a few hundred lines of metrics fill it."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={KILOBYTES}k", "none", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this process may not mount a disk")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def train(shoal: Shoal, tmp_path: Path, tiny: str, *more: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "mine.py").write_text(NET)
    every = ["--epochs", "4000", "--eval-every", "1", "--checkpoint-every", "1", "--log-every", "1"]
    settings = ["--data", tiny, "--model", "mine:net", "--batch", "8", "--threads", "1", "--lr", "0.001"]
    return shoal("train", *settings, *every, *more, "--out", "disk/run")


@pytest.mark.parametrize("workers", [ONE, PARTS, TWO, IN_STEP])
def test_a_disk_that_fills_up_ends_the_run_with_the_file_and_the_way_out(
    shoal: Shoal, tmp_path: Path, disk: Path, tiny: str, workers: list[str]
) -> None:
    """Lines of metrics fill it, after some checkpoints."""
    run = train(shoal, tmp_path, tiny, *workers)
    assert run.returncode == 1, run.stderr
    assert "cannot be written: No space left on device.\n" in run.stderr
    assert "Free space there" in run.stderr
    assert "then go on with: shoal train --resume disk/run\n" in run.stderr
    assert "Traceback" not in run.stderr
    assert "bug" not in run.stderr
    assert metrics_of(disk / "run")  # whole lines
    assert not list((disk / "run").rglob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    done = max(line["epoch"] for line in metrics_of(disk / "run") if line["event"] == "test")
    run = shoal("train", "--resume", "disk/run", "--epochs", str(done + 1))
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("workers", [ONE, IN_STEP])
def test_a_disk_that_is_full_before_the_first_checkpoint(
    shoal: Shoal, tmp_path: Path, disk: Path, tiny: str, workers: list[str]
) -> None:
    (disk / "full").write_bytes(bytes((KILOBYTES - 20) * 1024))
    run = train(shoal, tmp_path, tiny, *workers)
    assert run.returncode == 1, run.stderr
    assert "cannot be written: No space left on device.\n" in run.stderr
    assert "then start the run again: there is no checkpoint yet." in run.stderr
    assert "Traceback" not in run.stderr


HEAVY = """
from torch import nn

def net(input, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.Linear(600, classes))
"""


@pytest.mark.parametrize("workers", [ONE, IN_STEP])
def test_a_checkpoint_that_does_not_fit_leaves_nothing_on_the_disk(
    shoal: Shoal, tmp_path: Path, disk: Path, tiny: str, workers: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(HEAVY)
    settings = ["--data", tiny, "--model", "mine:net", "--batch", "8", "--threads", "1", "--epochs", "3"]
    run = shoal("train", *settings, *workers, "--checkpoint-every", "1step", "--out", "disk/run")
    assert run.returncode == 1, run.stderr
    assert "cannot be written: No space left on device.\n" in run.stderr
    assert not list((disk / "run").rglob(".*.tmp"))
    assert not RunFolder(disk / "run").can_go_on


def test_a_run_in_a_folder_that_cannot_be_written_is_not_resumed(
    shoal: Shoal, shoal_here: Shoal, tmp_path: Path, disk: Path, tiny: str
) -> None:
    (tmp_path / "mine.py").write_text(NET)
    settings = ["--data", tiny, "--model", "mine:net", "--batch", "8", "--threads", "1", "--epochs", "1"]
    run = shoal("train", *settings, "--out", "disk/run")
    assert run.returncode == 0, run.stderr
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run = shoal_here("train", "--resume", "disk/run", "--epochs", "2")
    assert run.returncode == 2, run.stderr
    assert "--resume 'disk/run': that folder cannot be written: Read-only file system.\n" in run.stderr
    assert "give the copy to --resume" in run.stderr
    assert "Traceback" not in run.stderr
