"""A network in training on one batch of random numbers: what every side of a comparison of exchanges is made of."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Trained:
    """A network, its optimizer, and its gradients on one batch."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, *, slow: float = 1.0) -> None:
        self.model, self.x, self.y = model, x, y
        self.slow = slow
        """Times as long as its gradients need."""
        self.processor_seconds = 0.0
        """Of this thread, in all gradients so far."""
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)

    def gradients(self) -> None:
        """Forward and backward."""
        begun, processor = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self.model(self.x), self.y))
        self.processor_seconds += time.thread_time() - processor
        if self.slow > 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - begun))

    def steps(self, count: int, step: Callable[[], object]) -> None:
        """So many gradients, each followed by `step`."""
        for _ in range(count):
            self.gradients()
            step()


def turn_of(work: Callable[[], object], exchange: Any) -> Callable[[], None]:
    """A turn of an exchange: the work, until nothing of it is on its way.

    What the first turn counted is forgotten: the weights that all begin with are no step's.
    """
    first = iter([True])

    def turn() -> None:
        work()
        exchange.wait_until_sent()
        if next(first, False):
            exchange.take_tally()

    return turn
