"""A file that is written once, from its beginning to its end, with as little work as the system allows.

Written the usual way every byte is copied into the system's memory first, which takes a processor that training could
have had, and pushes out of that memory what training reads. Whole pages therefore go to the disk directly (`O_DIRECT`)
where system and file system can do that; all else goes the usual way.
"""

import errno
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

PAGE = 4096
"""Bytes at whose multiples memory and file must lie for a direct way between them."""


class DiskFile:
    """What `write` was given is on the disk when the `with` ends well."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._can, self._direct = sys.platform == "linux", False
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if error is None:
                os.fsync(self._file.fileno())

    def write(self, block: bytes | memoryview) -> None:
        """Append it. Other threads go on meanwhile."""
        left = memoryview(block)
        while left:
            pages = len(left) // PAGE * PAGE
            if pages and self._can and self.size % PAGE == 0 and _address(left) % PAGE == 0:
                written = self._write_directly(left[:pages])
            else:
                self._turn(direct=False)
                written = self._file.write(left)
            left = left[written:]
            self.size += written

    def _write_directly(self, pages: memoryview) -> int:
        """How much of it was written: nothing, where that is no way."""
        try:
            self._turn(direct=True)
            return self._file.write(pages)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._can = False
            return 0

    def _turn(self, *, direct: bool) -> None:
        if direct != self._direct:
            import fcntl  # not on every system

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
            self._direct = direct


def _address(memory: memoryview) -> int:
    if memory.readonly:  # a text
        return 1
    view: Any = memory
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
