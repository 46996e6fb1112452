"""`gossip`: replicas train on their own and now and then send their weights to another, drawn at random; no server.

Keeps       mode=push (GoSGD, Blot et al. 2016): every replica has a share, and all shares, those on their way
            included, add up to one; the mean of weights by shares moves by gradients alone, whatever the order in
            which messages arrive. mode=pair: two replicas meet in the middle, and the plain mean stays. That mean is
            tested and saved. One replica is plain SGD, bit for bit. All of this also with `compress`, to rounding.
Gives up    replicas differ from each other (measured as `spread` when their mean is taken).
Costs       per step and replica `probability` copies of the weights, in pairs as many back, beside the training; two
            or three more copies of the weights in each replica (what is sent, what arrived). A test asks every replica
            for its weights. With `compress` messages are smaller. mode=push, bf16 or int8: no more memory; a step that
            sends takes as long as compressing. mode=pair: beside the training, and a copy of the weights more for every
            other replica that this one ever met, three until it met that one twice; the first message of a pair is
            whole.
Failure     a replica that dies or freezes is missed by nobody. What was on its way to it goes back to the sender; its
            own share is lost with it, as is what it did since it last spoke, though its batches count: shares are
            compared with each other only, so that nothing else changes. One that comes late is given half of
            another's share; one that leaves gives its own away. A message counts once both sides know that it
            arrived, so a share is never there twice; one that is lost in that very moment is lost.

Compressed, a push sends q, which is nearly the weights x, and keeps x + (x - q): with half of the share each, nothing
is lost. So what is left out must be small beside the weights, and topk and sign are for pairs alone, where what is
compressed is the difference from what both know (`compression/swaps.py`).
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from shoal.errors import ConfigError, PeerError
from shoal.exchanges import Rates
from shoal.exchanging.base import OwnWeights, distance, steps_apart
from shoal.exchanging.compression.codecs import Codec
from shoal.exchanging.compression.options import Compressing
from shoal.exchanging.compression.packing import Packer
from shoal.exchanging.compression.swaps import Refusal, Said, Swaps
from shoal.exchanging.membership.peers import Peers
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.shard import copy_all, on_host
from shoal.transport.links import Link, LinkError, fields

FIRST = 0
"""The number of the replica whose weights all others begin with."""
FIND_SECONDS = 30.0
"""Time that a replica has to get its first weights from another."""
PAUSE_SECONDS = 0.1
"""Between two tries."""
MISSED_AT_MOST = 1
"""Meetings in a row that a replica does without, because its last message is still on its way, before it waits for it.
On crowded cores most would be missed else, and replicas drift apart until they learn nothing."""
PATIENCE_SECONDS = 0.25
"""How long it waits for one message: neither a frozen peer nor a slow link must hold it up."""


class Options(Compressing):
    """Replicas send their weights to one another, drawn at random, and mix what they get (GoSGD, Blot et al. 2016)."""

    name = "gossip"
    keeps_own = True

    probability: float = Field(default=0.25, ge=0, le=1)
    """Of sending after a step. Unless given, 0.25 with two replicas and 0.5 with more."""
    period: int | None = Field(default=None, gt=0)
    """Send after every so many steps, in the place of `probability`."""
    mode: Literal["push", "pair"] = "pair"
    """pair: both take the mean of the two. push (GoSGD): the receiver mixes by shares, and nothing is sent back; what
    is on its way learns nothing meanwhile, so that accuracy is lost where messages take as long as steps."""

    def among(self, replicas: int) -> Self:
        """Replicas send more often the more of them there are, unless it was said how often."""
        return self.unless_given("probability", 1 / steps_apart(replicas))

    def own_rates(self, given: Rates, replicas: int) -> Rates:  # noqa: ARG002
        """Each steps by a part of the batch, of more noise; and momentum goes on as if weights had not been mixed."""
        return given.remembering(1 / 2)

    @property
    def own_in_words(self) -> str:
        """Weights, and what they count for in the mean."""
        return "weights and shares of their own"

    @model_validator(mode="after")
    def _check_compression(self) -> "Options":
        if self.compress in ("topk", "sign") and self.mode == "push":
            raise ConfigError(
                f"compress = {self.compress!r} with mode = 'push' would leave out most of the weights that it sends.",
                f"Give mode=pair with compress={self.compress}, or compress=int8 with mode=push.",
            )
        return self

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:  # noqa: ARG002
        """It is drawn; nothing where there is nobody to send to."""
        return 0 if replicas == 1 else None

    def join(self, replica: Replica, seat: Seat, number: int) -> "Gossip":
        """Each rank talks to the same rank of other replicas."""
        return Gossip(
            replica,
            peers_of(seat, number),
            random.Random(f"{number}/{seat.rank}"),
            share=first_share(seat, number),
            probability=self.probability,
            period=self.period,
            pairs=self.mode == "pair",
            codec=self.codec,
            outbox=outbox_of(seat, number),
        )


def peers_of(seat: Seat, number: int) -> Peers:
    """The other replicas, over the network or in a world of its own."""
    return Peers(seat, number) if seat.world is None else seat.world.peers(number)


def outbox_of(seat: Seat, number: int) -> "OutboxMaker":
    """What sends messages beside the training of replica `number`."""
    world = seat.world
    return Outbox if world is None else lambda deliver: world.outbox(number, deliver)


def first_share(seat: Seat, number: int) -> float:
    """Equal shares for the replicas that the run begins with; one that joins later gets some from another."""
    return 1 / seat.meeting.replicas if number < seat.meeting.replicas else 0.0


class Gossip(OwnWeights):
    """One rank of one replica: its weights, its share of the whole, and what arrived and is not mixed in yet."""

    def __init__(
        self,
        replica: Replica,
        peers: Peers,
        draws: random.Random,
        *,
        share: float,
        probability: float = 0.0,
        period: int | None = None,
        pairs: bool = False,
        codec: Codec | None = None,
        outbox: "OutboxMaker | None" = None,
    ) -> None:
        super().__init__(replica)
        self._peers, self._draws = peers, draws
        self._probability, self._period, self._pairs = probability, period, pairs
        self._count = 0
        self._missed = 0
        """Meetings in a row that were due while a message was on its way."""
        self._mixing = threading.Lock()
        """Guards weights, shares and the inbox, which training and the threads that answer peers read and change."""
        self.share = share
        """How much these weights count in the mean. Those of all replicas and of messages on their way add up to 1."""
        self._inbox = [torch.zeros_like(weight, device="cpu") for weight in replica.weights]
        self._inbox_share = 0.0
        """Of the weights in the inbox. In pairs the inbox holds a change, and this is 1 where there is one."""
        self._kept: list[Tensor] = []
        """This replica's own weights while the network shows the mean; else empty."""
        self._arrivals = _Arrivals(self._inbox)
        self._packer: Packer | None = None
        """Where messages are compressed."""
        if codec is not None:
            self._packer = Packer(codec, [w.numel() for w in replica.weights], [w.dtype for w in replica.weights])
        self._meeting = threading.Lock()
        """Guards `_swaps`. Taken before `_mixing`, where both are."""
        self._swaps: dict[int, Swaps] = {}
        """With compressed pairs: what was said with each other replica."""
        self._outbox = (outbox or Outbox)(self._deliver_in_pair if pairs and codec is not None else self._deliver)
        self._traffic = (0, 0)

    def begin(self, *, first: bool) -> None:
        self._peers.listen(self._answer)
        if not first:
            self._take_from_another()
        self.replica.tell_weights()

    def _take_from_another(self) -> None:
        """Take a peer's weights; a replica that joins late also gets half of its share."""
        late, until = not self.share, time.monotonic() + FIND_SECONDS
        while (left := until - time.monotonic()) > 0:
            for peer in self._peers.wait_for(None if late else FIRST, left):
                with suppress(LinkError), self._arrivals.room() as arrived:
                    reply = self._peers.ask(peer, {"op": "split" if late else "show"}, into=arrived)
                    copy_all(self.replica.weights, arrived)
                    self.share = fields.number(reply.head, "share") if late else self.share
                    return
            time.sleep(PAUSE_SECONDS)
        raise PeerError("no replica gave this one its first weights.", "Look at what the others did.")

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        self._count += 1
        with self._mixing:
            self._kept = []
            self._own_step(rate)
            changed = self._mix()
        if self._speaks_now():
            changed = self._speak() or changed
        self._tell_ranks(changed)
        self._count_traffic()
        return True

    def _speaks_now(self) -> bool:
        if self._period is not None:
            return self._count % self._period == 0
        return self._draws.random() < self._probability

    def _tell_ranks(self, changed: bool) -> None:
        """Give the weights that this rank changed to the replica's other ranks that hold the same shards."""
        transport = self.replica.transport
        if transport.world > 1 and any(row[0] for row in transport.gather_numbers([changed])):
            self.replica.tell_weights()

    def _speak(self) -> bool:
        """Send weights to a peer drawn at random. Whether that changed this replica's own weights."""
        peers = self._peers.there()
        if not peers or not self.replica.names or not self._outbox_is_free():
            return False
        peer = self._draws.choice(peers)
        self.tally.updates += 1
        if self._pairs and self._packer is not None:
            self._outbox.put((peer,))
            return False
        with self._mixing:
            message = self._taken_to_send()
        self._outbox.put((peer, *message))
        return self._packer is not None

    def _outbox_is_free(self) -> bool:
        """Whether the last message has arrived; waited for once, where a meeting was missed for it already."""
        if self._outbox.busy:
            self._missed += 1
            if self._missed == MISSED_AT_MOST + 1:  # once for each message: on a slow link training goes on
                self._outbox.wait(PATIENCE_SECONDS)
            if self._outbox.busy:
                return False
        self._missed = 0
        return True

    def _taken_to_send(self) -> tuple[list[Tensor], float, list[Tensor] | None]:
        """Weights to send, half of this replica's share, and how they travel, if compressed.

        What compression leaves out stays here: the mean by shares of what is sent and what is kept does not change.
        """
        if not self._pairs:
            self.share /= 2
        weights = self.replica.weights
        own = on_host([weight.clone() for weight in weights])
        if self._packer is None:
            return own, self.share, None
        payloads = self._packer.packed(self._packer.flats(own), whole=False)
        sent = self._packer.tensors(self._packer.unpacked(payloads, whole=False))
        for weight, whole, arrives in zip(weights, own, sent, strict=True):
            weight.add_((whole - arrives).to(weight.device))
        return sent, self.share, payloads

    def _deliver(self, peer: int, sent: list[Tensor], share: float, payloads: list[Tensor] | None) -> None:
        """In the outbox's thread: send to a peer. If that fails, weights and share go to this replica's inbox."""
        try:
            if self._pairs:
                theirs = [torch.empty_like(weight) for weight in sent]
                self._peers.ask(peer, {"op": "pair"}, sent, into=theirs, confirm=True)
                torch._foreach_sub_(theirs, sent)
                with self._mixing:
                    torch._foreach_add_(self._inbox, theirs, alpha=0.5)
                    self._inbox_share = 1.0
            else:
                head = {"op": "push", "share": share, "compressed": payloads is not None}
                self._peers.ask(peer, head, sent if payloads is None else payloads, confirm=True)
        except LinkError:
            self.tally.dropped += 1
            if not self._pairs:
                with self._mixing:
                    self._put_in_inbox(sent, share)

    def _deliver_in_pair(self, peer: int) -> None:
        """In the outbox's thread: meet a peer by compressed messages."""
        with self._meeting:
            meetings = self._swaps_with(peer)
            said = meetings.ask(self._flats_now())
        try:
            reply = self._peers.ask(peer, _head_of(said), said.buffers)
            answer = _answered(reply.head, reply.buffers)
            with self._meeting:
                self._put_change_in_inbox(meetings.hear(answer))
            self.tally.dropped += isinstance(answer, Refusal)
        except (LinkError, ValueError):  # it is gone, or answered nonsense
            self.tally.dropped += 1
            with self._meeting:
                meetings.lose()

    def _swaps_with(self, peer: int) -> Swaps:
        assert self._packer is not None
        if peer not in self._swaps:
            self._swaps[peer] = Swaps(self._packer, self._peers.replica, peer)
        return self._swaps[peer]

    def _flats_now(self) -> list[Tensor]:
        """A copy of the weights with what arrived mixed in."""
        assert self._packer is not None
        with self._mixing:
            own, _ = self.weights_now()
        return self._packer.flats(own)

    def _put_change_in_inbox(self, flats: Sequence[Tensor]) -> None:
        """Have it added to the weights, if there is a change."""
        if flats and self._packer is not None:
            with self._mixing:
                torch._foreach_add_(self._inbox, self._packer.tensors(flats))
                self._inbox_share = 1.0

    def _put_in_inbox(self, weights: Sequence[Tensor], share: float) -> None:
        """Add weights to those in the inbox: their mean by shares."""
        self._inbox_share += share
        for kept, arrived in zip(self._inbox, weights, strict=True):
            kept.lerp_(arrived, share / self._inbox_share)

    def _mix(self) -> bool:
        """Mix what is in the inbox into this replica's weights; whether there was anything."""
        if not self._inbox_share:
            return False
        weights = self.replica.weights
        if self._pairs:
            for weight, change in zip(weights, self._inbox, strict=True):
                weight.add_(change.to(weight.device))
                change.zero_()
        else:
            part = self._inbox_share / (self.share + self._inbox_share)
            for weight, arrived in zip(weights, self._inbox, strict=True):
                weight.lerp_(arrived.to(weight.device), part)
            self.share += self._inbox_share
        self._inbox_share = 0.0
        return True

    def flush(self) -> None:
        """Wait until the message on its way has arrived, or has come back."""
        self._outbox.wait(2 * self._peers.heartbeat)

    def hand_over(self) -> None:
        """Give weights and share to another replica."""
        self.flush()
        if self._pairs:
            return
        with self._mixing:
            self._mix()
            own = on_host([weight.clone() for weight in self.replica.weights])
        for peer in self._draws.sample(self._peers.there(), len(self._peers.there())):
            with suppress(LinkError):
                self._peers.ask(peer, {"op": "push", "share": self.share, "compressed": False}, own, confirm=True)
                self.share = 0.0
                return

    def settle(self) -> None:
        """The mean of all replicas' weights, by shares. One that does not answer is left out.

        Until its next step this replica tells others of the weights that it had: so all that settle while nobody steps
        get the same, bit for bit.
        """
        with self._waiting("mean of all replicas' weights"):
            self.flush()
            with self._mixing:
                self._keep()
                own, own_share = self.weights_now()
            mean, total = [torch.zeros_like(weight) for weight in own], 0.0
            for number in sorted([self._peers.replica, *self._peers.there()]) if own else ():
                with suppress(LinkError), self._arrivals.room() as arrived:
                    share = own_share if number == self._peers.replica else self._seen(number, arrived)
                    theirs = own if number == self._peers.replica else arrived
                    total += share
                    for kept, part in zip(mean, theirs, strict=True):
                        kept.lerp_(part, share / total if total else 0.0)
            self.tally.spread = distance(own, mean) if own else None
            with self._mixing:
                copy_all(self.replica.weights, mean)
        self._count_traffic()
        self.replica.tell_weights()

    def _keep(self) -> None:
        """Keep a copy of the weights, which others are shown while the network has the mean."""
        if not self._kept:
            self._mix()
            self._kept = [weight.clone() for weight in self.replica.weights]

    def _seen(self, peer: int, arrived: list[Tensor]) -> float:
        """Fetch another's weights; its share."""
        return fields.number(self._peers.ask(peer, {"op": "show"}, into=arrived).head, "share")

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The mean in the network. Meanwhile peers are sent this replica's own weights."""
        self.settle()
        try:
            yield
        finally:
            with self._mixing:
                copy_all(self.replica.weights, self._kept)
                self._kept = []
            self.replica.tell_weights()

    def own_state(self) -> dict[str, Tensor]:
        with self._mixing:
            self._mix()
        return {**super().own_state(), "share": torch.tensor(self.share, dtype=torch.float64)}

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        if "share" not in state:
            raise ValueError("there is no share")
        with self._mixing:
            super().put_own_state({name: value for name, value in state.items() if name != "share"})
            self.share = float(state["share"])

    def wait_until_sent(self) -> None:
        self._outbox.wait(self._peers.heartbeat)

    def close(self) -> None:
        self._outbox.close()
        self._peers.close()
        for error in self._peers.errors:
            raise error

    def _count_traffic(self) -> None:
        sent, received = self._peers.sent_bytes, self._peers.received_bytes
        self.tally.sent_bytes += sent - self._traffic[0]
        self.tally.received_bytes += received - self._traffic[1]
        self._traffic = sent, received

    # What peers say, answered in threads of their own

    def _answer(self, link: Link, head: dict[str, Any]) -> None:
        match fields.text(head, "op", ("push", "pair", "meet", "show", "split")):
            case "push":
                share = fields.number(head, "share")
                with self._pushed(link, compressed=fields.flag(head, "compressed")) as arrived:
                    link.send({})
                    with self._peers.confirmed(link), self._mixing:
                        self._put_in_inbox(arrived, share)
            case "meet":
                self._meet(link, head)
            case "pair":
                with self._arrivals.room() as arrived:
                    link.receive_into(arrived)
                    with self._mixing:
                        own, _ = self.weights_now()
                    link.send({}, own)
                    with self._peers.confirmed(link), self._mixing:
                        for change, theirs, mine in zip(self._inbox, arrived, own, strict=True):
                            change.add_(theirs.sub_(mine), alpha=0.5)
                        self._inbox_share = 1.0
            case "show":
                self._outbox.wait(self._peers.heartbeat / 2)  # whoever asks waits for a whole one
                with self._mixing:
                    own, share = self.weights_now()
                link.send({"share": share}, own)
            case "split":
                with self._mixing:
                    own, share = self.weights_now()
                    if not self._pairs:
                        self.share /= 2
                        self._inbox_share /= 2
                        share /= 2
                link.send({"share": share}, own)

    @contextmanager
    def _pushed(self, link: Link, *, compressed: bool) -> Iterator[list[Tensor]]:
        """Weights that a peer pushes."""
        if compressed:
            yield self._receive_compressed(link)
            return
        with self._arrivals.room() as arrived:
            link.receive_into(arrived)
            yield arrived

    def _receive_compressed(self, link: Link) -> list[Tensor]:
        packer = self._agreed_packer()
        payloads = packer.empty(whole=False)
        link.receive_into(payloads)
        try:
            return packer.tensors(packer.unpacked(payloads, whole=False))
        except ValueError as error:
            raise fields.refused(f"compressed weights cannot be read: {error}.") from error

    def _meet(self, link: Link, head: Mapping[str, Any]) -> None:
        """Answer a peer that would meet this replica in the middle."""
        peer, buffers = fields.integer(head, "from"), self._agreed_packer().empty(whole=fields.flag(head, "whole"))
        link.receive_into(buffers)
        with self._meeting:
            try:
                answer, change = self._swaps_with(peer).answer(_said(head, buffers), self._flats_now())
            except ValueError as error:
                raise fields.refused(f"compressed weights cannot be read: {error}.") from error
            self._put_change_in_inbox(change)
        if isinstance(answer, Refusal):
            link.send({"refused": True, "whole": answer.whole})
        else:
            link.send(_head_of(answer), answer.buffers)

    def _agreed_packer(self) -> Packer:
        if self._packer is None:
            raise fields.refused("compressed weights came where whole ones were agreed on.")
        return self._packer

    def weights_now(self) -> tuple[list[Tensor], float]:
        """A copy of the weights with the inbox mixed in, and its share. Neither the weights nor the inbox change."""
        own = on_host([weight.clone() for weight in self._kept or self.replica.weights])
        if self._pairs:
            if own:
                torch._foreach_add_(own, self._inbox)
            return own, self.share
        share = self.share + self._inbox_share
        if self._inbox_share:
            for weight, arrived in zip(own, self._inbox, strict=True):
                weight.lerp_(arrived, self._inbox_share / share)
        return own, share


def _head_of(said: Said) -> dict[str, Any]:
    return {
        "op": "meet",
        "from": int(said.name.partition(".")[0]),
        "name": said.name,
        "turn": said.turn,
        "last": said.last,
        "before": said.before,
        "whole": said.whole,
    }


def _said(head: Mapping[str, Any], buffers: Sequence[Tensor]) -> Said:
    name, last, before = (fields.text(head, field) for field in ("name", "last", "before"))
    return Said(name, fields.integer(head, "turn"), last, before, fields.flag(head, "whole"), buffers)


def _answered(head: Mapping[str, Any], buffers: Sequence[Tensor]) -> Said | Refusal:
    return Refusal(whole=fields.flag(head, "whole")) if head.get("refused") else _said(head, buffers)


class _Arrivals:
    """Room for weights that come from others: one that is kept, and new ones where several come at a time.

    So nobody waits for somebody else's message, which may never end.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._kept = [torch.empty_like(tensor) for tensor in like]
        self._free = threading.Lock()

    @contextmanager
    def room(self) -> Iterator[list[Tensor]]:
        if not self._free.acquire(blocking=False):
            yield [torch.empty_like(tensor) for tensor in self._kept]
            return
        try:
            yield self._kept
        finally:
            self._free.release()


class Outbox:
    """Sends one message at a time, in a thread of its own, so that training goes on."""

    def __init__(self, deliver: Any) -> None:
        self._deliver = deliver
        self._message: Any = None
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-outbox", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a message is on its way. What went wrong with the last one, other than its receiver, is raised."""
        if self._error is not None:
            raise self._error
        return self._message is not None

    def put(self, message: Any) -> None:
        """Send it; only when not `busy`."""
        with self._changed:
            self._message = message
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until no message is on its way, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._message is None, timeout=seconds)

    def close(self) -> None:
        """End the thread, without waiting for a message on its way for longer than a second."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._message is not None)
                if self._closed:
                    return
            try:
                self._deliver(*self._message)
            except Exception as error:
                self._error = error
            with self._changed:
                self._message = None
                self._changed.notify_all()


OutboxMaker = Callable[[Callable[..., None]], Outbox]
"""Makes an outbox of what delivers a message."""
