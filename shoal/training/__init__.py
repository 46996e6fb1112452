"""Training: one network, its data and its optimizer, step by step, to a folder that holds what became of it.

`job.py` builds and checks, `network.py` is the network on one device or over ranks, `loop.py` trains, `checkpoint.py`
lets a run go on, `evaluate.py` tests it, `outcome.py` says what a run is about and what it did.
"""

from shoal.training.listener import Listener

__all__ = ["Listener"]
