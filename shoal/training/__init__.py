"""Training: settings -> a folder with a trained network and what happened.

`start.py` finds or starts the ranks, `job.py` builds and checks, `network.py` is the network on one device or over
ranks, `loop.py` trains, `checkpoint.py` lets a run go on, `evaluate.py` tests it. With several replicas:
`replicated.py` starts or joins them, `conductor.py` hands out batches (`budget.py`), adds up who did what (`scores.py`)
and writes files, `replica.py` is one of them; `own_loop.py` is an exchange in a user's own loop.
"""

from shoal.training.listener import Listener
from shoal.training.start import resume, train

__all__ = ["Listener", "resume", "train"]
