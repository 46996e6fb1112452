"""Using: the folder of a finished run -> a network that predicts, is tested again, and goes elsewhere.

`trained.py` loads it, `transform.py` prepares samples as in training, `predicting.py` predicts, `testing.py` tests it
on any data under any plan, `exporting.py` writes it for other programs, `saving.py` the weights
of any network.
"""

from shoal.using.predicting import Prediction
from shoal.using.saving import save
from shoal.using.trained import Trained, load

__all__ = ["Prediction", "Trained", "load", "save"]
