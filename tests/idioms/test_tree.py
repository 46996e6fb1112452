"""The module's own tree stays visible over the shards; what is set on it counts, what cannot be honoured is refused."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import RunError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    batch,
    both,
    built,
    cases_of,
    close,
    learn,
    mine,
    name_of,
    ordinary,
    parallel,
    refused,
    same_grads,
    same_states,
)


class Nested(nn.Module):
    """With children of children, plain attributes and a method."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.features = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(self.features(self.a(x))))
        result: Tensor = self.head(x.mean((2, 3))) * self.scale
        return result

    def sum_of_biases(self) -> float:
        return sum(float(tensor.sum()) for name, tensor in self.named_parameters() if name.endswith("bias"))


def tree(plan: AnyPlan) -> None:
    """model.module, model.features[0], names, types, `apply`, methods and print(model) are the module's."""
    net, reference = built(Nested), built(Nested)
    model = parallel(net, plan)
    children = cast(Any, model)
    assert children.features[0] is net.features[0]
    assert children.module is net
    assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in reference.named_buffers()]
    assert [type(child) for child in model.children()] == [type(child) for child in reference.children()]
    assert (model.module if hasattr(model, "module") else model) is net
    assert isinstance(model, nn.Module)
    if not model.cuts_parameters:
        assert children.sum_of_biases() == reference.sum_of_biases()
    text = str(model)
    assert "(features): Sequential(" in text
    assert "(0): BatchNorm2d(6" in text
    assert "of 2" in text

    def constant(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.constant_(module.get_parameter("bias"), 0.0)

    model.apply(constant)
    reference.apply(constant)
    same_states(model, reference)


def frozen_batch_norm(plan: AnyPlan) -> None:
    """A loop over modules() puts batch norm into evaluation in training: it takes its running statistics."""
    reference, model = both(plan)
    x, y = batch()
    for net in (reference, model):
        net.norm.running_mean.fill_(0.3)
        net.norm.running_var.fill_(1.7)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)
    for net in (reference, model):
        net.zero_grad()
        net.train()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)


class Counting(nn.Module):
    """A buffer that counts every pass, and is read."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        result: Tensor = self.head(F.relu(self.b(self.norm(self.a(x)))).mean((2, 3))) * self.passes
        return result


def statistics_in_evaluation(plan: AnyPlan) -> None:
    """A batch norm that learns its statistics in evaluation (test-time adaptation), and a counter, go on there."""
    reference, model = both(plan, Counting)
    for net in (reference, model):
        net.eval()
        net.norm.train()
    with torch.no_grad():
        for samples in (6, 1, 6):  # of one sample some ranks have no part
            x, _ = batch(samples)
            close(model(mine(x)), mine(reference(x)))
            same_states(model, reference)


def dropout_in_evaluation(plan: AnyPlan) -> None:
    """A loop turns dropout on in evaluation (Monte Carlo dropout): every pass draws another mask."""
    model = parallel(built(Nested), plan).eval()
    x, _ = batch()
    with torch.no_grad():
        assert torch.equal(model(mine(x)), model(mine(x)))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        before = ordinary(model.features[0].running_mean)
        results = [model(mine(x)) for _ in range(3)]
        assert not torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])
        assert torch.equal(model.features[0].running_mean, before)


def dropout_rate(plan: AnyPlan) -> None:
    """Another dropout.p counts from the next pass on."""
    reference, model = both(plan, Nested)
    x, _ = batch()
    for rate in (0.0, 1.0):
        for net in (reference, model):
            net.features[2].p = rate
        close(model(mine(x)), mine(reference(x)))
    model.features[2].p = 0.5
    assert not torch.equal(model(mine(x)), model(mine(x)))


def freezing(plan: AnyPlan) -> None:
    """requires_grad_ of a child counts from the next pass on, off and on again."""
    reference, model = both(plan)
    for seed, frozen in enumerate((True, False, True)):
        x, y = batch(seed=seed)
        for net in (reference, model):
            net.zero_grad()
            net.a.requires_grad_(not frozen)
            net.head.bias.requires_grad_(not frozen)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        same_grads(model, reference)
    for net in (reference, model):
        net.requires_grad_(False)
    x, _ = batch()
    result = model(mine(x))
    assert not result.requires_grad
    close(result, mine(reference(x)))


def attributes(plan: AnyPlan) -> None:
    """Plain attributes are read and set through the network; forward reads them as they are now."""
    reference, model = both(plan, Nested)
    x, _ = batch()
    assert model.scale == 1.0
    for net in (reference, model):
        net.eval()
        net.scale = 3.0
    close(model(mine(x)), mine(reference(x)))
    assert model.module.scale == 3.0
    model.note = "mine"
    assert model.note == "mine"
    refused(AttributeError, "has no attribute 'nothing'", lambda: model.nothing)


def modes(plan: AnyPlan) -> None:
    """train() and eval() through the network or its module; `training` is the module's."""
    reference, model = both(plan)
    x, _ = batch()
    for net in (reference, model):
        net(x if net is reference else mine(x))
    reference.eval()
    model.module.eval()
    assert not model.training
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))
    model.train()
    assert model.module.training
    assert model.norm.training
    assert reference.train() is reference
    assert model.train() is model
    close(model(mine(x)), mine(reference(x)))
    same_states(model, reference)


def changed_in_place(plan: AnyPlan) -> None:
    """Weights that are changed in place, by element, count from the next pass on; so does another dtype."""
    reference, model = both(plan)
    x, _ = batch()
    with torch.no_grad():
        for net in (reference, model):
            for parameter in net.parameters():
                parameter.mul_(0.5)
            net.head.weight.data.add_(1.0)
    close(model(mine(x)), mine(reference(x)))
    same_states(model, reference)
    model.float()
    found = model(mine(x).float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, mine(reference(x)).float(), rtol=1e-3, atol=1e-4)


def calling_a_child(plan: AnyPlan) -> None:
    """A child whose parameters are whole here can be called; one that is cut is refused by its path."""
    reference, model = both(plan)
    x, _ = batch()
    for name, width in (("a", 3), ("b", 6)):
        own = torch.randn(2, width, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        shard = model.shards()[f"{name}.weight"]
        if shard.tensor.shape == shard.shape:
            close(getattr(model, name)(own), getattr(reference, name)(own))
        else:
            refused(
                RunError,
                f"module {name!r} cannot be called on its own: this rank holds a part of '{name}.",
                lambda name=name, own=own: getattr(model, name)(own),  # type: ignore[misc]
            )
    if model.cuts_parameters:
        refused(RunError, "cannot be called on its own", lambda: model.module(x))
    else:
        close(model.module(x), reference(x))
    close(model(mine(x)), mine(reference(x)))


def hooks_inside(plan: AnyPlan) -> None:
    """A hook registered on a module inside is refused by its path; when it is removed, the network goes on."""
    reference, model = both(plan)
    x, y = batch()
    for register, hook in (
        (model.b.register_forward_hook, lambda _module, _args, result: result * 2),
        (model.b.register_forward_pre_hook, lambda _module, args: args),
        (model.b.register_full_backward_hook, lambda _module, grads, _results: grads),
    ):
        handle = register(hook)
        refused(RunError, "module 'b' has a hook", lambda: model(mine(x)))
        handle.remove()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


def replaced(plan: AnyPlan) -> None:
    """A module or parameter that is replaced is refused by its path: change the module before parallelize."""
    reference, model = both(plan)
    x, _ = batch()
    before: dict[str, Any] = {"head": model.head, "weight": model.b.weight}
    model.head = nn.Linear(6, 4).double()
    refused(RunError, "'head' is not what it was when the network was laid over the ranks", lambda: model(mine(x)))
    model.head = before["head"]
    model.module.b.weight = nn.Parameter(torch.zeros(6, 6, 3, 3, dtype=torch.float64))
    refused(RunError, "'b.weight' is not what it was", lambda: model(mine(x)))
    model.module.b.weight = before["weight"]
    norm = model.norm
    nn.SyncBatchNorm.convert_sync_batchnorm(model.module)  # type: ignore[no-untyped-call]
    refused(RunError, "'norm' is not what it was", lambda: model(mine(x)))
    model.module.norm = norm
    close(model(mine(x)), mine(reference(x)))


def replaced_before(plan: AnyPlan) -> None:
    """Transfer learning: the head is replaced before, the rest frozen."""
    reference, net = built(), built()
    for one in (reference, net):
        one.requires_grad_(False)
        torch.manual_seed(8)
        one.head = nn.Linear(6, 3).double()
    model = parallel(net, plan)
    x, y = batch()
    learn(reference, x, y % 3)
    learn(model, mine(x), mine(y) % 3)
    same_grads(model, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_tree(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
