"""From a checkpoint to a job that goes on from there."""

from collections.abc import Mapping
from typing import Any

from shoal.config import TrainConfig
from shoal.data import Position
from shoal.training.checkpoints.carry_over import (
    PLACES_OF_PARTS,
    check_settings,
    renumbered,
    told,
)
from shoal.training.checkpoints.folder import Checkpoint
from shoal.training.checkpoints.job_state import put_in
from shoal.training.checkpoints.progress import Progress
from shoal.training.job import Job
from shoal.training.numbering import Done, Numbering


def read_state(checkpoint: Checkpoint, config: TrainConfig) -> dict[str, Any]:
    """What of a checkpoint is no tensor, if it is of a run with these settings but for those that may change."""
    state = checkpoint.state()
    with checkpoint.trusted():
        check_settings(state["config"], config)
    return state


def settings_before(state: Mapping[str, Any]) -> TrainConfig:
    """Of the run that wrote it."""
    return TrainConfig.model_validate(state["config"])


def step_seconds(checkpoint: Checkpoint) -> list[float]:
    """Of all steps that are in it."""
    seconds: list[float] = checkpoint.tensors("seconds").read("step_seconds").tolist()
    return seconds


def done_before(state: Mapping[str, Any], now: TrainConfig, train_samples: int) -> tuple[Done, int]:
    """Which batches are done, as a run with the settings `now` counts them, and how many samples that repeats."""
    before, counted, again = settings_before(state), state["progress"]["steps"], state.get("again", [])
    options = now.exchange_settings()
    in_order = options is None or options.same_batch
    done = Done(counted + len(again), tuple(again))
    ways = Numbering.of(before, train_samples), Numbering.of(now, train_samples)
    if ways[0] == ways[1] and not (in_order and again):
        return done, 0
    return renumbered(done, *ways, in_order=in_order)


def restore(checkpoint: Checkpoint, job: Job) -> tuple[Progress, list[str]]:
    """Put `job`, on this rank, where the run stood; and what people should know of that.

    On as many workers under the same plan it goes on bit for bit. Settings that the state does not fit are a
    `CheckpointError`; `job` must then not be used.
    """
    state = read_state(checkpoint, job.config)
    with checkpoint.trusted():
        return _restored(checkpoint, state, job)


def _restored(checkpoint: Checkpoint, state: Mapping[str, Any], job: Job) -> tuple[Progress, list[str]]:
    """What `restore` promises, of a state with settings that fit."""
    before, network = settings_before(state), job.network
    done, repeated = done_before(state, job.config, job.loader.order.samples)
    put_in(checkpoint, state, job, batches=done.counted * job.config.accumulate)
    progress = Progress.from_dict(
        state["progress"], step_seconds(checkpoint), rank=network.rank, ranks=network.ranks, device=job.device
    )
    same = all(getattr(before, name) == getattr(job.config, name) for name in PLACES_OF_PARTS)
    if not same or bool(before.recompute) != bool(job.config.recompute):  # both as the network was laid
        progress.sent_bytes = progress.sent_steps = 0
    if before.exchange_settings() is not None:
        _recount(progress, done.counted, Numbering.of(before, job.loader.order.samples), job)
    progress.repeated += repeated
    said = told(before, job.config, repeated, state.get("own_of_replicas", ()))
    if steps := state.get("losses_lost"):
        said.append(f"the losses of {steps} steps went with a lost worker; training losses are means of the others.")
    return progress, said


def _recount(progress: Progress, steps: int, before: Numbering, job: Job) -> None:
    """The same progress in steps of this job, where a run of replicas counted batches of another size."""
    progress.steps, progress.sent_bytes, progress.sent_steps = steps, 0, 0
    progress.position = Position(*divmod(steps, job.steps_per_epoch))
    progress.tested = min(job.numbering.at(before.before(progress.tested)), steps)
    if progress.summed[0] != progress.position.step:  # the mean loss so far counts as that of so many steps
        progress.losses *= progress.position.step / max(1, progress.summed[0])
        progress.summed = [progress.position.step, 0]
