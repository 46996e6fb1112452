"""Other replicas behind the wire: gossip's own questions and answers, in simulated time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.swarm.stage import Moment, Stage
from shoal.transport.links import Frame, LinkError, LinkLost

if TYPE_CHECKING:
    from shoal.swarm.swarm import Swarm

Answer = Callable[[Any, dict[str, Any]], None]


class _Conversation:
    """One question, its answer, and the words that confirm it. As a `Link`, the side that answers."""

    def __init__(self, swarm: "Swarm", asker: int, peer: int, buffers: Sequence[Tensor]) -> None:
        self._swarm, self.asker, self.peer = swarm, asker, peer
        self._buffers = [buffer.clone() for buffer in buffers]
        self._words: dict[int, list[Moment]] = {asker: [], peer: []}
        """What each side hears, in its order; made by whoever comes first, who speaks or who listens."""
        self._spoken: dict[int, int] = {asker: 0, peer: 0}
        self._heard: dict[int, int] = {asker: 0, peer: 0}
        self._error: LinkLost | None = None

    def say(self, to: int, head: Mapping[str, Any], buffers: Sequence[Tensor] = ()) -> None:
        """Send to one side."""
        moment = self._word(to, self._spoken[to])
        self._spoken[to] += 1
        kept = [buffer.clone() for buffer in buffers]
        src, dst = (self.peer, self.asker) if to == self.asker else (self.asker, self.peer)
        size = self._swarm.scaled(kept)
        self._swarm.wire.send(src, dst, size, lambda: moment.happen((dict(head), kept)), label="gossip")

    def hear(self, side: int) -> Frame:
        """Wait for what the other side says; a `LinkLost` a heartbeat after it died."""
        moment = self._word(side, self._heard[side])
        self._heard[side] += 1
        head, buffers = moment.wait()
        return Frame(head, buffers)

    def fail(self) -> None:
        """One side is gone: the other hears nothing more."""
        self._error = LinkLost("a replica is gone.", "It died.")
        for words in self._words.values():
            for moment in words:
                moment.happen(error=self._error)

    def _word(self, side: int, number: int) -> Moment:
        words = self._words[side]
        while len(words) <= number:
            words.append(Moment())
            if self._error is not None:
                words[-1].happen(error=self._error)
        return words[number]

    # What the side that answers calls

    def receive_into(self, into: Sequence[Tensor]) -> None:
        """What came with the question."""
        for tensor, arrived in zip(into, self._buffers, strict=True):
            tensor.copy_(arrived)

    def send(self, head: Mapping[str, Any], buffers: Sequence[Tensor] = ()) -> None:
        """The answer."""
        self.say(self.asker, head, buffers)

    def receive(self) -> Frame:
        """What the asker says after the answer."""
        return self.hear(self.peer)


class WiredPeers:
    """The other replicas, as one of them reaches them; in the place of `Peers`."""

    def __init__(self, swarm: "Swarm", replica: int) -> None:
        self._swarm, self.replica = swarm, replica
        self.heartbeat = swarm.options.heartbeat
        self.errors: list[Exception] = []
        self.sent_bytes = self.received_bytes = 0

    def listen(self, answer: Answer) -> None:
        """Answer peers from now on."""
        self._swarm.answers[self.replica] = answer

    def there(self) -> list[int]:
        """The replicas that take part, as far as the coordinator knows, without this one."""
        return sorted((self._swarm.known & self._swarm.answers.keys()) - {self.replica})

    def wait_for(self, peer: int | None, seconds: float) -> list[int]:  # noqa: ARG002  (of the protocol)
        """Those that are there."""
        return [number for number in self.there() if peer in (None, number)]

    def ask(
        self,
        peer: int,
        head: Mapping[str, Any],
        buffers: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        *,
        confirm: bool = False,
    ) -> Frame:
        """A peer's answer, as `Peers.ask`: a `LinkLost` a heartbeat after it died."""
        swarm = self._swarm
        talk = _Conversation(swarm, self.replica, peer, buffers)
        swarm.talks.add(talk)
        if peer not in swarm.alive:
            swarm.after_heartbeat(talk.fail)
        begin = lambda: swarm.enter(peer, lambda: self._answered(talk, peer, dict(head)))  # noqa: E731
        swarm.wire.send(self.replica, peer, swarm.scaled(buffers), begin, label="gossip")
        try:
            frame = talk.hear(self.replica)
            if confirm:
                talk.say(peer, {"confirmed": True})
                with suppress(LinkError):
                    talk.hear(self.replica)
        finally:
            swarm.talks.discard(talk)
        for tensor, arrived in zip(into or (), frame.buffers, strict=False):
            tensor.copy_(arrived)
        self.sent_bytes += swarm.scaled(buffers)
        self.received_bytes += swarm.scaled(frame.buffers)
        return frame

    def _answered(self, talk: _Conversation, peer: int, head: dict[str, Any]) -> None:
        with suppress(LinkError):  # the asker is gone: what it said does not count
            self._swarm.answers[peer](talk, head)

    @contextmanager
    def confirmed(self, link: _Conversation) -> Iterator[None]:
        """As `Peers.confirmed`."""
        link.receive()
        yield
        link.send({})

    def close(self) -> None:
        """There is nothing to close."""


class WiredOutbox:
    """Sends one message at a time beside the training, in the place of gossip's `Outbox`."""

    def __init__(self, swarm: "Swarm", number: int, deliver: Callable[..., None]) -> None:
        self._swarm, self._number, self._deliver = swarm, number, deliver
        self._sent: Moment | None = None

    @property
    def busy(self) -> bool:
        """Whether a message is on its way."""
        return self._sent is not None

    def put(self, message: Any) -> None:
        """Send it; only when not `busy`."""
        sent = self._sent = Moment()

        def deliver() -> None:
            self._deliver(*message)
            self._sent = None
            sent.happen()

        self._swarm.enter(self._number, deliver)

    def wait(self, seconds: float) -> None:
        """Wait until no message is on its way, for so many seconds at most."""
        if (sent := self._sent) is not None:
            stage: Stage = self._swarm.stage
            either = Moment()

            def tell() -> None:
                sent.wait()
                either.happen()

            self._swarm.enter(self._number, tell)
            stage.agenda.note(stage.now + seconds, lambda _: either.happen())
            either.wait()

    def close(self) -> None:
        """There is no thread."""
