"""Cases that run inside the ranks: gradients from factors, against one device and against sums."""

from collections.abc import Mapping
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.execution import factors
from shoal.execution.laying import capture_modes, lay
from shoal.plan import Plan
from shoal.traffic import Sent
from shoal.transport import Transport
from tests.parity.features import mine, same_grads


class Tokens(nn.Module):
    """Linear layers of every kind: on n x t x c, first, last, without a bias, used twice, tied, and one not used."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.twice = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = self.tied.weight
        self.middle = nn.Linear(8, 12, bias=False)
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(12, 6)
        self.middle.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = self.other(F.relu(self.tied(self.twice(F.relu(self.twice(x))))))
        x = self.drop(F.relu(self.middle(x)))
        result: Tensor = self.last(x.mean(1))
        return result


FACTORED = ("first", "middle", "last")
"""Its layers whose weights have one use."""


def tokens(*, frozen: bool = False) -> Tokens:
    torch.manual_seed(3)
    return Tokens(frozen=frozen).double()


def sequences(samples: int, seed: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, 5, dtype=torch.float64, generator=draw)
    return x, torch.randint(0, 6, (samples,), generator=draw)


def share(tensor: Tensor, shares: tuple[int, ...] | None) -> Tensor:
    if shares is None:
        return mine(tensor)
    rank = dist.get_rank()
    return tensor[sum(shares[:rank]) : sum(shares[: rank + 1])]


def step(model: nn.Module, reference: nn.Module, x: Tensor, y: Tensor, shares: tuple[int, ...] | None = None) -> None:
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    own = share(x, shares)
    # without samples there is no mean
    torch.autograd.backward(F.cross_entropy(model(own), share(y, shares)) if len(own) else model(own).sum())


def sent_by(model: shoal.ParallelModule, before: Mapping[str, Sent]) -> dict[str, tuple[int, int]]:
    """What was sent since, by layer."""
    counted = model.counted
    since = {
        name: (one.bytes - before.get(name, Sent()).bytes, one.messages - before.get(name, Sent()).messages)
        for name, one in counted.items()
    }
    return {name: one for name, one in since.items() if one[1]}


def told(predicted: Mapping[str, Sent]) -> dict[str, tuple[int, int]]:
    return {name: (one.bytes, one.messages) for name, one in predicted.items()}


def exact(plan: str | Plan, *, recompute: bool = False) -> None:
    """Three steps of an optimizer with momentum are one device's, and what is sent is what is predicted, by layer."""
    (x, y), reference = sequences(6), tokens()
    model = shoal.parallelize(tokens(), x, plan, factors="always", recompute=recompute)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, reference)]
    for number in range(3):
        before = model.counted
        step(model, reference, x, y)
        assert sent_by(model, before) == told(model.predicted()), number
        same_grads(model, reference)
        norms = shoal.clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norms[0], norms[1], check_dtype=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if plan == "data":
        assert model.plan.factors == FACTORED
        labels = set(model.predicted())
        assert labels == {*FACTORED, "gradients"}, "a weight with two uses is summed"


def other_shares() -> None:
    """Uneven shares, ranks without samples, frozen weights, an input's gradient, evaluation in between."""
    world = dist.get_world_size()
    reference = tokens()
    model = shoal.parallelize(tokens(), (6, 4, 5), "data", factors="always")
    for shares in ((3, 1, 2, 0)[:world], (1, 0, 0, 0)[:world], (2, 2, 2, 2)[:world]):
        x, y = sequences(sum(shares))
        x.requires_grad_()
        reference.zero_grad()
        model.zero_grad()
        step(model, reference, x, y, shares)
        same_grads(model, reference)
        model.eval()(share(x, shares))
        model.train()
    reference, model = tokens(frozen=True), shoal.parallelize(tokens(frozen=True), (6, 4, 5), "data", factors="always")
    x, y = sequences(6)
    before = model.counted
    step(model, reference, x, y)
    same_grads(model, reference)
    assert model._states["middle.weight"].grad is None
    assert "middle" not in sent_by(model, before)
    model.middle.weight.requires_grad_()  # and thawed
    reference.middle.weight.requires_grad_()
    reference.zero_grad()
    model.zero_grad()
    before = model.counted
    step(model, reference, x, y)
    same_grads(model, reference)
    assert sent_by(model, before) == told(model.predicted())


def accumulated() -> None:
    """no_sync, then a pass on top of it, on one rank alone too: everything is summed. Hooks see the new mean alone."""
    (x, y), reference = sequences(6), tokens()
    model = shoal.parallelize(tokens(), x, "data", factors="always")
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    with model.no_sync():
        before = model.counted
        torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
        assert not sent_by(model, before)
    before = model.counted
    step(model, reference, *sequences(6, seed=5))
    same_grads(model, reference)
    assert sent_by(model, before) == told(model.predicted(accumulated=True))
    reference.zero_grad()
    model.zero_grad()
    if dist.get_rank() == 0:  # the others do not know of it
        model.last.weight.grad = torch.ones_like(model.last.weight)
    reference.last.weight.grad = torch.ones_like(reference.last.weight) / dist.get_world_size()
    if dist.get_rank():
        model.last.weight.grad = torch.zeros_like(model.last.weight) if dist.get_rank() % 2 else None
    step(model, reference, x, y)
    same_grads(model, reference)
    reference.zero_grad()
    model.zero_grad()
    for net in (reference, model):
        net.first.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    step(model, reference, x, y)
    same_grads(model, reference)


def choices(plan: Any, sums: tuple[float, ...], products: tuple[float, ...]) -> tuple[str, ...] | None:
    """What "auto" does with a weight of 4 MiB and a small one, where the ranks have measured these seconds."""
    rank = dist.get_rank()
    large = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    with (
        mock.patch.object(Transport, "measured_sums", return_value=[(1e-4, seconds) for seconds in sums]),
        mock.patch.object(factors, "_longer_product", return_value=products[rank]),
    ):
        return shoal.parallelize(large, (4, 1024), plan).plan.factors


def autocast() -> None:
    """Under autocast factors travel as the weights' own type, and the gradients are those of sums to its precision."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6)), torch.randn(6, 5), torch.arange(6)
    captured = capture_modes(net, x)
    grads = []
    option: Literal["always", "never"]
    for option in ("always", "never"):
        model = lay(captured, "data", Transport(), factors=option, seed=0)
        before = model.counted
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(mine(x)), mine(y))
        torch.autograd.backward(loss)
        assert sent_by(model, before) == told(model.predicted())
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
