"""Checkpoints written beside training: a copy is taken between two steps, a thread writes it, one at a time.

Costs     a pass over this rank's state between two steps, and the memory of one copy of it as long as the run lasts
          (`staging.py`). Who saves again while the last one is still being written waits for it.
Failure   what the thread could not do, as on a full disk, is raised by the next call here.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from shoal.result import versions
from shoal.training.checkpoints.carry_over import settings_saved
from shoal.training.checkpoints.folder import STATE, CheckpointFolder, Draft
from shoal.training.checkpoints.job_state import Snapshot, room_for_snapshot, take_snapshot, write_snapshot
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.staging import Staging
from shoal.training.checkpoints.tensor_files import Part
from shoal.training.job import Job


class Beside:
    """Work that is done in a thread beside this one, one piece at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.over = False
        """Whether nobody waits for the work any more."""

    def begin(self, work: Callable[[], object]) -> None:
        """Let the thread do it. Waits for the last piece, and raises what went wrong with that."""
        self.finish()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # A daemon: a process that fails ends, and with it what was being written.
        self._thread = threading.Thread(target=run, name="shoal-checkpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Until the last piece is done, or gives up because it waits for others; whatever comes of it."""
        self.over = True
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise what went wrong, if it did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Until the last piece is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()


class Saver:
    """Saves one job, on each of its ranks, into the folder of its run.

    `token`: the same on all ranks. `together`: whether all ranks see the same folder, and each writes its own files;
    if not, rank 0 holds all that is to be saved.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        job: Job,
        *,
        token: int,
        together: bool,
        writing: Callable[[Path], AbstractContextManager[None]],
    ) -> None:
        self._folder, self._job, self._token, self._together, self._writing = folder, job, token, together, writing
        self._beside = Beside()
        self._staging = Staging()
        self._saves = 0
        self._unfinished: Draft | None = None
        """The checkpoint that is being written here, or could not be."""

    def prepare(self) -> None:
        """Begin to make the memory for copies of the state, which is as large as it will be after a first step."""
        room = room_for_snapshot(self._job)
        self._beside.begin(lambda: self._staging.make_room(room))

    def save(self, progress: Progress) -> None:
        """Take a copy, and begin to write it. A collective."""
        job = self._job
        losses = job.network.gather(progress.losses.tolist())
        self.finish()
        snapshot = take_snapshot(job, self._staging)  # the last one in it is on the disk
        if job.network.rank and not self._together:
            return
        content = content_of_state(job, progress, losses, snapshot)
        steps, seconds = progress.steps, list(progress.step_seconds)
        self._saves += 1
        number = self._saves  # the same on all ranks
        self._beside.begin(lambda: self._write(number, snapshot, content, steps, seconds))

    def check(self) -> None:
        """Raise what went wrong with the last one, if it did."""
        with self._writing(self._folder.path):
            self._beside.check()

    def finish(self) -> None:
        """Until the last one is on the disk."""
        with self._writing(self._folder.path):
            self._beside.finish()

    def close(self) -> None:
        """The run has ended, perhaps with an error: what is being written is written, without waiting for others.

        What could not be, as on a full disk, is removed by rank 0: it would keep the disk full. Others may write there.
        """
        self._beside.close()
        if self._unfinished is not None and self._job.network.rank == 0:
            self._unfinished.discard()

    def _write(
        self, number: int, snapshot: Snapshot, content: dict[str, Any], steps: int, seconds: list[float]
    ) -> None:
        rank, ranks = self._job.network.rank, self._job.network.ranks
        draft = self._unfinished = Draft(self._folder, f"save-{number}", self._token)
        write_snapshot(draft, snapshot, rank)
        if rank:
            draft.hand_over(rank)
            return
        write_state(draft, content, seconds)
        if self._together:
            draft.take_over(range(1, ranks), self._job.config.timeout, lambda: self._beside.over)
        draft.commit(steps)
        self._unfinished = None
        self._folder.keep(self._job.config.keep)


def content_of_state(
    job: Job, progress: Progress, losses: Sequence[Sequence[float]], snapshot: Snapshot
) -> dict[str, Any]:
    """What is no tensor, of a job that is so far; `losses`: of every rank."""
    return {
        "config": settings_saved(job.config),
        "plan": json.loads(job.network.plan.to_json()),
        "ranks": job.network.ranks,
        "train_samples": job.loader.order.samples,
        "versions": versions(),
        "progress": progress.to_dict(losses),
        **snapshot.common,
    }


def write_state(draft: Draft, content: dict[str, Any], step_seconds: list[float]) -> None:
    """What is no tensor; and the seconds of all steps, of which there may be millions."""
    draft.write_json(STATE, content)
    draft.write_parts("seconds.safetensors", {"step_seconds": Part.of(torch.tensor(step_seconds, dtype=torch.float64))})
