"""The learning rate of each step. Pure: a function of the step's number alone."""

import math

from shoal.config import Schedule


def rate_at(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """The rate of step `step` (from 0) of `total_steps`, after a linear climb over `warmup_steps`.

    >>> [rate_at(s, peak=1.0, schedule="cosine", warmup_steps=2, total_steps=6) for s in range(4)]
    [0.5, 1.0, 1.0, 0.8535533905932737]
    >>> [rate_at(s, peak=1.0, schedule="step", warmup_steps=0, total_steps=4) for s in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    match schedule:
        case "constant":
            return peak
        case "step":
            return peak / (100 if done >= 0.75 else 10 if done >= 0.5 else 1)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
