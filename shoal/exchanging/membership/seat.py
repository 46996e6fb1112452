"""One rank's place in a run: its pulse, and for the first rank of a replica the link to ask on."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.errors import RunError
from shoal.exchanging.membership.coordinator import FAILED
from shoal.exchanging.membership.meeting import Meeting
from shoal.exchanging.membership.pulse import Pulse
from shoal.exchanging.membership.world import World
from shoal.transport import Transport
from shoal.transport.links import JSON, Address, Frame, Link, LinkError, LinkLost, connect


class Seat:
    """This rank's place in a run: its pulse, and for the first rank of a replica the link to ask on."""

    world: World | None = None
    """Through which this rank reaches the others, where that is not the network."""

    def __init__(
        self, meeting: Meeting, *, rank: int, replica: int | None, pids: Sequence[int], heartbeat: float
    ) -> None:
        self.meeting, self.rank = meeting, rank
        self.welcome: Mapping[str, Any] = {"replica": replica}
        self._link: Link | None = None
        if rank == 0:
            hello: dict[str, JSON] = {"as": "replica", "replica": replica, "pids": list(pids)}
            self._link = connect(meeting.address, meeting.token, hello, name="the coordinator")
            self._link.give_up_after(meeting.timeout)
            self.welcome = self._link.receive().head
        self.heartbeat = heartbeat
        """Seconds of silence after which a peer counts as frozen."""
        self.waits: Callable[[], bool] = lambda: False
        """Whether this rank waits for other replicas now; told with every sign of life."""
        self._living: tuple[Link, Pulse] | None = None
        self._listening: threading.Thread | None = None
        """Hears what this rank is told unasked, if it listens."""
        self._ear: Link
        """The link on which it does."""
        self._deaf = threading.Event()
        """Whether it listens no more."""

    def live(self, replica: int) -> None:
        """Begin to give signs of life as a rank of `replica`. The first rank does so on the link that it asks on."""
        if self._link is not None:
            beat = Pulse(self._link, self.heartbeat, lambda: {"ask": "pulse", "waits": self.waits()})
            self._living = self._link, beat
            return
        hello: dict[str, JSON] = {"as": "pulse", "replica": replica, "rank": self.rank}
        link = connect(self.meeting.address, self.meeting.token, hello, name="the coordinator")
        link.give_up_after(self.meeting.timeout)
        self._living = link, Pulse(link, self.heartbeat, lambda: {"waits": self.waits()})

    def listen(
        self, replica: int, hear: Callable[[Mapping[str, Any]], None], inbox: tuple[Address, str] | None = None
    ) -> None:
        """Call `hear`, in a thread of its own, with whatever the coordinator tells this rank unasked.

        `inbox`: where this rank listens to the same rank of other replicas, and what these must know; it is then told
        of theirs, whenever that changes. If that link is lost while the coordinator is there, it listens anew, and is
        told again. Of other links, and of the coordinator itself, the link to ask on tells.
        """
        hello: dict[str, JSON] = {"as": "ear", "replica": replica, "rank": self.rank, "inbox": None, "token": ""}
        if inbox is not None:
            hello |= {"inbox": list(inbox[0]), "token": inbox[1]}

        def ear() -> Link:
            link = connect(self.meeting.address, self.meeting.token, hello, name="the coordinator")
            with suppress(LinkLost):  # whoever asks the coordinator is told why it has closed
                link.give_up_after(self.meeting.timeout)
            return link

        def listening() -> None:
            with suppress(LinkError):
                while True:
                    try:
                        hear(self._ear.receive().head)
                    except LinkLost:
                        if inbox is None or self._deaf.is_set():
                            raise
                        self._ear.close()
                        self._ear = ear()
                        if self._deaf.is_set():  # meanwhile
                            self._ear.close()

        self._ear = ear()
        self._listening = threading.Thread(target=listening, name="shoal-ear", daemon=True)
        self._listening.start()

    def ask(self, head: Mapping[str, Any], buffers: Sequence[Any] = ()) -> Frame:
        """The coordinator's answer; only the first rank of a replica asks."""
        self.send(head, buffers)
        return self.hear()

    def send(self, head: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Ask now; `hear` receives the answer later."""
        self._asking().send(head, buffers)

    def hear(self) -> Frame:
        """The answer to the oldest question that is not answered yet; a `RunError` where nobody can go on says why."""
        frame = self._asking().receive()
        if (failed := frame.head.get(FAILED)) is not None:
            raise RunError(*failed)
        return frame

    def _asking(self) -> Link:
        if self._link is None:
            raise ValueError("only the first rank of a replica asks")
        return self._link

    def leave(self) -> None:
        """Say goodbye and close the links."""
        self._stop_listening()
        if self._living is not None:
            link, pulse = self._living
            pulse.stop()
            if link is not self._link:
                with suppress(LinkLost):
                    link.send({"bye": True})
                link.close()
        if self._link is not None:
            with suppress(LinkLost):
                self.ask({"ask": "leave"})
            self._link.close()

    def give_up(self) -> None:
        """Say that this rank ends because another does not answer or is gone, before it ends: it is not the lost one.

        Only where no replica can go on without the others: then the run ends, and must know because of whom.
        """
        with suppress(LinkError):  # the coordinator has gone too
            if self._link is not None:
                self._link.send({"ask": "give up"})
            elif self._living is not None:
                self._living[0].send({"bye": True})

    def hang_up(self) -> None:
        """Close the links without saying goodbye, unless `leave` did: the coordinator counts the replica as lost."""
        self._stop_listening()
        if self._link is not None:
            self._link.close()
        if self._living is not None:
            link, pulse = self._living
            link.close()
            pulse.stop()

    def _stop_listening(self) -> None:
        self._deaf.set()
        if self._listening is not None:
            self._ear.close()
            if self._listening is not threading.current_thread():
                self._listening.join(1.0)


def take_seat(meeting: Meeting, transport: Transport, replica: int | None, pids: Sequence[int], beat: float) -> Seat:
    """This rank's seat, which gives signs of life from here on. All ranks of a replica call it.

    `replica` None: whatever number the coordinator gives, in `welcome`, which all ranks have. `pids`: of all its ranks.
    """
    seat = Seat(meeting, rank=transport.rank, replica=replica, pids=pids, heartbeat=beat)
    try:
        welcomes = transport.gather_objects(dict(seat.welcome) if transport.rank == 0 else None)
        seat.welcome = next(welcome for welcome in welcomes if welcome is not None)
        seat.live(seat.welcome["replica"])
    except BaseException:
        seat.hang_up()
        raise
    return seat
