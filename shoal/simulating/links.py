"""Links that several flows share fairly: each gets an equal part of the link while it is under way."""

import heapq
from collections.abc import Callable, Hashable
from itertools import count

Callback = Callable[[float], None]


class Agenda:
    """What happens next, in the order of time; at the same time, in the order in which it was noted."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callback]] = []
        self._ties = count()
        self.now = 0.0

    def note(self, when: float, what: Callback) -> None:
        """Call `what` then, with the time."""
        heapq.heappush(self._events, (when, next(self._ties), what))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            when, _, what = heapq.heappop(self._events)
            self.now = max(self.now, when)
            what(self.now)

    def end(self) -> None:
        """Forget all that was to happen."""
        self._events.clear()


class Link:
    """One direction of a link. n flows at a time take n times as long each.

    Kept as a clock that runs at 1/n of real time: a flow of s seconds ends when this clock is s further on.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._clock = self._seen = 0.0
        self._flows: list[tuple[float, int, int, Callback]] = []
        self._ties = count()
        self._active = 0
        self._version = 0

    def carry(self, seconds: float, flows: int, done: Callback) -> int:
        """Begin `flows` equal flows that would take `seconds` each, alone; `done` is told when they are through.

        Returns their number on this link, by which `drop` takes them off it.
        """
        self._advance()
        number = next(self._ties)
        heapq.heappush(self._flows, (self._clock + seconds, number, flows, done))
        self._active += flows
        self._expect()
        return number

    def drop(self, number: int) -> None:
        """Take flows off the link, which the others then share; `done` is not told. Nothing, where they are through.

        Costs a pass over what is on the link.
        """
        self._advance()
        kept = [flow for flow in self._flows if flow[1] != number]
        if len(kept) < len(self._flows):
            self._active -= sum(flow[2] for flow in self._flows) - sum(flow[2] for flow in kept)
            heapq.heapify(kept)
            self._flows = kept
            self._expect()

    def _advance(self) -> None:
        if self._active:
            self._clock += (self._agenda.now - self._seen) / self._active
        self._seen = self._agenda.now

    def _expect(self) -> None:
        self._version += 1
        if self._flows:
            left = max(self._flows[0][0] - self._clock, 0.0) * self._active
            version = self._version
            self._agenda.note(self._agenda.now + left, lambda now: self._through(now, version))

    def _through(self, now: float, version: int) -> None:
        if version != self._version:  # flows came since: this was too early
            return
        self._advance()
        end, _, flows, done = heapq.heappop(self._flows)
        self._clock = max(self._clock, end)
        self._active -= flows
        finished = [done]
        while self._flows and self._flows[0][0] <= self._clock * (1 + 1e-12):  # the same moment, but for rounding
            _, _, flows, done = heapq.heappop(self._flows)
            self._active -= flows
            finished.append(done)
        self._expect()
        for tell in finished:
            tell(now)


class Links:
    """All links of a cluster, made as they are used."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._links: dict[Hashable, Link] = {}

    def link(self, name: Hashable) -> Link:
        """The link of this name."""
        found = self._links.get(name)
        if found is None:
            found = self._links[name] = Link(self._agenda)
        return found

    def carry(self, name: Hashable, seconds: float, flows: int, done: Callback) -> int:
        """As `Link.carry` on the link of this name."""
        return self.link(name).carry(seconds, flows, done)

    def drop(self, name: Hashable, number: int) -> None:
        """As `Link.drop` on the link of this name."""
        self._links[name].drop(number)
