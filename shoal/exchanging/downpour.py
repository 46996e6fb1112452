"""`downpour`: asynchronous parameter servers (Dean et al. 2012; Paine et al. 2013 with n_push = n_fetch = n_sync).

Keeps       one replica is plain SGD, bit for bit, at any n_sync (with the rule chosen unless told);
            Adagrad over shards is Adagrad. Not with `compress`, which changes what is pushed.
Gives up    with several replicas a gradient is computed on weights that others have changed since (staleness,
            measured); shards may be of different versions. The order of updates differs from run to run.
Costs       per push and fetch one copy of the weights each way, to servers or, on one host, to shared memory; with
            `compress` pushes are smaller, weights come back as they are, and a replica has one copy more; beside
            the weights one to three more copies in each replica that takes steps of its own (n_push or n_fetch over 1,
            or rule=add); the rule's state lives in the servers.
Failure     a replica that dies or freezes is missed by nobody; its batch is handed out again. A server that dies ends
            the run, which can be resumed from its last checkpoint. A replica that is lost takes with it what `compress`
            has not sent yet; of a push that is dropped as too stale that stays, though its batch is trained on again.

With `overlap` a thread pushes and fetches while the next steps are computed (Dean): a step does not wait for servers,
and what it is computed on is a step older. One replica is then not plain SGD: its gradients are one update behind.

With `rule=sgd` and `rule=adagrad` servers step on pushed gradients; between pushes a replica takes steps of its own
with its own optimizer and pushes the sum of their gradients (Dean). With `rule=add` the replica's own optimizer makes
all steps, and it pushes how far they took it (Paine).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.diary import Diary, now
from shoal.errors import ConfigError
from shoal.exchanges import Holding, Rates
from shoal.exchanging.base import RESIDUAL, Exchange, distance
from shoal.exchanging.compression.options import Compressing
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.beside import Beside
from shoal.exchanging.servers.options import Served, asynchronous_rates, momentum_adds_up
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.server import ShardClient
from shoal.exchanging.servers.shard import Outcome, Push, copy_all, on_host
from shoal.exchanging.servers.slices import Slice
from shoal.timeline import Lane

SPREAD_EVERY = 50
"""Fetches from one measurement of the distance to the common weights to the next: it costs a pass over them."""


ALONE = 8
"""After so many pushes in a row without an update by others a replica takes itself for the only one. It begins so."""

_STEP_BY_ITSELF = "give rule='add', with which every replica steps by itself and pushes how far it came"
"""The way out where servers cannot step as an optimizer does."""


class Options(Compressing, Served):
    """Asynchronous parameter servers: whoever has a gradient pushes it, nobody waits (Dean et al. 2012)."""

    name = "downpour"

    rule: Literal["auto", "sgd", "adagrad", "add"] = "auto"
    """What servers do: sgd (with the run's momentum), adagrad (Dean 2012), or add changes that replicas made
    themselves, with a momentum of their own (Paine 2013). auto: sgd when every step is pushed, else add."""
    overlap: bool = False
    """Push and fetch in a thread of their own while the next steps are computed (Dean et al. 2012)."""

    @model_validator(mode="after")
    def _check_overlap(self) -> "Options":
        if self.overlap and self.max_staleness is not None:
            raise ConfigError(
                f"max_staleness = {self.max_staleness} drops a push after the next steps were begun, with overlap.",
                "Give one of them alone.",
            )
        return self

    @property
    def server_rule(self) -> Literal["sgd", "adagrad", "add"]:
        """The rule that `auto` stands for."""
        if self.rule != "auto":
            return self.rule
        return "sgd" if self.push_every == 1 else "add"

    @model_validator(mode="after")
    def _check_compression(self) -> "Options":
        if self.compress != "none" and self.servers == "direct":
            raise ConfigError(
                f"compress = {self.compress!r} with servers = 'direct': in shared memory nothing is sent.",
                "Give servers=processes or servers=threads, or leave compress out.",
            )
        return self

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:
        """Where something is sent, if it is to be compressed."""
        links = self.compress != "none"
        return super().holding(replicas, one_host=one_host and not links, weight_bytes=weight_bytes)

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:  # noqa: ARG002
        """With every push what is pushed, with every fetch a copy of the weights."""
        return 0 if in_memory else round(self.pushed_bytes(weights) / self.push_every + weights / self.fetch_every)

    def own_rates(self, given: Rates, replicas: int) -> Rates:
        """Every replica's gradient is an update."""
        return asynchronous_rates(given, replicas, at_servers=self.server_rule == "sgd")

    def warnings(self, replicas: int, *, lr: float, momentum: float) -> list[str]:
        """Momentum may add up, or may not be used at all."""
        if self.server_rule == "adagrad" and momentum:
            return [f"momentum {momentum:g} is not used: rule=adagrad has none. Give --momentum 0 to say so."]
        adds_up = self.rates == "given" and self.server_rule == "sgd"
        return momentum_adds_up(replicas, lr, momentum) if adds_up else []

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float] | None:
        """Weight decay, and with rule=sgd momentum; nothing with rule=add. Momentum is refused with rule=adagrad."""
        settings = self._settings(optimizer)
        if settings is not None and self.server_rule == "adagrad" and settings["momentum"]:
            raise ConfigError(
                "here servers step in the place of the optimizer, as Adagrad, and cannot do "
                f"momentum={settings['momentum']:g} of {type(optimizer).__name__}.",
                f"Give momentum=0, or torch.optim.Adagrad; or, to keep it, {_STEP_BY_ITSELF}.",
            )
        return settings

    def _settings(self, optimizer: Optimizer) -> Mapping[str, float] | None:
        """The same; of shoal train's SGD, whose momentum adagrad leaves out after a warning."""
        if self.server_rule == "add":
            return None
        return taken_over(optimizer, _STEP_BY_ITSELF, adagrad=self.server_rule == "adagrad")

    def join(self, replica: Replica, seat: Seat, number: int) -> "Downpour":
        """Servers take momentum and weight decay of the optimizer over, unless replicas make all steps themselves."""
        rule = self.server_rule
        settings = self._settings(replica.optimizer) or {"momentum": 0.0, "weight_decay": 0.0}
        at_server = settings["momentum"] if rule == "sgd" else 0.0
        terms = {
            "rule": rule,
            "momentum": at_server,
            "weight_decay": settings["weight_decay"],
            "max_staleness": self.max_staleness,
            **self.compression_terms(),
        }
        return Downpour(
            replica,
            reach_shards(replica, seat, number, terms, self.shards),
            rule=rule,
            server_momentum=at_server,
            push_every=self.push_every,
            fetch_every=self.fetch_every,
            turn=number,
            max_staleness=self.max_staleness,
            overlap=self.overlap,
            compressed=self.compress != "none",
        )


class Ask(NamedTuple):
    """What is asked of one shard."""

    number: int
    push: Sequence[Tensor] | None
    rate: float
    into: Sequence[Tensor] | None
    """Where its weights go, if they are fetched."""
    certain: bool = False
    """Whether another shard has taken its part of the push already."""


@dataclass(frozen=True)
class Underway:
    """What the thread beside compute is doing."""

    steps: int
    """Steps whose work it pushes; 0 where it only fetches."""
    fetches: bool


class Downpour(Exchange):
    """One replica and its shards, wherever these are."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        *,
        rule: str,
        server_momentum: float,
        push_every: int,
        fetch_every: int,
        turn: int = 0,
        sparse_back: bool = False,
        max_staleness: int | None = None,
        overlap: bool = False,
        compressed: bool = False,
    ) -> None:
        super().__init__(replica)
        self._slices = [slices for slices, _ in shards]
        self._shards = [shard for _, shard in shards]
        order = {name: (number, size) for number, (name, size) in enumerate(replica.sizes.items())}
        self._pieces = [[(*order[piece.name], piece.start, piece.stop) for piece in slices] for slices in self._slices]
        """For each shard, of each of its slices: which tensor, how large that is, from where and to where."""
        self._own_parts = self._cut(replica.weights)
        self._mark_parts: list[list[Tensor]] = []
        """The same parts of `_mark`."""
        self._rule, self._server_momentum = rule, server_momentum
        self._push_every, self._fetch_every = push_every, fetch_every
        self._local = push_every > 1 or fetch_every > 1 or rule == "add"
        """Whether this replica takes steps of its own between pushes or fetches."""
        self._versions = [0] * len(self._shards)
        self._undisturbed = [ALONE] * len(self._shards)
        """For each shard: pushes in a row before which nobody else had updated it since this replica's fetch."""
        self._turn = turn
        self._sparse_back = sparse_back
        self._compressed = compressed
        """Whether pushes are compressed on their way to shards."""
        self._may_be_dropped = max_staleness is not None
        """Whether shards may refuse a push. One of them then decides for all."""
        self._decides = False
        """Whether the shard that decides is this rank's first one."""
        self._count = 0
        self._fetch_count = 0
        self._traffic = (0, 0)
        self._mark: list[Tensor] = []
        """Weights as of the last push or fetch: the difference since is this replica's own work."""
        self._sums: list[Tensor] = []
        """Gradients since the last push, where servers want them and several make a push."""
        self._changes: list[Tensor] = []
        """Memory for how far weights came since `_mark`: new memory each time would cost more than the subtraction."""

        self._beside: Beside[list[Outcome]] | None = Beside("shoal-exchange") if overlap else None
        self._underway: Underway | None = None
        self._arriving: list[Tensor] = []
        """Where weights are fetched to beside compute."""
        self._bases: list[int] | None = None
        """Versions on which the pushed gradient was computed, where newer weights were fetched since."""
        self._own_versions: list[int] | None = None
        """Versions of the weights that this replica has, while newer ones may be on their way."""
        self._since_push = 0
        """Steps of which nothing is pushed yet."""
        self._landed = 0
        """Steps that are part of the common weights, and of which nobody was told yet."""

    @classmethod
    def of_every_gradient(
        cls,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        *,
        momentum: float,
        turn: int,
    ) -> "Downpour":
        """Servers step by SGD with momentum; every gradient is pushed, and the weights come back."""
        return cls(replica, shards, rule="sgd", server_momentum=momentum, push_every=1, fetch_every=1, turn=turn)

    def begin(self, *, first: bool) -> None:
        for number, (shard, weights) in enumerate(zip(self._shards, self._cut(self.replica.weights), strict=True)):
            if first:
                state = (
                    []
                    if self._server_state is None
                    else [self._cut(self.replica.remembered(self._server_state))[number]]
                )
                self._versions[number] = shard.begin(on_host(weights), [on_host(kept) for kept in state])
            else:
                self._versions[number] = shard.wait()
        speakers = [
            rank for rank, row in enumerate(self.replica.transport.gather_numbers([len(self._shards)])) if row[0]
        ]
        self._decides = speakers[:1] == [self.replica.transport.rank]
        self._push_and_fetch(None, None, into=self.replica.weights)
        self.replica.tell_weights()
        if self._local:
            self._mark = [weight.clone() for weight in self.replica.weights]
            self._mark_parts = self._cut(self._mark)
            if self._rule != "add":
                self._sums = [torch.zeros_like(weight) for weight in self.replica.weights]

    @property
    def _server_state(self) -> str | None:
        """The name under which the optimizer keeps the state of the servers' rule; None where the rule has none.

        Where replicas step too, their optimizers have a momentum of their own beside it.
        """
        if self._rule == "adagrad":
            return "sum"
        if self._rule == "add" or not self._server_momentum:
            return None
        return "server_momentum" if self._local else "momentum_buffer"

    def step(self, rate: float | None) -> bool | None:
        self._count += 1
        if self._beside is not None:
            return self._step_beside(self._beside, rate)
        self.tally.steps += 1
        if not self._local:
            applied = self._push_and_fetch(self._gradients(), rate, into=self.replica.weights)
            self.replica.tell_weights()
            return applied
        if self._rule != "add" and self._sums:
            torch._foreach_add_(self._sums, self._gradients())
        self._own_step(rate)
        push, fetch = self._count % self._push_every == 0, self._count % self._fetch_every == 0
        done = self._push_and_fetch_own(rate, push=push, fetch=fetch) if push or fetch else False
        return done if push else None

    def _step_beside(self, beside: Beside[list[Outcome]], rate: float | None) -> bool | None:
        """A step while a thread pushes and fetches; a later step takes over what was fetched."""
        self._since_push += 1
        bases = self._own_versions or list(self._versions)
        push = fetch = True
        values: list[Tensor] = []
        if not self._local:
            values = [gradient.clone() for gradient in self._gradients()]
        else:
            if self._sums:
                torch._foreach_add_(self._sums, self._gradients())
            self._own_step(rate)
            push, fetch = self._count % self._push_every == 0, self._count % self._fetch_every == 0
        if push or fetch or self._has_arrived(beside):
            self._take_over()
        if push or fetch:
            if self._local and push:
                values = [value.clone() for value in self._own_values()]
                if self._sums:
                    torch._foreach_zero_(self._sums)
                copy_all(self._mark, self.replica.weights)
            self._speak_beside(beside, values if push else None, rate, bases, fetch=fetch)
        return self._tell_landed()

    def _speak_beside(
        self,
        beside: Beside[list[Outcome]],
        values: list[Tensor] | None,
        rate: float | None,
        bases: list[int],
        *,
        fetch: bool,
    ) -> None:
        if fetch and not self._arriving:
            self._arriving = [torch.empty_like(weight) for weight in self.replica.weights]
        rate, into = self._rate(rate), self._arriving if fetch else None
        self._underway = Underway(self._since_push if values is not None else 0, fetch)
        if values is not None:
            self._since_push = 0
        self._bases, self._own_versions = bases, list(self._versions)
        beside.begin(lambda: self._speak(values, rate, into, lane="network"))

    def _has_arrived(self, beside: Beside[list[Outcome]]) -> bool:
        """Whether the answers are there, on all ranks of the replica: they take them over together."""
        if self._underway is None:
            return False
        return all(row[0] for row in self.replica.transport.gather_numbers([beside.done]))

    def _take_over(self) -> None:
        """Wait for the push and fetch under way, if any; take the fetched weights and add what was done since."""
        if self._underway is None or self._beside is None:
            return
        underway, self._underway = self._underway, None
        with self._waiting("push and fetch beside compute"):
            outcomes = self._beside.end()
        self._bases = self._own_versions = None
        weights = self.replica.weights
        if underway.fetches:
            self._fetch_count += 1
            if self._fetch_count % SPREAD_EVERY == 0:
                self.tally.spread = distance(weights, self._arriving)
            kept = self._change() if self._local else []
            copy_all(weights, self._arriving)
            copy_all(self._mark, self._arriving if self._mark else ())
            if kept:
                torch._foreach_add_(weights, kept)
            self.replica.tell_weights()
        if underway.steps:
            self._note(outcomes, applied=True)
            self._landed += underway.steps

    def _tell_landed(self) -> bool | None:
        """Count the steps whose work became part of the common weights since the last call; None without any."""
        landed, self._landed = self._landed, 0
        self.tally.steps += landed
        return True if landed else None

    def _land(self) -> None:
        """Wait for what is under way, and push what is left."""
        self._take_over()
        if self._since_push:
            self._push_and_fetch_own(None, push=True, fetch=True)
            self._landed, self._since_push = self._landed + self._since_push, 0
        self._count = 0

    def flush(self) -> bool | None:
        if self._beside is not None:
            self._land()
            return self._tell_landed()
        if not self._local or self._count % self._push_every == 0:
            return None
        self._count = 0
        return self._push_and_fetch_own(None, push=True, fetch=True)

    def _gradients(self) -> list[Tensor]:
        """What the last backward gives to servers, which may overwrite it."""
        return self.replica.gradients()

    def settle(self) -> None:
        if self._beside is not None:
            self._land()
        if self._local:
            if self._count % self._push_every:
                self._push_and_fetch_own(None, push=True, fetch=False)
            self._count = 0
        remembered = [] if self._server_state is None else self._cut(self.replica.remembered(self._server_state))
        with self._waiting("fetch the common weights"):
            for number, shard in enumerate(self._shards):
                taken = shard.snapshot()
                copy_all(self._own_parts[number], taken.weights)
                if remembered:
                    copy_all(remembered[number], taken.state[0])
                self._versions[number] = taken.version
        self.replica.tell_weights()
        copy_all(self._mark, self.replica.weights if self._mark else ())

    def own_state(self) -> dict[str, Tensor]:
        """What was not pushed yet; and what an optimizer remembers that is this replica's own."""
        remembered = self.replica.optimizer_state() if self._remembers else {}
        own = {key: value for key, value in remembered.items() if key.partition("/")[0] != self._server_state}
        return {**super().own_state(), **own}

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().put_own_state(state)
        if self._remembers:
            self.replica.put_optimizer_state(
                {key: value for key, value in state.items() if not key.startswith(RESIDUAL)}
            )

    @property
    def _remembers(self) -> bool:
        """Whether momentum, or what else an optimizer remembers, is this replica's own, and not the servers'."""
        return self._local

    def _kept_in_shards(self) -> list[list[Tensor]]:
        """What was not pushed to each shard yet, of each of its slices, as it is kept; of all or of none."""
        return [shard.kept_back() for shard in self._shards]

    def _kept_back(self) -> list[Tensor]:
        kept: dict[str, list[Tensor]] = {}
        for slices, parts in zip(self._slices, self._kept_in_shards(), strict=True):
            for piece, part in zip(slices, parts, strict=False):  # a shard keeps parts of all its slices, or none
                kept.setdefault(piece.name, []).append(part)
        return [torch.cat(kept[name]) for name in self.replica.names if name in kept]

    def _put_back(self, left: Sequence[Tensor]) -> None:
        for into, given in zip(self._kept_in_shards(), self._cut(left), strict=True):
            copy_all(into, given if into else ())

    def interrupt(self) -> None:
        """Whoever waits for a server's answer gets a `LinkLost`. Nothing waits in shared memory."""
        self.close()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        if self._beside is not None:
            self._beside.close()

    def _push_and_fetch_own(self, rate: float | None, *, push: bool, fetch: bool) -> bool:
        """Push what this replica did since its last push; fetch, and add to it what is not pushed yet."""
        weights = self.replica.weights
        kept = self._change() if not push and self._count % self._push_every > 0 else []
        # Where servers send changes only, these are relative to what this replica last fetched.
        into, after = (self._mark, weights) if self._sparse_back else (weights, self._mark)
        applied = self._push_and_fetch(self._own_values() if push else None, rate, into=into if fetch else None)
        if push and self._sums:
            torch._foreach_zero_(self._sums)
        if fetch:
            copy_all(after, into)
        elif push:
            copy_all(self._mark, weights)
        if kept:
            torch._foreach_add_(weights, kept)
        if fetch:
            self.replica.tell_weights()
        return applied

    def _own_values(self) -> list[Tensor]:
        """What is pushed for the steps since the last push: the change of weights, or the sum of gradients."""
        return self._change() if self._rule == "add" else self._sums

    def _change(self) -> list[Tensor]:
        """How far this replica came since its last push or fetch."""
        weights = self.replica.weights
        self._changes = self._changes or [torch.empty_like(weight) for weight in weights]
        for change, weight, mark in zip(self._changes, weights, self._mark, strict=True):
            torch.sub(weight, mark, out=change)
        return self._changes

    def _push_and_fetch(
        self,
        values: Sequence[Tensor] | None,
        rate: float | None,
        *,
        into: Sequence[Tensor] | None,
        at_least: int = 0,
    ) -> bool:
        """Push `values` and fetch weights `into` these tensors, unless there are none; at all shards at once."""
        rate = self._rate(rate)
        before = self._copy_now_and_then() if into is not None and values is not None else None
        decided: dict[int, Outcome] = {}
        what = "push" if into is None else "fetch" if values is None else "push and fetch"
        with self._waiting(what):
            taken = values is not None
            if values is not None and self._may_be_dropped:
                taken = self._push_first(self._cut(values), rate, decided)
            outcomes = self._speak(values if taken else None, rate, into, decided, at_least=at_least)
        if before is not None and into is not None:  # the second condition is for the type checker
            self.tally.spread = distance(before, into)
        return self._note(outcomes, applied=taken) if values is not None else True

    def _rate(self, rate: float | None) -> float:
        return float(self.replica.optimizer.param_groups[0]["lr"] if rate is None else rate)

    def _speak(
        self,
        values: Sequence[Tensor] | None,
        rate: float,
        into: Sequence[Tensor] | None,
        decided: Mapping[int, Outcome] = MappingProxyType({}),
        *,
        at_least: int = 0,
        lane: Lane = "compute",
    ) -> list[Outcome]:
        """What became of a push, at each shard; those that `decided` already are not pushed to again."""
        fetched = None if into is None else self._cut_into(into)
        pushed = None if values is None else self._cut(values)
        outcomes = dict(decided)
        asks: list[Ask] = []
        for number in self._turns():
            push = pushed[number] if pushed is not None and number not in outcomes else None
            asks.append(Ask(number, push, rate, None if fetched is None else fetched[number], self._may_be_dropped))
        begin, finish = self._begin, self._finish
        if (diary := self.replica.transport.diary) is not None:
            begin, finish = partial(self._begin_noted, diary, lane), partial(self._finish_noted, diary, lane)
        for ask in asks:
            begin(ask, at_least)
        for ask in asks:
            outcome = finish(ask)
            if ask.push is not None:
                outcomes[ask.number] = outcome
        return list(outcomes.values())

    def _begin_noted(self, diary: Diary, lane: Lane, ask: Ask, at_least: int) -> None:
        with self._noted(diary, ask, "push to" if ask.push is not None else "ask", lane):
            self._begin(ask, at_least)

    def _finish_noted(self, diary: Diary, lane: Lane, ask: Ask) -> Outcome:
        with self._noted(diary, ask, "fetch from" if ask.into is not None else "answer of", lane):
            return self._finish(ask)

    @contextmanager
    def _noted(self, diary: Diary, ask: Ask, what: str, lane: Lane) -> Iterator[None]:
        """Where steps are recorded: what is done with one shard, and the bytes that go there meanwhile."""
        shard = self._shards[ask.number]
        begun, before = now(), shard.traffic[0]
        yield
        sent = shard.traffic[0] - before
        diary.note("exchange", f"{what} shard {ask.number}", begun, lane=lane, bytes=sent)

    def _push_first(self, pushed: Sequence[Sequence[Tensor]], rate: float, outcomes: dict[int, Outcome]) -> bool:
        """Push to the one shard that decides for all shards, of all ranks of the replica, what is too stale."""
        taken = False
        if self._decides:
            ask = Ask(0, pushed[0], rate, None)
            self._begin(ask)
            outcomes[0] = self._finish(ask)
            taken = outcomes[0].applied
        return any(row[0] for row in self.replica.transport.gather_numbers([taken]))

    def _turns(self) -> Sequence[int]:
        """Shards in an order in which replicas that begin together do not all wait for the same one."""
        count = len(self._shards)
        return [(self._turn + number) % count for number in range(count)]

    def _gives_weights(self, number: int) -> bool:
        alone = self._rule == "add" and not self._compressed and self._undisturbed[number] >= ALONE
        return alone and self._beside is None  # with a thread beside compute the weights are in use

    def _base(self, number: int) -> int:
        """The version on which what is pushed to a shard was computed."""
        return self._versions[number] if self._bases is None else self._bases[number]

    def _first_push(self, number: int, values: Sequence[Tensor], rate: float) -> Push:
        """Whole weights where nobody else pushed for long: that is exact, while adding a change would round."""
        if self._gives_weights(number):
            own = on_host([weight.clone() for weight in self._own_parts[number]])
            return Push(own, self._versions[number], rate, "weights")
        return Push(on_host(values), self._base(number), rate)

    def _begin(self, ask: "Ask", at_least: int = 0) -> None:
        push = None if ask.push is None else self._first_push(ask.number, ask.push, ask.rate)
        if push is not None and ask.certain:
            push = replace(push, certain=True)
        self._shards[ask.number].ask(push, fetch=ask.into is not None, at_least=at_least)

    def _finish(self, ask: "Ask") -> Outcome:
        number, shard = ask.number, self._shards[ask.number]
        outcome = _answer(shard, ask.into)
        if ask.push is not None:
            if not outcome.applied and self._gives_weights(number):
                again = Push(on_host(ask.push), self._versions[number], ask.rate, certain=ask.certain)
                shard.ask(again, fetch=ask.into is not None)
                outcome = _answer(shard, ask.into)
            self._undisturbed[number] = 0 if outcome.staleness else self._undisturbed[number] + 1
        if ask.into is not None:
            self._versions[number] = outcome.version
        elif outcome.applied and ask.push is not None:
            self._versions[number] += 1  # this replica's own update does not make its next gradient stale
        return outcome

    def _copy_now_and_then(self) -> list[Tensor] | None:
        """A copy of the weights before every `SPREAD_EVERY`th fetch, to measure the distance; else None."""
        self._fetch_count += 1
        return [weight.clone() for weight in self.replica.weights] if self._fetch_count % SPREAD_EVERY == 0 else None

    def _note(self, outcomes: Iterable[Outcome], *, applied: bool) -> bool:
        """A push is as stale as its stalest part. Where replicas wait for each other, one that came late is dropped."""
        parts = list(outcomes)
        applied = applied and (all(part.applied for part in parts) or not parts)
        if applied:
            self.tally.updates += 1
            self.tally.staleness[max((part.staleness for part in parts), default=0)] += 1
        else:
            self.tally.dropped += 1
        sent = received = 0
        for shard in self._shards:
            there, back = shard.traffic
            sent, received = sent + there, received + back
        self.tally.sent_bytes += sent - self._traffic[0]
        self.tally.received_bytes += received - self._traffic[1]
        self._traffic = sent, received
        return applied

    def _cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each shard holds of these tensors, as views; of a tensor that it holds whole, that tensor."""
        return [
            [
                tensors[number] if stop - start == size else tensors[number][start:stop]
                for number, size, start, stop in pieces
            ]
            for pieces in self._pieces
        ]

    def _cut_into(self, into: Sequence[Tensor]) -> list[list[Tensor]]:
        """The same of where weights are fetched to, mostly the same tensors again and again."""
        if into is self.replica.weights:
            return self._own_parts
        return self._mark_parts if into is self._mark else self._cut(into)


def _answer(shard: ShardClient, into: Sequence[Tensor] | None) -> Outcome:
    """Receive a shard's answer in host memory, and copy it to the device where the replica's weights are."""
    if into is None or all(tensor.is_cpu for tensor in into):
        return shard.answer(into)
    arrived = [torch.empty_like(tensor, device="cpu") for tensor in into]
    outcome = shard.answer(arrived)
    copy_all(into, arrived)
    return outcome
