"""What every exchange offers to a training loop, and what it reports."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from shoal.diary import now
from shoal.exchanges import ExchangeOptions
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica

RESIDUAL = "residual/"
"""Before a weight's name: the key in `own_state` of what was not sent of its gradients or changes yet."""


class Kind(ExchangeOptions):
    """A kind of exchange: the `Options` of its file. Adding one means adding a file with such a class."""

    @abstractmethod
    def join(self, replica: Replica, seat: Seat, number: int) -> "Exchange":
        """One rank's side, of replica `number`. All ranks of the replica call it."""

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float] | None:  # noqa: ARG002
        """What servers that step in the optimizer's place take over of it; None where replicas make all steps.

        A `ConfigError` that names what servers cannot do, with the way out.
        """
        return None

    def unless_given(self, option: str, value: float) -> Self:
        """With this value of an option that nobody gave."""
        return self if option in self.model_fields_set else self.model_copy(update={option: value})


def steps_apart(replicas: int) -> int:
    """Steps between two meetings of replicas that step by themselves, unless it was said how often they meet.

    The more of them step meanwhile the further they go apart, so all together take equally many; each at least 2, so
    that any number of replicas step by themselves.

    >>> [steps_apart(replicas) for replicas in (1, 2, 3, 4, 8)]
    [4, 4, 2, 2, 2]
    """
    return max(2, min(4, 8 // replicas))


class OutOfStepError(Exception):
    """Another replica takes no part in this step: it rests, and all were to take the same steps."""


@dataclass
class Tally:
    """What happened between this replica and the others since the last `take_tally`."""

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
    with exchange.showing():            # now the weights are the common ones, to be tested or saved
        ...
    exchange.close()

    Here replicas have the common weights after every fetch. `OwnWeights` is for those that keep their own.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.tally = Tally()
        self.waits = False
        """Whether it waits for other replicas, or servers, now."""

    @abstractmethod
    def begin(self, *, first: bool) -> None:
        """Before the first step. The `first` replica gives the weights, unless some are there; others take them."""

    @abstractmethod
    def step(self, rate: float | None) -> bool | None:
        """After backward: one step of this replica, at this learning rate, or at those of the optimizer's groups.

        True: what this replica did since its last report counts: it is part of the common weights, or of weights that
        this replica goes on with. False: it was dropped (too late, or too stale). None: it will be pushed with a later
        step, or by `flush`.
        """

    def flush(self) -> bool | None:
        """Push what is not pushed yet; None if there is nothing. Before a pause, so that no work is held back."""
        return None

    @abstractmethod
    def settle(self) -> None:
        """Make this replica's weights and optimizer state the common ones. It needs no other replica to take part."""

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The common weights in the network, for a test or a checkpoint."""
        self.settle()
        yield

    def catch_up(self) -> None:
        """After a pause: fetch what the others did meanwhile, so that the next gradient is not stale."""
        self.settle()

    def own_state(self) -> dict[str, Tensor]:
        """What this replica needs to go on beside the common weights; saved in its slot of a checkpoint.

        Here what it has not sent yet. No tensor of it changes with the next step, unless it is the network's own.
        """
        left = self._kept_back()
        return {RESIDUAL + name: kept for name, kept in zip(self.replica.names, left, strict=True)} if left else {}

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `own_state` gave; after `begin`. A `ValueError` where it is of other weights.

        What was kept back by an exchange that was told to is forgotten by one that keeps nothing, and one that keeps
        something begins with nothing where nothing was kept.
        """
        if not any(key.startswith(RESIDUAL) for key in state):
            return
        for name, size in self.replica.sizes.items():
            left = state.get(RESIDUAL + name)
            if left is None or left.numel() != size:
                raise ValueError(f"what was not sent yet of {name} is not of {size} elements")
        self._put_back([state[RESIDUAL + name].view(-1) for name in self.replica.names])

    def _kept_back(self) -> list[Tensor]:
        """Copies of what was not sent yet of each tensor that this rank speaks for; none where nothing is kept."""
        return []

    def _put_back(self, left: Sequence[Tensor]) -> None:  # noqa: B027  (a hook, as `close` is)
        """Go on with what `_kept_back` gave."""

    def hand_over(self) -> bool | None:
        """Before this replica leaves for good: `flush`, and give away whatever would be lost with it."""
        return self.flush()

    def rest(self) -> None:  # noqa: B027  (only where a step is made by all replicas together)
        """This replica takes no step until `wake`: others that wait for it in one get an `OutOfStepError`, if they can.

        Does not wait for anybody.
        """

    def wake(self, *, complete: bool) -> None:  # noqa: B027
        """This replica takes steps again. `complete`: all replicas rested, and all take steps again from here."""

    def interrupt(self) -> None:  # noqa: B027
        """Let a step that waits for other replicas in another thread fail now, if it can. The exchange is over then."""

    def wait_until_sent(self) -> None:  # noqa: B027  (only where something is sent beside the training)
        """Return when nothing of this replica's is on its way any more."""

    def close(self) -> None:  # noqa: B027  (a hook: not every exchange has something to let go of)
        """Leave in good order."""

    def _own_step(self, rate: float | None) -> None:
        """A step of the replica's own optimizer."""
        if rate is not None:
            for group in self.replica.optimizer.param_groups:
                group["lr"] = rate
        diary = self.replica.transport.diary
        begun = 0 if diary is None else now()
        self.replica.optimizer.step()
        if diary is not None:
            diary.note("update", "optimizer", begun)

    def take_tally(self) -> Tally:
        """What happened since the last time."""
        tally, self.tally = self.tally, Tally()
        return tally

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Counts the time inside as `wait_seconds`: this replica does not compute. `what` it does instead."""
        begun = now()
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
            self.tally.wait_seconds += (now() - begun) / 1e9
            if (diary := self.replica.transport.diary) is not None:
                diary.note("exchange", what, begun)


class OwnWeights(Exchange):
    """For exchanges whose replicas keep weights of their own: they are not what is tested and saved as the network.

    `settle` still makes them the common ones. Costs a copy of the weights while they are shown.
    """

    @contextmanager
    def showing(self) -> Iterator[None]:
        """The common weights in the network, which has its own again afterwards."""
        own = [weight.clone() for weight in self.replica.weights]
        self.settle()
        try:
            yield
        finally:
            for weight, kept in zip(self.replica.weights, own, strict=True):
                weight.copy_(kept)
            self.replica.tell_weights()

    def catch_up(self) -> None:
        """Nothing to do: what the others did arrives with the next fetch."""

    def own_state(self) -> dict[str, Tensor]:
        """Weights, and what the optimizer remembers; beside what was not sent yet, where such is kept."""
        return {**super().own_state(), **self.replica.state()}

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with them."""
        super().put_own_state(state)
        self.replica.put_state({key: value for key, value in state.items() if not key.startswith(RESIDUAL)})


def distance(own: Sequence[Tensor], common: Sequence[Tensor]) -> float:
    """How far two copies are apart, relative to the length of the second."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(own, common, strict=True))
    length = sum(float(b.square().sum()) for b in common)
    return float((apart / length) ** 0.5) if length else 0.0
