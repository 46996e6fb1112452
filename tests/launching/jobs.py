"""What the ranks of the tests do. Importable, so that spawned processes find it."""

import multiprocessing as mp
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from shoal import errors
from shoal.errors import DivergedError, StoppedError
from shoal.launching import offer, run, tell_stage


def add_up(start: int) -> tuple[int, int, int, str]:
    """(rank, sum over ranks, threads, OMP_NUM_THREADS)."""
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def load_slowly() -> None:
    """Tell of it, rank 1 after the launcher has heard of rank 0."""
    if dist.get_rank() == 1:
        time.sleep(1)
    tell_stage("have loaded")


def where() -> Path:
    """The folder in which this rank works."""
    return Path.cwd()


@dataclass
class Seen:
    """What a process finds around it."""

    setting: str | None
    home: str | None
    cores: set[int]
    name: str
    forked: bool


def surroundings(setting: str) -> Seen:
    parent = mp.parent_process()
    assert parent is not None
    return Seen(
        os.environ.get(setting),
        os.environ.get("HOME"),
        os.sched_getaffinity(0),
        psutil.Process().name(),
        os.getppid() != parent.pid,
    )


def say(words: str) -> None:
    print(words)
    print("and to stderr:", words, file=sys.stderr)


def draws() -> tuple[float, float]:
    """Of Python and of numpy."""
    return random.random(), float(np.random.rand())  # noqa: NPY002  (its global generator is what this is about)


def leave_pid(folder: str) -> None:
    """So that a test can look whether this process is gone."""
    (Path(folder) / f"rank{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()


def fail(folder: str, how: str) -> None:
    """Rank 1 of three fails as `how` says while the others wait for it; asserting that it did is `what_fired`'s."""
    leave_pid(folder)
    if dist.get_rank() == 1:
        time.sleep(0.2)  # the others wait already
        (Path(folder) / "fired").touch()
        if how == "raise":
            error = ValueError("the weights\nare too heavy")
            error.add_note("in layer 'conv1' on rank 1")
            raise error
        if how == "diverge":
            raise DivergedError("the loss became nan.", "Lower --lr.")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(1000)
        if how == "return":
            return
    dist.all_reduce(torch.zeros(1))


def lose_first(folder: str) -> None:
    """Rank 0 reports a lost connection; only later rank 1 dies: its death is the cause all the same."""
    leave_pid(folder)
    if dist.get_rank() == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711")
    time.sleep(1.5)
    (Path(folder) / "fired").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def offer_a_part(folder: str) -> None:
    """Rank 1 freezes; rank 0, which waited for it, has not all of the run and says so before it ends."""
    leave_pid(folder)
    if dist.get_rank() == 1:
        (Path(folder) / "fired").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (Path(folder) / "fired").exists():
        time.sleep(0.01)
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError:
        assert not offer(7, time.time(), whole=False)
        raise


def wait_for_stop(folder: str) -> None:
    """Stop in good order when asked; rank 0 takes its time, as if it wrote a checkpoint."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    leave_pid(folder)
    while not asked:
        time.sleep(0.01)
    if dist.get_rank() == 0:
        time.sleep(2.5)
        (Path(folder) / "fired").touch()
    raise StoppedError("stopped after step 3.", "Go on.")


def sleep_forever(folder: str) -> None:
    leave_pid(folder)
    time.sleep(1000)


def give_what_cannot_be_sent() -> object:
    return threading.Lock()


def conduct(folder: str) -> tuple[bool, Seen]:
    """As a conductor does: starts a rank of its own, and says whether one process forked both, and what that saw."""
    (Path(folder) / "conductor").write_text(str(os.getpid()))
    ((helper, seen),) = run(helper_and_surroundings, "MY_SETTING", workers=1)
    return helper == os.getppid(), seen


def helper_and_surroundings(setting: str) -> tuple[int, Seen]:
    return os.getppid(), surroundings(setting)


def conduct_forever(folder: str) -> None:
    (Path(folder) / "conductor").write_text(str(os.getpid()))
    run(sleep_forever, folder, workers=2)


def home_of_shoal() -> str:
    """The folder that this process has it from."""
    return str(Path(errors.__file__).parent)
