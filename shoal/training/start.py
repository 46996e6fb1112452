"""Where a run begins: in this process alone, on ranks that it starts, or as one rank of a world that is there."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.config import TrainConfig, read_recipe
from shoal.errors import CheckpointError, ConfigError
from shoal.files import write_text_atomically
from shoal.launching import joined, run, surrounding
from shoal.machine import threads_each
from shoal.planning.strategies import AUTO
from shoal.result import RunResult
from shoal.training import checkpoint
from shoal.training.checkpoint import Progress
from shoal.training.folder import RunFolder
from shoal.training.job import Job, load_whole, prepare
from shoal.training.listener import Listener
from shoal.training.loop import Run
from shoal.transport import Transport
from shoal.transport.agreement import agree


def train(config: TrainConfig, listener: Listener | None = None) -> RunResult:
    """Run a new training as `config` says and write its folder.

    With several workers it starts them, unless torchrun or srun did; then this process is one of them. Rank 0 gets
    the listener, which for workers started here must survive pickling, and writes the folder.

    Raises `InputError` before anything is trained, `DivergedError` when the loss is no number, and
    `StoppedError` after Ctrl-C or SIGTERM, when all files are whole and a checkpoint is left. When a rank fails:
    its own error, or a `RunError` that names it.
    """
    with _torch_left_as_found():
        return _start(config, None, listener or Listener(), asked="workers" in config.model_fields_set)


def resume(path: Path, changes: Mapping[str, Any], listener: Listener | None = None) -> RunResult:
    """Go on with the run in `path`, bit for bit as if it had never stopped; under another plan or on other workers,
    to rounding.

    `changes` are settings given anew; those that the state so far depends on are refused. A finished run
    can go on only with more epochs.
    """
    folder = RunFolder.open(path)
    config = TrainConfig.parse({**read_recipe(folder.config), **changes, "out": path}, source="--resume: ")
    if config.plan == AUTO and not {"plan", "workers"} & changes.keys():
        config = config.model_copy(update={"plan": str(folder.plan)})  # what was found then, not what would be now
    with _torch_left_as_found():
        return _start(config, path, listener or Listener(), asked="workers" in changes)


@contextmanager
def _torch_left_as_found() -> Iterator[None]:
    """A caller's own arithmetic goes on as before: its threads, and its values near zero, which training flushes.

    In the calling thread: threads that torch started while it trained go on flushing in their share of an operation.
    """
    threads, flushed = torch.get_num_threads(), sys.float_info.min / 2 == 0.0
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)


def _start(config: TrainConfig, resumed: Path | None, listener: Listener, *, asked: bool) -> RunResult:
    """Decide who trains. `asked`: the number of workers was given, and not left to whoever starts them."""
    world = surrounding()
    if world is not None and world.size > 1:
        config = config.model_copy(update={"workers": world.workers(config.workers if asked else None)})
        if config.exchange_settings() is not None:
            from shoal.training.replicated import train_in_world

            device = _kind_of_device(config, world.local_size or world.size)
            return train_in_world(config, resumed, listener, device, world)
        with joined(world, _kind_of_device(config, world.local_size or world.size), config.timeout):
            return train_on_rank(config, resumed, listener, world.local_size)
    if config.exchange_settings() is not None:
        from shoal.training.replicated import train_here  # a run without an exchange need not wait for it to load

        return train_here(config, resumed, listener, _kind_of_device(config, config.workers))
    if config.workers == 1:
        return train_on_rank(config, resumed, listener)
    _check(config, resumed)
    results = run(
        train_on_rank,
        config,
        resumed,
        listener,
        workers=config.workers,
        threads=threads_each(config.threads, config.workers),
        timeout=config.timeout,
        device=_kind_of_device(config, config.workers),
    )
    return results[0]


def _kind_of_device(config: TrainConfig, ranks_here: int) -> str:
    """Where the ranks of this host compute: each on a GPU of its own where asked for, or where there are enough."""
    if config.device == "auto":
        return "cuda" if torch.cuda.device_count() >= ranks_here else "cpu"
    kind = config.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {config.device!r} cannot be shared by {config.workers} workers.",
            "Give cpu, or cuda for a GPU of its own to each worker.",
        )
    return kind


def _check(config: TrainConfig, resumed: Path | None) -> None:
    """Find what is wrong with the user's input before any rank is started; ranks find the rest."""
    if resumed is None:
        RunFolder.free(config)
    load_whole(config.model_copy(update={"device": "cpu"}))


def train_on_rank(
    config: TrainConfig, resumed: Path | None, listener: Listener, ranks_here: int | None = None
) -> RunResult:
    """The whole run, as one rank of the present process group, or alone without one."""
    transport = Transport()
    if transport.world > 1:
        config = config.model_copy(update={"device": _device_of_rank(config, ranks_here or transport.world)})
    heard = listener if transport.rank == 0 else Listener()
    job = prepare(config, transport, ranks_here=ranks_here, planning_progress=heard.planning)
    folder, progress = _begin(job, transport) if resumed is None else _go_on(job, transport, resumed)
    if transport.rank == 0:
        write_text_atomically(folder.config, job.config.to_yaml())
        job.network.plan.save(folder.plan)
    return Run(job, folder, progress, heard).complete()


def _device_of_rank(config: TrainConfig, ranks_here: int) -> str:
    kind = _kind_of_device(config, ranks_here)
    return f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind


def _begin(job: Job, transport: Transport) -> tuple[RunFolder, Progress]:
    """A new folder, made by rank 0."""
    made = agree(transport, lambda: RunFolder.create(job.config) if transport.rank == 0 else None)
    folder = next(one for one in transport.gather_objects(made) if one is not None)
    return folder, Progress.start(job.device)


def _go_on(job: Job, transport: Transport, path: Path) -> tuple[RunFolder, Progress]:
    """The folder of a stopped run, which every rank reads."""

    def restored() -> tuple[RunFolder, Progress]:
        folder = RunFolder.open(path)
        progress = checkpoint.restore(folder.checkpoint, job)
        if progress.position.epoch >= job.config.epochs and folder.result.exists():
            raise CheckpointError(
                f"--resume {str(path)!r}: that run has finished its {progress.position.epoch} epochs.",
                f"Ask for more with --epochs {progress.position.epoch + 5}, or start another run.",
            )
        return folder, progress

    return agree(transport, restored)
