"""Shards in memory that the processes of one host share: no server, no message. Each replica updates them itself.

Files in a folder of the system's memory file system, mapped by every process: one with all numbers, and one per shard
to lock. The kernel frees the lock of a process that dies, so a killed replica blocks nobody. A frozen one could: see
`holds_a_lock`. Memory is reserved before it is used: a file system that is full is an error, and not the end of a
process. The folder ends with the process that made it, however that ends: a process of its own watches over it
(`_guard`), since whoever is killed removes nothing; and what both left, the next run removes.
"""

import atexit
import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.exchanging.servers.shard import COUNTS, Policy, Shard
from shoal.exchanging.servers.shared_consensus import CHANGES, Place, Register, SharedConsensus
from shoal.exchanging.servers.slices import Slice

PREFIX = "shoal-shared-"
UNFINISHED = ".shoal-unfinished-"
"""The prefix of a folder's name until its lock is taken: other runs do not remove such folders."""
UNFINISHED_SECONDS = 600.0
"""Seconds after which such an unfinished folder counts as left behind by a process that was killed."""
ALIVE = "alive"
LOCKS = Path("/proc/locks")
"""Linux lists here which process holds which lock."""
ALIGNED = 64
"""Elements: tensors begin at multiples of this, whole cache lines whatever the type."""


_GUARD = """
trap '' HUP INT TERM
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf -- "$1" 2>/dev/null && exit; sleep 0.1; done
"""
"""Waits for the end of its input, which is that of the process that made the folder. Replicas that die with that
process may still add files, hence several tries."""


@dataclass(frozen=True)
class _Kept:
    """The lock that shows that a folder made here is in use, and the process that removes it if this one cannot."""

    alive: BinaryIO
    guard: "subprocess.Popen[bytes]"

    def let_go(self) -> None:
        """After the folder is removed."""
        self.alive.close()
        self.guard.communicate()


_kept: dict[Path, _Kept] = {}
"""Folders made here."""


def _root() -> Path:
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def _guard(path: Path) -> "subprocess.Popen[bytes]":
    """A process that removes `path` when this one is gone. In a session of its own: it outlives the terminal."""
    nowhere = subprocess.DEVNULL
    command = ["/bin/sh", "-c", _GUARD, "shoal-guard", str(path)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True
    )


class FileLock:
    """Exclusive among processes, and freed by the kernel when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def close(self) -> None:
        """Close the file, and so free the lock."""
        self._file.close()

    def __enter__(self) -> Self:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class SharedFolder:
    """Where the shards of one run lie."""

    path: Path

    @classmethod
    def create(cls) -> Self:
        """A new folder, after what dead runs left there is removed. Whoever makes it removes it: `remove`."""
        for left in _root().glob(f"{PREFIX}*"):
            cls(left).remove_if_left()
        for left in _root().glob(f"{UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > UNFINISHED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=_root()))
        file = (unfinished / ALIVE).open("ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        path = _root() / unfinished.name.replace(UNFINISHED, PREFIX)
        guard = _guard(path)
        unfinished.rename(path)  # others see the folder only from here on, when it is locked
        _kept[path] = _Kept(file, guard)
        return cls(path)

    def remove_if_left(self) -> None:
        """Remove it if the process that made it is gone, which held a lock for as long as it lived."""
        with suppress(OSError), (self.path / ALIVE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def room() -> int:
        """Bytes that are free for such folders."""
        return shutil.disk_usage(_root()).free

    def remove(self) -> None:
        """The memory is freed when the last process that maps it ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path in _kept:
            _kept.pop(self.path).let_go()

    def shards(
        self,
        column: int,
        layout: Sequence[Sequence[Slice]],
        kinds: Mapping[str, torch.dtype],
        policy: Policy,
    ) -> list[Shard]:
        """The shards of one column of ranks, mapped; zeros, and not ready, until somebody begins them.

        A `RunError` where there is no room for them.
        """
        atexit.register(self.remove_if_left)
        return [
            self._shard(f"{column}-{number}", slices, kinds, policy) for number, slices in enumerate(layout) if slices
        ]

    def consensus(
        self,
        column: int,
        layout: Sequence[Sequence[Slice]],
        kinds: Mapping[str, torch.dtype],
        policy: Policy,
        number: int,
    ) -> list[Shard]:
        """The same of shards whose weights are the mean of what each replica sent last; replica `number`'s view."""
        return [
            self._consensus(shard, f"{column}-{which}", slices, kinds, number)
            for which, (slices, shard) in enumerate(
                zip(filter(None, layout), self.shards(column, layout, kinds, policy), strict=True)
            )
        ]

    def register(self) -> Register:
        """Who takes part, for shards that are a mean of what those sent."""
        return Register(self.path, self._mapped(CHANGES, 1, torch.int64))

    def _consensus(
        self, shard: Shard, name: str, slices: Sequence[Slice], kinds: Mapping[str, torch.dtype], number: int
    ) -> Shard:
        def place(which: int) -> Place:
            sent = self._copy(f"{name}.sent{which}", slices, kinds)
            return Place(sent, self._mapped(f"{name}.mark{which}", 1, torch.int64))

        whole = {kept.name: getattr(shard, kept.name) for kept in fields(shard)}
        return SharedConsensus(**whole, number=number, register=self.register(), place_of=place)

    def _copy(self, name: str, slices: Sequence[Slice], kinds: Mapping[str, torch.dtype]) -> list[Tensor]:
        """Memory for a tensor of each slice."""
        tensors: list[tuple[Slice, Tensor]] = []
        for kind in sorted({kinds[piece.name] for piece in slices}, key=str):
            own = [piece for piece in slices if kinds[piece.name] == kind]
            tensors += zip(own, self._tensors(f"{name}.{str(kind)[6:]}", own, kind), strict=True)
        by_slice = dict(tensors)
        return [by_slice[piece] for piece in slices]

    def _shard(self, name: str, slices: Sequence[Slice], kinds: Mapping[str, torch.dtype], policy: Policy) -> Shard:
        counts = self._mapped(f"{name}.counts", COUNTS, torch.int64)
        copies = [self._copy(f"{name}.{copy}", slices, kinds) for copy in range(1 + policy.states)]
        if not policy.locked:
            return Shard(copies[0], copies[1:], counts, policy, nullcontext())
        lock = FileLock(self.path / f"{name}.lock")
        return Shard(copies[0], copies[1:], counts, policy, lock, lock.close)

    def _tensors(self, name: str, slices: Sequence[Slice], kind: torch.dtype) -> list[Tensor]:
        starts, end = [], 0
        for piece in slices:
            starts.append(end)
            end += -(-piece.size // ALIGNED) * ALIGNED
        whole = self._mapped(name, max(end, 1), kind)
        return [whole[start : start + piece.size] for start, piece in zip(starts, slices, strict=True)]

    def _mapped(self, name: str, size: int, kind: torch.dtype) -> Tensor:
        """A file of so many numbers, its memory reserved."""
        path = self.path / name
        with path.open("ab") as file:
            try:
                _reserve(file.fileno(), size * kind.itemsize)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise RunError(
                    f"there is no room for {size * kind.itemsize >> 10} KiB more of shared memory in {_root()}.",
                    "Give servers=processes, or the system more (docker run --shm-size).",
                ) from None
        return torch.from_file(str(path), shared=True, size=size, dtype=kind)

    def holds_a_lock(self, pids: Iterable[int]) -> bool:
        """Whether one of these processes is inside an update of any shard now, by what the kernel says.

        Where the kernel does not tell who holds a lock: whether anybody does.
        """
        paths = list(self.path.glob("*.lock"))
        if not LOCKS.exists():
            return any(_is_locked(path) for path in paths)
        inodes, wanted = {str(path.stat().st_ino) for path in paths}, set(map(str, pids))
        for line in LOCKS.read_text().splitlines():  # 7: FLOCK  ADVISORY  WRITE 4711 00:1a:815 0 EOF
            words = line.split()
            if words[1] == "FLOCK" and words[4] in wanted and words[5].rpartition(":")[2] in inodes:
                return True
        return False


def _reserve(file: int, size: int) -> None:
    """Make a file so large, which others may have done and filled already; an `OSError` where there is no room.

    Where the system cannot reserve memory (macOS) it looks whether there is enough now.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    there = os.fstatvfs(file)
    if os.fstat(file).st_size < size > there.f_bavail * there.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
