"""Training: settings -> a folder with a trained network and what happened.

`job.py` builds and checks, `loop.py` trains, `checkpoint.py` lets a run go on, `evaluate.py` tests it.
"""

from shoal.training.loop import Listener, resume, train

__all__ = ["Listener", "resume", "train"]
