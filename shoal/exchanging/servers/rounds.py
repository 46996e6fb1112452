"""Updates that wait for several gradients of one version: the server's side of `sync`, `backup` and `local`.

Keeps     no update leaves out a replica that was told that it counts, unless that replica is lost: with backup workers
          (Chen et al. 2016) the coordinator's tickets decide before a gradient is sent, and servers are told whose they
          are. So all shards of all servers count the same replicas, and a late gradient is not even sent.
Failure   what a replica had pushed to a shard when it was lost counts there, and only there.
"""

from collections.abc import Mapping

import torch

from shoal.exchanging.servers.gathering import Gathering
from shoal.exchanging.servers.shard import Outcome, Push, Shard


class Rounds(Gathering):
    """Adds up gradients until all that make a version's update are there, applies their mean, wakes those who wait."""

    def __init__(self, shard: Shard, wanted: int | None) -> None:
        """`wanted`: how many make every update; None where `made_by` says whose."""
        super().__init__(shard)
        self._wanted = wanted
        self._makers: Mapping[int, frozenset[int]] = {}
        self._sums = [torch.zeros_like(weight) for weight in shard.weights]
        self._arrived: set[int] = set()
        self._rate = 0.0

    def made_by(self, makers: Mapping[int, frozenset[int]]) -> None:
        """Whose gradients make the updates of certain versions; that of a version that is not there waits."""
        with self._changed:
            self._makers = makers
            self._apply_if_complete()

    def add(self, push: Push, replica: int) -> Outcome:
        """Take a gradient; the outcome has the version of the update that it is part of, or that replaced it."""
        with self._changed:
            applied = push.base == self._shard.version
            if applied:
                torch._foreach_add_(self._sums, push.tensors)
                self._arrived.add(replica)
                self._rate = max(self._rate, push.rate)  # gradients may arrive in any order
                self._apply_if_complete()
            return Outcome(push.base + 1, 0, applied)

    def _is_complete(self) -> bool:
        if self._wanted is not None:
            return len(self._arrived) >= self._wanted
        makers = self._makers.get(self._shard.version)
        return makers is not None and makers <= self._arrived

    def _apply_if_complete(self) -> None:
        if not self._is_complete():
            return
        if self._arrived:
            torch._foreach_div_(self._sums, len(self._arrived))
            self._shard.push_and_fetch(Push(self._sums, self._shard.version, self._rate), None)
            torch._foreach_zero_(self._sums)
            self._arrived.clear()
            self._rate = 0.0
        else:  # all replicas whose gradients were to count were lost before these arrived
            self._shard.skip()
        self._changed.notify_all()
