"""Execution: a program on real tensors and real processes.

`laying.py` builds a `ParallelModule` (`module.py`) over the user's own tree of modules (`tree.py`), whose tensors are
this rank's shards (`states.py`). On a call (`given_call.py`) the ranks agree (`calling.py`): which captured form it is
(`variants.py`), and what to run. It becomes one autograd node (`autograd_node.py`), which runs a pass (`passes.py`):
`engine.py` goes through the program's list forward and backward, by the route that is the same in every step
(`route.py`), and keeps what backward needs on a tape (`tape.py`).
`transfer.py` carries out moves, `peers.py` sums within layers, `gradients.py` sums gradients. `whole.py` puts a network
together again, and `torch_tools.py` tells torch's own tools what a shard is.
"""

from shoal.execution.module import ParallelModule
from shoal.execution.torch_tools import elementwise_optimizer
from shoal.execution.whole import (
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
)

__all__ = [
    "ParallelModule",
    "clip_grad_norm_",
    "elementwise_optimizer",
    "full_state_dict",
    "load_full_state_dict",
]
