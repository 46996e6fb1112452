"""Who waited in the steps of a trace, and whom for. Pure."""

from dataclasses import dataclass

from shoal.timeline import Trace


@dataclass(frozen=True)
class RankWaits:
    """One rank over all recorded steps."""

    rank: str
    share: float
    """Of the steps' time that it waited."""
    late: int
    """Steps in which it was the one that waited least, while others waited for it."""
    steps: int


def waits_of(trace: Trace) -> list[RankWaits]:
    """Every rank; none where nobody waited."""
    waited = dict.fromkeys(range(len(trace.ranks)), 0.0)
    late = dict.fromkeys(waited, 0)
    length = 0.0
    steps = trace.steps()
    for pieces in steps.values():
        length += max(piece.end for piece in pieces) - min(piece.start for piece in pieces)
        here = dict.fromkeys(waited, 0.0)
        for piece in pieces:
            if piece.kind == "wait" and piece.rank in here:
                here[piece.rank] += piece.seconds
        if any(here.values()):
            late[min(here, key=lambda rank: here[rank])] += 1
        for rank, seconds in here.items():
            waited[rank] += seconds
    if not any(waited.values()) or not length:
        return []
    return [RankWaits(trace.ranks[rank], seconds / length, late[rank], len(steps)) for rank, seconds in waited.items()]
