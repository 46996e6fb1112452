"""Trace: what every rank did and when, as it happened or as it is predicted, on one clock.

The file is `timeline.py`, since `shoal.trace` is the function that records one.

It saves as one file of Chrome's Trace Event Format, which Perfetto and Chrome open: a process for each rank, in it a
thread for each lane, and an arrow for each message. The same file loads again, so that a page, a test and a person
read the same numbers. A predicted trace has the same form as a measured one: `beside` puts one under the other.
"""

import json
from collections.abc import Iterator, Mapping
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
_MICRO = 1e6


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
        return replace(
            self,
            slices=tuple(replace(piece, start=piece.start - begin, end=piece.end - begin) for piece in slices),
            messages=tuple(replace(m, sent=m.sent - begin, received=m.received - begin) for m in messages),
        )

    def beside(self, other: Self) -> dict[str, Any]:
        """Both as one Chrome trace: this one's ranks above, the other's below."""
        events = [*_events(self, first=0), *_events(other, first=len(self.ranks))]
        return {"displayTimeUnit": "ms", "otherData": {"title": f"{self.title}, {other.title}"}, "traceEvents": events}

    def to_chrome(self) -> dict[str, Any]:
        """The content of the file."""
        about = {"schema": SCHEMA, "title": self.title, "origin": self.origin, "ranks": list(self.ranks)}
        return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(self, first=0))}

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
        about = content.get("otherData", {}) if isinstance(content, dict) else {}
        if about.get("schema") != SCHEMA:
            raise InputError(f"trace {str(path)!r} is not of schema {SCHEMA!r}.", remedy)
        try:
            events = content["traceEvents"]
            return cls(
                title=about["title"],
                origin=about["origin"],
                ranks=tuple(about["ranks"]),
                slices=tuple(_slice(event) for event in events if event["ph"] == "X"),
                messages=tuple(_messages(events)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"trace {str(path)!r} does not have the fields of a trace: {error}.", remedy) from None


def _events(trace: Trace, *, first: int) -> Iterator[dict[str, Any]]:
    """In Chrome's form: ranks are processes, lanes are threads; `first` is the first process's number."""
    for rank, name in enumerate(trace.ranks):
        shown = name if trace.origin == "measured" else f"{name} ({trace.origin})"
        yield _meta("process_name", first + rank, name=shown)
        yield _meta("process_sort_index", first + rank, sort_index=first + rank)
        for lane in LANES:
            yield _meta("thread_name", first + rank, LANES.index(lane), name=lane)
            yield _meta("thread_sort_index", first + rank, LANES.index(lane), sort_index=LANES.index(lane))
    for piece in sorted(trace.slices, key=lambda piece: (piece.start, -piece.end)):
        yield {
            "ph": "X",
            "name": piece.label or piece.kind,
            "cat": piece.kind,
            "pid": first + piece.rank,
            "tid": LANES.index(piece.lane),
            "ts": round(piece.start * _MICRO, 3),
            "dur": round(piece.seconds * _MICRO, 3),
            "args": {"label": piece.label, "step": piece.step, "bytes": piece.bytes},
        }
    for number, message in enumerate(trace.messages):
        common = {
            "name": message.label,
            "cat": "message",
            "id": first * 1_000_000 + number,
            "tid": LANES.index("network"),
            "args": {"bytes": message.bytes},
        }
        yield {"ph": "s", **common, "pid": first + message.src, "ts": round(message.sent * _MICRO, 3)}
        yield {"ph": "f", "bp": "e", **common, "pid": first + message.dst, "ts": round(message.received * _MICRO, 3)}


def _meta(kind: str, process: int, thread: int | None = None, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, **({} if thread is None else {"tid": thread}), "args": args}


def _slice(event: Mapping[str, Any]) -> Slice:
    start = event["ts"] / _MICRO
    args = event["args"]
    return Slice(
        kind=event["cat"],
        rank=event["pid"],
        label=args["label"],
        start=start,
        end=start + event["dur"] / _MICRO,
        lane=LANES[event["tid"]],
        step=args["step"],
        bytes=args["bytes"],
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
                sent=event["ts"] / _MICRO,
                received=end["ts"] / _MICRO,
                bytes=event["args"]["bytes"],
            )
