"""The folder of one run: where its files lie and that they can be written."""

import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shoal.config import TrainConfig
from shoal.errors import CheckpointError, InputError, OutputError, RunError
from shoal.files import remove_drafts
from shoal.result import WentOn
from shoal.training.checkpoints.folder import Checkpoint, CheckpointFolder

OLD = "checkpoint.pt"
"""What earlier versions wrote."""


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
    def checkpoints(self) -> CheckpointFolder:
        """All that is needed to go on, of some moments."""
        return CheckpointFolder(self.path / "checkpoints")

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
    def holds_old_checkpoint(self) -> bool:
        """Whether an earlier version left a checkpoint here, which is a pickle and is not read."""
        return (self.path / OLD).exists() and not self.can_go_on

    @property
    def restarts(self) -> int:
        """How often the run went on by itself, after a loss or with more workers."""
        return len(self.went_on)

    @property
    def went_on(self) -> list[WentOn]:
        """Each of these times, with how long it took where a step followed."""
        times: list[WentOn] = []
        for line in self._restarts():
            if "replaced" in line:
                continue
            if "stepped" not in line:
                times.append(WentOn.model_validate(line))
            elif times and times[-1].seconds_to_go_on is None:
                seconds = round(line["stepped"] - times[-1].noticed, 3)
                times[-1] = times[-1].model_copy(update={"seconds_to_go_on": seconds})
        return times

    @property
    def restarts_file(self) -> Path:
        """JSON objects, one per line: each time that the run went on by itself, and the first step after it."""
        return self.path / "restarts.jsonl"

    def _restarts(self) -> list[dict[str, Any]]:
        """The whole lines. A kill, or a full disk, may have left half of one."""
        found = []
        with suppress(FileNotFoundError):
            for line in self.restarts_file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    @property
    def replaced(self) -> int:
        """Lost replicas in whose place another was started, while the others went on."""
        return sum("replaced" in line for line in self._restarts())

    def note_replaced(self, replica: int) -> None:
        """In the place of a lost replica another is started."""
        self._append(json.dumps({"replaced": replica, "noticed": time.time()}))

    def note_going_on(self, change: WentOn) -> None:
        """The run goes on by itself."""
        self._append(change.model_dump_json(exclude_none=False))

    def note_step_after_restart(self) -> None:
        """A step is done: where it is the first after the run went on by itself, note when."""
        times = self.went_on
        if times and times[-1].seconds_to_go_on is None:
            self._append(json.dumps({"stepped": time.time()}))

    def _append(self, line: str) -> None:
        """A line of its own, also behind half of one."""
        with self.writing(self.restarts_file), self.restarts_file.open("ab+") as file:
            end = file.tell()
            file.seek(max(0, end - 1))
            behind_half = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * behind_half + line.encode() + b"\n")

    @property
    def can_go_on(self) -> bool:
        """Whether there is a checkpoint, whole or not."""
        return bool(self.checkpoints.all())

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
        if self.can_go_on or self.holds_old_checkpoint or self.result.exists():
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
        """A folder whose run can go on, by its path or by that of one of its checkpoints.

        It must hold a checkpoint and its settings.
        """
        folder = cls(path.resolve().parents[1] if _is_checkpoint(path) else path)
        if not (folder.can_go_on and folder.config.exists()):
            if folder.holds_old_checkpoint:
                raise CheckpointError(
                    f"--resume {str(path)!r}: {OLD} there was written by an earlier version, as a pickle, which may "
                    "run code when it is read, and so is not.",
                    "Finish that run with the version that began it; its weights can be taken with --init.",
                )
            raise CheckpointError(
                f"--resume {str(path)!r}: no run with a checkpoint lies there.",
                "Give the --out folder of a run that was stopped, which holds checkpoints/ and config.yaml; or one of "
                "its checkpoints.",
            )
        return folder

    def choose(self, path: Path) -> tuple[Checkpoint, list[str]]:
        """The checkpoint to go on from, and what people should know of that: that at `path`, or the newest whole one.

        Others that are newer are set aside. A `CheckpointError` says what is wrong with one that was asked for, or with
        the newest where none is whole. Only for whoever holds the folder.
        """
        if _is_checkpoint(path):
            checkpoint: Checkpoint | None = Checkpoint(self.checkpoints.path / path.resolve().name)
            damaged = [] if (why := Checkpoint(path).damage()) is None else [f"checkpoint {str(path)!r}: {why}."]
        else:
            checkpoint, damaged = self.checkpoints.newest_whole()
        if checkpoint is None or (damaged and _is_checkpoint(path)):
            raise CheckpointError(
                f"--resume: {damaged[0]}",
                "Give an older checkpoint, or start again in another --out; the weights of a whole model.safetensors "
                "can be taken with --init.",
            )
        aside = self.checkpoints.set_aside_after(checkpoint)
        told = [f"{text} The run goes on from {checkpoint.path.name}." for text in damaged]
        told += [f"{path.name} is newer than where the run goes on from: it is set aside." for path in aside]
        return checkpoint, told

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

    def check_there(self) -> None:
        """A `RunError` where the folder is gone, for whoever holds it, before it writes there.

        Else what is written to a file that is open is lost without a word, and a checkpoint makes a new folder, with
        which nobody can go on.
        """
        if not self.lock.exists():
            raise self._gone()

    def _gone(self) -> RunError:
        return RunError(
            f"the run's folder {str(self.path)!r} is gone: it was removed or renamed while the run went on.",
            "If it was renamed, go on with --resume and its new name; else start the run again.",
        )

    def _not_written(self, path: Path, error: OSError) -> RunError:
        if not self.path.is_dir():
            return self._gone()
        go_on = (
            f"then go on with: {self.how_to_go_on}"
            if self.can_go_on
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

    def held_by(self) -> str:
        """Who holds it, as this host sees it; nothing where nobody does, or where this host sees another folder."""
        try:
            return self.lock.read_text(encoding="utf-8")
        except OSError:
            return ""

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
            remove_drafts(self.checkpoints.path)
            yield
        finally:
            self.lock.unlink(missing_ok=True)
            os.close(lock)

    def _take(self, *, resumed: bool) -> int:
        """The open lock file, in which nobody else can write."""
        while True:
            lock = self._open_lock(resumed=resumed)
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

    def _open_lock(self, *, resumed: bool) -> int:
        try:
            return os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}."
            if resumed:
                raise CheckpointError(
                    f"--resume {str(self.path)!r}: that folder {why}",
                    "Let the folder be written to, or copy it to where you may write and give the copy to --resume.",
                ) from None
            raise OutputError(
                f"--out {str(self.path)!r} {why}", "Give a folder that you may write to, with --out DIR."
            ) from None

    def _taken(self, holder: str, *, resumed: bool) -> InputError:
        who = f" ({holder})" if holder else ""
        if resumed:
            return CheckpointError(
                f"--resume {str(self.path)!r}: that run is still under way{who}.",
                "Stop it first, or let it finish; to add a replica to it, use --join.",
            )
        return OutputError(f"--out {str(self.path)!r}: another run is under way there{who}.", "Give another --out.")


def _is_checkpoint(path: Path) -> bool:
    return path.resolve().parent.name == "checkpoints" and Checkpoint(path.resolve()).steps >= 0


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
