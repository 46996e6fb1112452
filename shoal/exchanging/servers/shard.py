"""A shard: the part of the weights that one server holds, and what it does with what replicas push.

Keeps       an update is whole: one push at a time, and a fetch sees none half done (one lock per shard).
Gives up    shards are updated independently, so what a replica fetches may be of different versions (Dean et al. 2012).
Costs       one pass over the shard per push, one copy per fetch, under the lock.
Failure     in shared memory a replica that is killed inside its own update leaves that update half done in one shard:
            as if a part of its gradient had been zero.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.exchanging.servers.rules import UpdateRule, staleness_factor
from shoal.exchanging.servers.sparse import Sparse

PushKind = Literal["gradient", "weights"]
VERSION, READY, GATHERED = 0, 1, 2
COUNTS = 3
"""Integers that a shard keeps beside its weights: updates so far, whether it has its first weights, and gradients that
wait for more to make an update with."""


@dataclass(frozen=True)
class Push:
    """What a replica gives to one shard."""

    values: Sequence[Tensor] | Sequence[Sparse]
    """All of one type."""
    base: int
    """The shard's version on which it was computed."""
    rate: float
    kind: PushKind = "gradient"
    """gradient: for the rule, which may also be `add`. weights: takes the place of the weights, if nobody else changed
    them since `base`; exact where adding a change would round."""
    certain: bool = False
    """Whether a gradient is applied however stale it is: another shard has taken its part of it."""

    @property
    def tensors(self) -> list[Tensor]:
        """The values of a push of whole tensors; of any other, none."""
        values = self.values
        return list(values) if values and isinstance(values[0], Tensor) else []  # type: ignore[arg-type]

    @property
    def sparse(self) -> list[Sparse]:
        """The values of a push of some elements of each tensor; of any other, none."""
        values = self.values
        return list(values) if values and isinstance(values[0], Sparse) else []  # type: ignore[arg-type]


class Outcome(NamedTuple):
    """What became of a push or a fetch."""

    version: int
    staleness: int = 0
    applied: bool = True


@dataclass(frozen=True)
class Snapshot:
    """Copies of a shard's weights and of what its rule remembers, of one moment."""

    version: int
    weights: list[Tensor]
    state: list[list[Tensor]]


@dataclass(frozen=True)
class Policy:
    """How a shard treats what it gets."""

    rule: UpdateRule
    max_staleness: int | None = None
    decay: Literal["none", "exponential", "inverse"] = "none"
    decay_base: float = 1.0
    gather: int = 1
    """Gradients whose mean makes one update, from whichever replicas (Zhang et al. 2016)."""
    locked: bool = True
    """Whether updates take turns; else they may overwrite each other's elements (Hogwild)."""

    @property
    def states(self) -> int:
        """Tensors of a weight's size that a shard keeps beside each weight: the rule's, and the sum that waits."""
        return self.rule.states + (self.gather > 1)


@dataclass
class Shard:
    """Weights, the rule's state, and the counts, all in memory that may be shared between processes."""

    weights: Sequence[Tensor]
    state: Sequence[Sequence[Tensor]]
    counts: Tensor
    policy: Policy
    lock: AbstractContextManager[object]
    close: Callable[[], None] = lambda: None
    """Closes the lock's file."""

    def __post_init__(self) -> None:
        self._counted = self.counts.numpy()
        """The same memory, of which numpy reads one number many times faster."""

    @property
    def version(self) -> int:
        """Updates so far."""
        return int(self._counted[VERSION])

    @property
    def ready(self) -> bool:
        """Whether it has its first weights."""
        return bool(self._counted[READY])

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]] = ()) -> None:
        """Take the first weights, and what the rule remembers of an earlier run; nothing, if it has some already."""
        with self.lock:
            if self.ready:  # all replicas bring the same first weights, and some may already train
                return
            copy_all(self.weights, weights)
            for kept, given in zip(self.state, state, strict=False):
                copy_all(kept, given)
            self._counted[READY] = 1

    def push_and_fetch(self, push: Push | None, into: Sequence[Tensor] | None) -> Outcome:
        """Apply a push, then copy the weights `into`, or the change where the rule answers with that.

        Either may be left out.
        """
        with self.lock:
            outcome = Outcome(self.version) if push is None else self._apply(push)
            if into is not None:
                change = push is not None and self.policy.rule.answers_change
                copy_all(into, push.tensors if push is not None and change else self.weights)
        return outcome

    def _apply(self, push: Push) -> Outcome:
        version = self.version
        # Without locks others may overwrite the count with a smaller one.
        staleness = version - push.base if self.policy.locked else max(0, version - push.base)
        limit = 0 if push.kind == "weights" else None if push.certain else self.policy.max_staleness
        if limit is not None and staleness > limit:
            return Outcome(version, staleness, applied=False)
        if push.kind == "weights":
            copy_all(self.weights, push.tensors)
        elif self.policy.gather > 1:
            self._gather(push, staleness_factor(staleness, self.policy.decay, self.policy.decay_base))
            return Outcome(self.version, staleness)
        else:
            self._step(push, staleness_factor(staleness, self.policy.decay, self.policy.decay_base))
        self._counted[VERSION] = version + 1
        return Outcome(version + 1, staleness)

    def _gather(self, push: Push, factor: float) -> None:
        """Add a gradient to those that wait; with the last one that is wanted, step by their mean."""
        torch._foreach_add_(list(self.state[-1]), push.tensors, alpha=factor)
        self._counted[GATHERED] += 1
        if self._counted[GATHERED] >= self.policy.gather:
            self._step_by_gathered(push.rate)

    def _step_by_gathered(self, rate: float) -> None:
        sums = list(self.state[-1])
        torch._foreach_div_(sums, int(self._counted[GATHERED]))
        self.policy.rule.apply(self.weights, sums, self.state[: self.policy.rule.states], rate)
        torch._foreach_zero_(sums)
        self._counted[GATHERED] = 0
        self._counted[VERSION] += 1

    def _step(self, push: Push, factor: float) -> None:
        rule, rate = self.policy.rule, push.rate
        # The factor weakens the rate, as in its paper: momentum remembers the whole gradient.
        if self.policy.decay == "inverse" and rule.reads_rate:
            rate, factor = rate * factor, 1.0
        if sparse := push.sparse:
            if factor != 1.0:
                for part in sparse:
                    part.values.mul_(factor)
            rule.apply_sparse(self.weights, sparse, self.state, rate)
            return
        tensors = push.tensors
        if factor != 1.0:
            torch._foreach_mul_(tensors, factor)
        rule.apply(self.weights, tensors, self.state, rate)

    def skip(self) -> None:
        """Raise the version without an update: the replicas that were to make it are gone."""
        with self.lock:
            self._counted[VERSION] += 1

    def snapshot(self, into: Sequence[Tensor] | None = None) -> Snapshot:
        """Copies of weights and state, of one version; in the tensors `into`, one after the other, if given."""
        kept = [self.weights, *self.state[: self.policy.rule.states]]
        room = iter([torch.empty_like(t) for tensors in kept for t in tensors] if into is None else into)
        copies = [[next(room) for _ in tensors] for tensors in kept]
        with self.lock:
            for copy, tensors in zip(copies, kept, strict=True):
                copy_all(copy, tensors)
            return Snapshot(self.version, copies[0], copies[1:])


def empty_shard(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], policy: Policy, lock: AbstractContextManager[object]
) -> Shard:
    """A shard in this process's own memory, which waits for its first weights."""
    weights = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, dtypes, strict=True)]
    state = [[torch.zeros_like(w) for w in weights] for _ in range(policy.states)]
    return Shard(weights, state, torch.zeros(COUNTS, dtype=torch.int64), policy, lock)


def copy_all(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensor by tensor, also between devices."""
    if into:
        torch._foreach_copy_(list(into), list(given))


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In host memory, where shards live; the same tensors where they are there already."""
    return [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]
