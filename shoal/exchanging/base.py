"""What every exchange is to a training loop, and what it tells about itself."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.exchanging.replica import Replica


@dataclass
class Tally:
    """What happened between this replica and the others since the last `take`."""

    steps: int = 0
    updates: int = 0
    """Pushes that were applied."""
    dropped: int = 0
    """Gradients that came too late, or were too stale."""
    wait_seconds: float = 0.0
    """Spent in the exchange instead of computing."""
    sent_bytes: int = 0
    received_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    spread: float | None = None
    """Distance of this replica's weights from the common ones when it last fetched, relative to their length."""

    def to_dict(self) -> dict[str, Any]:
        """For a message."""
        return {**self.__dict__, "staleness": sorted(self.staleness.items())}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Tally":
        """What `to_dict` gave."""
        return cls(**{**values, "staleness": Counter(dict(values["staleness"]))})

    def add(self, other: "Tally") -> None:
        """Take `other` in."""
        for name in ("steps", "updates", "dropped", "wait_seconds", "sent_bytes", "received_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.staleness.update(other.staleness)
        self.spread = self.spread if other.spread is None else other.spread


class Exchange(ABC):
    """One rank's side of an exchange. All ranks of a replica call the same methods in the same order.

    exchange.begin(first=True)          # one replica gives the first weights, the others take them
    ... loss.backward()
    exchange.step(rate)                 # in the place of optimizer.step()
    exchange.settle()                   # now the weights are the common ones, to be tested or saved
    exchange.close()
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.tally = Tally()

    @abstractmethod
    def begin(self, *, first: bool) -> None:
        """Before the first step. One that is `first` brings the first weights, if nobody did; others take them."""

    @abstractmethod
    def step(self, rate: float | None) -> bool | None:
        """After backward: take this replica one step on, at this learning rate, or at those of the optimizer's groups.

        True: what this replica did since its last push is part of the common weights now. False: it was dropped (too
        late, or too stale). None: it will be pushed with a later step, or by `flush`.
        """

    def flush(self) -> bool | None:
        """Push what is not pushed yet; None if there is nothing. Before a pause, so that no work waits for its end."""
        return None

    @abstractmethod
    def settle(self) -> None:
        """Make this replica's weights and optimizer state the common ones, which a test or a checkpoint wants."""

    def close(self) -> None:  # noqa: B027  (a hook: not every exchange has something to let go of)
        """Leave in good order."""

    def _own_step(self, rate: float | None) -> None:
        """A step of the replica's own optimizer."""
        if rate is not None:
            for group in self.replica.optimizer.param_groups:
                group["lr"] = rate
        self.replica.optimizer.step()

    def take_tally(self) -> Tally:
        """What happened since the last time."""
        tally, self.tally = self.tally, Tally()
        return tally

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """What is spent inside is time in which this replica does not compute."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.tally.wait_seconds += time.perf_counter() - begun


def distance(own: Sequence[Tensor], common: Sequence[Tensor]) -> float:
    """How far two copies are apart, relative to the length of the second."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(own, common, strict=True))
    length = sum(float(b.square().sum()) for b in common)
    return float((apart / length) ** 0.5) if length else 0.0
