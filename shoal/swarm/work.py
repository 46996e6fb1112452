"""What simulated replicas train on: a stand-in whose messages weigh what a network's would, or a network and data."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.exchanging import Replica

ELEMENTS = 4096
"""Of a stand-in: enough that sparse pushes choose among them."""


TESTED = 2000
"""Samples of the test part, the first, by which the common weights are tested: many tests make a curve."""


class Work(Protocol):
    """Networks that begin with the same weights, gradients, and a test."""

    scale: float
    """Bytes that travel for one byte of a tensor here."""

    def trainee(self, number: int, momentum: float) -> Replica:
        """A replica with weights and an optimizer of its own."""
        ...

    def gradient(self, replica: Replica, batch: int) -> None:
        """Backward of one batch, by its number."""
        ...

    def accuracy(self, weights: Mapping[str, Tensor]) -> float | None:
        """Of these flat weights; None where nothing is trained."""
        ...


class StandIn:
    """Random gradients of a few elements that stand for `weight_bytes`."""

    def __init__(self, weight_bytes: float, seed: int = 0, elements: int = ELEMENTS) -> None:
        self._elements = elements
        self.scale = weight_bytes / (4 * elements)
        self._gradient = torch.randn(elements, generator=torch.Generator().manual_seed(seed))

    def trainee(self, number: int, momentum: float) -> Replica:  # noqa: ARG002
        parameter = nn.Parameter(torch.ones(self._elements))
        return Replica({"weights": parameter}, torch.optim.SGD([parameter], lr=0.01, momentum=momentum))

    def gradient(self, replica: Replica, batch: int) -> None:
        gradient = replica.gradients()[0]
        gradient.copy_(self._gradient.roll(batch % self._elements))

    def accuracy(self, weights: Mapping[str, Tensor]) -> float | None:  # noqa: ARG002
        return None


class Training:
    """A small network on data that is in memory. One network's memory is used for all gradients' computing.

    Batch `k` is the k-th part of a shuffled order, another in every epoch; batch norm's statistics are each replica's.
    """

    scale = 1.0

    def __init__(
        self,
        build: Callable[[], nn.Module],
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        batch: int,
        seed: int = 0,
    ) -> None:
        self._build, self._train, self._test = build, train, test
        self._batch, self._seed = batch, seed
        self._networks: dict[int, nn.Module] = {}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self._tested = build()
        self._first = {name: value.clone() for name, value in self._tested.state_dict().items()}
        self._order: tuple[int, Tensor] | None = None

    def trainee(self, number: int, momentum: float) -> Replica:  # noqa: ARG002
        network = self._build()
        network.load_state_dict(self._first)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=momentum, fused=True)
        replica = Replica(dict(network.named_parameters()), optimizer)
        self._networks[id(replica)] = network
        return replica

    def gradient(self, replica: Replica, batch: int) -> None:
        network = self._networks[id(replica)]
        places = self._places(batch)
        network.train()
        network.zero_grad()
        F.cross_entropy(network(self._train[0][places]), self._train[1][places]).backward()  # type: ignore[no-untyped-call]

    def _places(self, batch: int) -> Tensor:
        per_epoch = len(self._train[0]) // self._batch
        epoch, number = divmod(batch, per_epoch)
        if self._order is None or self._order[0] != epoch:
            shuffled = torch.randperm(
                len(self._train[0]), generator=torch.Generator().manual_seed(self._seed * 1000003 + epoch)
            )
            self._order = epoch, shuffled
        return self._order[1][number * self._batch : (number + 1) * self._batch]

    def accuracy(self, weights: Mapping[str, Tensor]) -> float | None:
        for name, parameter in self._tested.named_parameters():
            parameter.data.copy_(weights[name].view_as(parameter))
        self._tested.eval()
        inputs, labels = (part[:TESTED] for part in self._test)
        with torch.no_grad():
            right = sum(
                int((self._tested(inputs[at : at + 1000]).argmax(1) == labels[at : at + 1000]).sum())
                for at in range(0, len(inputs), 1000)
            )
        return right / len(inputs)
