"""Hosts and their links: a message takes its part of its sender's way out and of its receiver's way in.

Each host has a link of its own, both directions of which work at once; whatever is on one direction at the same time
gets an equal part of it, and a message is there when both links are done with it, after the latency. A host that dies
takes with it what was on its way from it and to it; the links are then free for others.

Every byte sent has arrived, is on its way, or was lost with a host: `sent == arrived + lost + under_way`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from shoal.simulating.links import Agenda, Links

Host = Hashable
_OUT, _IN = "out", "in"


@dataclass(eq=False)
class _Flight:
    src: Host
    dst: Host
    bytes: float
    began: float
    arrived: Callable[[], None]
    lost: Callable[[], None]
    label: str
    parts: int = 2
    flows: dict[Hashable, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """One message that arrived."""

    src: Host
    dst: Host
    bytes: float
    began: float
    ended: float
    label: str


class Wire:
    """`bandwidth` in bytes/s per link and direction, those of `faster` hosts apart; `latency` in seconds, one way."""

    def __init__(
        self, agenda: Agenda, bandwidth: float, latency: float, faster: Mapping[Host, float] | None = None
    ) -> None:
        self._agenda, self._links = agenda, Links(agenda)
        self._bandwidth, self.latency = bandwidth, latency
        self._faster = faster or {}
        self._flights: dict[_Flight, None] = {}
        self._dead: set[Host] = set()
        self.sent = self.arrived = self.lost = 0.0
        self.by_host: Counter[tuple[Host, str]] = Counter()
        """Bytes that arrived, by host and direction."""
        self.messages: list[Sent] | None = None
        """Those that arrived, where they are kept."""

    def send(
        self,
        src: Host,
        dst: Host,
        size: float,
        arrived: Callable[[], None],
        lost: Callable[[], None] = lambda: None,
        *,
        label: str = "",
    ) -> None:
        """Send so many bytes. One of the two is called, later; within a host at once."""
        flight = _Flight(src, dst, size, self._agenda.now, arrived, lost, label)
        self.sent += size
        if src == dst:
            flight.parts = 0
            self._agenda.note(self._agenda.now, lambda _: self._arrive(flight))
            return
        self._flights[flight] = None
        if {src, dst} & self._dead:
            self._agenda.note(self._agenda.now, lambda _: self._lose(flight))
            return
        self._agenda.note(self._agenda.now + self.latency, lambda _: self._begin(flight))

    def die(self, host: Host) -> None:
        """A host is gone, with all that is on its way from it and to it."""
        self._dead.add(host)
        for flight in [flight for flight in self._flights if host in (flight.src, flight.dst)]:
            self._lose(flight)

    def _begin(self, flight: _Flight) -> None:
        if flight not in self._flights:
            return
        for link in ((_OUT, flight.src), (_IN, flight.dst)):
            seconds = flight.bytes / self._faster.get(link[1], self._bandwidth)
            flight.flows[link] = self._links.carry(link, seconds, 1, lambda _: self._part_done(flight))

    def _part_done(self, flight: _Flight) -> None:
        flight.parts -= 1
        if not flight.parts and flight in self._flights:
            del self._flights[flight]
            self._arrive(flight)

    def _arrive(self, flight: _Flight) -> None:
        self.arrived += flight.bytes
        self.by_host[flight.src, _OUT] += flight.bytes  # type: ignore[assignment]
        self.by_host[flight.dst, _IN] += flight.bytes  # type: ignore[assignment]
        if self.messages is not None and flight.bytes and flight.src != flight.dst:
            now = self._agenda.now
            self.messages.append(Sent(flight.src, flight.dst, flight.bytes, flight.began, now, flight.label))
        flight.arrived()

    def _lose(self, flight: _Flight) -> None:
        if flight not in self._flights:
            return
        del self._flights[flight]
        for link, number in flight.flows.items():
            self._links.drop(link, number)
        self.lost += flight.bytes
        flight.lost()

    @property
    def under_way(self) -> float:
        """Bytes on their way."""
        return sum(flight.bytes for flight in self._flights)
