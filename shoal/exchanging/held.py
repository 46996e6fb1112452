"""A shard: the part of the weights that one server holds, and what it does with what replicas push.

Keeps       an update is whole: one push at a time, and a fetch sees none half done (one lock per shard).
Gives up    shards are updated independently, so what a replica fetches may be of different versions (Dean et al. 2012).
Costs       one pass over the shard per push, one copy per fetch, under the lock.
Failure     in shared memory a replica that is killed inside its own update leaves that update half done in one shard:
            as if a part of its gradient had been zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shoal.exchanging.rules import Rule, staleness_factor
from shoal.exchanging.sparse import Sparse

Kind = Literal["gradient", "weights"]
VERSION, READY, HOLDER = 0, 1, 2
COUNTS = 3
"""Integers that a shard keeps beside its weights: updates so far, whether it has its first weights, who is updating."""


@dataclass(frozen=True)
class Push:
    """What a replica gives to one shard."""

    values: Sequence[Tensor] | Sequence[Sparse]
    base: int
    """The shard's version on which it was computed."""
    rate: float
    kind: Kind = "gradient"
    """gradient: for the rule, which may also be `add`. weights: takes the place of the weights, if nobody else changed
    them since `base`; exact where adding a change would round."""

    @property
    def tensors(self) -> list[Tensor]:
        """The values of a push of whole tensors; of any other, none."""
        return [one for one in self.values if isinstance(one, Tensor)]

    @property
    def sparse(self) -> list[Sparse]:
        """The values of a push of some elements of each tensor; of any other, none."""
        return [one for one in self.values if isinstance(one, Sparse)]


@dataclass(frozen=True)
class Outcome:
    """What became of a push or a fetch."""

    version: int
    staleness: int = 0
    applied: bool = True


@dataclass(frozen=True)
class Policy:
    """How a shard treats what it gets."""

    rule: Rule
    max_staleness: int | None = None
    decay: Literal["none", "exponential", "inverse"] = "none"
    decay_base: float = 1.0


@dataclass
class Shard:
    """Weights, the rule's state, and the counts, all in memory that may be shared between processes."""

    weights: Sequence[Tensor]
    state: Sequence[Sequence[Tensor]]
    counts: Tensor
    policy: Policy
    lock: AbstractContextManager[object]
    owner: int = field(default=0)
    """Who updates through this object, noted while it holds the lock."""
    close: Callable[[], None] = lambda: None
    """Lets go of what the lock needs."""

    @property
    def version(self) -> int:
        """Updates so far."""
        return int(self.counts[VERSION])

    @property
    def ready(self) -> bool:
        """Whether it has its first weights."""
        return bool(self.counts[READY])

    def begin(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]] = ()) -> None:
        """Take the first weights, and what the rule remembers of an earlier run; nothing, if it has some already."""
        with self._updating():
            if self.ready:  # all replicas that begin a run bring the same, and some may be at work already
                return
            copy_all(self.weights, weights)
            for kept, given in zip(self.state, state, strict=False):
                copy_all(kept, given)
            self.counts[READY] = 1

    def exchange(self, push: Push | None, into: Sequence[Tensor] | None) -> Outcome:
        """Apply a push, then copy the weights `into`; either may be left out."""
        with self._updating():
            outcome = Outcome(self.version) if push is None else self._apply(push)
            if into is not None:
                copy_all(into, self.weights)
        return outcome

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Hold the lock, and say who does."""
        with self.lock:
            self.counts[HOLDER] = self.owner + 1
            yield
            self.counts[HOLDER] = 0

    def _apply(self, push: Push) -> Outcome:
        version = self.version
        staleness = version - push.base
        limit = 0 if push.kind == "weights" else self.policy.max_staleness
        if limit is not None and staleness > limit:
            return Outcome(version, staleness, applied=False)
        if push.kind == "weights":
            copy_all(self.weights, push.tensors)
        else:
            self._step(push, staleness_factor(staleness, self.policy.decay, self.policy.decay_base))
        self.counts[VERSION] = version + 1
        return Outcome(version + 1, staleness)

    def _step(self, push: Push, factor: float) -> None:
        rule, rate = self.policy.rule, push.rate
        # Of the rate, as its paper has it: momentum remembers the whole gradient.
        if self.policy.decay == "inverse" and rule.reads_rate:
            rate, factor = rate * factor, 1.0
        if sparse := push.sparse:
            if factor != 1.0:
                for one in sparse:
                    one.values.mul_(factor)
            rule.apply_sparse(self.weights, sparse, self.state, rate)
            return
        tensors = push.tensors
        if factor != 1.0:
            torch._foreach_mul_(tensors, factor)
        rule.apply(self.weights, tensors, self.state, rate)

    def skip(self) -> None:
        """Count one update more without any: whoever was to make it is gone."""
        with self._updating():
            self.counts[VERSION] += 1

    def snapshot(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Copies of weights and state, of one version."""
        with self._updating():
            return [w.clone() for w in self.weights], [[s.clone() for s in kept] for kept in self.state]


def empty_shard(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], policy: Policy, lock: AbstractContextManager[object]
) -> Shard:
    """A shard in this process's own memory, which waits for its first weights."""
    weights = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, dtypes, strict=True)]
    state = [[torch.zeros_like(w) for w in weights] for _ in range(policy.rule.slots)]
    return Shard(weights, state, torch.zeros(COUNTS, dtype=torch.int64), policy, lock)


def copy_all(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Tensor by tensor, also between devices."""
    if into:
        torch._foreach_copy_(list(into), list(given))


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In host memory, where shards live; the same tensors where they are there already."""
    return [tensor.cpu() for tensor in tensors]
