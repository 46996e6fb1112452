"""Where data sets are looked for on this machine. No torch; costs a few file system calls.

The folders, in order: those that $SHOAL_DATA names, the user's data folder, the folder of Debian's
dataset-* packages, and the user's cache
($SHOAL_CACHE moves it), where downloads go.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from platformdirs import user_data_dir

from shoal.files import cache_folder

VARIABLE = "SHOAL_DATA"
DEBIAN = Path("/usr/share/datasets")


def search_folders() -> tuple[Path, ...]:
    """Every folder that is searched, in order, whether it exists or not."""
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return (*named, Path(user_data_dir("shoal", appauthor=False)), DEBIAN, cache_folder())


def find(files: Sequence[str], *, inside: Sequence[str]) -> Path | None:
    """The first folder that holds all `files`, in a sub-folder named in `inside` or directly."""
    for folder in _candidates(inside):
        if all((folder / name).is_file() for name in files):
            return folder
    return None


def _candidates(inside: Sequence[str]) -> Iterator[Path]:
    for folder in search_folders():
        yield from (folder / name for name in inside)
        yield folder


def searched() -> str:
    """The searched folders for an error message, missing ones marked."""
    return ", ".join(f"{f}" + ("" if f.is_dir() else " (no such folder)") for f in search_folders())
