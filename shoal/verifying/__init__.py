"""Verifying: a plan against one device, number by number, and the layer at fault where they differ.

`one_device.py` runs the eager module, `compare.py` the plan beside it, `blame.py` finds the first layer that is wrong
though all it depends on is right, `engine_masks.py` makes both draw the same masks, `verify.py` puts them together.
`from_settings.py` starts all that as the command line's settings say.
"""

from shoal.verifying.verify import verify

__all__ = ["verify"]
