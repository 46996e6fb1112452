"""Pushes that wait for each other at a server: what it tells of who takes part, and how long somebody waits."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

from shoal.errors import PeerError
from shoal.exchanging.servers.shard import Outcome, Push, Shard


class Gathering(ABC):
    """One shard's pushes. What it is told and does not depend on, it leaves alone."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._changed = threading.Condition()
        self._closed = False

    @abstractmethod
    def add(self, push: Push, replica: int) -> Outcome:
        """Take what a replica pushed; the outcome has the version to wait for."""

    def made_by(self, makers: Mapping[int, frozenset[int]]) -> None:  # noqa: B027  (to do nothing is the default)
        """With tickets: whose gradients make the updates of certain versions."""

    def members(self, active: frozenset[int], resting: frozenset[int]) -> None:  # noqa: B027
        """Who takes part from now on, and who of them has nothing to do."""

    def wait(self, version: int, *, applied: bool = True) -> Outcome:
        """Wait until the shard has this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._shard.version >= version)
            if self._closed:
                raise PeerError("the server was closed.", "Look at why the run ended.")
            return Outcome(self._shard.version, 0, applied)

    def close(self) -> None:
        """Wake everybody who waits, with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
