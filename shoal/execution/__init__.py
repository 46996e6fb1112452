"""Execution: a program on real tensors and real processes.

`laying.py` builds a `ParallelModule` (`module.py`), whose `engine.py` runs the program's list forward and
backward: `transfer.py` carries out moves, `peers.py` sums within layers, `gradients.py` sums gradients.
"""

from shoal.execution.module import (
    ParallelModule,
    clip_grad_norm_,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)

__all__ = [
    "ParallelModule",
    "clip_grad_norm_",
    "full_optimizer_state",
    "full_state_dict",
    "load_full_optimizer_state",
    "load_full_state_dict",
]
