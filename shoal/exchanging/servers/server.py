"""Servers that hold shards for replicas over links, and a shard on a server as a replica sees it.

    replica ──open, begin, push, fetch──▶ Server (a process, or threads of a replica's own) ──▶ Shard

One thread per link waits for its replica; pushes to one shard take turns at its lock. A server learns from the first
replica what it holds and by which rule, so it needs no settings of its own. Its state lives as long as the process.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, get_args

import torch
from psutil import virtual_memory
from torch import Tensor

from shoal.errors import PeerError
from shoal.exchanging.compression.codecs import DENSITY, Codec, CodecName, make_codec
from shoal.exchanging.compression.packing import Packer
from shoal.exchanging.compression.residual import Residual, of_one_kind
from shoal.exchanging.servers.consensus import Consensus
from shoal.exchanging.servers.gathering import Gathering
from shoal.exchanging.servers.rounds import Rounds
from shoal.exchanging.servers.rules import RuleName, StalenessKind, make_rule
from shoal.exchanging.servers.shard import Outcome, Policy, Push, Shard, Snapshot, copy_all, empty_shard
from shoal.exchanging.servers.sparse import Mirror, Selector, Sparse
from shoal.transport.links import GIVE_UP_SECONDS, Address, Door, Link, LinkSilent, connect, fields

CONSENSUS = "consensus"
"""The rule of a shard whose weights are the mean of what each replica pushed last."""
DTYPES = ("float32", "float64", "float16", "bfloat16")
"""Types that weights may have."""


@dataclass(frozen=True)
class Terms:
    """What a replica tells a server about the shard it is to hold; the same from all replicas."""

    sizes: Sequence[int]
    dtypes: Sequence[str]
    rule: str
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_staleness: int | None = None
    decay: str = "none"
    decay_base: float = 1.0
    wanted: int = 0
    """Gradients of one version that make an update; 0: each gradient is an update."""
    by_tickets: bool = False
    """Whether the coordinator says which replicas' gradients of a version make its update."""
    gather: int = 1
    """Gradients of any version that make an update."""
    delay: int = 0
    """With the rule "consensus": updates after which a replica that did not push is waited for."""
    locked: bool = True
    back: Mapping[str, Any] | None = None
    """How sparse changes are selected on their way back; None sends all weights."""
    compress: str = "none"
    """How gradients are compressed on their way here. First weights, whole weights and those sent back never are."""
    density: float = DENSITY
    """Of compress=topk: the share of the elements that is pushed."""

    @classmethod
    def said(cls, hello: Mapping[str, Any]) -> "Terms":
        """Read and check what a replica sent, before any memory is taken for it."""
        terms = hello.get("terms")
        if not isinstance(terms, dict) or not {"sizes", "dtypes", "rule"} <= set(terms) <= set(
            cls.__dataclass_fields__
        ):
            raise fields.refused("a replica asked for a shard but did not give its sizes, dtypes and rule.")
        sizes, kinds = fields.integers(terms, "sizes"), terms.get("dtypes")
        if not isinstance(kinds, list) or len(kinds) != len(sizes) or not all(kind in DTYPES for kind in kinds):
            raise fields.refused("the dtypes of a shard are not those of its tensors.")
        if sum(sizes) * max((getattr(torch, kind).itemsize for kind in kinds), default=1) > virtual_memory().total:
            raise fields.refused(f"a shard of {sum(sizes)} elements, more than this host has memory for.")
        told = cls(**terms)
        fields.text(terms, "rule", (*get_args(RuleName), CONSENSUS))
        fields.text({"decay": told.decay}, "decay", get_args(StalenessKind))
        for name in ("momentum", "weight_decay", "decay_base"):
            fields.number(asdict(told), name)
        if told.max_staleness is not None:
            fields.as_integer(told.max_staleness, "max_staleness")
        fields.as_integer(told.wanted, "wanted")
        fields.as_integer(told.gather, "gather", least=1)
        fields.as_integer(told.delay, "delay")
        for name in ("locked", "by_tickets"):
            fields.flag(asdict(told), name)
        fields.text({"compress": told.compress}, "compress", ("none", *get_args(CodecName)))
        if not 0 < fields.number({"density": told.density}, "density") <= 1:
            raise fields.refused(f"density = {told.density} where a share above 0 and up to 1 belongs.")
        return told

    def policy(self) -> Policy:
        """How the shard treats what it gets."""
        # With rate 1 and no momentum "outer" replaces the weights by what is pushed: here the mean.
        name: Any = "outer" if self.rule == CONSENSUS else self.rule
        decay: Any = self.decay
        rule = make_rule(name, momentum=self.momentum, weight_decay=self.weight_decay)
        return Policy(rule, self.max_staleness, decay, self.decay_base, self.gather, self.locked)

    def codec(self) -> Codec | None:
        """The codec of compressed gradients; None where they are not compressed."""
        return None if self.compress == "none" else make_codec(self.compress, self.density)  # type: ignore[arg-type]


MOST_BUFFERS = 8
"""Most buffers of a shard's size in use for pushes and fetches at a time. More would not make the network faster."""
STALL_SECONDS = 2.0
"""When no byte moves for so long, the replica may be frozen or cut off: one more buffer is allowed meanwhile."""


@dataclass
class Loan:
    """A buffer in use."""

    tensors: list[Tensor]
    stalled: bool = False


class Buffers:
    """Buffers of a shard's size for what is received and sent, each used for a moment: not a copy for every replica.

    When all are in use, a replica waits, and what it sends stays in the network's own memory.
    """

    def __init__(self, like: Sequence[Tensor], most: int = MOST_BUFFERS, *, keep: bool = True) -> None:
        self._like, self._most, self._keep = like, most, keep
        self._spare: list[list[Tensor]] = []
        self._freed = threading.Condition()
        self._stalled = 0
        self.made = 0
        """How many buffers there are now, in use or not."""

    @contextmanager
    def lent(self, link: Link) -> Iterator[list[Tensor]]:
        """A buffer, of any content, for what goes over `link`: tensors like the shard's. One at a time per link.

        A stall is noticed after the link's `timeout`: see `STALL_SECONDS`.
        """
        loan = Loan(self._take())
        before, link.on_stall = link.on_stall, partial(self._note_stall, loan)
        try:
            yield loan.tensors
        finally:
            self._put_back(loan)
            link.on_stall = before

    def _take(self) -> list[Tensor]:
        with self._freed:
            self._freed.wait_for(lambda: self._spare or self.made < self._most + self._stalled)
            if self._spare:
                return self._spare.pop()
            self.made += 1
        return [torch.empty_like(tensor) for tensor in self._like]

    def _put_back(self, loan: Loan) -> None:
        with self._freed:
            self._stalled -= loan.stalled
            if self._keep and self.made <= self._most + self._stalled:
                self._spare.append(loan.tensors)
            else:
                self.made -= 1
            self._freed.notify()

    def _note_stall(self, loan: Loan) -> None:
        with self._freed:
            self._stalled += not loan.stalled
            loan.stalled = True
            self._freed.notify()


@dataclass
class _Held:
    """A shard, its terms, its buffers, and what makes replicas wait for each other."""

    shard: Shard
    terms: Terms
    buffers: Buffers
    whole: Buffers
    """A buffer for the weights and the rule's state, which all replicas bring at once at first and take at once at the
    end."""
    begun: threading.Event = field(default_factory=threading.Event)
    gathering: Gathering | None = None


class Server:
    """Holds shards by key for whoever knows the door's token."""

    def __init__(self, host: str = "127.0.0.1", on_error: Callable[[BaseException], None] | None = None) -> None:
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._makers: Mapping[int, frozenset[int]] = {}
        self._members: tuple[frozenset[int], frozenset[int]] | None = None
        self.patience = GIVE_UP_SECONDS
        """Seconds for which the network to a replica may be cut."""
        self.errors: list[BaseException] = []
        """What went wrong here, unless `on_error` was given."""
        tell = on_error or self.errors.append
        self._door = Door(self._serve, host=host, on_error=lambda _link, _hello, error: tell(error))
        self.address, self.token = self._door.address, self._door.token
        """Where replicas reach it, and the token that they must know."""

    def made_by(self, makers: Mapping[int, frozenset[int]]) -> None:
        """With tickets: whose gradients make the updates of certain versions."""
        with self._lock:
            self._makers = makers
            for held in self._held.values():
                if held.gathering is not None:
                    held.gathering.made_by(makers)

    def members(self, active: frozenset[int], resting: frozenset[int]) -> None:
        """Who takes part from now on, and who of them has nothing to do."""
        with self._lock:
            self._members = active, resting
            for held in self._held.values():
                if held.gathering is not None:
                    held.gathering.members(active, resting)

    def close(self) -> None:
        """Let nobody in any more and end all threads."""
        for held in self._held.values():
            if held.gathering is not None:
                held.gathering.close()
            held.begun.set()
        self._door.close()

    def _serve(self, link: Link, hello: Mapping[str, Any]) -> None:
        """Answer one rank of one replica for as long as its link lasts."""
        link.give_up_after(self.patience)
        link.timeout, link.on_stall, link.waits_to_send = STALL_SECONDS, _wait_on, True
        held = self._open(fields.text(hello, "shard"), Terms.said(hello))
        desk = _Desk(link, held, fields.integer(hello, "replica"))
        link.send({"ready": held.begun.is_set()})
        while True:
            with suppress(LinkSilent):  # a replica that computes, or is frozen: the coordinator watches it
                desk.answer(link.receive_head().head)

    def _open(self, key: str, terms: Terms) -> _Held:
        with self._lock:
            if key not in self._held:
                kinds = [getattr(torch, name) for name in terms.dtypes]
                shard = empty_shard(terms.sizes, kinds, terms.policy(), threading.Lock())
                remembered = shard.state[: shard.policy.rule.states]
                all_of_it = [*shard.weights, *(tensor for kept in remembered for tensor in kept)]
                whole = Buffers(all_of_it, most=1, keep=False)
                gathering = self._gathering(shard, terms)
                self._held[key] = _Held(shard, terms, Buffers(shard.weights), whole, gathering=gathering)
            held = self._held[key]
        if held.terms != terms:
            raise PeerError(
                f"replicas disagree on shard {key}: {held.terms} and {terms}.", "Give all the same options."
            )
        return held

    def _gathering(self, shard: Shard, terms: Terms) -> Gathering | None:
        """What makes pushes wait for each other, if they do; told who takes part."""
        gathering = gathering_of(shard, terms)
        if gathering is not None:
            gathering.made_by(self._makers)
            if self._members is not None:
                gathering.members(*self._members)
        return gathering


def gathering_of(shard: Shard, terms: Terms) -> Gathering | None:
    """What makes pushes to a shard wait for each other by its terms, if they do."""
    if terms.rule == CONSENSUS:
        return Consensus(shard, least=max(1, terms.wanted), delay=terms.delay)
    if terms.wanted or terms.by_tickets:
        return Rounds(shard, None if terms.by_tickets else terms.wanted)
    return None


def _wait_on() -> None:
    """What a server does about a replica that is silent in the middle of a frame, while it has no buffer in use."""


class _Desk:
    """One link's side of a shard, and what the replica at its other end has."""

    def __init__(self, link: Link, held: _Held, replica: int) -> None:
        self._link, self._held, self._replica = link, held, replica
        self._codec = held.terms.codec()
        self._mirror: Mirror | None = None
        """The weights that this replica has, from its first fetch on, where it is sent changes only."""

    def answer(self, head: Mapping[str, Any]) -> None:
        shard, link = self._held.shard, self._link
        match fields.text(head, "op", ("begin", "wait", "speak", "snapshot")):
            case "begin":
                states = fields.integer(head, "slots", most=shard.policy.rule.states)
                count = len(shard.weights)
                with self._held.whole.lent(link) as arrived:
                    arrived = arrived[: count * (1 + states)]
                    link.receive_into(arrived)
                    state = [arrived[count * copy : count * (copy + 1)] for copy in range(1, 1 + states)]
                    shard.begin(arrived[:count], state)
                self._held.begun.set()
                link.send({"version": shard.version})
            case "wait":
                self._held.begun.wait()
                link.send({"version": shard.version})
            case "speak":
                self._push_and_fetch(head)
            case "snapshot":
                with self._held.whole.lent(link) as room:
                    taken = shard.snapshot(room)
                    link.send({"version": taken.version}, room)
                    self._knows(taken.weights)

    def _push_and_fetch(self, head: Mapping[str, Any]) -> None:
        fetches = fields.flag(head, "fetch")
        if self._held.shard.policy.rule.answers_change and head.get("kind") is not None:
            self._answer_change(head)
            return
        if fetches and self._held.gathering is None and head.get("kind") is not None:
            with self._pushed(head) as push:
                if room := push.tensors:  # of no use any more once they are applied
                    self._send_weights(self._held.shard.push_and_fetch(push, room), room)
                    return
                outcome = self._held.shard.push_and_fetch(push, None)
        else:
            outcome = self._apply(head)
        if not fetches:
            self._link.send(_told(outcome))
            return
        with self._held.buffers.lent(self._link) as room:
            # What others pushed meanwhile is in these weights too, and in the version that is sent with them.
            version = self._held.shard.push_and_fetch(None, room).version
            self._send_weights(outcome._replace(version=version), room)

    def _send_weights(self, outcome: Outcome, copy: Sequence[Tensor]) -> None:
        """Answer with a copy of the weights, or with what the replica does not have of them yet."""
        if self._mirror is None:
            self._link.send(_told(outcome), copy)
            self._knows(copy)
            return
        changes = self._mirror.changes(copy)
        counts = [change.values.numel() for change in changes]
        self._link.send({**_told(outcome), "sparse": counts}, sparse_buffers(changes))

    def _answer_change(self, head: Mapping[str, Any]) -> None:
        """Apply a push, and send back the change that it made."""
        with self._pushed(head) as push:
            outcome = self._held.shard.push_and_fetch(push, None)
            self._link.send(_told(outcome), push.tensors if head["fetch"] else ())

    def _knows(self, weights: Sequence[Tensor]) -> None:
        """Note that the replica has these weights now."""
        if self._held.terms.back is not None:
            self._mirror = Mirror(Selector(**self._held.terms.back), weights)

    def _apply(self, head: Mapping[str, Any]) -> Outcome:
        """Apply what is pushed, if anything; where pushes wait for each other, wait for the update that has it."""
        shard, gathering = self._held.shard, self._held.gathering
        if head.get("kind") is None:
            return Outcome(shard.version) if gathering is None else gathering.wait(fields.integer(head, "at_least"))
        with self._pushed(head) as push:
            if gathering is None:
                return shard.push_and_fetch(push, None)
            outcome = gathering.add(push, self._replica)
        return gathering.wait(outcome.version, applied=outcome.applied)

    @contextmanager
    def _pushed(self, head: Mapping[str, Any]) -> Iterator[Push]:
        """Receive what the replica pushes, into a buffer that is free again afterwards."""
        kind: Any = fields.text(head, "kind", ("gradient", "weights"))
        base, rate = fields.integer(head, "base", most=self._held.shard.version), fields.number(head, "rate")
        terms = (base, rate, kind, fields.flag(head, "certain"))
        weights = self._held.shard.weights
        if kind == "gradient" and self._codec is not None:
            if head.get("sparse") is not None:
                raise fields.refused("a sparse push came where compressed ones were agreed on.")
            packer = Packer(self._codec, [weight.numel() for weight in weights], [weight.dtype for weight in weights])
            payloads = packer.empty(whole=False)
            self._link.receive_into(payloads)
            with self._held.buffers.lent(self._link) as gradients:  # so that few pushes are there whole at a time
                self._decode(packer, payloads, gradients)
                yield Push(gradients, *terms)
            return
        if head.get("sparse") is None:
            with self._held.buffers.lent(self._link) as arrived:
                self._link.receive_into(arrived)
                yield Push(arrived, *terms)
            return
        counts = fields.integers(head, "sparse")
        if len(counts) != len(weights) or any(n > w.numel() for n, w in zip(counts, weights, strict=True)):
            raise fields.refused("a push has more elements than the shard.")
        values = empty_sparse(counts, weights)
        self._link.receive_into(sparse_buffers(values))
        if any(_outside(part) for part in values):
            raise fields.refused("a push has elements that the shard does not have.")
        yield Push(values, *terms)

    def _decode(self, packer: Packer, payloads: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The gradients of a compressed push: tensors of one type are one payload."""
        try:
            copy_all(gradients, packer.tensors(packer.unpacked(payloads, whole=False)))
        except ValueError as error:
            raise fields.refused(f"a compressed push cannot be read: {error}.") from error


def _told(outcome: Outcome) -> dict[str, Any]:
    return {"version": outcome.version, "staleness": outcome.staleness, "applied": outcome.applied}


def _outside(push: Sparse) -> bool:
    """Whether some index lies outside its tensor."""
    places = push.indices
    return bool(places.numel()) and not 0 <= int(places.min()) <= int(places.max()) < push.size


def sparse_buffers(values: Sequence[Sparse]) -> list[Tensor]:
    """Indices and values as buffers to send. A tensor that is sent whole sends no indices."""
    buffers: list[Tensor] = []
    for part in values:
        buffers += [part.values] if part.whole else [part.indices, part.values]
    return buffers


def empty_sparse(counts: Sequence[int], like: Sequence[Tensor]) -> list[Sparse]:
    """Empty tensors to receive such buffers into."""
    return [
        Sparse(
            torch.empty(0 if count == weight.numel() else count, dtype=torch.int32),
            torch.empty(count, dtype=weight.dtype),
            weight.numel(),
        )
        for count, weight in zip(counts, like, strict=True)
    ]


class ShardClient(Protocol):
    """A shard, wherever it is, as one rank of a replica sees it. `ask` then `answer`, so that several work at once."""

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> int:
        """Give the first weights; returns the version."""
        ...

    def wait(self) -> int:
        """Wait until some replica gave the first weights; returns the version."""
        ...

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0) -> None:
        """Send a push, and ask for weights or not: for all of them, or for changes only where that was agreed on.

        `at_least`: wait for this version, where updates wait for each other.
        """
        ...

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        """What became of what was asked; the weights go `into`, if they were asked for."""
        ...

    def snapshot(self) -> Snapshot:
        """Copies of weights and state, of one moment."""
        ...

    def kept_back(self) -> list[Tensor]:
        """What compression has not sent yet of each tensor, as it is kept: writing to it changes what is sent next.

        None where nothing is compressed.
        """
        ...

    @property
    def traffic(self) -> tuple[int, int]:
        """Payload bytes sent and received so far."""
        ...

    def close(self) -> None:
        """Close the link, or the lock's file."""
        ...


class LocalShard:
    """A shard that this process reaches in memory: `answer` does the push and the fetch."""

    def __init__(self, shard: Shard, timeout: float) -> None:
        self._shard, self._timeout = shard, timeout
        self._push: Push | None = None

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> int:
        self._shard.begin(weights, state)
        return self._shard.version

    def wait(self) -> int:
        pause = threading.Event()
        for _ in range(int(self._timeout / 0.01)):
            if self._shard.ready:
                return self._shard.version
            pause.wait(0.01)
        raise PeerError(
            f"no replica put first weights into shared memory within {self._timeout:g} seconds.",
            "Read replica 0's messages.",
        )

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0) -> None:  # noqa: ARG002  (of the protocol)
        self._push = push

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        return self._shard.push_and_fetch(self._push, into)

    def snapshot(self) -> Snapshot:
        return self._shard.snapshot()

    def kept_back(self) -> list[Tensor]:
        return []

    @property
    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._shard.close()


class RemoteShard:
    """A shard on a server, over one link."""

    def __init__(
        self, address: Address, token: str, key: str, terms: Terms, *, replica: int, name: str, timeout: float
    ) -> None:
        kinds = [getattr(torch, kind) for kind in terms.dtypes]
        self._like = [
            torch.empty(size, dtype=kind, device="meta") for size, kind in zip(terms.sizes, kinds, strict=True)
        ]
        self._states = terms.policy().rule.states
        codec, self._together = terms.codec(), of_one_kind(kinds)
        self.residuals = [
            Residual(codec, [torch.empty(terms.sizes[number], dtype=kinds[number]) for number in numbers])
            for numbers in (self._together if codec is not None else ())
            if codec is not None  # for the type checker
        ]
        """What compression has not sent yet, of the tensors of each type; empty without compression."""
        hello: dict[str, Any] = {"shard": key, "replica": replica, "terms": asdict(terms)}
        self._link = connect(address, token, hello, name=name)
        self._link.timeout = timeout
        self._link.give_up_after(timeout)
        self._link.receive()

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> int:
        self._link.send(
            {"op": "begin", "slots": len(state)}, [*weights, *(tensor for kept in state for tensor in kept)]
        )
        return int(self._link.receive().head["version"])

    def wait(self) -> int:
        self._link.send({"op": "wait"})
        return int(self._link.receive().head["version"])

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0) -> None:
        head: dict[str, Any] = {"op": "speak", "kind": None, "sparse": None, "at_least": at_least, "fetch": fetch}
        if push is None:
            self._link.send(head)
            return
        head |= {"kind": push.kind, "base": push.base, "rate": push.rate, "certain": push.certain}
        if sparse := push.sparse:
            head["sparse"] = [part.values.numel() for part in sparse]
            self._link.send(head, sparse_buffers(sparse))
        elif self.residuals and push.kind == "gradient":
            given = zip(self.residuals, self._together, strict=True)
            self._link.send(
                head, [residual.take(push.tensors[number] for number in numbers) for residual, numbers in given]
            )
        else:
            self._link.send(head, push.tensors)

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        head = self._link.receive_head().head
        if into is not None and "sparse" in head:
            changes = empty_sparse(head["sparse"], into)
            self._link.receive_into(sparse_buffers(changes))
            for weight, change in zip(into, changes, strict=True):
                change.set_in(weight)
        elif into is not None:
            self._link.receive_into(into)
        return Outcome(head["version"], head["staleness"], head["applied"])

    def snapshot(self) -> Snapshot:
        self._link.send({"op": "snapshot"})
        copies = [[torch.empty_like(tensor, device="cpu") for tensor in self._like] for _ in range(1 + self._states)]
        answer = self._link.receive([tensor for copy in copies for tensor in copy])
        return Snapshot(int(answer.head["version"]), copies[0], copies[1:])

    def kept_back(self) -> list[Tensor]:
        kept: dict[int, Tensor] = {}
        for residual, numbers in zip(self.residuals, self._together if self.residuals else (), strict=True):
            kept |= dict(zip(numbers, residual.state(), strict=True))
        return [kept[number] for number in sorted(kept)]

    @property
    def traffic(self) -> tuple[int, int]:
        return self._link.sent_bytes, self._link.received_bytes

    def close(self) -> None:
        self._link.close()
