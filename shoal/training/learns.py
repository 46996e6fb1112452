"""Whether a run has stopped learning: told of at once, not at its end. Pure."""

import math

from shoal.config import TrainConfig

NEAR_CHANCE = 0.99
"""Of the loss of guessing: a network that learned anything is well below."""
FEW_STEPS = 200
"""A first epoch with fewer steps at the full rate is too short to say anything."""


def stopped_learning(loss: float, classes: int, *, epoch: int, steps: int, remedy: str) -> str | None:
    """What to tell people after `epoch` (from 1), whose mean loss this was; None where all is well.

    `steps`: those of the run so far at the full rate.

    >>> stopped_learning(2.3026, 10, epoch=2, steps=50, remedy="Lower --lr.")
    'the mean loss of epoch 2, 2.303, is that of guessing among 10 classes: the network learns nothing. Lower --lr.'
    >>> stopped_learning(0.5, 10, epoch=2, steps=50, remedy="Lower --lr.")
    >>> stopped_learning(2.3026, 10, epoch=1, steps=50, remedy="Lower --lr.")
    """
    too_early = epoch == 1 and steps < FEW_STEPS
    if too_early or classes < 2 or loss < NEAR_CHANCE * math.log(classes):
        return None
    return (
        f"the mean loss of epoch {epoch}, {loss:.4g}, is that of guessing among {classes} classes: the network learns "
        f"nothing. {remedy}"
    )


def how_to_step_less(config: TrainConfig) -> str:
    """The remedy where a run diverges or learns nothing.

    >>> how_to_step_less(TrainConfig(lr=0.05))
    'Lower --lr (given 0.05) or --momentum, or add --warmup.'
    >>> how_to_step_less(TrainConfig(lr=0.05, replicas=2, exchange="hogwild"))
    'Lower --lr (given 0.05; hogwild steps at 0.025) or --momentum, or add --warmup.'
    """
    options, lr = config.exchange_settings(), config.rates().lr
    own = f"; {options.name} steps at {lr:g}" if options is not None and lr != config.lr else ""
    warm_start = "" if options is None or "warm_start" not in type(options).model_fields else " or warm_start"
    momentum = " or --momentum" if config.momentum else ""
    return f"Lower --lr (given {config.lr:g}{own}){momentum}, or add --warmup{warm_start}."
