"""Who takes part in a run: replicas that come, go, freeze and die, and the servers they find through here.

    replica's first rank ──ask──▶ Coordinator ◀──pulse── every rank and server      server ◀──needs── Coordinator

Every rank keeps a pulse: a link on which it says that it lives. A rank that dies closes its link, which is seen at
once; a rank that is frozen is silent for `heartbeat` seconds. Either takes its whole replica out; a frozen one that
wakes is back. Servers that are processes keep one too: a frozen one holds up all replicas, so people are told.
The coordinator must outlive the run: it lives in the process that started it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import PeerError
from shoal.exchanging.shared import SharedFolder
from shoal.exchanging.tickets import Tickets
from shoal.linking import Address, Door, Frame, Link, LinkError, LinkLost, LinkSilent

SERVER_SECONDS = 60.0
"""What servers have to start."""

FAREWELL_SECONDS = 120.0
"""What the others have to finish before a replica leaves whose threads they need."""

What = Literal["joined", "lost", "frozen", "back", "left", "server lost", "server frozen", "server back"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a replica, or to a server."""

    what: What
    who: int
    when: float
    """Wall clock."""

    @property
    def of_server(self) -> bool:
        """Whether `who` is a server's number, not a replica's."""
        return self.what.startswith("server")


@dataclass
class Member:
    """One replica."""

    replica: int
    link: Link
    pids: tuple[int, ...] = ()
    state: Literal["active", "frozen", "lost", "left"] = "active"
    pulses: dict[int, Link] = field(default_factory=dict)
    frozen_ranks: set[int] = field(default_factory=set)
    done: bool = False
    """Whether it needs no other any more."""


Answer = Callable[[Member, Frame], tuple[Mapping[str, Any], list[Any]]]
"""What to reply to what a replica asked and this layer does not know."""


class Coordinator:
    """The meeting point of one run. Thread-safe; `changed` is its lock and tells of every change."""

    def __init__(
        self,
        *,
        heartbeat: float,
        replicas: int = 1,
        servers: int = 0,
        shared: SharedFolder | None = None,
        wanted: int = 0,
        host: str = "127.0.0.1",
        welcome: Mapping[str, Any] | None = None,
        answer: Answer | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.members: dict[int, Member] = {}
        self.events: list[Event] = []
        self._heartbeat, self._replicas, self._wanted_servers = heartbeat, replicas, servers
        self._shared = shared
        self._servers: dict[int, tuple[Link | None, Address, str]] = {}
        self._tickets = Tickets(wanted) if wanted else None
        self._welcome, self._answer, self._on_event = welcome or {}, answer, on_event
        self._closing = False
        self._resting: set[int] = set()
        self.errors: list[Exception] = []
        """What went wrong here, unless somebody else wants to know."""
        tell = on_error or self.errors.append
        self._door = Door(self._serve, host=host, on_error=lambda _link, _hello, error: tell(error))
        self.address, self.token = self._door.address, self._door.token
        """Where replicas reach it, and what they must know."""

    def active(self) -> list[int]:
        """Replicas that take part now."""
        with self.changed:
            return sorted(number for number, member in self.members.items() if member.state == "active")

    def rest(self, replica: int, *, resting: bool) -> None:
        """With backup workers: whether a replica has nothing to do, so that no round waits for it."""
        with self.changed:
            if self._tickets is not None and resting != (replica in self._resting):
                self._resting ^= {replica}
                self._tell_tickets()

    def close(self) -> None:
        """End all links and threads."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._door.close()

    def drop(self, replica: int) -> None:
        """Treat a replica as lost, also one that never came."""
        with self.changed:
            if replica in self.members:
                self._lose(self.members[replica], "lost")
            elif self._tickets is not None:
                self._tickets.begin_anyway()
                self._tell_servers(self._tickets.needs())

    def _serve(self, link: Link, hello: Mapping[str, Any]) -> None:
        match hello["as"]:
            case "replica":
                self._serve_replica(link, hello)
            case "pulse":
                self._hear_pulse(link, hello)
            case "server":
                self._keep_server(link, hello)

    # Replicas

    def _serve_replica(self, link: Link, hello: Mapping[str, Any]) -> None:
        with self.changed:
            number, late = hello["replica"], False
            if number is None or number in self.members:
                # Numbers below are those of replicas that the run began with, and that may still be on their way.
                number, late = max(self._replicas - 1, *self.members, 0) + 1, True
            member = self.members[number] = Member(number, link, tuple(hello["pids"]))
            self._tell("joined", number)
        link.send({"replica": number, "late": late, **self._welcome})
        try:
            while True:
                frame = link.receive()
                if frame.head["ask"] == "leave":
                    with self.changed:
                        if member.state != "lost":
                            member.state = "left"
                            self._tell("left", number)
                    link.send({})
                    return
                head, buffers = self._reply(member, frame)
                link.send(head, buffers)
        except LinkLost:
            with self.changed:
                self._lose(member, "lost")

    def _reply(self, member: Member, frame: Frame) -> tuple[Mapping[str, Any], list[Any]]:
        match frame.head["ask"]:
            case "servers":
                return {"servers": self._all_servers()}, []
            case "ticket":
                return self._ticket(member, frame.head["version"]), []
            case "farewell":  # of a replica that others may still need: its threads hold a part of the weights
                with self.changed:
                    member.done = True
                    self.changed.notify_all()
                    self.changed.wait_for(self._all_done, timeout=FAREWELL_SECONDS)
                return {}, []
            case "serve":  # a replica whose threads are a server
                with self.changed:
                    self._servers[frame.head["number"]] = (None, tuple(frame.head["address"]), frame.head["token"])
                    self.changed.notify_all()
                return {}, []
        if self._answer is None:
            raise PeerError(f"a replica asked for {frame.head['ask']!r}, which nobody answers here.", "")
        return self._answer(member, frame)

    def _all_done(self) -> bool:
        active = [member for member in self.members.values() if member.state == "active"]
        return self._closing or all(member.done for member in active)

    def _ticket(self, member: Member, version: int) -> dict[str, Any]:
        if self._tickets is None:
            raise PeerError("this exchange counts no gradients.", "")
        with self.changed:
            counts = member.state == "active" and self._tickets.ask(member.replica, version)
            return {"counts": counts, "version": self._tickets.version}

    def _hear_pulse(self, link: Link, hello: Mapping[str, Any]) -> None:
        """A rank's signs of life: an end without goodbye is a death, silence is a freeze."""
        with self.changed:
            member = self.members[hello["replica"]]
            member.pulses[hello["rank"]] = link
        link.timeout = self._heartbeat
        try:
            while True:
                try:
                    frame = link.receive()
                except LinkSilent:
                    self._freeze(member, hello["rank"])
                    continue
                if frame.head.get("bye"):
                    return
                self._thaw(member, hello["rank"])
        except LinkLost:
            with self.changed:
                if member.state != "left":
                    self._lose(member, "lost")

    def _freeze(self, member: Member, rank: int) -> None:
        with self.changed:
            member.frozen_ranks.add(rank)
            if member.state == "active":
                member.state = "frozen"
                self._tell("frozen", member.replica)
            if self._shared is not None and member.replica in self._shared.holders():
                # Frozen inside an update of shared weights it would stop all others for good.
                for pid in member.pids:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)

    def _thaw(self, member: Member, rank: int) -> None:
        if not member.frozen_ranks:  # without the lock: nearly always so, and only this thread adds its own rank
            return
        with self.changed:
            member.frozen_ranks.discard(rank)
            if member.state == "frozen" and not member.frozen_ranks:
                member.state = "active"
                self._tell("back", member.replica)

    def _lose(self, member: Member, what: What) -> None:
        if member.state in ("lost", "left"):
            return
        member.state = "lost"
        self._tell(what, member.replica)
        for link in (member.link, *member.pulses.values()):
            link.close()  # the other ranks of the replica learn of it, and threads that wait for it wake

    def _tell(self, what: What, who: int) -> None:
        event = Event(what, who, time.time())
        self.events.append(event)
        self._tell_tickets()
        if not self._closing:
            self._on_event(event)
        self.changed.notify_all()

    def _tell_tickets(self) -> None:
        if self._tickets is not None:
            self._tickets.members(set(self.active()) - self._resting)
            self._tell_servers(self._tickets.needs())

    # Servers

    def _keep_server(self, link: Link, hello: Mapping[str, Any]) -> None:
        link.send({"heartbeat": self._heartbeat})
        with self.changed:
            self._servers[hello["number"]] = (link, tuple(hello["address"]), hello["token"])
            if self._tickets is not None:
                self._tell_servers(self._tickets.needs())
            self.changed.notify_all()
        link.timeout = self._heartbeat
        frozen = False
        try:
            while True:
                try:
                    link.receive()
                except LinkSilent:
                    silent = True
                else:
                    silent = False
                if silent != frozen:
                    frozen = silent
                    with self.changed:
                        self._tell("server frozen" if frozen else "server back", hello["number"])
        except LinkLost:
            with self.changed:
                if not self._closing:
                    self._tell("server lost", hello["number"])

    def _all_servers(self) -> list[list[Any]]:
        with self.changed:
            there = self.changed.wait_for(
                lambda: len(self._servers) >= self._wanted_servers or self._closing, timeout=SERVER_SECONDS
            )
            if not there:
                raise PeerError(
                    f"{self._wanted_servers - len(self._servers)} of {self._wanted_servers} servers did not come in "
                    f"{SERVER_SECONDS:g} seconds.",
                    "Look at their messages above.",
                )
            return [[list(address), token] for _, (_, address, token) in sorted(self._servers.items())]

    def _tell_servers(self, needs: tuple[Mapping[int, int], int]) -> None:
        of_versions, then = needs
        for server, _, _ in self._servers.values():
            if server is not None:
                with suppress(LinkError):  # told by the thread that listens to it, and told again when it is back
                    server.send({"needs": [[version, need] for version, need in of_versions.items()], "then": then})
