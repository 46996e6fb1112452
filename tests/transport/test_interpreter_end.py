"""How a script ends: no thread of ours is left that could touch a tensor while the interpreter ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, glob, os

def name_of(task):
    try:
        return open(task).read()
    except OSError:  # it has just ended
        return ""

def threads():
    return sum(name_of(task).startswith("pt_gloo") for task in glob.glob("/proc/self/task/*/comm"))

def tell(what):
    os.write(1, f"{what} {threads()}\\n".encode())  # in one piece: the other rank writes too

atexit.register(tell, "at the end")  # before shoal's own, so it runs after it

import torch, torch.distributed as dist
import shoal

dist.init_process_group("gloo")
network = shoal.parallelize(torch.nn.Conv2d(3, 4, 3), torch.randn(4, 3, 8, 8), plan="model")
for _ in range(20):
    network(torch.randn(2, 3, 8, 8)).sum().backward()
tell("while it runs")
"""

OF_THE_SCRIPT = 2
"""Threads of the script's own group, which it does not end."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no thread begins while the interpreter ends: a pause instead")
def test_threads_of_groups_end_before_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    words = [line.rsplit(" ", 1) for line in ended.stdout.splitlines()]
    running = [int(count) for what, count in words if what == "while it runs"]
    ending = [int(count) for what, count in words if what == "at the end"]
    assert (len(running), len(ending)) == (2, 2), ended.stdout
    assert min(running) > OF_THE_SCRIPT
    assert max(ending) <= OF_THE_SCRIPT
