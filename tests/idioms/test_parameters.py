"""A script's own expressions of parameters: right where each element counts alone, refused by name where a rank would
take its part of a cut parameter for the whole.
"""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import RunError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    Net,
    batch,
    both,
    cases_of,
    close,
    learn,
    mine,
    name_of,
    refused,
    same_grads,
    same_states,
)


def is_cut(model: shoal.ParallelModule, name: str) -> bool:
    """Whether some rank holds less than all of a parameter."""
    return type(model.get_parameter(name)) is not nn.Parameter


def same_or_refused(reference: Any, model: Any, text: str, edit: Callable[[Any], object]) -> None:
    """Where the plan cuts 'b.weight' refused with this text, else the same as on one device."""
    if is_cut(model, "b.weight"):
        refused(RunError, text, lambda: edit(model))
    else:
        for net in (reference, model):
            torch.manual_seed(5)
            edit(net)
        same_states(model, reference)


def drawn_after(plan: AnyPlan) -> None:
    """Random numbers for a parameter that is laid over the ranks: not where it is cut."""
    reference, model = both(plan)
    edits: dict[str, Callable[[Any], object]] = {
        "torch.nn.init.xavier_normal_": lambda net: net.b.apply(lambda child: nn.init.xavier_normal_(child.weight)),
        "torch.nn.init.kaiming_uniform_": lambda net: net.b.reset_parameters(),
        "torch.nn.init.trunc_normal_": lambda net: nn.init.trunc_normal_(net.b.weight),
        "torch.nn.init.orthogonal_": lambda net: nn.init.orthogonal_(net.b.weight),
        "torch.nn.init.dirac_": lambda net: nn.init.dirac_(net.b.weight),
        "torch.nn.init.sparse_": lambda net: nn.init.sparse_(net.b.weight.view(6, -1), 0.5),
        "normal_": lambda net: net.b.weight.data.normal_(),
        "uniform_": lambda net: net.b.weight.detach().uniform_(),
        "randn_like": lambda net: net.b.weight.data.add_(torch.randn_like(net.b.weight)),
    }
    for called, edit in edits.items():
        same_or_refused(reference, model, f"{called} would fill this rank's part of parameter 'b.weight'", edit)
    for net in (reference, model):
        for constant in (nn.init.ones_, nn.init.zeros_, partial(nn.init.constant_, val=0.1)):
            constant(net.b.weight)
        net.norm.reset_parameters()
    same_states(model, reference)


def functions_of_elements(plan: AnyPlan) -> None:
    """Clipping of weights, decay by hand, means over time, L1 and proximal penalties: each element alone."""
    reference, model = both(plan)
    x, y = batch()
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        copied = copy.deepcopy(list(net.parameters()))
        with torch.no_grad():
            for parameter, old, same in zip(net.parameters(), before, copied, strict=True):
                parameter.clamp_(-0.2, 0.2).mul_(0.9).sub_(0.01 * torch.sign(parameter))
                parameter.data = parameter.data * 0.5
                old.lerp_(parameter, 0.3)
                parameter.copy_(0.5 * old + 0.5 * same)
        penalty: Any = 0
        for parameter, old in zip(net.parameters(), before, strict=True):
            penalty = penalty + parameter.abs().sum() + ((parameter - old.detach()) ** 2).sum() / 2
        loss = F.cross_entropy(net(own), classes)
        loss += 0.1 * penalty
        assert math.isfinite(loss.item())
        assert not torch.isnan(loss)
        assert loss.detach().numpy().shape == ()
        torch.autograd.backward(loss)
        for parameter in net.parameters():
            parameter.grad += 0.1 * parameter.detach()
            parameter.grad.add_(parameter.detach(), alpha=0.1)
    same_grads(model, reference)
    same_states(model, reference)
    for parameter in model.parameters():
        assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
        assert type(pickle.loads(pickle.dumps(parameter.detach().clone()))) is Tensor


def functions_of_whole_parameters(plan: AnyPlan) -> None:
    """A norm, a product, a mean, or a root of a sum of a part is not that of the whole."""
    x, y = batch()

    def step(net: Any, penalty: Callable[[Tensor], Tensor]) -> None:
        own, classes = (x, y) if type(net) is Net else (mine(x), mine(y))
        torch.autograd.backward(F.cross_entropy(net(own), classes) + 0.1 * penalty(net.b.weight))

    penalties: dict[str, Callable[[Tensor], Tensor]] = {
        "norm would see": lambda w: w.norm(),
        "linalg_vector_norm would see": lambda w: torch.linalg.vector_norm(w),
        "matmul would see": lambda w: (w.flatten(1) @ w.flatten(1).T - torch.eye(6)).square().sum(),
        "mean would see": lambda w: w.square().mean(),
        "sum would see": lambda w: w.square().sum((1, 2, 3)).sqrt().sum(),
        "__getitem__ would see": lambda w: w[0].square().sum(),
        "max would see": lambda w: w.abs().max(),
        "sqrt of a sum over": lambda w: w.square().sum().sqrt(),
        "pow of a sum over": lambda w: (torch.zeros(()) + w.square().sum()) ** 0.5,
        "mul of a sum over": lambda w: w.sum() * w.square().sum(),
    }
    for text, penalty in penalties.items():
        reference, model = both(plan, Net, norm=False)
        if is_cut(model, "b.weight"):
            refused(RunError, f"{text}", lambda net=model, penalty=penalty: step(net, penalty))  # type: ignore[misc]
            refused(RunError, "parameter 'b.weight'", lambda net=model, penalty=penalty: penalty(net.b.weight))  # type: ignore[misc]
        else:
            for net in (reference, model):
                step(net, penalty)
            same_grads(model, reference)
    reference, model = both(plan)
    text = "norm would see this rank's part of parameter 'b.weight' alone, not the whole"
    same_or_refused(reference, model, text, lambda net: net.b.weight.data.div_(net.b.weight.norm()))
    text = "item of a sum over parameter 'b.weight' would be that of this rank's share of the sum"
    same_or_refused(reference, model, text, lambda net: net.b.weight.square().sum().item())
    text = "cat would see this rank's part of parameter"
    same_or_refused(reference, model, text, lambda net: nn.utils.parameters_to_vector(net.b.parameters()))


def hooks_of_whole_gradients(plan: AnyPlan) -> None:
    """A hook may read any number of a gradient; to change it by one that is this rank's part's own is refused."""
    x, y = batch()
    text = "a hook makes the gradient of parameter 'b.weight' by more than functions of each element"
    hooks: list[Callable[[Tensor], Tensor]] = [
        lambda grad: grad / grad.norm(),
        lambda grad: grad - grad.mean((1, 2, 3), keepdim=True),
        lambda grad: F.normalize(grad),
    ]
    for hook in hooks:
        reference, model = both(plan)
        for net in (reference, model):
            net.b.weight.register_hook(hook)
        if is_cut(model, "b.weight"):
            refused(RunError, text, lambda net=model: learn(net, mine(x), mine(y)))  # type: ignore[misc]
        else:
            learn(reference, x, y)
            learn(model, mine(x), mine(y))
            same_grads(model, reference)
    reference, model = both(plan)
    read: list[float] = []
    for net in (reference, model):
        net.b.weight.register_hook(lambda grad: read.append(float(grad.norm())))
        net.b.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * 2)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    assert len(read) == 2


def counted_parameters(plan: AnyPlan) -> None:
    """sum(p.numel()) would count this rank's part; model.shards() knows the whole shapes."""
    reference, model = both(plan)

    def count(net: nn.Module) -> int:
        return sum(parameter.numel() for parameter in net.parameters())

    if model.cuts_parameters:
        refused(RunError, "would be that of this rank's part of it", lambda: count(model))
    else:
        assert count(model) == count(reference)
    names = dict(model.named_parameters())
    whole = sum(math.prod(shard.shape) for name, shard in model.shards().items() if name in names)
    assert whole == count(reference)


def laid_whole_again(plan: AnyPlan) -> None:
    """Under a plan that cuts nothing all of it is allowed again; optimizers see ordinary parameters meanwhile."""
    reference, model = both(plan)
    x, y = batch()
    steps = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for net in (reference, model)]
    for optimizer, net, own, classes in zip(steps, (reference, model), (x, mine(x)), (y, mine(y)), strict=True):
        for _ in range(2):
            learn(net, own, classes)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.step(lambda net=net, own=own, classes=classes: float(learn(net, own, classes)))
    same_states(model, reference)
    again = shoal.parallelize(model, (6, 3, 8, 6), "data", bucket_bytes=1 << 16)
    close(again.get_parameter("b.weight").norm().detach(), reference.b.weight.norm().detach())
    learn(reference, x, y)
    learn(again, mine(x), mine(y))
    for optimizer in steps:
        optimizer.step()
    same_states(again, reference)
    close(again.get_parameter("b.weight").norm().detach(), reference.b.weight.norm().detach())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_parameters(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
