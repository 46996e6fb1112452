"""Custom autograd functions on real ranks: their own backward sees the whole gradient, under every plan."""

# ruff: noqa: ARG004  (torch's own signatures)
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from tests.parity.conftest import RunOnRanks
from tests.unit.capture_check import Guided


class Sign(torch.autograd.Function):
    """Binary weights, straight through where they are small."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.limit = limit
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad.clamp(-0.01, 0.01) * (weight.abs() < ctx.limit), None


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3) / 4)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = Guided.apply(self.first(x))
        y = self.norm(F.conv2d(y, Sign.apply(self.weight, 0.5), padding=1))
        result: Tensor = self.head(Reverse.apply(F.relu(y)).mean((2, 3)))
        return result


def train(plan: str, steps: int) -> dict[str, Tensor]:
    one, generator = Binary().double(), torch.Generator().manual_seed(2)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    many = shoal.parallelize(Binary().double(), (6, 3, 8, 8), plan)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (one, many)]
    mine = slice(rank * 6 // world, (rank + 1) * 6 // world)
    for _ in range(steps):
        x = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 5, (6,), generator=generator)
        for model, part, optimizer in zip((one, many), (slice(None), mine), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    found = shoal.full_state_dict(many)
    return {name: (found[name] - tensor).abs().max() for name, tensor in one.state_dict().items()}


@pytest.mark.parametrize("plan", ["data", "model", "spatial", "owt"])
def test_custom_functions_train_as_on_one_device(plan: str, on_ranks: RunOnRanks) -> None:
    for differences in on_ranks(2, train, plan, 3):
        assert max(differences.values()) < 1e-9, differences
