"""Many replicas over many steps in simulated time: who trains on what, who is there, and what comes of it.

Promise   every exchange's own `Options.join` and `Exchange.step` run here, with its shards, rounds, tickets and shares,
          and the conductor's own budget of batches; only wires, clocks and processes are simulated. The same seed gives
          the same run.
Cost      about 0.1 ms for a message and a step each, and the gradients where some are computed.
Not seen  what a host's processor spends on messages, tests and checkpoints; a full switch; frozen replicas; groups of
          ranks. Servers and the conductor have hosts of their own, which do not die.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchanges import ExchangeOptions, Holding, Rates
from shoal.exchanging import Exchange, Kind, Replica, Seat
from shoal.exchanging.gossip import Gossip
from shoal.exchanging.membership.peers import Peers
from shoal.exchanging.membership.tickets import Tickets
from shoal.exchanging.servers.server import ShardClient
from shoal.exchanging.servers.slices import Slice
from shoal.replicas.budget import Budget, LockstepBudget, SharedBudget
from shoal.swarm.churn import Churn
from shoal.swarm.peers import Answer, WiredOutbox, WiredPeers
from shoal.swarm.ring import Group, Ring
from shoal.swarm.servers import Farm, SharedShard
from shoal.swarm.stage import Actor, Moment, Stage
from shoal.swarm.wire import Host, Sent, Wire
from shoal.swarm.work import Work
from shoal.timeline import Message, Trace
from shoal.timeline import Slice as Drawn

TESTS = 10
"""Tests of the common weights over a run that trains."""


@dataclass(frozen=True)
class Setting:
    """The hosts, their links and what happens to them."""

    replicas: int
    steps: int
    """Of each replica, in the mean: all together have `replicas` times as many batches, unless all share every one."""
    step_seconds: float
    bandwidth: float
    """Bytes/s of each host's link, in each direction."""
    latency: float = 0.0
    jitter: float = 0.0
    """Standard deviation of a step's time as a part of it; log-normal, the mean stays."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Speeds of replicas that are not as fast as the others."""
    churn: Churn | None = None
    server_bandwidth: float | None = None
    apply_seconds: float = 0.0
    """That a server takes for a push."""
    one_host: bool = False
    seed: int = 0
    samples: int = 1
    """Of a replica's batch."""
    draws: Sequence[Sequence[float]] = ()
    """Measured seconds of steps, by replica, from which steps are drawn in the place of `step_seconds` and `jitter`."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    exchange: str
    seconds: float
    steps: int
    """That replicas computed, those of dead ones included."""
    counted: int
    """Replicas' batches that became part of the common weights, or of a replica's own."""
    samples_per_second: float
    staleness: Mapping[int, int]
    sent_bytes: float
    arrived_bytes: float
    lost_bytes: float
    bytes_per_step: float
    busiest_link: float
    """Part of the time for which the busiest link's busier direction was full."""
    computing: float
    """Part of the time of living replicas in which they computed."""
    dropped: int
    lost_steps: int
    """Computed by replicas that died before anybody had them."""
    deaths: int
    joins: int
    ended: str | None
    """Why it ended before all batches were trained on."""
    curve: Sequence[tuple[float, int, float]]
    """Simulated seconds, batches counted, accuracy of the common weights."""

    @property
    def mean_staleness(self) -> float:
        """Updates by others between a gradient's weights and its own update."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / total if total else 0.0

    def numbers(self) -> dict[str, Any]:
        """For other programs."""
        return {**self.__dict__, "mean_staleness": self.mean_staleness, "staleness": dict(self.staleness)}


@dataclass(eq=False)
class _Member:
    number: int
    exchange: Exchange
    random: np.random.Generator
    actors: set[Actor] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    born: float = 0.0
    died: float | None = None
    computed: float = 0.0
    steps: int = 0
    unshared: int = 0
    """Steps since it last spoke to anybody."""


class Swarm:
    """One run. It is the `World` that exchanges reach, and the coordinator that knows who is there."""

    def __init__(
        self,
        options: ExchangeOptions,
        setting: Setting,
        work: Work,
        rates: Rates,
        *,
        progress: Callable[[int, int, float], None] = lambda *_: None,
        traced: bool = False,
    ) -> None:
        assert isinstance(options, Kind)
        self.options: Kind = options.among(setting.replicas)
        self.setting, self._work, self._progress = setting, work, progress
        refuse(self.options, setting)
        weights = round(work.scale * sum(w.nbytes for w in work.trainee(0, 0.0).weights))
        holding = self.options.holding(setting.replicas, one_host=setting.one_host, weight_bytes=weights)
        self._rates = self.options.tuned(rates, setting.replicas)
        self.stage = Stage()
        hosts: list[Host] = [("server", number) for number in range(holding.servers or 1)]
        faster = {} if setting.server_bandwidth is None else dict.fromkeys(hosts, setting.server_bandwidth)
        self.wire = Wire(self.stage.agenda, setting.bandwidth, setting.latency, faster)
        if traced:
            self.wire.messages = []
        self._drawn: list[Drawn] | None = [] if traced else None
        self._holding: Holding = holding
        self._farm = Farm(self.stage.agenda, self.wire, hosts, work.scale, setting.apply_seconds)
        self._ring = Ring(self, setting.replicas)
        wanted = self.options.gradients_per_update(setting.replicas)
        self._tickets = Tickets(wanted, setting.replicas) if wanted else None
        self._budget: Budget
        if self.options.same_batch:
            self._budget = LockstepBudget(setting.steps, setting.replicas)
            self._parts = setting.replicas
        else:
            self._budget = SharedBudget(setting.steps * setting.replicas, warm=self.options.lone_batches)
            self._parts = 1
        self._total = setting.steps * setting.replicas // self._parts
        self.answers: dict[int, Answer] = {}
        self.talks: set[Any] = set()
        self.members: dict[int, _Member] = {}
        self.alive: set[int] = set()
        self.known: set[int] = set()
        """Who takes part, as far as the coordinator knows."""
        self._resting: set[int] = set()
        self._idle: list[Moment] = []
        self._next_number = setting.replicas
        self._fate = np.random.default_rng((setting.seed, 1))
        self._deaths = self._joins = self._lost_steps = 0
        self._ended: str | None = None
        self._over = False
        self._seconds = 0.0
        self._curve: list[tuple[float, int, float]] = []
        self._next_test = 0.0

    # The run

    def run(self) -> Outcome:
        """Until all batches are trained on, or nobody can go on."""
        for number in range(self.setting.replicas):
            self._come(number)
        self.stage.run()
        if not self._over:
            self._over, self._seconds = True, self.stage.now
            self._ended = self._ended or "no replica was left that could go on"
        self._test(last=True)
        return self._outcome()

    def _come(self, number: int) -> None:
        """A replica begins, at the start or in the place of one that died."""
        random_steps = np.random.default_rng((self.setting.seed, 2, number))
        replica = self._work.trainee(number, self._rates.momentum)
        meeting = SimpleNamespace(replicas=self.setting.replicas, timeout=math.inf, shared=None, store=None)
        if self._holding.place == "direct":
            meeting.shared = "memory"
        seat = SimpleNamespace(
            world=self,
            rank=0,
            meeting=meeting,
            heartbeat=self.options.heartbeat,
            ask=lambda head: self._ask(number, head),
        )
        exchange = self.options.join(replica, cast(Seat, seat), number)
        member = self.members[number] = _Member(number, exchange, random_steps, born=self.stage.now)
        if isinstance(exchange, Gossip):
            exchange._draws = random.Random(f"{self.setting.seed}/{number}")
        self.alive.add(number)
        self.known.add(number)
        self._tell()
        churn = self.setting.churn
        if churn is not None:
            at = self.stage.now + float(self._fate.exponential(churn.lifetime))
            self.stage.agenda.note(at, lambda _: self._die(number))
        self.enter(number, lambda: self._live(member))

    def _live(self, member: _Member) -> None:
        """What a replica does for as long as it lives."""
        exchange, stage = member.exchange, self.stage
        exchange.begin(first=member.number == 0)
        there_and_back = 2 * self.setting.latency
        ahead: tuple[int, float] | None = None
        while True:
            taken = ahead or self._take(member)
            ahead = None
            if taken is None:
                return
            batch, asked = taken
            if stage.now < asked + there_and_back:
                stage.sleep(asked + there_and_back - stage.now)
            if self.options.asks_ahead and not self.options.drops:
                following = self._budget.take(member.number)
                ahead = None if following is None else (following, stage.now)
            begun = stage.now
            self._work.gradient(exchange.replica, batch)
            seconds = self._step_seconds(member)
            stage.sleep(seconds)
            member.computed += seconds
            member.steps += 1
            member.unshared += 1
            computed, spoken = stage.now, exchange.tally.updates
            counted = exchange.step(self._rates.lr)
            member.pending.append(batch)
            if exchange.tally.updates > spoken:
                member.unshared = 0
            if self._drawn is not None:
                row = member.number
                self._drawn.append(Drawn("step", row, f"batch {batch}", begun, stage.now, "steps", member.steps))
                self._drawn.append(Drawn("forward", row, f"batch {batch}", begun, computed, step=member.steps))
                if stage.now > computed:
                    self._drawn.append(
                        Drawn("exchange", row, self.options.name, computed, stage.now, step=member.steps)
                    )
            self._report(member, counted)

    def _take(self, member: _Member) -> tuple[int, float] | None:
        """The next batch and when it was asked for; None when the run is over. Waits where there is none now."""
        while (batch := self._budget.take(member.number)) is None:
            self._report(member, member.exchange.flush())
            if self._budget.finished:
                return None
            self._resting.add(member.number)
            self._tell()
            changed = Moment()
            self._idle.append(changed)
            changed.wait()
            self._resting.discard(member.number)
            self._tell()
        return batch, self.stage.now

    def _step_seconds(self, member: _Member) -> float:
        setting = self.setting
        if setting.draws:
            measured = setting.draws[member.number % len(setting.draws)]
            return float(member.random.choice(np.asarray(measured)))
        seconds = setting.step_seconds / setting.slow.get(member.number, 1.0)
        if setting.jitter:
            spread = math.log1p(setting.jitter**2)
            seconds *= float(member.random.lognormal(-spread / 2, spread**0.5))
        return seconds

    def _report(self, member: _Member, counted: bool | None) -> None:
        if counted is None or self._over:
            return
        batches, member.pending = member.pending, []
        for batch in batches:
            self._budget.done(member.number, batch, applied=counted)
        self._wake()
        self._progress(self._budget.counted, self._total, self.stage.now)
        self._test()
        if self._budget.finished:
            self._end(None)

    def _wake(self) -> None:
        idle, self._idle = self._idle, []
        for moment in idle:
            moment.happen()

    def _end(self, why: str | None) -> None:
        self._over, self._ended, self._seconds = True, why, self.stage.now
        self.stage.agenda.end()

    # Deaths and joins

    def enter(self, number: int, play: Callable[[], None]) -> None:
        """Somebody who acts on a replica's host, and ends with it."""
        if number in self.alive:
            member = self.members[number]
            member.actors = {actor for actor in member.actors if actor.there}
            member.actors.add(self.stage.enter(play))

    def after_heartbeat(self, do: Callable[[], None]) -> None:
        """What others notice of a host that is silent."""
        self.stage.agenda.note(self.stage.now + self.options.heartbeat, lambda _: do())

    def _die(self, number: int) -> None:
        """A host vanishes without a word."""
        member = self.members[number]
        member.died = self.stage.now
        self._deaths += 1
        self._lost_steps += len(member.pending) if not isinstance(member.exchange, Gossip) else 0
        self._lost_steps += member.unshared if self.options.keeps_own and not member.pending else 0
        self.alive.discard(number)
        self.answers.pop(number, None)
        self.wire.die(number)
        for actor in member.actors:
            actor.end()
        for talk in [talk for talk in self.talks if number in (talk.asker, talk.peer)]:
            self.after_heartbeat(talk.fail)
        self.after_heartbeat(lambda: self._miss(number))
        churn = self.setting.churn
        if churn is not None and churn.away and self.options.takes_late:
            at = self.stage.now + float(self._fate.exponential(churn.away))
            self.stage.agenda.note(at, lambda _: self._return())

    def _miss(self, number: int) -> None:
        """The coordinator notices."""
        self.known.discard(number)
        if not self.options.survives:
            self._end(f"replica {number} was lost, and {self.options.name} cannot go on without one")
            return
        self._budget.lose(number)
        self._tell()
        self._wake()

    def _return(self) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        if not self.alive:
            self._end("all replicas were gone")
            return
        self._joins += 1
        self._come(number)

    # What the coordinator says

    def _ask(self, number: int, head: Mapping[str, Any]) -> Any:
        """A question of a replica to the coordinator: of tickets alone, here."""
        assert head["ask"] == "ticket"
        assert self._tickets is not None
        self.stage.sleep(self.setting.latency)
        before = self._tickets.version
        counts = number in self.known and self._tickets.ask(number, int(head["version"]))
        if self._tickets.version != before:
            self._tell_servers()
        told = {"counts": counts, "version": self._tickets.version}
        self.stage.sleep(self.setting.latency)
        return SimpleNamespace(head=told)

    def _tell(self) -> None:
        """Who takes part has changed."""
        if self._tickets is not None:
            self._tickets.members(self.known, self._resting)
        self._tell_servers()

    def _tell_servers(self) -> None:
        active, resting = frozenset(self.known), frozenset(self._resting)
        makers = {} if self._tickets is None else self._tickets.makers()
        if not self._farm.held:
            return

        def tell(_: float) -> None:
            for held in self._farm.held:
                held.told(active, resting, makers)

        self.stage.agenda.note(self.stage.now + self.setting.latency, tell)

    # What exchanges reach

    def shards(
        self, replica: Replica, number: int, terms: Mapping[str, Any]
    ) -> list[tuple[Sequence[Slice], ShardClient]]:
        """The servers' shards; or the one that replicas of a host share."""
        shards = self._farm.shards(replica, number, number, terms)
        if self._holding.place == "direct":
            return [
                (held.slices, SharedShard(held, self.wire, number, number, self._work.scale))
                for held in self._farm.held
            ]
        return shards

    def peers(self, number: int) -> Peers:
        """The other replicas."""
        return cast(Peers, WiredPeers(self, number))

    def outbox(self, number: int, deliver: Callable[..., None]) -> Any:
        """Beside the training."""
        return WiredOutbox(self, number, deliver)

    def group(self, number: int) -> Any:
        """All replicas."""
        return Group(self._ring, number)

    def scaled(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that tensors stand for."""
        return round(self._work.scale * sum(tensor.nbytes for tensor in tensors))

    # What came of it

    def common(self) -> dict[str, Tensor]:
        """The common weights of now, which a test would take: the servers', or the mean of replicas'."""
        there = [self.members[number] for number in sorted(self.alive)] or [next(iter(self.members.values()))]
        first = there[0].exchange
        if isinstance(first, Gossip):
            mean, total = [torch.zeros_like(weight) for weight in first.replica.weights], 0.0
            for member in there:
                assert isinstance(member.exchange, Gossip)
                own, share = member.exchange.weights_now()
                total += share
                for kept, part in zip(mean, own, strict=True):
                    kept.lerp_(part, share / total if total else 0.0)
            return dict(zip(first.replica.names, mean, strict=True))
        if self._farm.held:
            return self._farm.weights()
        return dict(zip(first.replica.names, first.replica.weights, strict=True))

    def shares(self) -> float:
        """Of gossip: the shares that living replicas hold, without those on their way."""
        return sum(
            member.exchange.weights_now()[1]
            for number, member in self.members.items()
            if number in self.alive and isinstance(member.exchange, Gossip)
        )

    def _test(self, *, last: bool = False) -> None:
        counted = self._budget.counted
        if counted < self._next_test and not last:
            return
        self._next_test = counted + self._total / TESTS
        accuracy = self._work.accuracy(self.common())
        if accuracy is not None and not (self._curve and self._curve[-1][1] == counted):
            self._curve.append((self.stage.now, counted, accuracy))

    def _outcome(self) -> Outcome:
        seconds, members = self._seconds, list(self.members.values())
        staleness: Counter[int] = Counter()
        for member in members:
            staleness.update(member.exchange.tally.staleness)
        lived = sum((seconds if m.died is None else min(m.died, seconds)) - m.born for m in members)
        counted, steps = self._budget.counted * self._parts, sum(m.steps for m in members)
        ways = self.wire.by_host.items()
        rate = {host: self.setting.server_bandwidth or self.setting.bandwidth for (host, _), _ in ways}
        full = [size / (rate[host] if isinstance(host, tuple) else self.setting.bandwidth) for (host, _), size in ways]
        return Outcome(
            exchange=self.options.name,
            seconds=seconds,
            steps=steps,
            counted=counted,
            samples_per_second=counted * self.setting.samples / seconds if seconds else 0.0,
            staleness=dict(sorted(staleness.items())),
            sent_bytes=self.wire.sent,
            arrived_bytes=self.wire.arrived,
            lost_bytes=self.wire.lost,
            bytes_per_step=self.wire.arrived / steps if steps else 0.0,
            busiest_link=max(full, default=0.0) / seconds if seconds else 0.0,
            computing=sum(m.computed for m in members) / lived if lived else 0.0,
            dropped=sum(m.exchange.tally.dropped for m in members),
            lost_steps=self._lost_steps,
            deaths=self._deaths,
            joins=self._joins,
            ended=self._ended,
            curve=tuple(self._curve),
        )

    def trace(self) -> Trace:
        """What every replica did, with a row for each, servers last."""
        assert self._drawn is not None, "it was not to be traced"
        assert self.wire.messages is not None
        servers = sorted(
            {host for sent in self.wire.messages for host in (sent.src, sent.dst) if isinstance(host, tuple)}
        )
        rows: dict[Any, int] = {number: number for number in self.members}
        rows.update({host: len(self.members) + place for place, host in enumerate(servers)})
        names = [f"replica {number}" for number in sorted(self.members)] + [f"server {host[1]}" for host in servers]
        messages = tuple(_message(sent, rows) for sent in self.wire.messages)
        title = f"{self.options.name} among {self.setting.replicas} replicas"
        return Trace(title, "predicted", tuple(names), tuple(self._drawn), messages)


def _message(sent: Sent, rows: Mapping[Any, int]) -> Message:
    return Message(rows[sent.src], rows[sent.dst], sent.label, sent.began, sent.ended, round(sent.bytes))


def refuse(options: ExchangeOptions, setting: Setting) -> None:
    """A `ConfigError` where these options cannot be simulated, or cannot be at all."""
    options.check_replicas(setting.replicas)
    for name, plain in (("compress", "none"), ("overlap", False)):
        if getattr(options, name, plain) != plain:
            raise ConfigError(
                f"{options.name} with {name}={getattr(options, name)} is not simulated.", f"Leave {name} out."
            )
    if getattr(options, "servers", "auto") == "threads":
        raise ConfigError("servers=threads is not simulated.", "Give servers=processes: hosts of their own.")


def simulate_swarm(
    options: ExchangeOptions,
    setting: Setting,
    work: Work,
    rates: Rates = Rates(0.05, 0.9),  # noqa: B008  (immutable)
    **how: Any,
) -> Outcome:
    """One run of so many replicas; see `Swarm`."""
    return Swarm(options, setting, work, rates, **how).run()
