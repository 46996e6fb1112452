"""Whether a run has stopped learning: told of at once, not at its end. Pure."""

import math

from shoal.config import TrainConfig
from shoal.training.listener import About

NEAR_CHANCE = 0.99
"""Of the loss of guessing: a network that learned anything is well below."""
FEW_STEPS = 200
"""After fewer steps at the full rate a network that has not learned anything yet may still begin to."""


def stopped_learning(loss: float, about: About, *, before: float, epoch: int, steps: int, remedy: str) -> str | None:
    """What to tell people after `epoch` (from 1), whose mean loss this was; None where all is well.

    `before`: the mean loss of the epoch before, not a number for the first. `steps`: those of the run so far at the
    full rate. It is told of at once where the network had learned something, and else after `FEW_STEPS` or at the
    end. Of a loss of the user's own nobody knows what guessing gives: nothing is told.
    """
    if about.own_loss or about.classes < 2:
        return None
    guessing = NEAR_CHANCE * math.log(about.classes)
    may_begin_yet = steps < FEW_STEPS and not before < guessing and epoch < about.epochs
    if loss < guessing or may_begin_yet:
        return None
    return (
        f"the mean loss of epoch {epoch}, {loss:.4g}, is that of guessing among {about.classes} classes: the network "
        f"learns nothing. {remedy}"
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
