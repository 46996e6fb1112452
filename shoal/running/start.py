"""Where a run begins: in this process alone, on ranks that it starts, or as one rank of a world that is there."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.config import TrainConfig, read_recipe
from shoal.launching import joined, run, surrounding
from shoal.machine import threads_each
from shoal.planning.strategies import AUTO
from shoal.result import RunResult
from shoal.training.device import kind_of_device
from shoal.training.job import load_whole
from shoal.training.listener import Listener
from shoal.training.rank import train_on_rank
from shoal.training.run_folder import RunFolder


def train(config: TrainConfig, listener: Listener | None = None) -> RunResult:
    """Run a new training as `config` says and write its folder.

    With several workers it starts them, unless torchrun or srun did; then this process is one of them. Rank 0 gets
    the listener, which for workers started here must survive pickling, and writes the folder.

    Raises `InputError` before anything is trained, `DivergedError` when the loss is not finite, and
    `StoppedError` after Ctrl-C or SIGTERM, when all files are whole and a checkpoint is left. When a rank fails:
    its own error, or a `RunError` that names it.
    """
    with _torch_left_as_found():
        return _start(config, None, listener or Listener(), asked=config.tells("workers"))


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
        workers = world.workers(config.workers if asked else None)
        every_rank = config.exchange is not None and not config.tells("replicas")
        config = config.on(workers) if every_rank else config.model_copy(update={"workers": workers})
        if config.exchange_settings() is not None:
            from shoal.replicas.run import train_in_world

            device = kind_of_device(config, world.local_size or world.size)
            return train_in_world(config, resumed, listener, device, world)
        with joined(world, kind_of_device(config, world.local_size or world.size), config.timeout):
            return train_on_rank(config, resumed, listener, world.local_size)
    if config.exchange_settings() is not None:
        from shoal.replicas.run import train_here  # a run without an exchange need not wait for it to load

        return train_here(config, resumed, listener, kind_of_device(config, config.workers))
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
        device=kind_of_device(config, config.workers),
    )
    return results[0]


def _check(config: TrainConfig, resumed: Path | None) -> None:
    """Find what is wrong with the user's input before any rank is started; ranks find the rest."""
    if resumed is None:
        RunFolder.free(config)
    load_whole(config.model_copy(update={"device": "cpu"}))
