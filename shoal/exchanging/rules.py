"""What a server does to its weights with what a replica pushed. Flat tensors, in place, element by element.

Keeps     an update of shards that were cut as `shards.spread` cuts has the bits of the update of whole tensors, and
          `Sgd` those of torch.optim.SGD(fused=True); so one replica and any number of servers are plain SGD.
Costs     one pass over the weights for a dense push. A sparse one touches only its elements, but for momentum, which
          decays everywhere: two passes.

A state tensor has its weight's shape and type and begins as zeros; `state[k][i]` is the k-th of weight i. Whoever
holds the weights allocates it, perhaps in memory that processes share. All tensors are contiguous.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.exchanging.sparse import Sparse

RuleName = Literal["sgd", "adagrad", "add"]
StalenessKind = Literal["none", "exponential", "inverse"]

State = Sequence[Sequence[Tensor]]


class Rule(ABC):
    """How pushes change weights. Has no state of its own, so threads may share one."""

    reads_rate: ClassVar[bool] = True
    """Whether the rate scales the update; else replicas have applied theirs already."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """State tensors per weight."""

    @abstractmethod
    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        """Change `weights` and `state` by one push. No rule here changes `pushed`, but callers must not rely on it."""

    @abstractmethod
    def apply_sparse(self, weights: Sequence[Tensor], pushed: Sequence[Sparse], state: State, rate: float) -> None:
        """The same for a push of some elements; the others count as zeros.

        Without weight decay, which would touch every weight: the replica adds it to its gradient before it selects.
        A tensor that was pushed whole is changed to the bit as `apply` without weight decay does.
        """


@dataclass(frozen=True)
class Sgd(Rule):
    """Momentum at the server: m = momentum * m + pushed + weight_decay * w, and then w -= rate * m.

    Beginning with m = 0 is what torch does, whose first step sets m, but for the sign of a zero.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def slots(self) -> int:
        return 1 if self.momentum else 0

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        self._apply(weights, pushed, state[0] if self.slots else (), rate, self.weight_decay)

    def _apply(
        self,
        weights: Sequence[Tensor],
        pushed: Sequence[Tensor],
        momenta: Sequence[Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        if not weights:  # torch cannot tell the device of no tensors
            return
        torch._fused_sgd_(
            list(weights),
            list(pushed),
            list(momenta),
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def apply_sparse(self, weights: Sequence[Tensor], pushed: Sequence[Sparse], state: State, rate: float) -> None:
        for index, (weight, push) in enumerate(zip(weights, pushed, strict=True)):
            momenta = [state[0][index]] if self.slots else []
            if push.whole:
                self._apply([weight], [push.values], momenta, rate, weight_decay=0.0)
            elif momenta:
                momenta[0].mul_(self.momentum).index_add_(0, push.indices, push.values)
                weight.add_(momenta[0], alpha=-rate)
            else:
                weight.index_add_(0, push.indices, push.values, alpha=-rate)


@dataclass(frozen=True)
class Adagrad(Rule):
    """A rate per weight: s += g**2, and then w -= rate * g / (sqrt(s) + eps), where g = pushed + weight_decay * w."""

    weight_decay: float = 0.0
    eps: float = 1e-10

    @property
    def slots(self) -> int:
        return 1

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        self._apply(weights, pushed, state[0], rate, self.weight_decay)

    def _apply(
        self,
        weights: Sequence[Tensor],
        pushed: Sequence[Tensor],
        sums: Sequence[Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        if not weights:
            return
        step = torch.ones((), device=weights[0].device)  # which step it is matters only to a rate that decays by itself
        torch._fused_adagrad_(
            list(weights),
            list(pushed),
            list(sums),
            [step] * len(weights),
            lr=rate,
            lr_decay=0.0,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )

    def apply_sparse(self, weights: Sequence[Tensor], pushed: Sequence[Sparse], state: State, rate: float) -> None:
        for weight, push, sums in zip(weights, pushed, state[0], strict=True):
            if push.whole:
                self._apply([weight], [push.values], [sums], rate, weight_decay=0.0)
                continue
            touched = sums[push.indices].addcmul_(push.values, push.values)
            sums[push.indices] = touched
            weight.index_add_(0, push.indices, push.values / touched.sqrt_().add_(self.eps), alpha=-rate)


@dataclass(frozen=True)
class Add(Rule):
    """w += pushed: replicas push changes of weights, to which they applied the rate and all else themselves."""

    reads_rate = False

    @property
    def slots(self) -> int:
        return 0

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        if weights:
            torch._foreach_add_(list(weights), list(pushed))

    def apply_sparse(self, weights: Sequence[Tensor], pushed: Sequence[Sparse], state: State, rate: float) -> None:
        for weight, push in zip(weights, pushed, strict=True):
            if push.whole:
                weight.add_(push.values)
            else:
                weight.index_add_(0, push.indices, push.values)


def make_rule(name: RuleName, momentum: float, weight_decay: float) -> Rule:
    """The rule of this name. Momentum is read by "sgd" alone, weight decay by "sgd" and "adagrad"."""
    match name:
        case "sgd":
            return Sgd(momentum, weight_decay)
        case "adagrad":
            return Adagrad(weight_decay)
        case "add":
            return Add()


def staleness_factor(staleness: int, kind: StalenessKind, base: float) -> float:
    """By how much a push counts whose weights were `staleness` updates old when it arrived.

    "exponential": base ** staleness (Chan & Lane 2014), a factor of what was pushed, so that momentum sees it too;
    0 < base <= 1. "inverse": 1 / staleness (Zhang et al. 2016), a factor of the rate, or of a change to which the
    replica has applied the rate itself. Adagrad would divide a factor of what was pushed out again.

    >>> [staleness_factor(2, kind, base=0.5) for kind in ("none", "exponential", "inverse")]
    [1.0, 0.25, 0.5]
    """
    if staleness < 0:
        raise ValueError(f"a push cannot be {staleness} updates old: its weights would be from the future")
    match kind:
        case "none":
            return 1.0
        case "exponential":
            return base**staleness
        case "inverse":
            return 1.0 / max(1, staleness)
