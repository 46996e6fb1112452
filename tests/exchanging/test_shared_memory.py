"""Shared memory of one host: who holds a lock, who removes what, and what happens when there is no room."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal.errors import RunError
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.exchanging.servers import shared_memory
from shoal.exchanging.servers.rules import make_rule
from shoal.exchanging.servers.shard import Policy
from shoal.exchanging.servers.shared_memory import FileLock, SharedFolder
from shoal.exchanging.servers.slices import cut_over
from shoal.transport.links import JSON, connect

pytestmark = pytest.mark.timeout(60)
POLICY = Policy(make_rule("sgd", momentum=0.9, weight_decay=0.0))


@pytest.fixture
def folder() -> Iterator[SharedFolder]:
    made = SharedFolder.create()
    yield made
    made.remove()


def map_into(folder: SharedFolder) -> None:
    """As a replica does, which then goes."""
    for shard in folder.shards(0, cut_over({"weight": 1000}, 2), {"weight": torch.float32}, POLICY):
        shard.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(FileLock(path)) as lock, lock:
        yield


STOPS = """
import os, signal, sys
from pathlib import Path
from shoal.exchanging.servers.shared_memory import FileLock
with FileLock(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_kernel_tells_who_is_frozen_with_a_lock(folder: SharedFolder) -> None:
    """Stopped right after it took the lock, and before it could have noted so anywhere."""
    map_into(folder)
    held = folder.path / "0-1.lock"
    process = subprocess.Popen([sys.executable, "-c", STOPS, str(held)])
    try:
        deadline = time.monotonic() + 30
        while not folder.holds_a_lock([process.pid]):
            assert time.monotonic() < deadline, "the lock was never taken"
            time.sleep(0.01)
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] in "TRS"
        assert not folder.holds_a_lock([os.getpid()])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not folder.holds_a_lock([process.pid])
    with locked(held):  # the kernel freed it
        assert folder.holds_a_lock([os.getpid()])


def test_one_that_froze_with_a_lock_is_killed_and_one_without_is_not(folder: SharedFolder) -> None:
    """The others would wait for the lock for good."""
    map_into(folder)
    held = folder.path / "0-1.lock"
    holder = subprocess.Popen([sys.executable, "-c", STOPS, str(held)])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    place = Coordinator(heartbeat=30.0, replicas=2, shared=folder)
    try:
        deadline = time.monotonic() + 30
        while not folder.holds_a_lock([holder.pid]):
            assert time.monotonic() < deadline, "the lock was never taken"
            time.sleep(0.01)
        links = []
        for replica, process in enumerate((holder, other)):
            hello: dict[str, JSON] = {"as": "replica", "replica": replica, "pids": [process.pid]}
            links.append(connect(place.address, place.token, hello, name="the place"))
            links[-1].receive()
            place.suspect(replica, hangs=True)
        assert holder.wait(30) == -signal.SIGKILL
        assert other.poll() is None
        with locked(held):
            assert folder.holds_a_lock([os.getpid()])
        for link in links:
            link.close()
    finally:
        place.close()
        for process in (holder, other):
            process.kill()
            process.wait()


def test_where_the_kernel_does_not_tell_any_holder_counts(
    folder: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_into(folder)
    monkeypatch.setattr(shared_memory, "LOCKS", Path("/nowhere"))
    assert not folder.holds_a_lock([1])
    with locked(folder.path / "0-0.lock"):
        assert folder.holds_a_lock([1])


def test_nobody_removes_a_folder_that_is_just_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers: one looks for what dead runs left while the other is about to lock its new folder."""
    lock = fcntl.flock
    others: list[SharedFolder | None] = []

    def flock(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and not others:
            others.append(None)
            others.append(SharedFolder.create())
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = SharedFolder.create()
    try:
        assert len(others) == 2, "nobody came between"
        assert mine.path.is_dir()
        assert (mine.path / "alive").exists()
    finally:
        for made in (mine, others[1]):
            assert isinstance(made, SharedFolder)
            made.remove()


def test_a_full_file_system_is_an_error_with_a_way_out(folder: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"no room for .* of shared memory") as caught:
        map_into(folder)
    assert "servers=processes" in caught.value.remedy


def test_memory_is_reserved_before_it_is_used(folder: SharedFolder) -> None:
    map_into(folder)
    for path in folder.path.glob("0-*"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


MAKES = """
import time
from shoal.exchanging.servers.shared_memory import SharedFolder
print(SharedFolder.create().path, flush=True)
time.sleep(60)
"""
MAPS = """
import os, sys, torch
from pathlib import Path
from tests.exchanging.test_shared_memory import map_into
from shoal.exchanging.servers.shared_memory import SharedFolder
map_into(SharedFolder(Path(sys.argv[1])))
print("mapped", flush=True)
sys.stdin.read()
"""


def gone(path: Path) -> bool:
    """Soon, or the test's time-out ends it."""
    while path.exists():
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_stays_of_a_launcher_that_is_killed(how: signal.Signals) -> None:
    """Nor of its replicas, which are killed with it and so remove nothing either."""
    launcher = subprocess.Popen([sys.executable, "-c", MAKES], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    path = Path(launcher.stdout.readline().strip())
    replica = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert replica.stdout is not None
    assert replica.stdout.readline() == "mapped\n"
    assert path.is_dir()
    guards = [child for child in psutil.Process(launcher.pid).children() if str(path) in child.cmdline()]
    assert len(guards) == 1
    replica.kill()
    replica.communicate()
    assert path.is_dir()
    launcher.send_signal(how)
    launcher.communicate()
    assert launcher.returncode == -how
    assert gone(path)
    assert not psutil.wait_procs(guards, timeout=30)[1]


def test_the_last_to_leave_removes_what_launcher_and_guard_left() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", MAKES], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    path = Path(launcher.stdout.readline().strip())
    replica = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert replica.stdout is not None
    assert replica.stdout.readline() == "mapped\n"
    for guard in psutil.Process(launcher.pid).children():
        guard.kill()
    launcher.kill()
    launcher.communicate()
    assert path.is_dir()
    replica.communicate("", timeout=30)
    assert not path.exists()


def test_where_the_system_cannot_reserve_memory_files_are_made_all_the_same(
    folder: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    layout, kinds = cut_over({"weight": 1000}, 1), {"weight": torch.float32}
    (first,) = folder.shards(0, layout, kinds, POLICY)
    first.begin([torch.arange(1000.0)], [])
    (second,) = folder.shards(0, layout, kinds, POLICY)  # which must not empty what is there
    fetched = [torch.zeros(1000)]
    second.push_and_fetch(None, fetched)
    assert torch.equal(fetched[0], torch.arange(1000.0))
    for shard in (first, second):
        shard.close()
    with pytest.raises(RunError, match="no room for"):
        folder.shards(1, cut_over({"weight": 1 << 50}, 1), kinds, POLICY)
