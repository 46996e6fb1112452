"""Servers behind the wire: the real shards, rules and rounds, each with a link, and no process.

What a server does with a push is `Shard`'s, `Rounds`' and `Consensus`' own code; here is when it does it, and what its
answer weighs. A server does one thing at a time, and takes `apply_seconds` for it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.server import ShardClient, Terms, gathering_of
from shoal.exchanging.servers.shard import Outcome, Push, Snapshot, empty_shard
from shoal.exchanging.servers.slices import Slice, cut_over
from shoal.exchanging.servers.sparse import Mirror, Selector, Sparse
from shoal.simulating.links import Agenda
from shoal.swarm.stage import Moment
from shoal.swarm.wire import Host, Wire

Buffers = Sequence[Tensor] | Sequence[Sparse]


class Held:
    """One shard, whoever waits for a version of it, and the host where it is."""

    def __init__(self, agenda: Agenda, host: Host, slices: Sequence[Slice], terms: Terms, apply_seconds: float) -> None:
        kinds = [getattr(torch, name) for name in terms.dtypes]
        self.host, self.slices, self.terms = host, slices, terms
        self.shard = empty_shard(terms.sizes, kinds, terms.policy(), nullcontext())
        self.gathering = gathering_of(self.shard, terms)
        self._agenda, self._apply_seconds = agenda, apply_seconds
        self._free_at = 0.0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def in_turn(self, do: Callable[[], None]) -> None:
        """Do something when all that came before is done, and the time for it has passed."""
        if not self._apply_seconds:
            do()
            return
        self._free_at = max(self._agenda.now, self._free_at) + self._apply_seconds
        self._agenda.note(self._free_at, lambda _: do())

    def when(self, version: int, do: Callable[[], None]) -> None:
        """Do something once the shard has this version."""
        self._waiting.append((version, do))
        self.look()

    def look(self) -> None:
        """Whoever waited for the version that is there goes on."""
        ready = [do for version, do in self._waiting if version <= self.shard.version]
        self._waiting = [(version, do) for version, do in self._waiting if version > self.shard.version]
        for do in ready:
            do()

    def told(self, active: frozenset[int], resting: frozenset[int], makers: Mapping[int, frozenset[int]]) -> None:
        """What the coordinator tells servers."""
        if self.gathering is not None:
            self.gathering.members(active, resting)
            self.gathering.made_by(makers)
            self.look()


class Farm:
    """All servers of a run, made when the first replica says what they hold."""

    def __init__(self, agenda: Agenda, wire: Wire, hosts: Sequence[Host], scale: float, apply_seconds: float) -> None:
        self._agenda, self._wire, self._hosts = agenda, wire, hosts
        self._scale, self._apply_seconds = scale, apply_seconds
        self.held: list[Held] = []

    def shards(
        self, replica: Replica, host: Host, number: int, terms: Mapping[str, Any]
    ) -> list[tuple[Sequence[Slice], ShardClient]]:
        """The shards as one replica sees them."""
        if not self.held:
            kinds = {name: weight.dtype for name, weight in zip(replica.names, replica.weights, strict=True)}
            for server, slices in zip(self._hosts, cut_over(replica.sizes, len(self._hosts)), strict=True):
                if slices:
                    own = Terms([part.size for part in slices], [str(kinds[part.name])[6:] for part in slices], **terms)
                    self.held.append(Held(self._agenda, server, slices, own, self._apply_seconds))
        return [(held.slices, WiredShard(held, self._wire, host, number, self._scale)) for held in self.held]

    def weights(self) -> dict[str, Tensor]:
        """The common weights of now, flat, by name."""
        parts: dict[str, list[Tensor]] = {}
        for held in self.held:
            for piece, weight in zip(held.slices, held.shard.weights, strict=True):
                parts.setdefault(piece.name, []).append(weight)
        return {name: torch.cat(pieces) for name, pieces in parts.items()}


class WiredShard:
    """A shard at a server, as one replica sees it."""

    def __init__(self, held: Held, wire: Wire, host: Host, number: int, scale: float) -> None:
        self._held, self._wire, self._host, self._number, self._scale = held, wire, host, number, scale
        self._asked: Moment | None = None
        self._mirror: Mirror | None = None
        """The weights that this replica has, where it is sent changes only."""
        self._sent = self._received = 0

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> int:
        self._held.shard.begin(weights, state)
        return self._held.shard.version

    def wait(self) -> int:
        return self._held.shard.version

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0) -> None:
        asked = self._asked = Moment()
        size = 0
        if push is not None:
            push = replace(push, values=push.sparse or [tensor.clone() for tensor in push.tensors])
            size = _bytes(push.values, self._scale)
        self._sent += size
        serve = lambda: self._held.in_turn(lambda: self._serve(asked, push, fetch, at_least))  # noqa: E731
        self._wire.send(self._host, self._held.host, size, serve, label="push" if size else "ask")

    def _serve(self, asked: Moment, push: Push | None, fetch: bool, at_least: int) -> None:
        """At the server, when all of the push is there."""
        held = self._held
        if push is not None and held.shard.policy.rule.answers_change:
            outcome = held.shard.push_and_fetch(push, None)
            self._reply(asked, outcome, push.tensors if fetch else ())
        elif held.gathering is None:
            self._reply_with_weights(asked, held.shard.push_and_fetch(push, None), fetch)
        else:
            outcome = Outcome(at_least) if push is None else held.gathering.add(push, self._number)
            held.when(
                outcome.version,
                lambda: self._reply_with_weights(asked, Outcome(held.shard.version, 0, outcome.applied), fetch),
            )
            held.look()  # this push may have been the last that others waited for

    def _reply_with_weights(self, asked: Moment, outcome: Outcome, fetch: bool) -> None:
        weights = [weight.clone() for weight in self._held.shard.weights] if fetch else []
        if fetch and self._mirror is not None:
            self._reply(asked, outcome, self._mirror.changes(weights))
            return
        if fetch and self._held.terms.back is not None:
            self._mirror = Mirror(Selector(**self._held.terms.back), weights)
        self._reply(asked, outcome, weights)

    def _reply(self, asked: Moment, outcome: Outcome, buffers: Buffers) -> None:
        size = _bytes(buffers, self._scale)
        arrive = lambda: asked.happen((outcome, buffers, size))  # noqa: E731
        self._wire.send(self._held.host, self._host, size, arrive, label="fetch" if size else "answer")

    def answer(self, into: Sequence[Tensor] | None) -> Outcome:
        assert self._asked is not None
        outcome, buffers, size = self._asked.wait()
        self._received += size
        if into is not None:
            for weight, part in zip(into, buffers, strict=True):
                part.set_in(weight) if isinstance(part, Sparse) else weight.copy_(part)
        told: Outcome = outcome
        return told

    def snapshot(self) -> Snapshot:
        return self._held.shard.snapshot()

    def kept_back(self) -> list[Tensor]:
        return []

    @property
    def traffic(self) -> tuple[int, int]:
        return self._sent, self._received

    def close(self) -> None:
        """There is nothing to close."""


class SharedShard(WiredShard):
    """A shard in memory that the replicas of one host share: whoever pushes applies it itself, in the shard's turn."""

    def ask(self, push: Push | None, *, fetch: bool, at_least: int = 0) -> None:  # noqa: ARG002  (of the protocol)
        asked = self._asked = Moment()
        into = [torch.empty_like(weight) for weight in self._held.shard.weights] if fetch else None
        do = lambda: asked.happen((self._held.shard.push_and_fetch(push, into), into or [], 0))  # noqa: E731
        self._held.in_turn(do)


def _bytes(buffers: Buffers, scale: float) -> int:
    return round(scale * sum(part.nbytes for part in buffers))
