"""A sum over all replicas by a ring, in the place of a process group. By formula: all take part at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.swarm.stage import Moment

if TYPE_CHECKING:
    from shoal.swarm.swarm import Swarm


class Ring:
    """What all replicas sum, call by call: every one makes the same calls in the same order."""

    def __init__(self, swarm: "Swarm", replicas: int) -> None:
        self._swarm, self._replicas = swarm, replicas
        self._calls: dict[int, list[tuple[int, Tensor, Moment]]] = {}

    def seconds(self, size: float) -> float:
        """2 (R - 1) messages of 1 / R of it, one after the other."""
        setting, count = self._swarm.setting, self._replicas
        return 2 * (count - 1) * (setting.latency + size / count / setting.bandwidth)

    def take(self, call: int, number: int, tensor: Tensor) -> Moment:
        """One replica's part of a sum."""
        done = Moment()
        parts = self._calls.setdefault(call, [])
        parts.append((number, tensor, done))
        if len(parts) == self._replicas:
            size = self._swarm.scaled([tensor])
            agenda = self._swarm.stage.agenda
            agenda.note(agenda.now + self.seconds(size), lambda _: self._end(self._calls.pop(call)))
            self._swarm.wire.sent += 2 * (self._replicas - 1) * size
        return done

    def _end(self, parts: list[tuple[int, Tensor, Moment]]) -> None:
        parts.sort(key=lambda part: part[0])
        total = torch.stack([tensor for _, tensor, _ in parts]).sum(0)
        self._swarm.wire.arrived += 2 * (self._replicas - 1) * self._swarm.scaled([total])
        for _, tensor, done in parts:
            tensor.copy_(total)
            done.happen()


class Group:
    """One replica's side."""

    def __init__(self, ring: Ring, number: int) -> None:
        self._ring, self._number = ring, number
        self._calls = 0

    def broadcast(self, tensor: Tensor, root: int) -> "Sum":  # noqa: ARG002
        """Replicas of a simulation begin with the same weights."""
        done = Moment()
        done.happen()
        return Sum(done)

    def allreduce(self, tensors: Sequence[Tensor]) -> "Sum":
        """The sum of one tensor."""
        self._calls += 1
        return Sum(self._ring.take(self._calls, self._number, tensors[0]))


class Sum:
    """What is under way."""

    def __init__(self, done: Moment) -> None:
        self._done = done

    def is_completed(self) -> bool:
        """Whether it is there."""
        return self._done.come

    def wait(self, timeout: Any = None) -> None:  # noqa: ARG002  (simulated time has nothing to look for meanwhile)
        """Until it is there."""
        self._done.wait()
