"""A run on one rank: alone, or as one of many that hold parts of the network."""

from contextlib import ExitStack
from pathlib import Path

from shoal.config import TrainConfig
from shoal.errors import ConfigError
from shoal.files import write_text_atomically
from shoal.result import RunResult
from shoal.training import checkpoint
from shoal.training.checkpoint import Progress
from shoal.training.device import device_of_rank
from shoal.training.job import Job, prepare
from shoal.training.listener import Listener
from shoal.training.loop import Run
from shoal.training.outcome import inference_of
from shoal.training.own_objects import NO_OBJECTS, OwnObjects, write_objects
from shoal.training.run_folder import RunFolder
from shoal.transport import Transport
from shoal.transport.agreement import agree


def train_on_rank(
    config: TrainConfig,
    resumed: Path | None,
    listener: Listener,
    ranks_here: int | None = None,
    own: OwnObjects = NO_OBJECTS,
) -> RunResult:
    """The whole run, as one rank of the present process group, or alone without one."""
    transport = Transport()
    if transport.world > 1:
        config = config.model_copy(update={"device": device_of_rank(config, ranks_here or transport.world)})
    heard = listener if transport.rank == 0 else Listener()
    fresh = resumed is None
    job = prepare(config, transport, own, fresh=fresh, ranks_here=ranks_here, planning_progress=heard.planning)
    if fresh:
        _check_trace(job)
    with ExitStack() as stack:
        folder, progress = _begin(job, transport, stack) if resumed is None else _go_on(job, transport, resumed, stack)
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
        return Run(job, folder, progress, heard).complete()


def _check_trace(job: Job) -> None:
    """Refuse, on all ranks alike, to record steps that the run does not have."""
    steps = job.config.traced_steps(0, job.total_steps)
    if steps and steps[0] > job.total_steps:
        raise ConfigError(
            f"trace = {job.config.trace!r} begins after the last of the {job.total_steps} steps of this run.",
            f"Name steps up to {job.total_steps}, or only how many.",
        )


def _begin(job: Job, transport: Transport, stack: ExitStack) -> tuple[RunFolder, Progress]:
    """A new folder, made by rank 0, which holds it until `stack` closes."""

    def made() -> RunFolder | None:
        if transport.rank:
            return None
        folder = RunFolder.create(job.config)
        stack.enter_context(folder.held(resumed=False))
        return folder

    folders = transport.gather_objects(agree(transport, made))
    return next(folder for folder in folders if folder is not None), Progress.start(job.device)


def _go_on(job: Job, transport: Transport, path: Path, stack: ExitStack) -> tuple[RunFolder, Progress]:
    """The folder of a stopped run, which every rank reads and rank 0 holds until `stack` closes."""

    def held() -> RunFolder:
        folder = RunFolder.open(path)
        if transport.rank == 0:
            stack.enter_context(folder.held(resumed=True))
        return folder

    def restored() -> Progress:
        progress = checkpoint.restore(folder.checkpoint, job)
        stopped = progress.best.stops(job.config.patience)
        folder.check_unfinished(progress.position.epoch, job.config, stopped=stopped)
        return progress

    folder = agree(transport, held)
    return folder, agree(transport, restored)
