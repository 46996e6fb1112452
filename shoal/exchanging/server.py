"""Servers that hold shards for replicas over links, and a shard on a server as a replica sees it.

    replica ──open, begin, exchange──▶ Server (a process, or threads of a replica's own) ──▶ Shard

One thread per link waits for its replica; pushes to one shard take turns at its lock. A server learns from the first
replica what it holds and by which rule, so it needs no settings of its own. Its state lives as long as the process.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import PeerError
from shoal.exchanging.held import Outcome, Policy, Push, Shard, empty_shard
from shoal.exchanging.rounds import Rounds
from shoal.exchanging.rules import make_rule
from shoal.exchanging.sparse import Mirror, Selector, Sparse
from shoal.linking import Address, Door, Link, connect


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
    """Gradients of one version that make an update (backup workers); 0: each gradient is one."""
    back: Mapping[str, Any] | None = None
    """How sparse changes are selected on their way back; None sends all weights."""

    def policy(self) -> Policy:
        """How the shard treats what it gets."""
        rule = make_rule(self.rule, momentum=self.momentum, weight_decay=self.weight_decay)  # type: ignore[arg-type]
        return Policy(rule, self.max_staleness, self.decay, self.decay_base)  # type: ignore[arg-type]


@dataclass
class _Held:
    """A shard and those who wait for it."""

    shard: Shard
    terms: Terms
    begun: threading.Event = field(default_factory=threading.Event)
    rounds: Rounds | None = None


class Server:
    """Holds shards by key for whoever knows the door's token."""

    def __init__(self, host: str = "127.0.0.1", on_error: Callable[[BaseException], None] | None = None) -> None:
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._needs: tuple[Mapping[int, int], int] | None = None
        self.errors: list[BaseException] = []
        """What went wrong here, unless somebody else wants to know."""
        tell = on_error or self.errors.append
        self._door = Door(self._serve, host=host, on_error=lambda _link, _hello, error: tell(error))
        self.address, self.token = self._door.address, self._door.token
        """Where replicas reach it, and what they must know."""

    def need(self, of_versions: Mapping[int, int], then: int) -> None:
        """With backup workers: how many gradients make the update of certain versions, and of all later ones."""
        with self._lock:
            self._needs = of_versions, then
            for held in self._held.values():
                if held.rounds is not None:
                    held.rounds.need(of_versions, then)

    def close(self) -> None:
        """Let nobody in any more and end all threads."""
        for held in self._held.values():
            if held.rounds is not None:
                held.rounds.close()
            held.begun.set()
        self._door.close()

    def _serve(self, link: Link, hello: Mapping[str, Any]) -> None:
        """One rank of one replica, for as long as it stays."""
        held = self._open(str(hello["shard"]), Terms(**hello["terms"]))
        desk = _Desk(link, held)
        link.send({"ready": held.begun.is_set()})
        while True:
            head = link.receive_head()
            desk.answer(head.head)

    def _open(self, key: str, terms: Terms) -> _Held:
        with self._lock:
            if key not in self._held:
                kinds = [getattr(torch, name) for name in terms.dtypes]
                shard = empty_shard(terms.sizes, kinds, terms.policy(), threading.Lock())
                rounds = Rounds(shard, terms.wanted) if terms.wanted else None
                if rounds is not None and self._needs is not None:
                    rounds.need(*self._needs)
                self._held[key] = _Held(shard, terms, rounds=rounds)
            held = self._held[key]
        if held.terms != terms:
            raise PeerError(
                f"replicas disagree on shard {key}: {held.terms} and {terms}.", "Give all the same options."
            )
        return held


class _Desk:
    """One link's side of a shard: the buffers that its pushes land in, and its mirror."""

    def __init__(self, link: Link, held: _Held) -> None:
        self._link, self._held = link, held
        self._arrived = [torch.empty_like(weight) for weight in held.shard.weights]
        self._copy = [torch.empty_like(weight) for weight in held.shard.weights]
        self._mirror: Mirror | None = None
        """What this replica has, from its first fetch on, where it is told changes only."""

    def answer(self, head: Mapping[str, Any]) -> None:
        shard, link = self._held.shard, self._link
        match head["op"]:
            case "begin":
                state = [[torch.empty_like(w) for w in shard.weights] for _ in range(head["slots"])]
                link.receive_into([*self._arrived, *(tensor for kept in state for tensor in kept)])
                shard.begin(self._arrived, state)
                self._held.begun.set()
                link.send({"version": shard.version})
            case "wait":
                self._held.begun.wait()
                link.send({"version": shard.version})
            case "exchange":
                self._exchange(head)
            case "snapshot":
                weights, state = shard.snapshot()
                link.send({"version": shard.version}, [*weights, *(tensor for kept in state for tensor in kept)])

    def _exchange(self, head: Mapping[str, Any]) -> None:
        push = self._push(head)
        wants = head["fetch"]
        into = self._copy if wants else None
        if self._held.rounds is not None:
            outcome = self._held.rounds.exchange(push, into, at_least=head["at_least"])
        else:
            outcome = self._held.shard.exchange(push, into)
        reply: dict[str, Any] = {
            "version": outcome.version,
            "staleness": outcome.staleness,
            "applied": outcome.applied,
        }
        if not wants:
            self._link.send(reply)
        elif wants == "whole" or self._mirror is None:
            self._link.send(reply, self._copy)
            if self._held.terms.back is not None:
                self._mirror = Mirror(Selector(**self._held.terms.back), self._copy)
        else:
            changes = self._mirror.changes(self._copy)
            self._link.send({**reply, "sparse": [one.values.numel() for one in changes]}, sparse_buffers(changes))

    def _push(self, head: Mapping[str, Any]) -> Push | None:
        if head["kind"] is None:
            return None
        weights = self._held.shard.weights
        if head["sparse"] is None:
            self._link.receive_into(self._arrived)
            return Push(self._arrived, head["base"], head["rate"], head["kind"])
        values = empty_sparse(head["sparse"], weights)
        self._link.receive_into(sparse_buffers(values))
        return Push(values, head["base"], head["rate"], head["kind"])


def sparse_buffers(values: Sequence[Sparse]) -> list[Tensor]:
    """Indices and values as they travel. A tensor that is sent whole sends no indices."""
    found: list[Tensor] = []
    for one in values:
        found += [one.values] if one.whole else [one.indices, one.values]
    return found


def empty_sparse(counts: Sequence[int], like: Sequence[Tensor]) -> list[Sparse]:
    """Where such buffers are received."""
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
        """Give the first weights; the version."""
        ...

    def wait(self) -> int:
        """Until somebody gave the first weights; the version."""
        ...

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0, whole: bool = False) -> None:
        """Send a push, and ask for weights or not: for all of them with `whole`, else perhaps for changes only.

        `at_least`: wait for this version, where updates wait for each other.
        """
        ...

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        """What became of it; the weights go `into` where they were asked for."""
        ...

    def snapshot(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Copies of weights and state."""
        ...

    @property
    def traffic(self) -> tuple[int, int]:
        """Payload bytes sent and received so far."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class LocalShard:
    """A shard that this process reaches in memory: an exchange is done when its answer is asked for."""

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
        raise PeerError("nobody gave the shared weights their first values.", "Look at what the first replica did.")

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0, whole: bool = False) -> None:  # noqa: ARG002  (of the protocol)
        self._push = push

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        return self._shard.exchange(self._push, into)

    def snapshot(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        return self._shard.snapshot()

    @property
    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._shard.close()


class RemoteShard:
    """A shard on a server, over one link."""

    def __init__(self, address: Address, token: str, key: str, terms: Terms, name: str, timeout: float) -> None:
        kinds = [getattr(torch, kind) for kind in terms.dtypes]
        self._like = [
            torch.empty(size, dtype=kind, device="meta") for size, kind in zip(terms.sizes, kinds, strict=True)
        ]
        self._slots = terms.policy().rule.slots
        self._sparse_back = terms.back is not None
        self._whole_next = True  # the first fetch, after which the server knows what this replica has
        self._link = connect(address, token, {"shard": key, "terms": asdict(terms)}, name=name)
        self._link.timeout = timeout
        self._link.receive()

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> int:
        self._link.send(
            {"op": "begin", "slots": len(state)}, [*weights, *(tensor for kept in state for tensor in kept)]
        )
        return int(self._link.receive().head["version"])

    def wait(self) -> int:
        self._link.send({"op": "wait"})
        return int(self._link.receive().head["version"])

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0, whole: bool = False) -> None:
        head: dict[str, Any] = {"op": "exchange", "kind": None, "sparse": None, "at_least": at_least}
        head["fetch"] = (
            ("sparse" if self._sparse_back and not (whole or self._whole_next) else "whole") if fetch else ""
        )
        if push is None:
            self._link.send(head)
            return
        head |= {"kind": push.kind, "base": push.base, "rate": push.rate}
        if sparse := push.sparse:
            head["sparse"] = [one.values.numel() for one in sparse]
            self._link.send(head, sparse_buffers(sparse))
        else:
            self._link.send(head, push.tensors)

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        arrived = self._link.receive_head()
        head = arrived.head
        if into is None:
            pass
        elif "sparse" in head:
            changes = empty_sparse(head["sparse"], into)
            self._link.receive_into(sparse_buffers(changes))
            for weight, change in zip(into, changes, strict=True):
                change.set_in(weight)
        else:
            self._link.receive_into(into)
            self._whole_next = False
        return Outcome(head["version"], head["staleness"], head["applied"])

    def snapshot(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        self._link.send({"op": "snapshot"})
        tensors = [[torch.empty_like(one, device="cpu") for one in self._like] for _ in range(1 + self._slots)]
        self._link.receive([one for copy in tensors for one in copy])
        return tensors[0], tensors[1:]

    @property
    def traffic(self) -> tuple[int, int]:
        return self._link.sent_bytes, self._link.received_bytes

    def close(self) -> None:
        self._link.close()
