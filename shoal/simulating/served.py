"""Workers and parameter servers in time: each worker steps, pushes its gradients and fetches weights. Pure.

    asynchronous   a worker goes on when its own weights are there; the servers apply what comes, as it comes
    together       the servers wait for all workers, and all fetch the same weights

Parameters lie evenly on the servers, each of which has a card of its own, as each worker has; both directions of a card
work at once, and whatever is on one at the same time gets an equal part of it. A message is through when both cards are
done with it. Applying takes the servers no time: no paper says what they compute with.

Cost: a heap event per message and step. Not seen: deaths, joins, a switch that is itself full.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from shoal.errors import InputError
from shoal.simulating.links import Agenda, Links


@dataclass(frozen=True)
class Served:
    """Workers of one kind and the servers that they share."""

    workers: int
    step: float
    """Seconds of one step of a worker, its own devices' sums included."""
    pushed: float
    """Bytes of one push, to all servers together."""
    fetched: float
    bandwidth: float
    """Bytes/s of each card, in each direction."""
    latency: float = 0.0
    servers: int = 1
    every: int = 1
    """Steps between two pushes."""
    together: bool = False
    jitter: float = 0.0
    """Standard deviation of a step's time, as a part of it; log-normal, the mean stays."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.workers, self.servers, self.every) < 1 or min(self.step, self.bandwidth) <= 0:
            raise InputError(
                f"{self.workers} workers, {self.servers} servers, a push every {self.every} steps of {self.step} s at "
                f"{self.bandwidth} bytes/s cannot be simulated.",
                "All of these are above 0.",
            )


@dataclass(frozen=True)
class Service:
    """What came of it."""

    seconds: float
    """Until the last worker had its last weights."""
    steps: int
    """Of all workers."""
    rate: float
    """Steps per second of all workers, in the second half of the time in which all are at work."""
    staleness: tuple[int, ...]
    """Of every push in its order: updates by others since the weights that it was computed from set out."""
    bytes: float
    """Pushed and fetched."""

    @property
    def mean_staleness(self) -> float:
        """Over the second half of the pushes."""
        late = self.staleness[len(self.staleness) // 2 :]
        return float(np.mean(late)) if late else 0.0


def serve(served: Served, *, rounds: int = 100) -> Service:
    """Let every worker push and fetch `rounds` times. The same seed gives the same times."""
    if rounds < 2:
        raise InputError(f"{rounds} rounds say nothing about a steady state.", "Give 2 or more.")
    return _Servers(served, rounds).run()


class _Servers:
    def __init__(self, served: Served, rounds: int) -> None:
        self.served, self.rounds = served, rounds
        self.agenda = Agenda()
        self.links = Links(self.agenda)
        self.random = np.random.default_rng(served.seed)
        self.version = 0
        self.known = [0] * served.workers
        """By worker, the version that it computes with."""
        self.staleness: list[int] = []
        self.ends: list[list[float]] = [[] for _ in range(served.workers)]
        """When rounds ended, by worker."""
        self.arrived: list[int] = []

    def run(self) -> Service:
        for worker in range(self.served.workers):
            self._compute(worker, 0.0)
        self.agenda.run()
        served, total = self.served, self.served.workers * self.rounds
        assert sum(map(len, self.ends)) == total, "a worker waits for what never comes"
        seconds = self.agenda.now
        return Service(
            seconds,
            total * served.every,
            self._rate(),
            tuple(self.staleness),
            total * (served.pushed + served.fetched),
        )

    def _rate(self) -> float:
        """Of every worker between its middle and last round, as long as all are still at work."""
        rate, until = 0.0, min(ends[-1] for ends in self.ends)
        for ends in self.ends:
            there = [end for end in ends if end <= until]
            late = there[(len(there) - 1) // 2 :] if len(there) > 1 else ends[:2]
            rate += self.served.every * (len(late) - 1) / (late[-1] - late[0])
        return rate

    def _compute(self, worker: int, now: float) -> None:
        seconds = self.served.step * self.served.every
        if self.served.jitter:
            spread = np.log1p(self.served.jitter**2)
            draws = self.random.lognormal(-spread / 2, spread**0.5, size=self.served.every)
            seconds = self.served.step * float(draws.sum())
        self.agenda.note(now + seconds, lambda then: self._send(worker, "push", self._pushed, then))

    def _send(self, worker: int, kind: str, done: Callable[[int, float], None], now: float) -> None:
        """One message to or from every server; `done` when all are through."""
        size = self.served.pushed if kind == "push" else self.served.fetched
        share = size / self.served.servers / self.served.bandwidth
        open_parts = [2 * self.served.servers]

        def through(then: float) -> None:
            open_parts[0] -= 1
            if not open_parts[0]:
                done(worker, then)

        def begin(_: float) -> None:
            for server in range(self.served.servers):
                cards: tuple[Hashable, Hashable] = (kind, "worker", worker), (kind, "server", server)
                for card in cards:
                    self.links.carry(card, share, 1, through)

        self.agenda.note(now + self.served.latency, begin)

    def _pushed(self, worker: int, now: float) -> None:
        if not self.served.together:
            self._apply(worker)
            self._send(worker, "fetch", self._fetched, now)
            return
        self.arrived.append(worker)
        if len(self.arrived) == self.served.workers:
            everyone, self.arrived = self.arrived, []
            self.staleness += [0] * len(everyone)
            self.version += 1
            for other in everyone:
                self._send(other, "fetch", self._fetched, now)

    def _apply(self, worker: int) -> None:
        self.staleness.append(self.version - self.known[worker])
        self.version += 1
        self.known[worker] = self.version

    def _fetched(self, worker: int, now: float) -> None:
        self.ends[worker].append(now)
        if len(self.ends[worker]) < self.rounds:
            self._compute(worker, now)
