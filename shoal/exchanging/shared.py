"""Shards in memory that the processes of one host share: no server, no message. Each replica updates them itself.

Files in a folder of the system's memory file system, mapped by every process: one with all numbers, and one per shard
to lock. The kernel frees the lock of a process that dies, so a killed replica blocks nobody. A frozen one could: see
`holder`.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from shoal.exchanging.held import COUNTS, HOLDER, Policy, Shard
from shoal.exchanging.shards import Slice

PREFIX = "shoal-shared-"
ALIVE = "alive"
ALIGNED = 64
"""Elements: tensors begin at multiples of this, whole cache lines whatever the type."""


_kept: dict[Path, BinaryIO] = {}
"""What says that folders made here are in use."""


def _root() -> Path:
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class FileLock:
    """Exclusive among processes, and freed by the kernel when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def close(self) -> None:
        """Let go of the file, and with it of the lock."""
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
        for left in _root().glob(f"{PREFIX}*/{ALIVE}"):
            with suppress(OSError), left.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever made it holds this while it lives
                shutil.rmtree(left.parent, ignore_errors=True)
        folder = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=_root())))
        _kept[folder.path] = file = (folder.path / ALIVE).open("ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        return folder

    @staticmethod
    def room() -> int:
        """Bytes that are free for such folders."""
        return shutil.disk_usage(_root()).free

    def remove(self) -> None:
        """The memory is freed when the last process that maps it ends."""
        if self.path in _kept:
            _kept.pop(self.path).close()
        shutil.rmtree(self.path, ignore_errors=True)

    def shards(
        self,
        column: int,
        layout: Sequence[Sequence[Slice]],
        kinds: Mapping[str, torch.dtype],
        policy: Policy,
        owner: int,
    ) -> list[Shard]:
        """The shards of one column of ranks, mapped; zeros, and not ready, until somebody begins them."""
        return [
            self._shard(f"{column}-{number}", slices, kinds, policy, owner)
            for number, slices in enumerate(layout)
            if slices
        ]

    def _shard(
        self, name: str, slices: Sequence[Slice], kinds: Mapping[str, torch.dtype], policy: Policy, owner: int
    ) -> Shard:
        counts = torch.from_file(str(self.path / f"{name}.counts"), shared=True, size=COUNTS, dtype=torch.int64)
        copies = []
        for copy in range(1 + policy.rule.slots):
            tensors: list[tuple[Slice, Tensor]] = []
            for kind in sorted({kinds[one.name] for one in slices}, key=str):
                own = [one for one in slices if kinds[one.name] == kind]
                tensors += zip(own, self._tensors(f"{name}.{copy}.{str(kind)[6:]}", own, kind), strict=True)
            by_slice = dict(tensors)
            copies.append([by_slice[one] for one in slices])
        lock = FileLock(self.path / f"{name}.lock")
        return Shard(copies[0], copies[1:], counts, policy, lock, owner, lock.close)

    def _tensors(self, name: str, slices: Sequence[Slice], kind: torch.dtype) -> list[Tensor]:
        starts, end = [], 0
        for one in slices:
            starts.append(end)
            end += -(-one.size // ALIGNED) * ALIGNED
        whole = torch.from_file(str(self.path / name), shared=True, size=max(end, 1), dtype=kind)
        return [whole[start : start + one.size] for start, one in zip(starts, slices, strict=True)]

    def holders(self) -> set[int]:
        """Who is inside an update of any shard now, by the owners' numbers."""
        found = set()
        for path in self.path.glob("*.counts"):
            counts = torch.from_file(str(path), shared=True, size=COUNTS, dtype=torch.int64)
            found.add(int(counts[HOLDER]) - 1)
        return found - {-1}
