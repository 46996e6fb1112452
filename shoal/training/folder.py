"""The folder of one run: where its files lie and that they can be written."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shoal.config import TrainConfig
from shoal.errors import CheckpointError, OutputError


@dataclass(frozen=True)
class RunFolder:
    """Names of a run's files. `create` and `open` are the only ways in and check what they find."""

    path: Path

    @property
    def result(self) -> Path:
        """What the run did; written last, so a folder with it holds a finished run."""
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line, as the run went."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The settings, resolved: a recipe that repeats the run."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """How the layers were cut."""
        return self.path / "plan.json"

    @property
    def checkpoint(self) -> Path:
        """All that is needed to go on."""
        return self.path / "checkpoint.pt"

    @property
    def meeting(self) -> Path:
        """While a run with an asynchronous exchange goes on: where another replica can join it."""
        return self.path / "meeting.json"

    @property
    def weights(self) -> Path:
        """The trained parameters and buffers alone."""
        return self.path / "model.safetensors"

    @classmethod
    def free(cls, config: TrainConfig) -> Self:
        """The folder that `create` would make, nothing done yet; one that already holds a run is an `OutputError`."""
        folder = cls(config.out or _fresh_name(config))
        if folder.checkpoint.exists() or folder.result.exists():
            raise OutputError(
                f"--out {str(folder.path)!r} already holds a run.",
                f"Give another --out, or go on with that run: shoal train --resume {folder.path}",
            )
        return folder

    @classmethod
    def create(cls, config: TrainConfig) -> Self:
        """Make the folder (a new one under `runs/` unless the config names one) and prove it writable.

        A folder that already holds a run is an `OutputError`: results are never overwritten.
        """
        folder = cls.free(config)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.metrics.touch()
        except OSError as error:
            raise OutputError(
                f"--out {str(folder.path)!r} cannot be written: {error.strerror or error}.",
                "Give a folder that you may write to, with --out DIR.",
            ) from None
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """A folder whose run can go on: it must hold a checkpoint and its settings."""
        folder = cls(path)
        if not (folder.checkpoint.exists() and folder.config.exists()):
            raise CheckpointError(
                f"--resume {str(path)!r}: no run with a checkpoint lies there.",
                "Give the --out folder of a run that was stopped; it holds checkpoint.pt and config.yaml.",
            )
        return folder


def _fresh_name(config: TrainConfig) -> Path:
    """`runs/lenet5-digits-20260131-120000`; a number is added when that second is taken."""
    words = re.sub(r"[^\w.-]+", "_", f"{config.model}-{config.data}").strip("_")
    first = Path("runs") / f"{words}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = first, 1
    while path.exists():
        count += 1
        path = first.with_name(f"{first.name}-{count}")
    return path
