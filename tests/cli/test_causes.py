"""A listener, a data set or a network that raises during a run: the cause is told first, and no process stays."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import begin

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(300),
]
NET = """
import torch
from torch import nn

class Same(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Same.calls += 1
        if {in_model} and Same.calls > 20:
            raise ValueError("the model broke")
        return grad.clone()

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(72, classes)

    def forward(self, x):
        return self.fc(Same.apply(self.conv(x)).flatten(1))

def net(input, classes):
    return Net(classes)
"""
"""Its module is imported by every process that trains or listens, and so may put a fault into it."""
FAULTS = {
    "listener": """
from shoal.cli import progress

def stepped(self, steps, epoch):
    if steps > 20:
        raise ValueError("the listener broke")

progress._Lines.stepped = stepped
""",
    "data": """
from shoal.data.loader import Loader

read = Loader.batch

def batch(self, epoch, step):
    if epoch > 2:
        raise ValueError("the data broke")
    return read(self, epoch, step)

Loader.batch = batch
""",
    "model": "",
}
"""What raises, and how it comes to that in the middle of a run."""
ONE = pytest.param(["--workers", "1"], id="one worker")
TWO = pytest.param(["--workers", "2"], id="two workers")
REPLICAS = pytest.param(["--replicas", "2", "--exchange", "downpour"], id="two replicas")
IN_STEP = pytest.param(["--replicas", "2"], id="two replicas in step", marks=pytest.mark.thorough)


@pytest.mark.parametrize("workers", [ONE, TWO, REPLICAS, IN_STEP])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_told_first_and_no_process_is_left(
    tmp_path: Path, tiny: str, fault: str, workers: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(NET.format(in_model=fault == "model") + FAULTS[fault])
    settings = ["--data", tiny, "--model", "mine:net", "--batch", "8", "--threads", "1", "--lr", "0.001"]
    settings += ["--epochs", "100000", "--eval-every", "100000", "--checkpoint-every", "100000", "--out", "run"]
    process = begin(tmp_path, "shoal", "train", *settings, *workers)
    family: dict[int, psutil.Process] = {}
    try:
        while process.poll() is None:
            family |= {one.pid: one for one in _children(process.pid)}
            time.sleep(0.05)
        _, stderr = process.communicate(timeout=1)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    told = next(line for line in stderr.splitlines() if line.startswith("shoal: "))
    assert f"ValueError: the {fault} broke." in told
    assert stderr.count("shoal: ") == 1
    assert stderr.index(told) < stderr.index("Traceback") < stderr.index("mine.py")  # then where it happened
    assert "report" not in stderr  # it is no bug of ours
    assert psutil.wait_procs(list(family.values()), timeout=10)[1] == []


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
