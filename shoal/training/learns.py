"""Whether a run has stopped learning: told of at once, not at its end. Pure."""

import math

NEAR_CHANCE = 0.99
"""Of the loss of guessing: a network that learned anything is well below."""


def stopped_learning(loss: float, classes: int, *, epoch: int, remedy: str) -> str | None:
    """What to tell people after `epoch` (from 1), whose mean loss this was; None where all is well.

    The first epoch may be one of a climbing rate, and says nothing yet.

    >>> stopped_learning(2.3026, 10, epoch=2, remedy="Lower --lr.")
    'the mean loss of epoch 2, 2.303, is that of guessing among 10 classes: the network learns nothing. Lower --lr.'
    >>> stopped_learning(0.5, 10, epoch=2, remedy="Lower --lr.")
    """
    if epoch < 2 or classes < 2 or loss < NEAR_CHANCE * math.log(classes):
        return None
    return (
        f"the mean loss of epoch {epoch}, {loss:.4g}, is that of guessing among {classes} classes: the network learns "
        f"nothing. {remedy}"
    )
