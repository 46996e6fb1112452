"""Launching: processes that work together, started here or by torchrun or srun. Loads torch only in the ranks.

`world.py` reads who this process is, `group.py` joins the ranks, `process.py` is one process and `forked.py` how it
begins, `place.py` says where processes are started, of which `on_ray.py` is one place. `ranks.py` starts and supervises
ranks that live and die together, `replicas.py` groups of which some may be lost, `apart.py` one process that is watched
from outside. `stopping.py` counts how often one asked to stop, `failure.py` decides what went wrong first.
"""

from shoal.launching.apart import run_apart
from shoal.launching.failure import Failure, RemoteError
from shoal.launching.group import assembled, joined, table_of, told_to_all
from shoal.launching.on_ray import RayPlace, Room, on_ray
from shoal.launching.place import HERE, Place
from shoal.launching.process import OnStage, leave, load_ahead, offer, say, tell_stage
from shoal.launching.ranks import TimeOverError, run
from shoal.launching.replicas import Again, Replicas
from shoal.launching.stopping import Requests, stop_signals
from shoal.launching.world import World, surrounding

__all__ = [
    "World",
    "surrounding",
    "joined",
    "table_of",
    "told_to_all",
    "assembled",
    "load_ahead",
    "run",
    "run_apart",
    "TimeOverError",
    "offer",
    "OnStage",
    "Replicas",
    "Again",
    "Place",
    "HERE",
    "on_ray",
    "RayPlace",
    "Room",
    "tell_stage",
    "say",
    "leave",
    "Requests",
    "stop_signals",
    "Failure",
    "RemoteError",
]
