"""A run that goes on by itself after a loss: as often as `--restarts` says, on as many workers as `--elastic` says.

    a worker is lost ──▶ as many as are left, at least MIN ──▶ after a while, at a step's end ──▶ up to MAX again

Every number of workers is an attempt of its own, with processes and a plan of its own, that goes on from the newest
checkpoint: of the moment of the loss where a survivor held all of the run (`training/last_words.py`), else the last
that was saved. The batch stays the batch of all, so that the run stays the run of one device, to rounding.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal import planning
from shoal.config import TORCH_STRATEGIES, TrainConfig
from shoal.errors import ConfigError, DiedError, InputError, Loss, NoPlaceError, PeerError
from shoal.launching import TimeOverError
from shoal.planning.strategies import AUTO
from shoal.result import RunResult, WentOn
from shoal.training.checkpoints.folder import Checkpoint
from shoal.training.listener import Listener
from shoal.training.numbering import Numbering, samples_per_number
from shoal.training.run_folder import RunFolder
from shoal.units import WorkerRange


@dataclass(frozen=True)
class Attempt:
    """The run on some number of workers, until it ends, loses one, or has trained for so many `seconds`."""

    config: TrainConfig
    resumed: Path | None
    seconds: float | None
    """None: there is no number of workers to grow to."""
    restarts: int
    """Lost replicas in whose place another may be started while the others go on."""
    larger: tuple[int, ...] = ()
    """Numbers of workers to grow to, least first, where there are `seconds`."""


def workers_lost_with_one(config: TrainConfig) -> int:
    """All of its replica, where there are replicas."""
    return 1 if config.exchange_settings() is None else config.workers // config.replicas


def on_workers(config: TrainConfig, workers: int) -> TrainConfig:
    """The same run on another number of workers: replicas keep their size, and the batch stays that of all."""
    replicas = 1 if config.exchange_settings() is None else workers // workers_lost_with_one(config)
    values = {name: getattr(config, name) for name in config.model_fields_set}
    return TrainConfig(**{**values, "batch": config.batch, "workers": workers, "replicas": replicas})


def fits(config: TrainConfig, workers: int) -> bool:
    """Whether the run can be laid over so many workers."""
    if workers % workers_lost_with_one(config):
        return False
    try:
        there = on_workers(config, workers)
        if there.plan not in TORCH_STRATEGIES:
            planning.check(there.plan, workers // there.replicas)
    except InputError:
        return False
    return True


def largest(config: TrainConfig, least: int, most: int) -> int | None:
    """The largest number of workers of these on which the run can go on."""
    return next((workers for workers in range(most, least - 1, -1) if fits(config, workers)), None)


def go_on_by_itself(
    train: Callable[[Attempt], RunResult], config: TrainConfig, resumed: Path | None, listener: Listener
) -> RunResult:
    """Train, in as many attempts as it takes and `config` allows.

    An error that a worker raised itself would come again, and is raised. So is a loss that leaves too few workers, with
    the checkpoint from which one can go on.
    """
    if config.elastic is not None:
        _check_range(config, config.elastic)
    folder = RunFolder.free(config) if resumed is None else RunFolder.open(resumed)
    given = config.model_copy(update={"out": folder.path})
    workers, left, losses = config.workers, config.restarts, 0
    while True:
        attempt, replaced = _attempt(given, workers, folder, resumed, losses, left), folder.replaced
        try:
            return train(attempt)
        except TimeOverError as over:
            assert attempt.larger, "only an attempt that can grow has its time"
            grown = over.workers or attempt.larger[-1]
            why = (
                f"the run has trained on {workers} workers for {attempt.seconds:g} seconds, and there is room for more."
            )
            change = _change(folder, attempt.config, why, workers, grown, Loss((), time.time()))
            workers = grown
            listener.regrouping(change)
        except NoPlaceError as error:
            there = None if given.elastic is None else largest(given, given.elastic.least, workers - 1)
            if there is None:
                raise
            losses += 1
            change = _change(folder, attempt.config, error.problem, workers, there, Loss((), time.time()))
            workers = there
            listener.regrouping(change)
        except (DiedError, PeerError) as error:
            fewer = _fewer(given, workers, error.loss)
            left -= folder.replaced - replaced
            if fewer is None and not left:
                raise _with_the_way_out(error, given, workers, folder) from error.__cause__
            losses += 1
            loss = error.loss or Loss((), time.time())
            change = _change(folder, attempt.config, error.problem, workers, fewer or workers, loss)
            if fewer is None:
                left -= 1
                listener.restarting(error.problem, left)
            else:
                workers = fewer
                listener.regrouping(change)
        if folder.path.exists():
            folder.note_going_on(change)
        if folder.can_go_on:
            resumed = folder.path


def _attempt(
    given: TrainConfig, workers: int, folder: RunFolder, resumed: Path | None, losses: int, left: int
) -> Attempt:
    """The next one. After every loss it takes twice as long until the run grows again. `left`: of the restarts."""
    config = given if workers == given.workers else on_workers(given, workers)
    if resumed is not None and config.plan == AUTO and folder.plan.exists():
        config = _with_plan_of(folder, config)
    if given.elastic is None or not losses:
        return Attempt(config, resumed, None, left)
    larger = tuple(more for more in range(workers + 1, given.elastic.most + 1) if fits(given, more))
    return Attempt(config, resumed, given.elastic.seconds * 2 ** (losses - 1) if larger else None, left, larger)


def _with_plan_of(folder: RunFolder, config: TrainConfig) -> TrainConfig:
    """With the plan that was found before, where that was for as many workers."""
    try:
        planning.check(str(folder.plan), config.workers // config.replicas)
    except InputError:
        return config
    return config.model_copy(update={"plan": str(folder.plan)})


def _check_range(config: TrainConfig, elastic: WorkerRange) -> None:
    """Refuse a range of which the plan and the batch allow nothing but the number that the run begins with."""
    others = [workers for workers in range(elastic.least, elastic.most + 1) if workers != config.workers]
    if others and not any(fits(config, workers) for workers in others):
        raise ConfigError(
            f"elastic = '{elastic}', but plan = {config.plan!r} with batch = {config.batch} can be laid over no other "
            f"number of workers than {config.workers}.",
            "Choose a plan for any number, such as data or auto; with replicas, a --batch that each number divides.",
        )


def _fewer(config: TrainConfig, workers: int, loss: Loss | None) -> int | None:
    """On how many workers to go on without those that are lost; None where there is no such number."""
    if config.elastic is None or loss is None or not loss.lost:
        return None
    return largest(config, config.elastic.least, workers - len(loss.lost) * workers_lost_with_one(config))


def _with_the_way_out(
    error: DiedError | PeerError, config: TrainConfig, workers: int, folder: RunFolder
) -> DiedError | PeerError:
    """The error that ends the run, with where to go on from; where too few workers are left, with that."""
    newest = folder.checkpoints.all()[-1:]
    go_on = (
        f"Its newest checkpoint is {newest[0].path.name}. Go on with: {folder.how_to_go_on}"
        if newest
        else "There is no checkpoint yet: start it again."
    )
    if config.elastic is None or error.loss is None or not error.loss.lost:
        told = folder.how_to_go_on in error.remedy or "There is no checkpoint yet" in error.remedy
        return error if told else type(error)(error.problem, f"{error.remedy} {go_on}")
    there = max(0, workers - len(error.loss.lost) * workers_lost_with_one(config))
    allows = f"and elastic = '{config.elastic}' allows no such number"
    return type(error)(f"{error.problem} {there} of {workers} workers are left, {allows}.", go_on)


def _change(folder: RunFolder, config: TrainConfig, why: str, before: int, after: int, loss: Loss) -> WentOn:
    """What is known when the run goes on."""
    checkpoint, _ = folder.checkpoints.newest_whole()
    steps = 0 if checkpoint is None else checkpoint.steps
    return WentOn(
        why=why,
        lost=list(loss.lost),
        workers_before=before,
        workers_after=after,
        step=steps,
        checkpoint=None if checkpoint is None else checkpoint.path.name,
        samples_again=_samples_again(loss, checkpoint, config),
        noticed=loss.noticed,
        seconds_to_notice=None if loss.stepped is None else max(0.0, round(loss.noticed - loss.stepped, 3)),
    )


def _samples_again(loss: Loss, checkpoint: Checkpoint | None, config: TrainConfig) -> int | None:
    """Samples trained on after the checkpoint, that are lost; None where nobody knows."""
    if loss.steps is None:
        return None
    begun = 0 if checkpoint is None else checkpoint.steps
    samples = None if checkpoint is None else checkpoint.state().get("train_samples")
    if samples is None:  # nothing says how many an epoch has, so where the smaller batches are
        return max(0, loss.steps - begun) * samples_per_number(config) if config.last_batch == "drop" else None
    numbering = Numbering.of(config, samples)
    return max(0, numbering.before(loss.steps) - numbering.before(begun))
