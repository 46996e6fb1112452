"""Fetch public files once, whole or not at all. No torch.

Keeps     a file under its own name has the checksum we know: it is written under a temporary name in the
          same folder, checked, and renamed. Two processes may fetch at once; each renames a whole file.
Failure   nothing is left behind; `DataError` names the address and the way to do without it.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from shoal.errors import DataError
from shoal.units import show_bytes

BLOCK = 1 << 16
TIMEOUT = 20.0  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """A public file whose content is known."""

    name: str
    size: int
    sha256: str


def fetch(files: Sequence[Remote], *, base_url: str, folder: Path, remedy: str) -> None:
    """Bring those of `files` that `folder` lacks. `remedy` tells the user how to do without the network."""
    missing = [file for file in files if not (folder / file.name).is_file()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _progress(sum(file.size for file in missing), base_url, folder) as advance:
            for file in missing:
                _fetch_one(file, base_url.rstrip("/") + "/" + file.name, folder, advance)
    except (OSError, HTTPException) as error:  # refused, unknown host, HTTP status, disk full, read-only
        raise DataError(f"could not download from {base_url} to {folder}: {error}.", remedy) from error


def check(path: Path, file: Remote, remedy: str) -> None:
    """Refuse a file that is not the known one. Costs a read and a hash of it (25 ms for 26 MB)."""
    try:
        size = path.stat().st_size
        if size != file.size:
            problem = f"{path} has {size} bytes where {file.size} are expected: it is truncated or another file."
            raise DataError(problem, remedy)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.", remedy) from error
    if digest != file.sha256:
        raise DataError(f"{path} is corrupt or another file: its sha256 is {digest}, not {file.sha256}.", remedy)


def _fetch_one(file: Remote, url: str, folder: Path, advance: Callable[[int], None]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out, urlopen(url, timeout=TIMEOUT) as response:
            digest = _copy(response, out, advance)
        if digest != file.sha256:
            raise DataError(
                f"{url} gave a file with the sha256 {digest}, not {file.sha256}; it was not kept.",
                f"Try again later, or put {file.name} from elsewhere in a folder and set SHOAL_DATA to it.",
            )
        Path(temporary).replace(folder / file.name)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _copy(source: IO[bytes], out: IO[bytes], advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    while block := source.read(BLOCK):
        out.write(block)
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()


@contextmanager
def _progress(total: int, base_url: str, folder: Path) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere; both on the error stream, which is for people."""
    message = f"downloading {show_bytes(total)} from {base_url} to {folder}"
    if not sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    console.print(message, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("download", total=total)
        yield lambda count: bar.update(task, advance=count)
