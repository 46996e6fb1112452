"""Updates that wait for several gradients of one version: the server's side of backup workers (Chen et al. 2016).

Which gradients count is decided before they are sent, by the coordinator's tickets; here they are only added up. So all
shards of all servers count the same replicas, and a late gradient is not even sent.
"""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.errors import PeerError
from shoal.exchanging.held import Outcome, Push, Shard


class Rounds:
    """Adds up gradients until as many are there as the version needs, applies their mean, and wakes who waits."""

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
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def exchange(self, push: Push | None, into: Sequence[Tensor] | None, *, at_least: int) -> Outcome:
        """Add a gradient and wait for its update; without one, wait until the shard has the version `at_least`."""
        with self._changed:
            applied = True
            if push is not None:
                applied = push.base == self._shard.version
                at_least = push.base + 1
                if applied:
                    torch._foreach_add_(self._sums, push.tensors)
                    self._count += 1
                    self._rate = push.rate
                    self._apply_if_complete()
            self._changed.wait_for(lambda: self._closed or self._shard.version >= at_least)
            if self._closed:
                raise PeerError("the server was closed.", "Look at why the run ended.")
            outcome = self._shard.exchange(None, into)
            return Outcome(outcome.version, 0, applied)

    def _apply_if_complete(self) -> None:
        version = self._shard.version
        if self._count < self._of_versions.get(version, self._wanted):
            return
        if self._count:
            torch._foreach_div_(self._sums, self._count)
            self._shard.exchange(Push(self._sums, version, self._rate), None)
            torch._foreach_zero_(self._sums)
            self._count = 0
        else:  # all whose gradients were to count were lost before these came
            self._shard.skip()
        self._changed.notify_all()
