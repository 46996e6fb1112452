"""A running average of the weights, which is often the better network: it is what is tested and saved as weights.

After step n every average goes 1 - d of the way to its weight, where d = min(decay, (1 + n) / (10 + n)): the first
weights, which are random, are soon forgotten however slow the decay. Buffers, such as batch norm's statistics, are
those of the network.

Keeps     each element by itself, so that averages of parts are parts of the average: the same under any plan.
Costs     a copy of the weights, and a pass over it per step; another copy while it is shown.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Of the parameters of one rank that learn, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._weights = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
        self._decay = decay
        self.updates = 0
        """Steps that are in it."""
        self.parts = {name: weight.clone() for name, weight in self._weights.items()}
        """The averages, of this rank's part of each parameter."""

    def update(self) -> None:
        """After a step."""
        self.updates += 1
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.parts.values()), list(self._weights.values()), 1 - decay)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The averages in the network, which has its own weights again afterwards."""
        own = [weight.clone() for weight in self._weights.values()]
        _copy(self.parts.values(), self._weights.values())
        try:
            yield
        finally:
            _copy(own, self._weights.values())

    def load(self, updates: int, parts: Mapping[str, Tensor]) -> None:
        """Go on with this rank's parts of averages of so many steps."""
        self.updates = updates
        _copy((parts[name] for name in self.parts), self.parts.values())


def _copy(given: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for source, target in zip(given, into, strict=True):
        target.copy_(source)
