"""A rank's diary: what it did and when, as plain tuples, noted while it works and read afterwards.

A transport has a diary while its steps are recorded, and None otherwise: whoever works asks for it once and notes
nothing without it. A note costs about a microsecond. `tracing/` makes a Trace of the diaries of all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns as now
from typing import NamedTuple

from shoal.timeline import Kind, Lane

__all__ = ["MOST_EVENTS", "Diary", "Event", "MessageEnd", "Underway", "now"]

MOST_EVENTS = 200_000
"""That a diary holds, some 50 MB; what comes later is counted and left out."""

FORWARD_PASS, BACKWARD_PASS = "pass", "pass"
"""The labels of whole passes, in which those of layers lie."""

BETWEEN: Mapping[Kind, tuple[Kind, str]] = {
    "forward": ("data", "batch, and your own code before the pass"),
    "backward": ("forward", "loss, and your own code between the passes"),
    "update": ("update", "your own code before the optimizer"),
}
"""What a loop of the user's own does before a pass begins, as far as anybody can know."""

Event = tuple[Kind, str, int, int, Lane, int, int, tuple[int, ...]]
"""(kind, label, start, end, lane, step, bytes sent, ranks that it was with); times in nanoseconds of this host."""


class MessageEnd(NamedTuple):
    """One end of a message. Both ends have the same step, ranks, tag and number; so they are found to be one."""

    step: int
    src: int
    dst: int
    tag: int
    number: int
    """How many of this step, these ranks and this tag came before."""
    sent: bool
    at: int
    label: str
    bytes: int


@dataclass
class Diary:
    """What one rank does. Threads may note at the same time."""

    most_events: int = MOST_EVENTS
    step: int = 0
    """The training step that is under way."""
    notes_passes: bool = False
    """Whether networks note whole passes: in a loop of the user's own nobody else does."""
    events: list[Event] = field(default_factory=list)
    ends: list[MessageEnd] = field(default_factory=list)
    left_out: int = 0
    """Notes for which there was no room."""
    _last: int = 0
    """When the last whole pass, or the step before, had ended."""
    _counts: defaultdict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def begin_step(self, number: int) -> None:
        """What follows belongs to this step."""
        self.step = number
        self._last = now()
        self._counts.clear()

    def note(
        self,
        kind: Kind,
        label: str,
        start: int,
        end: int | None = None,
        *,
        lane: Lane = "compute",
        bytes: int = 0,
        peers: tuple[int, ...] = (),
    ) -> None:
        """Something that lasted from `start` until now, or until `end`."""
        if len(self.events) < self.most_events:
            self.events.append((kind, label, start, now() if end is None else end, lane, self.step, bytes, peers))
        else:
            self.left_out += 1

    def note_step(self, start: int, end: int) -> None:
        """The whole step that is under way, as whoever counts steps measured it."""
        self.note("step", f"step {self.step}", start, end, lane="steps")

    def note_pass(self, kind: Kind, label: str, start: int) -> None:
        """A whole pass, or update, in a loop of the user's own, and what the loop did since the one before."""
        gap, what = BETWEEN[kind]
        self.note(gap, what, self._last, start)
        self.note(kind, label, start)
        self._last = now()

    def noting(self, kind: Kind, label: str, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, which notes itself when it is done."""

        def noted() -> None:
            start = now()
            work()
            self.note(kind, label, start)

        return noted

    def number(self, src: int, dst: int, tag: int) -> int:
        """The number of the next message of this kind in this step."""
        count = self._counts[src, dst, tag]
        self._counts[src, dst, tag] = count + 1
        return count

    def end(self, end: MessageEnd) -> None:
        """One end of a message."""
        if len(self.ends) < self.most_events:
            self.ends.append(end)
        else:
            self.left_out += 1


class Underway:
    """Messages that were begun together: in the network's lane from then until the last of them is done."""

    __slots__ = ("_begun", "_bytes", "_diary", "_kind", "_label", "_left", "_peers")

    def __init__(
        self,
        diary: Diary,
        kind: Kind,
        label: str,
        *,
        begun: int,
        works: int = 1,
        bytes: int = 0,
        peers: tuple[int, ...] = (),
    ) -> None:
        self._diary, self._kind, self._label = diary, kind, label
        self._begun, self._left, self._bytes, self._peers = begun, works, bytes, peers

    def done(self, at: int | None = None) -> None:
        """One of them is. More calls than there are messages mean nothing."""
        self._left -= 1
        if self._left == 0:
            self._diary.note(
                self._kind, self._label, self._begun, at, lane="network", bytes=self._bytes, peers=self._peers
            )
