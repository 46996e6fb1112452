"""Whole or absent: files that a reader never sees half written; and the folder for what can be had again."""

import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_dir

_DRAFT = re.compile(r"\..+\.\d+\.tmp")


def cache_folder() -> Path:
    """For downloads and measurements: `SHOAL_CACHE`, or the system's place for caches. It may not exist yet."""
    return Path(os.environ.get("SHOAL_CACHE") or user_cache_dir("shoal", appauthor=False))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then put it in place in one step.

    A crash or a kill at any moment leaves the old file or the new one, never a part. The data is on the
    disk before the name appears. The temporary name is removed when `write` raises. Whoever may read a new file in
    this folder may read this one, also where `write` makes its file for its owner alone, as safetensors does.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.touch()
        usual = draft.stat().st_mode
        write(draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        if draft.stat().st_mode != usual:
            draft.chmod(stat.S_IMODE(usual))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """`write_atomically` for a text that is already there."""
    write_atomically(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def remove_drafts(folder: Path) -> None:
    """Remove what `write_atomically` could not: drafts of processes that were killed, of files and of folders.

    Only for a folder in which nobody writes.
    """
    for path in folder.glob(".*.tmp"):
        if _DRAFT.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif _DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder be on the disk, where the system can be told so."""
    if sys.platform == "win32":
        return
    names = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(names)
    finally:
        os.close(names)
