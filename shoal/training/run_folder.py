"""The folder of one run: where its files lie and that they can be written."""

import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shoal.config import TrainConfig
from shoal.errors import CheckpointError, InputError, OutputError, RunError
from shoal.files import remove_drafts


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
    def objects(self) -> Path:
        """Of a run from Python with a network, data, loss or optimizer of one's own: what these are called."""
        return self.path / "objects.json"

    @property
    def how_to_go_on(self) -> str:
        """What to type to go on with the run."""
        if self.objects.exists():
            return f"shoal.resume({str(self.path)!r}, ...) with the same objects"
        return f"shoal train --resume {self.path}"

    @property
    def plan(self) -> Path:
        """How the layers were cut."""
        return self.path / "plan.json"

    @property
    def predicted_trace(self) -> Path:
        """Beside a trace, what the cost model had predicted of a step, where it knew."""
        return self.path / "predicted_trace.json"

    @property
    def outline(self) -> Path:
        """The network under its plan, stage by stage, where it is cut over several workers."""
        return self.path / "outline.json"

    @property
    def events(self) -> Path:
        """A folder of TensorBoard's, where it was asked for."""
        return self.path / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """All that is needed to go on."""
        return self.path / "checkpoint.pt"

    def own_state(self, replica: int, moment: int) -> Path:
        """What a replica has beside the common weights, of the checkpoint at this moment, in batches."""
        return self.path / f"replica-{replica}-{moment}.pt"

    def keep_own_states(self, moments: Mapping[int, int]) -> None:
        """Remove those that belong to no checkpoint any more."""
        kept = {self.own_state(replica, moment) for replica, moment in moments.items()}
        for path in self.path.glob("replica-*-*.pt"):
            if path not in kept:
                path.unlink(missing_ok=True)

    @property
    def meeting(self) -> Path:
        """While a run with an asynchronous exchange goes on: where another replica can join it."""
        return self.path / "meeting.json"

    @property
    def inference(self) -> Path:
        """What the weights need to be used: shape, normalisation, names of classes, network."""
        return self.path / "inference.json"

    @property
    def trace(self) -> Path:
        """What all ranks did in the steps that `--trace` records."""
        return self.path / "trace.json"

    @property
    def weights(self) -> Path:
        """The trained parameters and buffers, with the text of `inference.json` as metadata."""
        return self.path / "model.safetensors"

    @property
    def best(self) -> Path:
        """The weights of the best test, as `weights` are."""
        return self.path / "best.safetensors"

    @classmethod
    def free(cls, config: TrainConfig) -> Self:
        """The folder that `create` would make, nothing done yet; one that already holds a run is an `OutputError`."""
        folder = cls(config.out or _fresh_name(config))
        folder._check_nobody_writes()
        folder._check_free()
        return folder

    def _check_nobody_writes(self) -> None:
        """That a run goes on here is told before what it has written: one would not want to go on with it."""
        try:
            lock = os.open(self.lock, os.O_RDONLY)
        except OSError:
            return
        try:
            _lock(lock)
        except BlockingIOError:
            raise self._taken(os.read(lock, 200).decode(errors="replace"), resumed=False) from None
        finally:
            os.close(lock)

    def _check_free(self) -> None:
        if self.checkpoint.exists() or self.result.exists():
            raise OutputError(
                f"--out {str(self.path)!r} already holds a run.",
                f"Give another --out, or go on with that run: {self.how_to_go_on}",
            )

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

    def check_unfinished(self, done: int, config: TrainConfig, *, stopped: bool) -> None:
        """A `CheckpointError` where the run has its result and no more epochs than those done are asked for.

        `stopped`: it has waited for a better test as long as `config` says.
        """
        epochs = config.epochs
        if self.result.exists() and stopped and done < epochs:
            raise CheckpointError(
                f"--resume {str(self.path)!r}: that run stopped early, after {done} epochs, with patience = "
                f"{config.patience}.",
                "To go on, give a larger --patience.",
            )
        if self.result.exists() and done >= epochs:
            raise CheckpointError(
                f"--resume {str(self.path)!r}: that run has finished its {done} epochs.",
                f"Ask for more with --epochs {done + 5}, or start another run.",
            )

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """While a file of the run is written: a `RunError` with the way out where that fails, as on a full disk."""
        try:
            yield
        except OSError as error:
            raise self._not_written(path, error) from error

    def _not_written(self, path: Path, error: OSError) -> RunError:
        go_on = (
            f"then go on with: {self.how_to_go_on}"
            if self.checkpoint.exists()
            else "then start the run again: there is no checkpoint yet."
        )
        return RunError(
            f"{str(path)!r} cannot be written: {error.strerror or error}.",
            f"Free space there, or mend whatever else keeps it from being written, {go_on}",
        )

    @property
    def lock(self) -> Path:
        """While a run writes here: held by its process, whose number it holds."""
        return self.path / ".lock"

    @contextmanager
    def held(self, *, resumed: bool) -> Iterator[None]:
        """For this process alone, until the end of the block or of the process, however that comes.

        An `InputError` that names the folder where another process holds it. What a killed run left half written is
        removed.
        """
        lock = self._take(resumed=resumed)
        try:
            if not resumed:
                self._check_free()  # another run may have come and gone since somebody looked
            remove_drafts(self.path)
            yield
        finally:
            self.lock.unlink(missing_ok=True)
            os.close(lock)

    def _take(self, *, resumed: bool) -> int:
        """The open lock file, in which nobody else can write."""
        while True:
            lock = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(lock)
                if os.path.samestat(os.fstat(lock), self.lock.stat()):
                    with self.writing(self.lock):
                        os.ftruncate(lock, 0)
                        os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
                    return lock
            except BlockingIOError:
                raise self._taken(os.read(lock, 200).decode(errors="replace"), resumed=resumed) from None
            except FileNotFoundError:  # whoever held it has just left, and took the file along
                pass
            os.close(lock)

    def _taken(self, holder: str, *, resumed: bool) -> InputError:
        who = f" ({holder})" if holder else ""
        if resumed:
            return CheckpointError(
                f"--resume {str(self.path)!r}: that run is still under way{who}.",
                "Stop it first, or let it finish; to add a replica to it, use --join.",
            )
        return OutputError(f"--out {str(self.path)!r}: another run is under way there{who}.", "Give another --out.")


def _lock(file: int) -> None:
    """For this process alone until it ends or closes the file; a `BlockingIOError` where another has it."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        warnings.warn(
            f"the run's folder cannot be locked ({error.strerror}): take care that no other run uses it.", stacklevel=2
        )


def _fresh_name(config: TrainConfig) -> Path:
    """`runs/lenet5-digits-20260131-120000`; a number is added when that second is taken."""
    words = re.sub(r"[^\w.-]+", "_", f"{config.model}-{config.data}").strip("_")
    first = Path("runs") / f"{words}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = first, 1
    while path.exists():
        count += 1
        path = first.with_name(f"{first.name}-{count}")
    return path
