"""Finding: from a network to the plan that is fastest on the devices at hand, and the network laid so.

`auto.py` profiles what is not yet known (`shoal.profiling`), searches (`shoal.planning`), races the best few on the
real devices (`race.py`) and remembers the winner (`cache.py`). `parallel.py` is
`shoal.parallelize`, `simulated.py` is `shoal.simulate`.
"""

from shoal.finding.auto import Chosen, choose_plan, find_plan
from shoal.finding.parallel import parallelize
from shoal.finding.simulated import simulate

__all__ = ["Chosen", "choose_plan", "find_plan", "parallelize", "simulate"]
