"""The checkpoints of a run: folders that are whole or absent, of which the newest few are kept.

    checkpoints/step-00001200/
        model.safetensors          parameters and buffers, under the names of the network
        optimizer.safetensors      what the optimizer remembers of each, as NAME/WHAT
        average.safetensors        their running average (--ema)
        replica-1.safetensors      what replica 1 has of its own, where an exchange keeps such
        rank-0.json                what is of one rank alone: its random state, its share of the losses
        state.json                 progress, settings, plan, versions: whatever is no tensor
        manifest.json              size and checksum of every file above; written last

What rank R > 0 holds of a cut network is in files of its own: `model-rank1.safetensors`, ... (`tensor_files.py`).

Whole or absent   files are written into a draft beside the others, which gets its name when the manifest is written.
Checked           before a run goes on, every file is read and its checksum compared: `Checkpoint.damage`.
"""

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, PeerError
from shoal.files import sync_folder, write_text_atomically
from shoal.training.checkpoints.tensor_files import (
    CHECKSUMS,
    Parts,
    SavedTensors,
    Seal,
    blocks_of,
    seal_of,
    write_blocks,
)

SCHEMA, _SCHEMA_OF_SHA256 = "shoal.checkpoint/6", "shoal.checkpoint/5"
MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?(?:-(\d+))?")
"""Steps; behind a point, that steps were counted anew, in larger batches, so many times less one; behind a dash, that
it is not the first of these steps."""
_NOT_AS_SAVED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What Python says of a value that is missing, of another type, or out of all bounds."""
_LOOK_SECONDS = 0.01
"""Between two looks at whether another rank has written its part."""


def new_token() -> int:
    """What drafts of one run are told apart by from those of a killed one; all its ranks must have the same."""
    return secrets.randbelow(10**9)


def file_of_rank(kind: str, rank: int) -> str:
    """The name of a rank's file of tensors.

    >>> file_of_rank("model", 0), file_of_rank("model", 1)
    ('model.safetensors', 'model-rank1.safetensors')
    """
    return f"{kind}.safetensors" if rank == 0 else f"{kind}-rank{rank}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on the disk. `damage` says whether it can be used."""

    path: Path

    @property
    def order(self) -> tuple[int, int, int]:
        """Which counting of steps it is of, its steps, and which one of these steps it is: a later one sorts behind."""
        found = _NAME.fullmatch(self.path.name)
        return (int(found[2] or 1), int(found[1]), int(found[3] or 1)) if found else (0, -1, 0)

    @property
    def steps(self) -> int:
        """Steps that are in it."""
        return self.order[1]

    def damage(self) -> str | None:
        """What is wrong with it; None where every file is as it was written. Costs reading all of it."""
        try:
            for name, seal in self._seals().items():
                if not (self.path / name).is_file():
                    return f"{name} is missing"
                if (self.path / name).stat().st_size != seal.bytes:
                    return f"{name} is not of {seal.bytes} bytes"
                if seal_of(self.path / name, seal.kind) != seal:
                    return f"{name} has another checksum than {MANIFEST} says"
        except CheckpointError as error:
            return error.problem.rstrip(".")
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        return None

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """While what it says is used: whatever does not fit is a `CheckpointError`, since anybody may have written it.

        Checksums find damage, not what was never right.
        """
        try:
            yield
        except _NOT_AS_SAVED as error:
            raise CheckpointError(
                f"checkpoint {str(self.path)!r} does not say what a run needs to go on: "
                f"{type(error).__name__}: {str(error).strip() or 'no more is known'}.",
                "Go on from another checkpoint.",
            ) from error

    def files(self) -> list[str]:
        """The names of its files, but for the manifest."""
        return list(self._seals())

    def state(self) -> dict[str, Any]:
        """What is no tensor."""
        return self.json(STATE)

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """What rank `rank` alone had; None where there was no such rank."""
        name = f"rank-{rank}.json"
        return self.json(name) if name in self._seals() else None

    def tensors(self, kind: str) -> SavedTensors:
        """All tensors of one kind, of whichever ranks: model, optimizer, average, replica-R."""
        wanted = re.compile(rf"{re.escape(kind)}(-rank\d+)?\.safetensors")
        return SavedTensors(self.path / name for name in self._seals() if wanted.fullmatch(name))

    def json(self, name: str) -> dict[str, Any]:
        """A file of texts and numbers."""
        if not (self.path / name).is_file():  # a pipe would be waited for
            raise CheckpointError(f"{name} is missing.", "Go on from another checkpoint.")
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}.", "Go on from another checkpoint.") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{name} does not hold names and values.", "Go on from another checkpoint.")
        return content

    def _seals(self) -> dict[str, Seal]:
        manifest = self.json(MANIFEST)
        if manifest.get("schema") not in (SCHEMA, _SCHEMA_OF_SHA256):
            raise CheckpointError(
                f"it was written by another version: its schema is {manifest.get('schema')!r}, not {SCHEMA!r}.",
                "Go on with the version that wrote it.",
            )
        try:
            seals = {name: _seal(said) for name, said in manifest["files"].items()}
        except (KeyError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{MANIFEST} lists no files.", "Go on from another checkpoint.") from None
        if any(Path(name).name != name for name in seals):
            raise CheckpointError(f"{MANIFEST} names files elsewhere.", "Go on from another checkpoint.")
        if STATE not in seals:
            raise CheckpointError(f"{MANIFEST} does not list {STATE}.", "Go on from another checkpoint.")
        return seals


def _seal(said: dict[str, Any]) -> Seal:
    """As a manifest says it: the size, and a checksum under the name of its kind."""
    (kind,) = said.keys() & CHECKSUMS
    return Seal(said["bytes"], kind, said[kind])


class CheckpointFolder:
    """`OUT/checkpoints`. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Checkpoint]:
        """Oldest first, whole or damaged."""
        if not self.path.is_dir():
            return []
        found = [Checkpoint(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda checkpoint: checkpoint.order)

    def newest_whole(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest that is not damaged, and what is wrong with those after it, for people."""
        damaged: list[str] = []
        for checkpoint in reversed(self.all()):
            why = checkpoint.damage()
            if why is None:
                return checkpoint, damaged
            damaged.append(f"checkpoint {str(checkpoint.path)!r} is damaged: {why}.")
        return None, damaged

    def set_aside_after(self, checkpoint: Checkpoint) -> list[Path]:
        """Rename those that are newer, from which nobody is to go on any more; their new names."""
        aside = []
        for newer in self.all():
            if newer.order > checkpoint.order:
                number, target = 1, newer.path.with_name(f"left-{newer.path.name}")
                while target.exists():
                    number += 1
                    target = newer.path.with_name(f"left-{newer.path.name}-{number}")
                newer.path.rename(target)
                aside.append(target)
        return aside

    def keep(self, count: int, spared: Checkpoint | None = None) -> None:
        """Remove all but the newest, and one that somebody may still read."""
        for checkpoint in self.all()[:-count]:
            if checkpoint == spared:
                continue
            # Its name goes first, so that nobody finds half of it.
            old = checkpoint.path.with_name(f".{checkpoint.path.name}.{new_token()}.tmp")
            checkpoint.path.rename(old)
            shutil.rmtree(old, ignore_errors=True)

    def free_path(self, steps: int) -> Path:
        """A name for a checkpoint of so many steps that sorts after those there are.

        A run that goes on with larger batches has fewer steps than before: its steps are a new counting.
        """
        counting, most, again = max((checkpoint.order for checkpoint in self.all()), default=(1, -1, 0))
        if steps < most:
            counting += 1
        name = f"step-{steps:08d}" + (f".{counting}" if counting > 1 else "")
        return self.path / (f"{name}-{again + 1}" if steps == most else name)


class Draft:
    """A checkpoint that is being written, by one rank or by several that see the same folder.

    `token`: the same on all of them. One of them commits; the others hand over. What is not committed is removed when
    a run begins or goes on.
    """

    def __init__(self, folder: CheckpointFolder, name: str, token: int) -> None:
        self._folder = folder
        self.path = folder.path / f".{name}.{token}.tmp"
        self._seals: dict[str, Seal] = {}
        self.path.mkdir(parents=True, exist_ok=True)

    def write_parts(self, name: str, parts: Parts) -> None:
        """A file of tensors."""
        self._seals[name] = write_blocks(self.path / name, blocks_of(parts))

    def write_bytes(self, name: str, content: bytes | memoryview) -> None:
        """A file that came from elsewhere."""
        self._seals[name] = write_blocks(self.path / name, [content])

    def write_json(self, name: str, content: object) -> None:
        """A file of texts and numbers."""
        self.write_bytes(name, json.dumps(content, indent=1).encode())

    def hand_over(self, rank: int) -> None:
        """This rank has written all its files: tell whoever commits, by a file."""
        write_text_atomically(self._said_by(rank), json.dumps(self._said()))

    def take_over(self, ranks: Iterable[int], timeout: float, over: Callable[[], bool] = lambda: False) -> None:
        """Wait for the files of other ranks. `over`: whether nobody wants the checkpoint any more.

        A `PeerError` names those that write nothing for `timeout` seconds.
        """
        waiting, written, since = set(ranks), -1, time.monotonic()
        while waiting:
            for rank in sorted(waiting):
                if self._said_by(rank).exists():
                    said = json.loads(self._said_by(rank).read_text(encoding="utf-8"))
                    self._seals |= {name: _seal(seal) for name, seal in said.items()}
                    self._said_by(rank).unlink()
                    waiting.remove(rank)
            if (now := self._bytes()) != written:
                written, since = now, time.monotonic()
            if over() or time.monotonic() - since > timeout:
                named = ", ".join(map(str, sorted(waiting)))
                raise PeerError(
                    f"ranks {named} did not write their part of a checkpoint within {timeout:g} seconds.",
                    "All ranks must see the same --out folder; if writing takes longer, give a longer --timeout.",
                )
            if waiting:
                time.sleep(_LOOK_SECONDS)

    def _bytes(self) -> int:
        """What is written by now."""
        total = 0
        for path in self.path.iterdir():
            with suppress(FileNotFoundError):  # it had another name a moment ago
                total += path.stat().st_size
        return total

    def _said(self) -> dict[str, dict[str, Any]]:
        """The seals by file, as a manifest says them."""
        return {name: {"bytes": seal.bytes, seal.kind: seal.checksum} for name, seal in sorted(self._seals.items())}

    def _said_by(self, rank: int) -> Path:
        return self.path / f"written-{rank}.json"

    def commit(self, steps: int) -> Checkpoint:
        """Give it its name, under which it is whole."""
        manifest = {"schema": SCHEMA, "steps": steps, "files": self._said()}
        write_blocks(self.path / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        sync_folder(self.path)
        path = self._folder.free_path(steps)
        self.path.rename(path)
        sync_folder(self._folder.path)
        return Checkpoint(path)

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
