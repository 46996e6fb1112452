"""Which gradients of a version count: the first N that are ready (Chen et al. 2016). Pure."""

from collections.abc import Iterable, Mapping


class Tickets:
    """Gives out N tickets per version; who has one sends its gradient, who has none drops it.

    Nothing begins before N replicas are there, or `begin_anyway`. With fewer than N left later, as many as there are. A
    replica that is lost with a ticket is no longer waited for; if it is back in time, it is again.

    >>> tickets = Tickets(1)
    >>> tickets.members({0, 1})
    >>> tickets.ask(0, 0), tickets.ask(1, 0), tickets.version
    (True, False, 1)
    """

    def __init__(self, wanted: int, first: int | None = None) -> None:
        """`wanted`: N, which may be more than ever come; `first`: how many a run begins with, N unless given."""
        self.version = 0
        """Rounds whose tickets are all given out: the servers' version once the gradients of these have arrived."""
        self._wanted = wanted
        self._first = min(wanted, wanted if first is None else first)
        self._active: frozenset[int] = frozenset()
        self._training: frozenset[int] = frozenset()
        self._given: dict[int, set[int]] = {0: set()}
        """Holders of the tickets of the last round that is given out, and of the one that is open."""
        self._complete = False
        """Whether as many as wanted were there at some time."""

    def ask(self, replica: int, version: int) -> bool:
        """Whether a gradient computed on `version` counts."""
        if version != self.version:
            return False
        self._given[version].add(replica)
        self._close_if_full()
        return True

    def members(self, active: Iterable[int], resting: Iterable[int] = ()) -> None:
        """Replicas that take part from now on; no round waits until a resting one asks for a ticket."""
        self._active = frozenset(active)
        self._training = self._active.difference(resting)
        self._complete = self._complete or len(self._training) >= self._first
        self._close_if_full()

    def begin_anyway(self) -> None:
        """Begin though fewer than wanted have come: some replica will never come."""
        self._complete = True
        self._close_if_full()

    def makers(self) -> Mapping[int, frozenset[int]]:
        """By version: whose gradients make its update, without replicas that were lost since.

        Of the last round that is given out alone: a ticket for the open one is asked for with weights that have all
        earlier updates, in all servers.
        """
        return {version: self._active & given for version, given in self._given.items() if version < self.version}

    def _need(self) -> int:
        # A resting replica that still pushes what it had left takes no other replica's place.
        there = self._training | (self._active & self._given[self.version])
        return max(1, min(self._wanted, len(there))) if self._complete else self._first

    def _close_if_full(self) -> None:
        given = self._given[self.version]
        count = len(self._active & given)
        if count and count >= self._need():
            self.version += 1
            self._given = {self.version - 1: given, self.version: set()}
