"""Weights that are the mean of what each replica pushed last: the server's side of asynchronous ADMM.

Keeps       the mean is over the replicas that take part now: what a lost one pushed is dropped.
Gives up    between two updates what replicas pushed may be up to `delay` updates old.
Costs       one copy of the shard for each replica, at the server.
Failure     whoever waits for a replica that is lost or frozen goes on when the server is told of it.
"""

import torch
from torch import Tensor

from shoal.exchanging.servers.gathering import Gathering
from shoal.exchanging.servers.shard import Outcome, Push, Shard


class Consensus(Gathering):
    """Updates when `least` replicas have pushed since the last update, and nobody's push is `delay` updates old.

    With delay 0 a replica may be as late as it likes. Whoever pushes waits for the update that its push is part of.
    """

    def __init__(self, shard: Shard, *, least: int, delay: int = 0) -> None:
        super().__init__(shard)
        self._least, self._delay = least, delay
        self._latest: dict[int, list[Tensor]] = {}
        """What each replica pushed last."""
        self._updates: dict[int, int] = {}
        """The update that each replica's push was part of, or will be."""
        self._arrived: set[int] = set()
        self._members: frozenset[int] | None = None
        """Who takes part; None: whoever pushed."""
        self._resting: frozenset[int] = frozenset()

    def members(self, active: frozenset[int], resting: frozenset[int] = frozenset()) -> None:
        """Who takes part from now on. What others pushed is dropped; one that is back counts from its next push.

        `resting`: those among them that have nothing to do, so that nobody waits for their next push.
        """
        with self._changed:
            self._members, self._resting = active, resting
            for gone in self._latest.keys() - active:
                del self._latest[gone], self._updates[gone]
            self._arrived &= active
            self._update_if_due()

    def add(self, push: Push, replica: int) -> Outcome:
        """Take what a replica pushed; the outcome has the version of the update that it becomes part of."""
        with self._changed:
            version = self._shard.version
            kept = self._latest.setdefault(replica, [torch.empty_like(weight) for weight in self._shard.weights])
            torch._foreach_copy_(kept, push.tensors)
            self._arrived.add(replica)
            self._updates[replica] = version + 1
            self._update_if_due()
            return Outcome(version + 1, max(0, version - push.base))

    def _update_if_due(self) -> None:
        members = self._members or frozenset(self._latest)
        busy = members - self._resting
        if not self._arrived or len(self._arrived) < min(self._least, len(busy)):
            return
        version = self._shard.version
        last = (self._updates[replica] for replica in self._latest if replica in busy)
        if self._delay and any(version + 1 - update >= self._delay for update in last):
            return
        self._shard.push_and_fetch(Push(self._means(len(members)), version, 1.0), None)
        self._arrived.clear()
        self._changed.notify_all()

    def _means(self, members: int) -> list[Tensor]:
        """The means of what each replica pushed last; one that has not pushed yet counts with the present weights."""
        silent = members - len(self._latest)
        means = []
        for weight, *parts in zip(self._shard.weights, *self._latest.values(), strict=True):
            mean = weight * silent if silent else torch.zeros_like(weight)
            for part in parts:
                mean += part
            means.append(mean.div_(members))
        return means
