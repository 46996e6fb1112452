"""Which replica trains on which batch: one budget of samples for all, whoever comes, goes or is slow. Pure.

Batches have numbers from 0 to `total` - 1. However many replicas share them, each counts once; what a lost replica
had taken, and what was dropped, is handed out again before anything new.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol


class Budget(Protocol):
    """Batches that are still to be trained on."""

    @property
    def counted(self) -> int:
        """Batches that were trained on and counted."""
        ...

    @property
    def repeated(self) -> Sequence[int]:
        """Numbers of batches that a replica finished after they had been given to another."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def take(self, replica: int) -> int | None:
        """The next batch for a replica; None if there is none for it now."""
        ...

    def done(self, replica: int, number: int, *, applied: bool) -> None:
        """A replica trained on a batch; if its gradient was dropped, the batch is handed out again."""
        ...

    def lose(self, replica: int) -> None:
        """A replica is gone: what it had taken is handed out again."""
        ...

    def holds(self, replica: int) -> bool:
        """Whether a replica has batches that it has not reported on."""
        ...

    def handed(self, replica: int) -> int:
        """The number that comes next for a replica."""
        ...

    def left(self) -> list[int]:
        """Numbers below the largest ever taken that were not counted: to go on later, they come first."""
        ...


class SharedBudget:
    """Every batch goes to one replica, whichever asks first.

    `warm` batches are only for the replica that asks first; the others begin when these are counted.
    """

    def __init__(self, total: int, *, warm: int = 0, start: int = 0, again: Iterable[int] = ()) -> None:
        self.total, self.warm = total, warm
        self.repeated: list[int] = []
        self._next = start
        left = list(again)
        self.counted = start - len(left)
        self._again = deque(number for number in left if number < total)  # a resumed run may have fewer epochs
        self._taken: dict[int, int] = {}
        self._warming: int | None = None

    @property
    def finished(self) -> bool:
        return self.counted >= self.total

    def take(self, replica: int) -> int | None:
        if self.counted < self.warm and not self._may_warm(replica):
            return None
        if self._again:
            number = self._again.popleft()
        elif self._next < self.total:
            number, self._next = self._next, self._next + 1
        else:
            return None
        self._taken[number] = replica
        return number

    def _may_warm(self, replica: int) -> bool:
        if self._warming is None:
            self._warming = replica
        return replica == self._warming

    def done(self, replica: int, number: int, *, applied: bool) -> None:
        if self._taken.get(number) != replica:  # it was given to another while this one was away
            self.repeated += [number] if applied else []
            return
        del self._taken[number]
        if applied:
            self.counted += 1
        else:
            self._again.append(number)

    def lose(self, replica: int) -> None:
        if replica == self._warming:
            self._warming = None
        lost = sorted(number for number, who in self._taken.items() if who == replica)
        for number in lost:
            del self._taken[number]
        self._again.extend(lost)

    def holds(self, replica: int) -> bool:
        return replica in self._taken.values()

    def handed(self, replica: int) -> int:  # noqa: ARG002  (the same for all)
        return self._again[0] if self._again else self._next

    def left(self) -> list[int]:
        return sorted({*self._again, *self._taken})


class LockstepBudget:
    """Every batch goes to every replica, each of which trains on its share of it."""

    def __init__(self, total: int, replicas: int, *, start: int = 0) -> None:
        self.total, self.replicas = total, replicas
        self.repeated: list[int] = []
        self._next = [start] * replicas
        self._done = [start] * replicas

    @property
    def counted(self) -> int:
        """Batches of which every replica has trained on its share."""
        return min(self._done)

    @property
    def finished(self) -> bool:
        return self.counted >= self.total

    def take(self, replica: int) -> int | None:
        if self._next[replica] >= self.total:
            return None
        self._next[replica] += 1
        return self._next[replica] - 1

    def done(self, replica: int, number: int, *, applied: bool) -> None:  # noqa: ARG002  (nothing is ever dropped)
        self._done[replica] = number + 1

    def lose(self, replica: int) -> None:
        """Replicas in lockstep do not go on without one of them."""

    def holds(self, replica: int) -> bool:
        return self._done[replica] < self._next[replica]

    def handed(self, replica: int) -> int:
        return self._next[replica]

    def left(self) -> list[int]:
        return []
