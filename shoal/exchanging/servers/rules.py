"""What a server does to its weights with what a replica pushed. Flat tensors, in place, element by element.

Keeps     an update of shards that were cut as `slices.cut_over` cuts has the bits of the update of whole tensors, and
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

from shoal.exchanging.servers.sparse import Sparse

RuleName = Literal["sgd", "adagrad", "add", "elastic", "outer", "outer_change"]
StalenessKind = Literal["none", "exponential", "inverse"]

State = Sequence[Sequence[Tensor]]


class UpdateRule(ABC):
    """How pushes change weights. Has no state of its own, so threads may share one."""

    reads_rate: ClassVar[bool] = True
    """Whether the rate scales the update; else replicas have applied theirs already."""
    answers_change: ClassVar[bool] = False
    """Whether whoever pushes and fetches gets the change that its push made, which `apply` leaves in the place of what
    was pushed; else it gets the weights."""

    @property
    @abstractmethod
    def states(self) -> int:
        """State tensors per weight."""

    @abstractmethod
    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        """Change `weights` and `state` by one push. No rule here changes `pushed`, but callers must not rely on it."""

    def apply_sparse(self, weights: Sequence[Tensor], pushed: Sequence[Sparse], state: State, rate: float) -> None:
        """The same for a push of some elements; the others count as zeros.

        Without weight decay, which would touch every weight: the replica adds it to its gradient before it selects.
        A tensor that was pushed whole is changed to the bit as `apply` without weight decay does.
        """
        raise ValueError(f"{type(self).__name__} takes whole tensors")


@dataclass(frozen=True)
class Sgd(UpdateRule):
    """Momentum at the server: m = momentum * m + pushed + weight_decay * w, and then w -= rate * m.

    Beginning with m = 0 is what torch does, whose first step sets m, but for the sign of a zero.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def states(self) -> int:
        return 1 if self.momentum else 0

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        self._apply(weights, pushed, state[0] if self.states else (), rate, self.weight_decay)

    def _apply(
        self,
        weights: Sequence[Tensor],
        pushed: Sequence[Tensor],
        momenta: Sequence[Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        if not weights:  # torch takes the device from the tensors, and here there are none
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
            momenta = [state[0][index]] if self.states else []
            if push.whole:
                self._apply([weight], [push.values], momenta, rate, weight_decay=0.0)
            elif momenta:
                momenta[0].mul_(self.momentum).index_add_(0, push.indices, push.values)
                weight.add_(momenta[0], alpha=-rate)
            else:
                weight.index_add_(0, push.indices, push.values, alpha=-rate)


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """A rate per weight: s += g**2, and then w -= rate * g / (sqrt(s) + eps), where g = pushed + weight_decay * w."""

    weight_decay: float = 0.0
    eps: float = 1e-10

    @property
    def states(self) -> int:
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
        step = torch.ones((), device=weights[0].device)  # the step's number matters only to a decaying rate
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
class Add(UpdateRule):
    """w += pushed: replicas push changes of weights, to which they applied the rate and all else themselves."""

    reads_rate = False

    @property
    def states(self) -> int:
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


@dataclass(frozen=True)
class Elastic(UpdateRule):
    """w += d, where d = rate * (pushed - w): replicas push their weights, and take d off their own (Zhang et al. 2015).

    What the centre gains a replica loses, element by element: their sum stays, to rounding.
    """

    answers_change = True

    @property
    def states(self) -> int:
        return 0

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        if weights:
            change = list(pushed)
            torch._foreach_sub_(change, list(weights))
            torch._foreach_mul_(change, rate)
            torch._foreach_add_(list(weights), change)


@dataclass(frozen=True)
class Outer(UpdateRule):
    """An optimizer around the replicas' own: w goes towards the pushed mean of their weights.

    g = w - pushed, m = momentum * m + g, and then w -= rate * (g + momentum * m): Nesterov's (Douillard et al. 2023).
    With rate 1 and no momentum w becomes what was pushed, bit for bit: plain averaging.
    """

    momentum: float = 0.0

    @property
    def states(self) -> int:
        return 1 if self.momentum else 0

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        if not self.momentum and rate == 1.0:
            for weight, mean in zip(weights, pushed, strict=True):
                weight.copy_(mean)
            return
        self._step(weights, [weight - mean for weight, mean in zip(weights, pushed, strict=True)], state, rate)

    def _step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], state: State, rate: float) -> None:
        """Nesterov's, which changes `gradients` too."""
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if self.momentum:
                momentum = state[0][index]
                momentum.mul_(self.momentum).add_(gradient)
                gradient.add_(momentum, alpha=self.momentum)
            weight.sub_(gradient, alpha=rate)


@dataclass(frozen=True)
class OuterChange(Outer):
    """The same where replicas push how far they came from w, not where they are: g = -pushed.

    With rate 1 and no momentum w becomes w + pushed, which rounds where `Outer` does not.
    """

    def apply(self, weights: Sequence[Tensor], pushed: Sequence[Tensor], state: State, rate: float) -> None:
        self._step(weights, [-change for change in pushed], state, rate)


def make_rule(name: RuleName, momentum: float, weight_decay: float) -> UpdateRule:
    """The rule of this name. Momentum is read by "sgd" and the outer ones, weight decay by "sgd" and "adagrad"."""
    match name:
        case "sgd":
            return Sgd(momentum, weight_decay)
        case "adagrad":
            return Adagrad(weight_decay)
        case "add":
            return Add()
        case "elastic":
            return Elastic()
        case "outer":
            return Outer(momentum)
        case "outer_change":
            return OuterChange(momentum)


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
