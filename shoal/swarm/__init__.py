"""Swarm: many replicas with an exchange between them in simulated time. The exchanges' own code runs in it.

stage.py      actors: code that waits, run one at a time in the order of simulated time
wire.py       hosts, the links that their messages share, and what is lost with a host
servers.py    shards behind the wire; `peers.py` other replicas; `ring.py` sums over all
work.py       what replicas train on: a stand-in for weights, or a network and data
churn.py      when replicas die and come back
swarm.py      the run: who takes which batch, who is there, what came of it
"""

from shoal.swarm.churn import Churn
from shoal.swarm.swarm import Outcome, Setting, simulate_swarm

__all__ = ["Churn", "Outcome", "Setting", "simulate_swarm"]
