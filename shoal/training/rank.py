"""A run on one rank: alone, or as one of many that hold parts of the network."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from shoal.config import TrainConfig
from shoal.errors import ConfigError, OutputError
from shoal.files import write_text_atomically
from shoal.result import RunResult
from shoal.training.checkpoints.folder import Checkpoint, new_token
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.restoring import restore
from shoal.training.checkpoints.saving import Saver
from shoal.training.device import device_of_rank
from shoal.training.job import Job, prepare
from shoal.training.listener import Listener
from shoal.training.loop import Run
from shoal.training.outcome import inference_of
from shoal.training.own_objects import NO_OBJECTS, OwnObjects, write_objects
from shoal.training.run_folder import RunFolder
from shoal.transport import Transport
from shoal.transport.agreement import agree

Value = TypeVar("Value")


def train_on_rank(
    config: TrainConfig,
    resumed: Path | None,
    listener: Listener,
    ranks_here: int | None = None,
    own: OwnObjects = NO_OBJECTS,
) -> RunResult:
    """The whole run, as one rank of the present process group, or alone without one.

    `resumed`: the folder of a run to go on with, or one of its checkpoints.
    """
    transport = Transport()
    if transport.world > 1:
        config = config.model_copy(update={"device": device_of_rank(config, ranks_here or transport.world)})
    heard = listener if transport.rank == 0 else Listener()
    fresh = resumed is None
    job = prepare(config, transport, own, fresh=fresh, ranks_here=ranks_here, planning_progress=heard.planning)
    if fresh:
        _check_trace(job)
    with ExitStack() as stack:
        told: list[str] = []
        if resumed is None:
            folder, progress = _begin(job, transport, stack), Progress.start(job.device)
        else:
            folder, progress, told = _go_on(job, transport, resumed, stack)
        saver = _saver(job, transport, folder)
        if transport.rank == 0:
            with folder.writing(folder.config):
                write_text_atomically(folder.config, job.config.to_yaml())
            with folder.writing(folder.inference):
                write_text_atomically(folder.inference, inference_of(job.config, job.splits).to_json())
            write_objects(folder, own)
            with folder.writing(folder.plan):
                job.network.plan.save(folder.plan)
            if job.network.outline is not None:
                with folder.writing(folder.outline):
                    job.network.outline.save(folder.outline)
        return Run(job, folder, progress, heard, saver, told).complete()


def _by_first(transport: Transport, work: Callable[[], Value]) -> Value:
    """What rank 0 makes, on all ranks, which raise what it raises. Collective."""
    made = agree(transport, lambda: None if transport.rank else work())
    values: list[Value | None] = transport.gather_objects(made)
    return next(value for value in values if value is not None)


def _check_trace(job: Job) -> None:
    """Refuse, on all ranks alike, to record steps that the run does not have."""
    steps = job.config.traced_steps(0, job.total_steps)
    if steps and steps[0] > job.total_steps:
        raise ConfigError(
            f"trace = {job.config.trace!r} begins after the last of the {job.total_steps} steps of this run.",
            f"Name steps up to {job.total_steps}, or only how many.",
        )


def _begin(job: Job, transport: Transport, stack: ExitStack) -> RunFolder:
    """A new folder, made by rank 0, which holds it until `stack` closes."""

    def made() -> RunFolder:
        folder = RunFolder.create(job.config)
        stack.enter_context(folder.held(resumed=False))
        return folder

    return _by_first(transport, made)


def _go_on(job: Job, transport: Transport, path: Path, stack: ExitStack) -> tuple[RunFolder, Progress, list[str]]:
    """The folder of a stopped run, which every rank reads and rank 0 holds until `stack` closes."""

    def chosen() -> tuple[RunFolder, Checkpoint, list[str]]:
        folder = RunFolder.open(path)
        stack.enter_context(folder.held(resumed=True))
        return folder, *folder.choose(path)

    folder, checkpoint, told = _by_first(transport, chosen)

    def restored() -> tuple[Progress, list[str]]:
        progress, said = restore(checkpoint, job)
        stopped = progress.best.stops(job.config.patience)
        folder.check_unfinished(progress.position.epoch, job.config, stopped=stopped)
        return progress, said

    progress, said = agree(transport, restored)
    return folder, progress, [*told, *said]


def _saver(job: Job, transport: Transport, folder: RunFolder) -> Saver:
    """What saves the job. Where ranks do not see the same folder, rank 0 must hold all that is to be saved."""
    token, lock = _by_first(transport, lambda: (new_token(), folder.held_by()))
    saves = any(part.saves for part in job.network.held().values()) or bool(job.network.own_tensors(job.optimizer))
    table = transport.gather_objects((folder.held_by() == lock, saves))
    blind = [rank for rank, (sees, _) in enumerate(table) if not sees]
    unsaved = [rank for rank in blind if table[rank][1]]
    if unsaved:
        raise OutputError(
            f"--out {str(folder.path)!r}: rank {unsaved[0]} does not see this folder, and the plan cuts parameters, of "
            "which every rank saves its own.",
            "Give a folder that all hosts share, or a plan that cuts none, such as data.",
        )
    return Saver(folder.checkpoints, job, token=token, together=not blind, writing=folder.writing)
