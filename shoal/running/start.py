"""Where a run begins: in this process alone, on ranks that it starts, or as one rank of a world that is there."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config import TrainConfig, read_recipe
from shoal.data.torch_sets import batch_of
from shoal.errors import ConfigError
from shoal.launching import (
    OnStage,
    RayPlace,
    Room,
    TimeOverError,
    joined,
    on_ray,
    run,
    run_apart,
    surrounding,
)
from shoal.machine import threads_each
from shoal.planning.strategies import AUTO
from shoal.result import RunResult
from shoal.running.going_on import Attempt, go_on_by_itself
from shoal.training.device import kind_of_device
from shoal.training.job import load_whole
from shoal.training.listener import Listener, Listeners, Relayed, hearing
from shoal.training.loop import TRAINING
from shoal.training.network import Criterion
from shoal.training.own_objects import OwnObjects, check_same
from shoal.training.rank import train_on_rank
from shoal.training.run_folder import RunFolder
from shoal.training.tensorboard import TensorBoardEvents, check_installed


def train(
    config: TrainConfig | None = None,
    listener: Listener | None = None,
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    data: object = None,
    loss: Criterion | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loader_workers: int | None = None,
    **settings: Any,
) -> RunResult:
    """Run a new training and write its folder: as a `TrainConfig` says, or as its settings say, given as keywords.

    In the place of names these may be objects:

    model           a module, or a function or class that makes one, called with those of `input` (a sample's shape)
                    and `classes` that it accepts. A module begins with its present weights and is left as it is: the
                    trained ones are in the run's folder
    data            (train, test), each a map-style torch `Dataset` that gives (x, y), a `DataLoader` of one, or a data
                    set of Shoal's; or a function that gives them, called on each rank. `classes=N` says how many there
                    are where the data set does not
    loss            of scores and classes, their mean: one number. `F.cross_entropy` unless given. It may be any such
                    function; over ranks it stays one device's, also where they have unequal shares
    optimizer       a function of the parameters that makes a torch optimizer; its rate is the peak of the schedule
    loader_workers  processes of each rank that read a `Dataset`, or a loader's own number; 0: the rank itself

    With several workers it starts them, unless torchrun or srun did; then this process is one of them. Objects go to
    them by cloudpickle, also those of a script or a notebook. Rank 0 gets the listener, which for workers started here
    must survive pickling, and writes the folder.

    Raises `InputError` before anything is trained, `DivergedError` when the loss is not finite, and
    `StoppedError` after Ctrl-C or SIGTERM, when all files are whole and a checkpoint is left. When a rank fails:
    its own error, or a `RunError` that names it.
    """
    own, named = _sorted(model, data, loss, optimizer, loader_workers)
    if config is None:
        if "batch" not in settings and (batch := batch_of(own.data)) is not None:
            settings["batch"] = batch
        config = TrainConfig.parse({**settings, **named})
    elif given := {**settings, **named}:
        raise ConfigError(
            f"{next(iter(given))} = {next(iter(given.values()))!r} is given beside a TrainConfig.",
            "Give it to the TrainConfig, or all settings as keywords.",
        )
    _check_batch(config, own)
    own.check_settings(config)
    config = _with_names(config, own)
    with _torch_left_as_found():
        return _start(config, None, listener or Listener(), own, asked=config.tells("workers"))


def resume(
    path: str | Path,
    changes: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    *,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    data: object = None,
    loss: Criterion | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loader_workers: int | None = None,
) -> RunResult:
    """Go on with the run in `path`, bit for bit as if it had never stopped; under another plan or on other workers,
    to rounding. It goes on from its newest whole checkpoint; or from the checkpoint that `path` is.

    `changes` are settings given anew; those that the state so far depends on are refused. A finished run
    can go on only with more epochs. A run that was begun with objects needs the same ones again.
    """
    path, changes = Path(path), changes or {}
    folder = RunFolder.open(path)
    own = OwnObjects(model, data, loss, optimizer, loader_workers)
    check_same(folder, own.names())
    left = own.names().keys() | _taken_back(changes)
    given = {name: value for name, value in read_recipe(folder.config).items() if name not in left}
    config = TrainConfig.parse({**given, **changes, "out": folder.path}, source="--resume: ")
    config = _with_names(config, own)
    if config.plan == AUTO and config.elastic is None and not {"plan", "workers"} & changes.keys():
        config = config.model_copy(update={"plan": str(folder.plan)})  # what was found then, not what would be now
    with _torch_left_as_found():
        return _start(config, path, listener or Listener(), own, asked="workers" in changes)


def changes_to(folder: RunFolder, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings of a command that are not the ones of the run in `folder`, for `resume`.

    What was left to us then (`data = default`, `plan = auto`) stays what it was found to be.
    """
    before, now = (TrainConfig.parse(given) for given in (read_recipe(folder.config), values))
    usual = TrainConfig.model_fields["data"].default
    return {
        name: value
        for name, value in values.items()
        if getattr(now, name) != getattr(before, name) and not (name == "data" and value == usual)
    }


def _taken_back(changes: Mapping[str, Any]) -> set[str]:
    """Settings of a run that belong to an exchange which it goes on without."""
    if "exchange" not in changes:
        return set()
    return {"exchange_options"} | ({"replicas", "workers", "slow"} if changes["exchange"] in (None, "none") else set())


def _sorted(
    model: object, data: object, loss: object, optimizer: object, loader_workers: int | None
) -> tuple[OwnObjects, dict[str, str]]:
    """Objects, and the names of what was given by name; a `ConfigError` for what is neither."""
    given = {"model": model, "data": data, "loss": loss, "optimizer": optimizer}
    named = {what: value for what, value in given.items() if isinstance(value, str)}
    objects: dict[str, Any] = {what: value for what, value in given.items() if what not in named}
    if "loss" in named:
        raise ConfigError(
            f"loss = {named['loss']!r} is a name, and losses have none.",
            "Give a function of scores and classes, such as torch.nn.functional.cross_entropy.",
        )
    for what, wanted in (
        ("model", "a torch.nn.Module, or a function that makes one"),
        ("loss", "a function of scores and classes"),
        ("optimizer", "a function of the parameters that makes a torch optimizer"),
    ):
        value = objects.get(what)
        if value is not None and (not callable(value) or isinstance(value, torch.optim.Optimizer)):
            raise ConfigError(f"{what} = {type(value).__name__} does not work.", f"Give a name, or {wanted}.")
    if loader_workers is not None and loader_workers < 0:
        raise ConfigError(f"loader_workers = {loader_workers} is below 0.", "Give a number of processes.")
    if loader_workers and objects.get("data") is None:
        raise ConfigError(
            f"loader_workers = {loader_workers} read a torch Dataset, and none was given.",
            "Leave loader_workers out: data with a name is read ahead by threads.",
        )
    return OwnObjects(**objects, loader_workers=loader_workers), named


def _with_names(config: TrainConfig, own: OwnObjects) -> TrainConfig:
    """Where a setting stands for an object, what that is called; refused where the setting says something too."""
    names = {name: value for name, value in own.names().items() if name in ("model", "data")}
    for name in names:
        if config.tells(name):
            raise ConfigError(
                f"{name} = {getattr(config, name)!r} is given as a setting and as an object.", "Give one of them."
            )
    return config.model_copy(update=names)


def _check_batch(config: TrainConfig, own: OwnObjects) -> None:
    batch = batch_of(own.data)
    if batch not in (None, config.batch):
        raise ConfigError(
            f"batch = {config.batch}, but the loader of the training part has batches of {batch}.",
            "Give one of them; it is the batch of all workers together.",
        )


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


def _start(config: TrainConfig, resumed: Path | None, listener: Listener, own: OwnObjects, *, asked: bool) -> RunResult:
    """Train; where a worker is lost, go on as `config` says. `asked`: as in `_train`."""
    if config.elastic is not None and (world := surrounding()) is not None and world.size > 1:
        raise ConfigError(
            f"elastic = '{config.elastic}', but {world.origin} started the ranks, and Shoal cannot start others.",
            "Leave --elastic out: torchrun --nnodes MIN:MAX --max-restarts N with --resume auto does the like.",
        )
    if not config.goes_on_by_itself or surrounding() is not None:
        return _train(Attempt(config, resumed, None, restarts=0), listener, own, asked=asked)
    return go_on_by_itself(lambda attempt: _train(attempt, listener, own, asked=asked), config, resumed, listener)


def _train(attempt: Attempt, listener: Listener, own: OwnObjects, *, asked: bool) -> RunResult:
    """Decide who trains. `asked`: the number of workers was given, and not left to whoever starts them."""
    config, resumed = attempt.config, attempt.resumed
    if config.tensorboard:
        check_installed()
        listener = Listeners((listener, TensorBoardEvents()))
    world = surrounding()
    if config.on == "ray":
        if world is not None:
            raise ConfigError(
                f"on = 'ray' asks Ray for the workers, but {world.origin} started this process as one of them.",
                f"Leave --on out, or start one process without {world.origin}.",
            )
        return _train_on_ray(attempt, config, listener, own)
    every_rank = config.exchange is not None and not config.tells("replicas")
    if world is not None and world.size == 1 and not asked and (every_rank or config.replicas == 1):
        config = config.on_workers(1)  # a run that others took part in before goes on alone
    if world is not None and world.size > 1:
        workers = world.workers(config.workers if asked else None)
        config = config.on_workers(workers) if every_rank else config.model_copy(update={"workers": workers})
        if config.exchange_settings() is not None:
            from shoal.replicas.run import train_in_world

            device = kind_of_device(config, world.local_size or world.size)
            return train_in_world(config, resumed, listener, device, world, own)
        with joined(world, kind_of_device(config, world.local_size or world.size), config.timeout):
            return train_on_rank(config, resumed, listener, world.local_size, own)
    clock = _Clock(attempt.seconds, listener.starting)
    if config.exchange_settings() is not None:
        from shoal.replicas.run import train_here  # a run without an exchange need not wait for it to load

        device = kind_of_device(config, config.workers)
        if not config.goes_on_by_itself:
            return train_here(config, resumed, listener, device, own)
        return run_apart(
            partial(train_here, replaces=attempt.restarts),
            config,
            resumed,
            listener,
            device,
            own,
            called="conductor",
            threads=threads_each(config.threads, config.workers),
            timeout=config.timeout,
            on_stage=clock.hear,
            time_is_up=clock.time_is_up,
        )
    if config.workers == 1 and not config.goes_on_by_itself:
        return train_on_rank(config, resumed, listener, own=own)
    _check(config, resumed, own)
    results = run(
        train_on_rank,
        config,
        resumed,
        listener,
        None,
        own,
        workers=config.workers,
        threads=threads_each(config.threads, config.workers),
        timeout=config.timeout,
        device=kind_of_device(config, config.workers),
        on_stage=clock.hear,
        offering=config.goes_on_by_itself,
        time_is_up=clock.time_is_up,
    )
    return results[0]


def _train_on_ray(attempt: Attempt, config: TrainConfig, listener: Listener, own: OwnObjects) -> RunResult:
    """Ranks as actors of a Ray cluster, conducted from here. Each has one core unless --threads says more."""
    config, resumed = config.model_copy(update={"threads": config.threads or 1}), attempt.resumed
    if config.exchange_settings() is not None:
        if not config.goes_on_by_itself:
            return _replicas_on_ray(config, resumed, listener, own)
        with ExitStack() as stack:
            # This process asks for room itself: the conductor apart is ended once there is some.
            place = stack.enter_context(on_ray()) if attempt.larger else None
            clock = stack.enter_context(_growing(attempt, config, place, listener))
            return run_apart(
                partial(_replicas_on_ray, replaces=attempt.restarts),
                config,
                resumed,
                listener,
                own,
                called="conductor",
                threads=config.threads or 1,
                timeout=config.timeout,
                on_stage=clock.hear,
                time_is_up=clock.time_is_up,
            )
    _check(config, resumed, own)
    with on_ray(listener.starting) as place, _growing(attempt, config, place, listener) as clock:
        device = place.device(config.device, config.workers)
        results = run(
            train_on_rank,
            config.model_copy(update={"device": device}),
            resumed,
            Relayed(),  # what rank 0 printed would be seen on its own node
            None,
            own,
            workers=config.workers,
            threads=config.threads or 1,
            timeout=config.timeout,
            device=device,
            on_stage=clock.hear,
            on_said=hearing(listener),
            offering=config.goes_on_by_itself,
            time_is_up=clock.time_is_up,
            place=place,
        )
        return results[0]


def _replicas_on_ray(
    config: TrainConfig, resumed: Path | None, listener: Listener, own: OwnObjects, *, replaces: int = 0
) -> RunResult:
    from shoal.replicas.run import train_here

    with on_ray(listener.starting) as place:
        device = place.device(config.device, config.workers)
        config = config.model_copy(update={"device": device})
        return train_here(config, resumed, listener, device, own, place, replaces=replaces)


@contextmanager
def _growing(attempt: Attempt, config: TrainConfig, place: RayPlace | None, listener: Listener) -> Iterator["_Clock"]:
    """While the run trains on Ray: it grows when its time is over and Ray has given room for more workers."""
    if place is None or not attempt.larger:
        yield _Clock(None, listener.starting)
        return
    device = place.device(config.device, config.workers)
    room = Room(config.workers, attempt.larger, config.threads or 1, device)
    try:
        yield _Clock(attempt.seconds, listener.starting, room.is_there)
    except TimeOverError as over:
        over.workers = room.workers
        raise
    finally:
        room.close()


class _Clock:
    """Whether workers have trained for as long as they may, from what they tell on their way.

    `and_then`: what must be so too, asked again and again once the time is over.
    """

    def __init__(self, seconds: float | None, on_stage: OnStage, and_then: Callable[[], bool] = lambda: True) -> None:
        self._seconds, self._on_stage, self._and_then = seconds, on_stage, and_then
        self._begun: float | None = None

    def hear(self, done: str, by: int, of: int) -> None:
        """So many of them have done this."""
        if done == TRAINING and by == of:
            self._begun = time.monotonic()
        else:
            self._on_stage(done, by, of)

    def time_is_up(self) -> bool:
        """Whether they are to stop."""
        if self._seconds is None or self._begun is None:
            return False
        return time.monotonic() - self._begun > self._seconds and self._and_then()


def _check(config: TrainConfig, resumed: Path | None, own: OwnObjects) -> None:
    """Find what is wrong with the user's input before any rank is started; ranks find the rest."""
    if resumed is None:
        RunFolder.free(config)
    load_whole(config.model_copy(update={"device": "cpu"}), own, fresh=resumed is None)
