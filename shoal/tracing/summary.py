"""A trace in a few numbers: where each rank's steps go, and for whom others waited. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.timeline import Kind, Slice, Trace

Occurrence = tuple[int, str, int]
"""A step, what was waited for, and how many such waits the rank had in it before."""


@dataclass(frozen=True)
class RankSummary:
    """What one rank does in a step, in mean seconds over the steps of a trace."""

    name: str
    steps: int
    seconds: float
    """Of a whole step."""
    by_kind: Mapping[Kind, float]
    """What it does itself: of a slice that others lie in, what is left of it without them."""
    waited_for: float
    """What other ranks wait for this one in a step, all of them together."""

    @property
    def rest(self) -> float:
        """What no slice tells of."""
        return max(0.0, self.seconds - sum(self.by_kind.values()))


def summarize(trace: Trace) -> tuple[RankSummary, ...]:
    """Each rank's steps, in the order of ranks. A rank of which no whole step was recorded has none."""
    late = _waited_for(trace)
    summaries = []
    for rank, name in enumerate(trace.ranks):
        mine = [piece for piece in trace.slices if piece.rank == rank]
        steps = [piece for piece in mine if piece.kind == "step"]
        count = max(1, len(steps))
        spans = {step.step: step for step in steps}
        inside = [piece for piece in mine if piece.lane == "compute" and _within(piece, spans.get(piece.step))]
        own: defaultdict[Kind, float] = defaultdict(float)
        for piece, seconds in own_seconds(inside):
            own[piece.kind] += seconds / count
        whole = sum(step.seconds for step in steps) / count
        summaries.append(RankSummary(name, len(steps), whole, dict(own), late.get(rank, 0.0) / count))
    return tuple(summaries)


def own_seconds(slices: Iterable[Slice]) -> list[tuple[Slice, float]]:
    """Slices of one lane of one rank, each with what is left of it without those that lie in it."""
    left: list[tuple[Slice, float]] = []
    around: list[int] = []
    """The slices that have begun and not ended, as places in `left`."""
    for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end)):
        while around and left[around[-1]][0].end <= piece.start:
            around.pop()
        if around:
            outer, seconds = left[around[-1]]
            left[around[-1]] = outer, seconds - piece.seconds
        around.append(len(left))
        left.append((piece, piece.seconds))
    return left


def _within(piece: Slice, step: Slice | None) -> bool:
    return step is not None and step.start <= piece.start and piece.end <= step.end


def _waited_for(trace: Trace) -> dict[int, float]:
    """By rank: how long others waited for it. Of several that are waited for, it is the one that came last."""
    begun = _wait_begins(trace.slices)
    late: defaultdict[int, float] = defaultdict(float)
    for (rank, occurrence), piece in begun.items():
        known = {peer: begun.get((peer, occurrence)) for peer in piece.peers}
        came = {peer: theirs.start for peer, theirs in known.items() if theirs is not None}
        last = piece.peers[0] if len(piece.peers) == 1 else max(came, key=lambda peer: came[peer], default=None)
        if last is not None and came.get(last, piece.end) >= piece.start and last != rank:
            late[last] += piece.seconds
    return late


def _wait_begins(slices: Sequence[Slice]) -> dict[tuple[int, Occurrence], Slice]:
    """Every wait for other ranks, by its rank and by what all ranks call it."""
    seen: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    waits: dict[tuple[int, Occurrence], Slice] = {}
    for piece in sorted(slices, key=lambda piece: piece.start):
        if piece.kind == "wait" and piece.peers:
            key = piece.rank, piece.step, piece.label
            waits[piece.rank, (piece.step, piece.label, seen[key])] = piece
            seen[key] += 1
    return waits
