"""Updates that wait for several gradients of one version: the server's side of backup workers (Chen et al. 2016).

Which gradients count is decided before they are sent, by the coordinator's tickets; here they are only added up. So all
shards of all servers count the same replicas, and a late gradient is not even sent.
"""

import threading
from collections.abc import Mapping

import torch

from shoal.errors import PeerError
from shoal.exchanging.servers.shard import Outcome, Push, Shard


class Rounds:
    """Adds up gradients until a version has as many as it needs, applies their mean, and wakes those who wait."""

    def __init__(self, shard: Shard, wanted: int) -> None:
        self._shard = shard
        self._wanted = wanted
        self._of_versions: Mapping[int, int] = {}
        self._sums = [torch.zeros_like(weight) for weight in shard.weights]
        self._count = 0
        self._rate = 0.0
        self._changed = threading.Condition()
        self._closed = False

    def need(self, of_versions: Mapping[int, int], then: int) -> None:
        """How many gradients make the update of certain versions, and of all later ones: replicas come and go."""
        with self._changed:
            self._of_versions, self._wanted = dict(of_versions), then
            self._apply_if_complete()

    def close(self) -> None:
        """Wake everybody who waits, with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def add(self, push: Push) -> Outcome:
        """Take a gradient; the outcome has the version of the update that it is part of, or that replaced it."""
        with self._changed:
            applied = push.base == self._shard.version
            if applied:
                torch._foreach_add_(self._sums, push.tensors)
                self._count += 1
                self._rate = max(self._rate, push.rate)  # gradients may arrive in any order
                self._apply_if_complete()
            return Outcome(push.base + 1, 0, applied)

    def wait(self, version: int, *, applied: bool = True) -> Outcome:
        """Wait until the shard has this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._shard.version >= version)
            if self._closed:
                raise PeerError("the server was closed.", "Look at why the run ended.")
            return Outcome(self._shard.version, 0, applied)

    def _apply_if_complete(self) -> None:
        version = self._shard.version
        if self._count < self._of_versions.get(version, self._wanted):
            return
        if self._count:
            torch._foreach_div_(self._sums, self._count)
            self._shard.push_and_fetch(Push(self._sums, version, self._rate), None)
            torch._foreach_zero_(self._sums)
            self._count, self._rate = 0, 0.0
        else:  # all replicas whose gradients were to count were lost before these arrived
            self._shard.skip()
        self._changed.notify_all()
