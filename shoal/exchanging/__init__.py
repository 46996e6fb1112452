"""Exchanging: how replicas of one network keep together.

One file per exchange says everything about it: what it promises, its options, what it does.

    allreduce   the mean of gradients, in every step         allreduce.py
    sync        the same, by parameter servers               sync.py
    backup      the same, without the last few               backup.py
    downpour    asynchronous parameter servers               downpour.py
    dasgd       the same, with sparse gradients              dasgd.py
    softsync    the same, with the mean of several pushes    softsync.py
    hogwild     shared memory without locks                  hogwild.py
    easgd       own weights, tied to a common centre         easgd.py
    admm        own weights, tied by multipliers             admm.py
    gossip      own weights, sent to a peer now and then     gossip.py
    local       own steps, then the mean of weights          local.py

`base.py` is what they have in common, `replica.py` the network as they see it. `servers/` holds common weights:
`slices.py` cuts them, `rules.py` steps, `shard.py` is a part of them, in shared memory (`shared_memory.py`,
`shared_consensus.py`) or behind a server (`server.py`, `process.py`). `compression/` makes smaller what is sent.
`membership/` knows who takes part: `meeting.py` is where replicas meet, `coordinator.py` hears everybody's `pulse.py`,
`seat.py` is one rank's place.
"""

from shoal.exchanges import ExchangeOptions
from shoal.exchanging import compression
from shoal.exchanging.base import Exchange, Kind, OutOfStepError, Tally
from shoal.exchanging.membership.coordinator import Event, Member
from shoal.exchanging.membership.meeting import Meeting, MeetingPlace
from shoal.exchanging.membership.seat import Seat, take_seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.reach import serve_in_threads

__all__ = [
    "Exchange",
    "Kind",
    "OutOfStepError",
    "Tally",
    "Event",
    "Member",
    "Meeting",
    "MeetingPlace",
    "Seat",
    "take_seat",
    "join",
    "serve_in_threads",
    "Replica",
    "compression",
]


def join(options: ExchangeOptions, replica: Replica, seat: Seat, number: int) -> Exchange:
    """One rank's side of the exchange that options stand for. All ranks of the replica call it."""
    assert isinstance(options, Kind)
    exchange = options.join(replica, seat, number)
    seat.waits = lambda: exchange.waits
    return exchange
