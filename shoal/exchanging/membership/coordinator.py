"""Who takes part in a run: replicas that come, go, freeze and die, and the servers they find through here.

    replica's first rank ──ask──▶ Coordinator ◀──pulse── every rank and server      server ◀──makers── Coordinator

Every rank keeps a pulse: it says on a link, the first rank on the one that it asks on, that it lives. A rank that dies
closes its link, which is seen at once; a rank that is frozen, or cut off, is silent for `heartbeat` seconds. Either
takes its whole replica out; a frozen one that wakes is back. Servers that are processes keep one too: a frozen one
holds up all replicas, so people are told. One thread hears all of them; an answer that has to wait costs none.
The coordinator must outlive the run: it lives in the process that started it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from shoal.errors import PeerError, RunError, ShoalError
from shoal.exchanging.membership.tickets import Tickets
from shoal.exchanging.servers.shared_memory import SharedFolder
from shoal.transport.links import (
    JSON,
    Address,
    Crowd,
    Door,
    Frame,
    Guest,
    Link,
    LinkError,
    LinkLost,
    LinkSilent,
    fields,
    tell_of_nonsense,
)
from shoal.transport.links.sockets import allow_many_files

PLACE_SECONDS = 20.0
"""Time that replicas, which were started together, have to come before it is decided on which hosts servers run."""
CLOSE_SECONDS = 5.0
"""Time that threads have to end after their links were closed."""
TELL_SECONDS = 1.0
"""Time that those who have not asked since a failure have to come for its reason, before the coordinator is gone."""

FAILED = "failed"
"""In an answer: problem and remedy of what keeps everybody from going on."""
MOST_REPLICAS = 1 << 20
"""Replica numbers above this are refused."""
NO_PROGRESS = -1
"""Stands for a rank's number where not a rank is frozen but the whole replica makes no progress."""

What = Literal["joined", "lost", "frozen", "back", "left", "gave up", "server lost", "server frozen", "server back"]


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


@dataclass(frozen=True)
class Ear:
    """The link on which a rank is told things unasked; and its inbox for the same rank of other replicas, if any."""

    link: Link
    inbox: Address | None
    token: str
    """The token that callers at the inbox must know."""


@dataclass
class Member:
    """One replica."""

    replica: int
    link: Link
    host: str
    """Its address."""
    pids: tuple[int, ...] = ()
    state: Literal["active", "frozen", "lost", "left"] = "active"
    pulses: dict[int, Link] = field(default_factory=dict)
    frozen_ranks: set[int] = field(default_factory=set)
    waiting_ranks: set[int] = field(default_factory=set)
    """Ranks that said with their last sign of life that they wait for other replicas."""
    ears: dict[int, Ear] = field(default_factory=dict)
    """By rank, for its ranks that listen."""
    done: bool = False
    """Whether it no longer needs any other replica."""
    heard: float = field(default_factory=time.monotonic)
    """When it last asked something."""
    told: bool = False
    """Whether it was answered why nobody can go on."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other replicas: all its ranks do, so none of them hangs."""
        return bool(self.waiting_ranks) and len(self.waiting_ranks) == len(self.pids)

    def note_waiting(self, rank: int, sign: Mapping[str, Any]) -> None:
        """A rank gave a sign of life; one that says nothing else computes."""
        if fields.flag({"waits": False, **sign}, "waits"):
            self.waiting_ranks.add(rank)
        else:
            self.waiting_ranks.discard(rank)


@dataclass(frozen=True)
class Waiting:
    """A replica whose answer has to wait."""

    member: Member
    ready: Callable[[], Mapping[str, Any] | None]
    """Gives the answer; None while there is none yet. May raise a `PeerError`."""


Answer = Callable[[Member, Frame], tuple[Mapping[str, Any], list[Any]] | None]
"""Replies to questions that the coordinator itself does not know; None where the reply comes by `answer_later`."""


class Coordinator:
    """The meeting point of one run. Thread-safe; `changed` is its lock and tells of every change."""

    def __init__(
        self,
        *,
        heartbeat: float,
        timeout: float = 120.0,
        replicas: int = 1,
        servers: int = 0,
        servers_on_hosts: bool = False,
        shared: SharedFolder | None = None,
        registers: bool = False,
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
        self._heartbeat, self._timeout = heartbeat, timeout
        self._replicas, self._wanted_servers = replicas, servers
        self._shared = shared
        self._register = shared.register() if shared is not None and registers else None
        self._servers: dict[int, tuple[Link | None, Address, str]] = {}
        self._frozen_servers: set[int] = set()
        self._lost_servers: set[int] = set()
        self._to_start: dict[int, list[int]] | None = None if servers_on_hosts else {}
        """Servers that replicas have yet to start on their hosts; None until that is decided."""
        self._tickets = Tickets(wanted, replicas) if wanted else None
        self._welcome, self._answer, self._on_event = welcome or {}, answer, on_event
        self._closing = False
        self._resting: set[int] = set()
        self.failure: ShoalError | None = None
        """Why nobody can go on, if so."""
        self._tell_error = on_error or self.fail
        self._waiting: list[Waiting] = []
        self._expected = set(range(replicas))
        """Replicas that the run was to begin with and that have not come."""
        self._last_needed = time.monotonic()
        """When some replica was last seen that may still need others."""
        allow_many_files()
        self._crowd = Crowd(heartbeat, on_error=self._tell_error, name="shoal-members")
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._look, name="shoal-clock", daemon=True)
        self._clock.start()
        try:
            self._door = Door(self._serve, host=host, on_error=lambda _link, _hello, error: self._tell_error(error))
        except BaseException:
            self._closed.set()
            self._crowd.close(CLOSE_SECONDS)
            raise
        self.address, self.token = self._door.address, self._door.token
        """Where replicas reach it, and the token that they must know."""

    def active(self) -> list[int]:
        """Replicas that take part now."""
        with self.changed:
            return sorted(number for number, member in self.members.items() if member.state == "active")

    def rest(self, replica: int, *, resting: bool) -> None:
        """Whether a replica has nothing to do, so that no update waits for it."""
        with self.changed:
            if resting != (replica in self._resting):
                self._resting ^= {replica}
                self._tell_updates()  # peers are not told: they speak with those that rest, too

    def close(self) -> None:
        """End all links and threads. After a failure, those that come for its reason a moment later still hear it."""
        with self.changed:
            if self.failure is not None:
                self.changed.wait_for(self._all_told, TELL_SECONDS)
            self._closing = True
            self.answer_waiting()
            self.changed.notify_all()
        self._closed.set()
        self._door.close()
        self._crowd.close(CLOSE_SECONDS)
        if self._clock is not threading.current_thread():
            self._clock.join(CLOSE_SECONDS)

    def drop(self, replica: int) -> None:
        """Treat a replica as lost, also one that never came."""
        with self.changed:
            if replica in self.members:
                self._lose(self.members[replica], "lost")
                return
            self._expected.discard(replica)
            if self._tickets is not None:
                self._tickets.begin_anyway()
                self._tell_servers()
            self.answer_waiting()

    def fail(self, error: Exception) -> None:
        """Nobody can go on: replicas that wait for an answer, and those that ask from now on, are told why.

        What goes wrong here is such an error, unless `on_error` was given.
        """
        with self.changed:
            if self.failure is None and not self._closing:
                self.failure = error if isinstance(error, ShoalError) else _bug(error)
                self.answer_waiting()
                self.changed.notify_all()

    def _all_told(self) -> bool:
        return all(member.told for member in self.members.values() if member.state == "active")

    def _note_told(self, member: Member, answer: Mapping[str, Any]) -> None:
        if FAILED in answer:
            with self.changed:
                member.told = True
                self.changed.notify_all()

    def _failed(self) -> Mapping[str, Any] | None:
        """What everybody is answered after a failure."""
        return None if self.failure is None else {FAILED: [self.failure.problem, self.failure.remedy]}

    def suspect(self, replica: int, *, hangs: bool) -> None:
        """Treat a replica as frozen because it makes no progress, though it gives signs of life; or no longer."""
        with self.changed:
            member = self.members[replica]
            if hangs:
                self._freeze(member, NO_PROGRESS)
            else:
                self._thaw(member, NO_PROGRESS)

    def _serve(self, link: Link, hello: Mapping[str, Any]) -> bool:
        """A new link: from now on receive what comes on it."""
        link.give_up_after(self._timeout)
        match fields.text(hello, "as", ("replica", "pulse", "ear", "server", "end of server")):
            case "replica":
                self._take_replica(link, hello)
            case "pulse":
                self._take_pulse(link, hello)
            case "ear":
                self._take_ear(link, hello)
            case "server":
                self._take_server(link, hello)
            case "end of server":
                self.lose_server(fields.integer(hello, "number", most=self._wanted_servers - 1))
                return False
        return True

    def _listen(
        self, link: Link, hear: Callable[[Guest], bool], lost: Callable[[], None], silent: Callable[[], None]
    ) -> Guest:
        """Call `hear` whenever something comes on a link, until the link is lost."""

        def heard(guest: Guest) -> bool:
            try:
                return hear(guest)
            except LinkSilent:  # nothing had come after all
                return True
            except LinkLost:
                lost()
            except LinkError as error:  # what came was malformed
                lost()
                tell_of_nonsense(link, error)
            return False

        link.timeout, link.on_stall = self._heartbeat, silent
        return self._crowd.add(link, heard, silent)

    def _look(self) -> None:
        """The clock thread: time may decide answers that wait."""
        while not self._closed.wait(self._heartbeat / 4):
            with self.changed:
                self.answer_waiting()

    # Replicas

    def _take_replica(self, link: Link, hello: Mapping[str, Any]) -> None:
        pids = fields.integers(hello, "pids", least=1)
        wanted = None if hello.get("replica") is None else fields.integer(hello, "replica", most=MOST_REPLICAS)
        with self.changed:
            number, late = wanted, False
            if number is None or number in self.members:
                # Numbers below are those of replicas that the run began with, and that may still be on their way.
                number, late = max(self._replicas - 1, *self.members, 0) + 1, True
            member = self.members[number] = Member(number, link, link.host, pids)
            self._expected.discard(number)
            self._tell("joined", number)
        link.send({"replica": number, "late": late, **self._welcome})
        lost, silent = partial(self._lost, member), partial(self._freeze, member, 0)
        self._listen(link, partial(self._hear_replica, member), lost, silent)

    def _hear_replica(self, member: Member, guest: Guest) -> bool:
        frame = member.link.receive()
        self._thaw(member, 0)
        asked = fields.text(frame.head, "ask")
        if asked == "pulse":
            guest.watched = True
            member.note_waiting(0, frame.head)
            return True
        member.heard = time.monotonic()
        if asked == "give up":
            self._leave(member, "gave up")
            return False
        if asked == "leave":
            self._leave(member, "left")
            member.link.send({})
            return False
        answer = self._reply(member, frame)
        if answer is not None:
            self._send(member, *answer)
            self._note_told(member, answer[0])
        return True

    def _leave(self, member: Member, what: What) -> None:
        with self.changed:
            if member.state != "lost":
                member.state = "left"
                self._tell(what, member.replica)

    def _send(self, member: Member, head: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Send an answer. A replica takes its answer before it asks again; one that does not is refused."""
        try:
            member.link.send(head, buffers)
        except LinkSilent as error:
            raise fields.refused(f"replica {member.replica} does not receive the answer to its question.") from error

    def _lost(self, member: Member) -> None:
        with self.changed:
            if member.state != "left":
                self._lose(member, "lost")

    def _reply(self, member: Member, frame: Frame) -> tuple[Mapping[str, Any], list[Any]] | None:
        """The answer; None where it comes later."""
        if (failed := self._failed()) is not None:
            return failed, []
        match frame.head["ask"]:
            case "servers":
                self.answer_later(member, partial(self._all_servers, member, time.monotonic()))
                return None
            case "ticket":
                return self._ticket(member, fields.integer(frame.head, "version")), []
            case "farewell":  # of a replica that others may still need: its threads hold a part of the weights
                with self.changed:
                    member.done = True
                self.answer_later(member, self._all_done)
                return None
            case "serve":  # a replica whose threads are a server
                with self.changed:
                    self._add_server(None, frame.head)
                    self.answer_waiting()
                return {}, []
        if self._answer is None:
            raise fields.refused(f"a replica asked for {frame.head['ask']!r}, which is not answered here.")
        return self._answer(member, frame)

    def answer_later(self, member: Member, ready: Callable[[], Mapping[str, Any] | None]) -> None:
        """Answer as soon as `ready` gives an answer, perhaps at once."""
        with self.changed:
            self._waiting.append(Waiting(member, ready))
            self.answer_waiting()

    def answer_waiting(self) -> None:
        """Answer those that wait and for whom there is an answer now. Under the lock."""
        if any(self._may_need_others(member) for member in self.members.values()):
            self._last_needed = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for asker in waiting:
            try:
                answer = self._failed() or asker.ready()
            except Exception as error:
                self._tell_error(error)
                answer = self._failed()
                if answer is None:
                    self._lose(asker.member, "lost")
                    continue
            if answer is None:
                self._waiting.append(asker)
            else:
                with suppress(LinkError):  # the thread that receives from this link notices too
                    asker.member.link.send(answer)
                    self._note_told(asker.member, answer)

    def _may_need_others(self, member: Member) -> bool:
        return member.state == "active" and not member.done

    def _all_done(self) -> Mapping[str, Any] | None:
        """The answer once no replica needs another. One that is frozen may wake, and one that is late may come: for
        them everybody waits for the time-out, counted from when some replica was last at work.
        """
        members = self.members.values()
        if any(self._may_need_others(member) for member in members):
            return {} if self._closing else None
        away = bool(self._expected) or any(member.state == "frozen" and not member.done for member in members)
        waits = away and time.monotonic() < self._last_needed + self._timeout
        return None if waits and not self._closing else {}

    def _ticket(self, member: Member, version: int) -> dict[str, Any]:
        if self._tickets is None:
            raise fields.refused("a replica asked for a ticket, but this exchange gives out none.")
        with self.changed:
            before = self._tickets.version
            counts = member.state == "active" and self._tickets.ask(member.replica, version)
            if self._tickets.version != before:
                self._tell_servers()
            return {"counts": counts, "version": self._tickets.version}

    def _take_pulse(self, link: Link, hello: Mapping[str, Any]) -> None:
        """A rank's signs of life: if its link ends it has died, if it is silent it is frozen."""
        replica, rank = fields.integer(hello, "replica"), fields.integer(hello, "rank")
        with self.changed:
            if replica not in self.members:
                raise fields.refused(f"signs of life came from replica {replica}, which has not joined.")
            member = self.members[replica]
            member.pulses[rank] = link
        lost, silent = partial(self._lost, member), partial(self._freeze, member, rank)
        self._listen(link, partial(self._hear_pulse, member, rank), lost, silent).watched = True

    def _hear_pulse(self, member: Member, rank: int, guest: Guest) -> bool:
        sign = guest.link.receive().head
        if sign.get("bye"):
            return False
        member.note_waiting(rank, sign)
        self._thaw(member, rank)
        return True

    def _freeze(self, member: Member, rank: int) -> None:
        with self.changed:
            member.frozen_ranks.add(rank)
            if member.state == "active":
                member.state = "frozen"
                self._tell("frozen", member.replica)
            if self._shared is not None and self._shared.holds_a_lock(member.pids):
                # If it froze inside an update of shared weights, it would block all others for good.
                for pid in member.pids:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)

    def _thaw(self, member: Member, rank: int) -> None:
        if not member.frozen_ranks:  # looked at without the lock, because it is nearly always so
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
            link.close()  # so the replica's other ranks notice, and threads that wait on these links wake

    def _tell(self, what: What, who: int) -> None:
        event = Event(what, who, time.time())
        self.events.append(event)
        self._tell_members()
        if not self._closing:
            try:
                self._on_event(event)
            except Exception as error:  # whoever hears of events must not keep others from being heard
                self._tell_error(error)
        self.answer_waiting()
        self.changed.notify_all()

    def _tell_members(self) -> None:
        """Tell who takes part to everybody who needs it: servers, replicas that share memory, and ranks with peers."""
        self._tell_updates()
        if self._register is not None:
            away = [number for number, member in self.members.items() if member.state == "frozen"]
            self._register.tell(self.active(), away)
        self._tell_peers()

    def _tell_updates(self) -> None:
        """Tell servers whose gradients make updates."""
        if self._tickets is not None:
            self._tickets.members(self.active(), self._resting)
        self._tell_servers()

    # Ranks that are told things unasked

    def tell_all(self, notice: Mapping[str, Any]) -> None:
        """Send something to every rank that listens. Under the lock."""
        for member in self.members.values():
            for ear in member.ears.values():
                with suppress(LinkError):  # it has left, or its pulse shows what became of it
                    ear.link.send(notice)

    def _take_ear(self, link: Link, hello: Mapping[str, Any]) -> None:
        replica, rank = fields.integer(hello, "replica"), fields.integer(hello, "rank")
        inbox = None if hello.get("inbox") is None else fields.address(hello, "inbox")
        ear = Ear(link, inbox, fields.text(hello, "token"))
        with self.changed:
            if replica not in self.members:
                raise fields.refused(f"a rank of replica {replica} wants to listen, but that replica has not joined.")
            self.members[replica].ears[rank] = ear
            self._tell_peers()

        def hear(guest: Guest) -> bool:
            guest.link.receive()
            return True

        nothing = lambda: None  # noqa: E731  (whether the rank lives, its pulse tells)
        self._listen(link, hear, nothing, nothing)
        if inbox is not None:  # whoever lives and does not listen loses the link, listens anew and is told anew
            link.on_stall = None

    def _tell_peers(self) -> None:
        """Tell every rank that has an inbox where the inboxes of the same rank in the other active replicas are.

        One that is frozen is told when it is back: what it does not read would fill its link and hold up everybody.
        """
        there = {
            (member.replica, rank): ear
            for member in self.members.values()
            if member.state == "active"
            for rank, ear in member.ears.items()
            if ear.inbox is not None
        }
        for (replica, rank), ear in there.items():
            peers: list[Any] = [
                [other, list(theirs.inbox or ()), theirs.token]
                for (other, column), theirs in there.items()
                if column == rank and other != replica
            ]
            try:
                ear.link.send({"peers": peers})
            except LinkSilent:  # it lives and does not listen
                ear.link.close()
            except LinkError:  # its pulse shows what became of it
                pass

    # Servers

    def _take_server(self, link: Link, hello: Mapping[str, Any]) -> None:
        with self.changed:
            number = self._add_server(link, hello)
            link.send({"heartbeat": self._heartbeat, "timeout": self._timeout})
            self._tell_servers()
            self.answer_waiting()
            self.changed.notify_all()
        lost, silent = partial(self.lose_server, number), partial(self._note_server, number, frozen=True)
        self._listen(link, partial(self._hear_server, number), lost, silent).watched = True

    def _hear_server(self, number: int, guest: Guest) -> bool:
        guest.link.receive()
        self._note_server(number, frozen=False)
        return True

    def _note_server(self, number: int, *, frozen: bool) -> None:
        if frozen == (number in self._frozen_servers):  # looked at without the lock, because it is nearly always so
            return
        with self.changed:
            self._frozen_servers ^= {number}
            self._tell("server frozen" if frozen else "server back", number)

    def lose_server(self, number: int) -> None:
        """A server ended, perhaps before it came; its link may have said so before."""
        with self.changed:
            if not self._closing and number not in self._lost_servers:
                self._lost_servers.add(number)
                self._tell("server lost", number)

    def _add_server(self, link: Link | None, said: Mapping[str, Any]) -> int:
        number = fields.integer(said, "number", most=self._wanted_servers - 1)
        if number in self._servers:
            raise fields.refused(f"there is a second server {number}.")
        self._servers[number] = (link, fields.address(said, "address"), fields.text(said, "token"))
        return number

    def _all_servers(self, member: Member, asked: float) -> Mapping[str, Any] | None:
        """Where servers are, once all have come; a `PeerError` if that takes longer than the time-out.

        Before that: which of them this replica is to start on its host.
        """
        if self._to_start is None and (not self._expected or time.monotonic() > asked + PLACE_SECONDS):
            self._to_start = self._placed()
        if self._to_start and (start := self._to_start.pop(member.replica, None)):
            return {"start": start}
        missing = sorted(set(range(self._wanted_servers)) - set(self._servers))
        if missing:
            if self._closing or time.monotonic() < asked + self._timeout:
                return None
            raise PeerError(
                f"server {missing[0]} did not come in {self._timeout:g} seconds; of {self._wanted_servers}, "
                f"{len(missing)} are missing.",
                "Look at their messages above, or give them longer (--timeout).",
            )
        return {"servers": [[list(address), token] for _, (_, address, token) in sorted(self._servers.items())]}

    def _placed(self) -> dict[int, list[int]]:
        """Which replica starts which servers: the first one of every host, and all hosts equally many.

        So each host's network carries its part. The first server is where the coordinator is: one that is alone is lost
        with that host only, which ends the run anyway.
        """
        first: dict[str, int] = {}
        for number, member in sorted(self.members.items()):
            if member.state == "active":
                first.setdefault(member.host, number)
        own = self.address[0]
        hosts = sorted(first, key=lambda host: (host != own, first[host]))
        to_start: dict[int, list[int]] = {}
        for server in range(self._wanted_servers if hosts else 0):
            to_start.setdefault(first[hosts[server % len(hosts)]], []).append(server)
        return to_start

    def _tell_servers(self) -> None:
        """Tell servers who takes part, and with tickets whose gradients make the update that is due."""
        makers = {} if self._tickets is None else self._tickets.makers()
        told: dict[str, JSON] = {
            "members": self.active(),
            "resting": sorted(self._resting),
            "makers": [[version, sorted(replicas)] for version, replicas in makers.items()],
        }
        for number, (server, _, _) in self._servers.items():
            if server is not None and number not in self._frozen_servers:  # such a one is told when it is back
                with suppress(LinkError):  # the thread that receives from it notices
                    server.send(told)

    def end_servers(self) -> None:
        """End the servers that are processes, and with them the waits of replicas for their answers."""
        with self.changed:
            for server, _, _ in self._servers.values():
                if server is not None:
                    server.close()


def _bug(error: Exception) -> RunError:
    told = RunError(f"the coordinator failed: {type(error).__name__}: {error}.", "This is a bug: please report it.")
    told.__cause__ = error
    return told
