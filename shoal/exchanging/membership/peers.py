"""The same rank of the other replicas: who is there, told by the coordinator, and links to them.

    rank r of replica i ──▶ inbox of rank r of replica j        coordinator ──who is there──▶ every rank

Under one plan rank r holds the same shards in every replica, so it talks only to rank r of the others.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shoal.exchanging.membership.seat import Seat
from shoal.transport.links import (
    Address,
    Door,
    Frame,
    Link,
    LinkError,
    LinkLost,
    LinkSilent,
    connect,
    fields,
    own_address,
)

CONFIRMED = {"confirmed": True}
Answer = Callable[[Link, dict[str, Any]], None]
"""Called with a link and the head of a peer's frame: receives the frame's buffers, and replies on the link."""


class Peers:
    """`listen` opens this rank's inbox, `ask` sends to a peer's: from any thread, to each peer one at a time."""

    def __init__(self, seat: Seat, replica: int) -> None:
        self._seat, self.replica = seat, replica
        """The number of this rank's own replica."""
        self.heartbeat = seat.heartbeat
        """Seconds for which a peer may be silent."""
        self._changed = threading.Condition()
        self._there: dict[int, tuple[Address, str]] = {}
        self._links: dict[int, tuple[Link, threading.Lock]] = {}
        self._door: Door | None = None
        self._closed = False
        self.errors: list[Exception] = []
        """What went wrong in answering a peer."""
        self.sent_bytes = self.received_bytes = 0

    def listen(self, answer: Answer) -> None:
        """Answer peers from now on, in threads of their own."""

        def serve(link: Link, _hello: Mapping[str, Any]) -> None:
            while True:
                link.timeout = None
                head = link.receive_head().head
                link.timeout = self.heartbeat  # in the middle of what it says, a silent peer is lost
                answer(link, head)

        host = own_address(self._seat.meeting.address[0])
        self._door = Door(serve, host=host, on_error=lambda _link, _hello, error: self.errors.append(error))
        self._seat.listen(self.replica, self._hear, (self._door.address, self._door.token))

    def there(self) -> list[int]:
        """The replicas that take part now, without this one."""
        with self._changed:
            return sorted(self._there)

    def wait_for(self, peer: int | None, seconds: float) -> list[int]:
        """Wait for this peer, or for any (None), and give those that are there; none after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._there) if peer is None else peer in self._there, timeout=seconds)
            return sorted(number for number in self._there if peer in (None, number))

    def ask(
        self,
        peer: int,
        head: Mapping[str, Any],
        buffers: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        *,
        confirm: bool = False,
    ) -> Frame:
        """A peer's answer. A `LinkLost` where it is gone, or silent for a heartbeat: it may have heard or not.

        `confirm`: tell it that its answer arrived, so that what was sent counts there (`confirmed`), and wait until it
        does. Then an error here means that it does not count there. Only if the peer, or the network, is lost just
        after its answer does it count here and not there.
        """
        link, lock = self._link(peer)
        with lock:
            try:
                link.send(head, buffers)
                frame = link.receive(into)
                if confirm:
                    link.send(CONFIRMED)
                    self._wait_until_done(peer, link)
            except LinkError as error:
                self._forget(peer, link)
                if isinstance(error, LinkSilent):
                    raise LinkLost(error.problem, error.remedy) from error
                raise
        self.sent_bytes += sum(buffer.nbytes for buffer in buffers)
        self.received_bytes += sum(buffer.nbytes for buffer in frame.buffers)
        return frame

    def _wait_until_done(self, peer: int, link: Link) -> None:
        try:
            link.receive()
        except LinkError:
            self._forget(peer, link)

    @contextmanager
    def confirmed(self, link: Link) -> Iterator[None]:
        """In an answer, after it was sent: what makes the peer's words count, once it says that the answer arrived.

        A `LinkLost`, and nothing counts, if it does not.
        """
        try:
            if link.receive().head != CONFIRMED:
                raise fields.refused("a replica went on without a word about what it had sent.")
        except LinkSilent as error:
            raise LinkLost(error.problem, error.remedy) from error
        yield
        link.send({})

    def close(self) -> None:
        """Close the inbox and all links."""
        with self._changed:
            self._closed = True
            links = [link for link, _ in self._links.values()]
        for link in links:
            link.close()
        if self._door is not None:
            self._door.close()

    def _hear(self, told: Mapping[str, Any]) -> None:
        with self._changed:
            self._there = {number: ((host, port), token) for number, (host, port), token in told["peers"]}
            self._changed.notify_all()

    def _link(self, peer: int) -> tuple[Link, threading.Lock]:
        with self._changed:
            if peer in self._links:
                return self._links[peer]
            if peer not in self._there or self._closed:
                raise LinkLost(f"replica {peer} is not there.", "It left, or was lost.")
            address, token = self._there[peer]
        try:
            link = connect(address, token, {}, name=f"replica {peer}", timeout=self.heartbeat)
        except LinkSilent as error:
            raise LinkLost(error.problem, error.remedy) from error
        link.timeout = self.heartbeat
        with self._changed:
            if peer in self._links or self._closed:  # another thread was faster, or this was closed
                link.close()
                if self._closed:
                    raise LinkLost(f"the link to replica {peer} was closed.", "The run is over.")
            else:
                self._links[peer] = link, threading.Lock()
            return self._links[peer]

    def _forget(self, peer: int, link: Link) -> None:
        with self._changed:
            if peer in self._links and self._links[peer][0] is link:
                del self._links[peer]
        link.close()
