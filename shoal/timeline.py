"""Trace: what every rank did and when, as it happened or as it is predicted, on one clock.

The file is `timeline.py`, since `shoal.trace` is the function that records one.

It saves as one file of Chrome's Trace Event Format, which Perfetto and Chrome open: a process for each rank, in it a
thread for each lane, and an arrow for each message. The same file loads again, so that a page, a test and a person
read the same numbers. A predicted trace has the same form as a measured one: `beside` puts one under the other.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from shoal.errors import InputError
from shoal.files import write_text_atomically

SCHEMA = "shoal.trace/1"

Kind = Literal["step", "data", "forward", "backward", "move", "sum", "gradients", "wait", "exchange", "update", "test"]
"""A whole step; taking a batch; a layer forward and backward; rows between ranks; sums within a layer, such as batch
norm's; sums of gradients; waiting for others; messages of an exchange; the optimizer's step; a test."""
Lane = Literal["steps", "compute", "network"]
"""Whole steps; what the rank does itself, one after the other; what travels meanwhile."""
Origin = Literal["measured", "predicted"]

LANES: tuple[Lane, ...] = get_args(Lane)
NETWORK = LANES.index("network")
"""The first of its rows in a file; it may need several."""
_MICRO = 1e6
_FIRST = 1
"""The number of a process's first thread: Perfetto takes 0 for one thread of all processes."""
_DEEP = 100
"""Messages of one rank and label that are under way at a time, at most."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One thing that one rank did.

    Slices of one rank lie beside or within each other, never across, in the lanes `steps` and `compute`. In `network`
    they may overlap, since several messages travel at a time; a file has as many rows for them as it takes.
    """

    kind: Kind
    rank: int
    label: str
    """The layer, or what it is about."""
    start: float
    """Seconds since the trace began."""
    end: float
    lane: Lane = "compute"
    step: int = 0
    """The training step that it belongs to."""
    bytes: int = 0
    """Payload that this rank sent for it."""
    peers: tuple[int, ...] = ()
    """The other ranks that it is with: whom a wait waits for, whose sum it is."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """Payload on its way from one rank to another."""

    src: int
    dst: int
    label: str
    sent: float
    received: float
    bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """What all ranks did in some steps."""

    title: str
    origin: Origin
    ranks: tuple[str, ...]
    """What each rank is called: `rank 0`, `replica 1, rank 0`, `server 2`."""
    slices: tuple[Slice, ...]
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        """A `ValueError` for what no run can have done."""
        rows = range(len(self.ranks))
        for piece in self.slices:
            if piece.rank not in rows or not piece.start <= piece.end:
                raise ValueError(f"{piece} is of no rank, or ends before it begins")
            if not all(peer in rows for peer in piece.peers):
                raise ValueError(f"{piece} is with a rank that is not there")
        for message in self.messages:
            if message.src not in rows or message.dst not in rows or not message.sent <= message.received:
                raise ValueError(f"{message} is of no rank, or arrives before it is sent")

    @property
    def seconds(self) -> float:
        """From the first slice to the end of the last."""
        if not self.slices:
            return 0.0
        return max(piece.end for piece in self.slices) - min(piece.start for piece in self.slices)

    def steps(self) -> dict[int, list[Slice]]:
        """The slices of every training step, in the order of their starts."""
        found: dict[int, list[Slice]] = {}
        for piece in sorted(self.slices, key=lambda piece: (piece.step, piece.start)):
            found.setdefault(piece.step, []).append(piece)
        return found

    def of_step(self, step: int) -> Self:
        """One step alone, from time 0."""
        slices = [piece for piece in self.slices if piece.step == step]
        begin = min((piece.start for piece in slices), default=0.0)
        end = max((piece.end for piece in slices), default=0.0)
        messages = [message for message in self.messages if begin <= message.sent <= end]
        return replace(self, slices=tuple(slices), messages=tuple(messages)).from_zero()

    def from_zero(self) -> Self:
        """The same, where the first slice begins at 0."""
        return self.earlier(min((piece.start for piece in self.slices), default=0.0))

    def earlier(self, seconds: float) -> Self:
        """The same, so much earlier: as another clock shows it."""
        return replace(
            self,
            slices=tuple(replace(p, start=p.start - seconds, end=p.end - seconds) for p in self.slices),
            messages=tuple(replace(m, sent=m.sent - seconds, received=m.received - seconds) for m in self.messages),
        )

    def beside(self, other: Self) -> dict[str, Any]:
        """Both as one Chrome trace: this one's ranks above, the other's below."""
        events = [*_events(self, first=0), *_events(other, first=len(self.ranks))]
        return {"displayTimeUnit": "ms", "otherData": {"title": f"{self.title}, {other.title}"}, "traceEvents": events}

    def to_chrome(self) -> dict[str, Any]:
        """The content of the file."""
        about = {"schema": SCHEMA, "title": self.title, "origin": self.origin, "ranks": list(self.ranks)}
        return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(self, first=0))}

    @classmethod
    def from_chrome(cls, content: Any) -> Self:
        """What `to_chrome` gave; anything else is a `ValueError` that says what is wrong."""
        about = content.get("otherData") if isinstance(content, dict) else None
        if not isinstance(about, dict) or about.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA!r}")
        try:
            events, ranks, title, origin = content["traceEvents"], about["ranks"], about["title"], about["origin"]
            if origin not in get_args(Origin) or not isinstance(title, str):
                raise ValueError(f"its title is {title!r} and its origin {origin!r}")
            return cls(
                title=title,
                origin=origin,
                ranks=tuple(map(str, ranks)),
                slices=tuple(_slice(event) for event in events if event["ph"] == "X"),
                messages=tuple(_messages(events)),
            )
        except KeyError as error:
            raise ValueError(f"{error} is missing in it") from None
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"it does not have the fields of a trace: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the file that Perfetto opens; it appears whole or not at all."""
        write_text_atomically(Path(path), json.dumps(self.to_chrome()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; anything else is an `InputError`."""
        remedy = "`shoal train --trace` writes such a file into the run's folder, as trace.json."
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"trace {str(path)!r} cannot be read: {error}.", remedy) from None
        try:
            return cls.from_chrome(content)
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not a trace of shoal: {error}.", remedy) from None


def _events(trace: Trace, *, first: int) -> Iterator[dict[str, Any]]:
    """In Chrome's form: ranks are processes, lanes are threads; `first` is the first process's number."""
    for rank, name in enumerate(trace.ranks):
        shown = name if trace.origin == "measured" else f"{name} ({trace.origin})"
        yield _meta("process_name", first + rank, name=shown)
        yield _meta("process_sort_index", first + rank, sort_index=first + rank)
        for row, lane in enumerate(LANES):
            yield _meta("thread_name", first + rank, row, name=lane)
            yield _meta("thread_sort_index", first + rank, row, sort_index=row)
    placed = _placed(trace.slices)
    for rank, row in sorted({(piece.rank, row) for piece, row in placed if row > NETWORK}):
        yield _meta("thread_name", first + rank, row, name=f"{LANES[NETWORK]} ({row - NETWORK + 1})")
        yield _meta("thread_sort_index", first + rank, row, sort_index=row)
    for piece, row in placed:
        start, end = _micro(piece.start), _micro(piece.end)
        yield {
            "ph": "X",
            "name": piece.label if piece.kind == "step" else f"{piece.kind} {piece.label}".rstrip(),
            "cat": piece.kind,
            "pid": first + piece.rank,
            "tid": _FIRST + row,
            "ts": start,
            "dur": round(end - start, 3),
            "args": {"label": piece.label, "step": piece.step, "bytes": piece.bytes, "peers": list(piece.peers)},
        }
    row_at = _rows_of_messages(placed)
    for number, message in enumerate(trace.messages):
        common = {
            "name": message.label,
            "cat": "message",
            "id": first * 1_000_000 + number,
            "args": {"bytes": message.bytes},
        }
        ends = ({"ph": "s"}, message.src, message.sent), ({"ph": "f", "bp": "e"}, message.dst, message.received)
        for phase, rank, at in ends:
            row = row_at(rank, message.label, at)
            yield {**phase, **common, "pid": first + rank, "tid": _FIRST + row, "ts": _micro(at)}


def _micro(seconds: float) -> float:
    """In microseconds, to the nanosecond."""
    return round(seconds * _MICRO, 3)


def _seconds(micro: float) -> float:
    """What `_micro` was given, to the nanosecond."""
    return round(micro * 1e3) / 1e9


def _placed(slices: tuple[Slice, ...]) -> list[tuple[Slice, int]]:
    """Slices in the order of their starts, each with its row: those of `network` that overlap in rows of their own."""
    used: dict[int, list[float]] = {}
    """Of each rank until when each row of the network is in use."""
    placed = []
    for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end)):
        row = LANES.index(piece.lane)
        if row == NETWORK:
            ends = used.setdefault(piece.rank, [])
            place = next((place for place, end in enumerate(ends) if end <= piece.start), len(ends))
            ends[place : place + 1] = [piece.end]
            row += place
        placed.append((piece, row))
    return placed


def _rows_of_messages(placed: list[tuple[Slice, int]]) -> Callable[[int, str, float], int]:
    """Finds the row of the slice that a message leaves or arrives in: an arrow is drawn only from slice to slice."""
    of_label: dict[tuple[int, str], list[tuple[float, float, int]]] = {}
    for piece, row in placed:
        if row >= NETWORK:
            of_label.setdefault((piece.rank, piece.label), []).append((piece.start, piece.end, row))

    def row_at(rank: int, label: str, at: float) -> int:
        pieces = of_label.get((rank, label), [])
        last = bisect_right(pieces, at, key=lambda piece: piece[0])
        begun = pieces[max(0, last - _DEEP) : last]
        return next((row for _, end, row in reversed(begun) if at <= end), NETWORK)

    return row_at


def _meta(kind: str, process: int, row: int | None = None, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, **({} if row is None else {"tid": _FIRST + row}), "args": args}


def _slice(event: Mapping[str, Any]) -> Slice:
    args, kind, row = event["args"], event["cat"], event["tid"] - _FIRST
    if kind not in get_args(Kind) or row < 0:
        raise ValueError(f"no slice is a {kind!r} of thread {event['tid']}")
    return Slice(
        kind=kind,
        rank=event["pid"],
        label=args["label"],
        start=_seconds(event["ts"]),
        end=_seconds(event["ts"] + event["dur"]),
        lane=LANES[min(row, NETWORK)],
        step=args["step"],
        bytes=args["bytes"],
        peers=tuple(args.get("peers", ())),
    )


def _messages(events: list[Mapping[str, Any]]) -> Iterator[Message]:
    arrived = {event["id"]: event for event in events if event["ph"] == "f"}
    for event in events:
        if event["ph"] == "s":
            end = arrived[event["id"]]
            yield Message(
                src=event["pid"],
                dst=end["pid"],
                label=event["name"],
                sent=_seconds(event["ts"]),
                received=_seconds(end["ts"]),
                bytes=event["args"]["bytes"],
            )
