"""Training: settings -> a folder with a trained network and what happened.

`start.py` finds or starts the ranks, `job.py` builds and checks, `network.py` is the network on one device or over
ranks, `loop.py` trains, `checkpoint.py` lets a run go on, `evaluate.py` tests it.
"""

from shoal.training.loop import Listener
from shoal.training.start import resume, train

__all__ = ["Listener", "resume", "train"]
