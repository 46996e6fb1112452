"""Exchanging: how replicas of one network keep together.

One file per exchange, each of which opens with what it promises:

    allreduce   lockstep                     allreduce.py
    backup      lockstep without the last    backup.py, tickets.py, rounds.py
    downpour    asynchronous servers         downpour.py
    dasgd       the same, sparse             dasgd.py, sparse.py

`shards.py` cuts the weights, `rules.py` steps, `held.py` is a shard, in shared memory (`shared.py`) or behind a server
(`server.py`, `serve.py`); `coordinator.py` knows by everybody's `pulse.py` who takes part, `meeting.py` is where they
meet; `joining.py` puts one rank's side together.
"""

from shoal.exchanging.base import Exchange, Tally
from shoal.exchanging.coordinator import Event, Member
from shoal.exchanging.joining import Seat, join, serve_in_threads
from shoal.exchanging.meeting import Meeting, MeetingPlace, server_count
from shoal.exchanging.replica import Replica

__all__ = [
    "Exchange",
    "Tally",
    "Event",
    "Member",
    "Meeting",
    "MeetingPlace",
    "Seat",
    "join",
    "serve_in_threads",
    "server_count",
    "Replica",
]
