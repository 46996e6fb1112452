"""Launching: processes that work together, started here or by torchrun or srun. Loads torch only in the ranks.

`world.py` reads who this process is, `group.py` joins the ranks, `ranks.py` starts and supervises ranks of this
host, `failure.py` decides what went wrong first.
"""

from shoal.launching.failure import Failure, RemoteError
from shoal.launching.group import joined
from shoal.launching.ranks import leave, run
from shoal.launching.world import World, surrounding

__all__ = ["World", "surrounding", "joined", "run", "leave", "Failure", "RemoteError"]
