"""What of a checkpoint fits the settings with which a run goes on. Pure.

    the same plan, workers, exchange and replicas     all of it: the run goes on bit for bit
    another plan, other workers                       all of it, box by box: the same run to rounding
    another exchange, other replicas                  the common weights, what the optimizer remembers, and the position
                                                      in the data; not what replicas had of their own
    another network, data set, batch, ...             nothing: refused

The order of samples does not depend on how they are grouped in batches, so a position in it is one of samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.config import TrainConfig
from shoal.errors import CheckpointError
from shoal.training.numbering import Done, Numbering, samples_per_number

CHANGEABLE = frozenset(
    {
        *(
            "epochs",
            "patience",
            "eval_every",
            "eval_steps",
            "checkpoint_every",
            "keep",
            "restarts",
            "elastic",
            "log_every",
        ),
        *("out", "tensorboard", "trace"),
        *("workers", "plan", "recompute", "factors", "optimizer_state", "race"),
        *("bucket_bytes", "timeout", "threads", "device"),
        *("exchange", "exchange_options", "replicas", "slow"),
    }
)
"""What may change when a run goes on: nothing that the state so far depends on."""
PLACES_OF_PARTS = ("plan", "workers", "optimizer_state")
"""Settings that decide which rank holds which part."""


def settings_saved(config: TrainConfig) -> dict[str, Any]:
    """The settings of a run as a checkpoint has them."""
    return config.model_dump(mode="json")


def check_settings(before: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse settings that the state of a checkpoint does not fit, with the name of the first."""
    for name, value in settings_saved(config).items():
        if name not in CHANGEABLE and before.get(name) != value:
            raise CheckpointError(
                f"--resume: the run was made with {name} = {before.get(name)!r}, now it is {value!r}.",
                f"These may change when a run goes on: {', '.join(sorted(CHANGEABLE))}.",
            )

    if before["plan"] != config.plan and "post-local-sgd" in (before["plan"], config.plan):
        raise CheckpointError(
            f"--resume: the run was made with plan = {before['plan']!r}, now it is {config.plan!r}.",
            "With post-local-sgd each worker has weights of its own, which fit no other plan: give --plan as it was.",
        )


def renumbered(done: Done, before: Numbering, now: Numbering, *, in_order: bool) -> tuple[Done, int]:
    """The same in batches as they are `now`, and how many samples are trained on again.

    A new batch is done if all its samples are. `in_order`: whether nothing may be left out before what is done.

    >>> renumbered(Done(6), Numbering(32, 640), Numbering(64, 640), in_order=True)
    (Done(handed=3, again=()), 0)
    >>> renumbered(Done(5, (1,)), Numbering(32, 640), Numbering(64, 640), in_order=False)
    (Done(handed=2, again=(0,)), 64)
    """
    handed = now.at(before.before(done.handed))
    lacking = {number for left in done.again for number in before.sharing(left, now) if number < handed}
    if in_order:
        handed, lacking = min([handed, *lacking]), set()
    renewed = Done(handed, tuple(sorted(lacking)))
    return renewed, before.of_done(done) - now.of_done(renewed)


def told(before: TrainConfig, now: TrainConfig, repeated: int, lost: Iterable[str] = ()) -> list[str]:
    """For people: what a run that goes on with other settings does not have any more."""
    lines = []
    changed = [
        f"{name} = {getattr(now, name)!r} (before: {getattr(before, name)!r})"
        for name in ("exchange", "replicas")
        if getattr(now, name) != getattr(before, name)
    ]
    if changed and (gone := sorted(set(lost))):
        lines.append(
            f"goes on with {', '.join(changed)}: every replica begins with the common weights; what does not carry "
            f"over is {_listed(gone)}."
        )
    if repeated:
        lines.append(
            f"{repeated} samples are trained on again: what was done does not fill whole batches of "
            f"{samples_per_number(now)} (before: {samples_per_number(before)})."
        )
    return lines


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
