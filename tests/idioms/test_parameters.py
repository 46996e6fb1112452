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
        "exponential_": lambda net: net.b.weight.data.copy_(torch.empty_like(net.b.weight).exponential_()),
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
    """A hook changes each element alone; a number of this rank's part of a gradient is refused."""
    x, y = batch()
    hooks: dict[str, Callable[[Tensor], Tensor | None]] = {
        "norm would see": lambda grad: grad / grad.norm(),
        "mean would see": lambda grad: grad - grad.mean((1, 2, 3), keepdim=True),
        "normalize would see": lambda grad: F.normalize(grad),
        "max would see": lambda grad: print(grad.abs().max()),
    }
    for text, hook in hooks.items():
        reference, model = both(plan)
        for net in (reference, model):
            net.b.weight.register_hook(hook)
        if is_cut(model, "b.weight"):
            text += " this rank's part of the gradient of parameter 'b.weight' alone, not the whole"
            refused(RunError, text, lambda net=model: learn(net, mine(x), mine(y)))  # type: ignore[misc]
        else:
            learn(reference, x, y)
            learn(model, mine(x), mine(y))
            same_grads(model, reference)
    reference, model = both(plan)
    for net in (reference, model):
        net.b.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * 2)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def masks_of_elements(plan: AnyPlan) -> None:
    """Pruning and masking by conditions on each element; other words for the same operators."""
    reference, model = both(plan)
    x, y = batch()
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        learn(net, own, classes)
        with torch.no_grad():
            for parameter in net.parameters():
                small = (parameter > -0.05) & ~(parameter > 0.05)
                parameter.masked_fill_(small, 0.0)
                parameter.data[parameter.data.abs() > 0.2] = 0.1
                parameter.negative().multiply(2.0).subtract(0.1).absolute()
                parameter.grad.masked_fill_(parameter.grad.greater(0.1) | parameter.grad.isnan(), 0.5)
                parameter.copy_(parameter.abs_() // 0.01 * 0.01 + torch._foreach_maximum([parameter], 0.02)[0])
    same_states(model, reference)
    same_grads(model, reference)


def what_optimizers_remember(plan: AnyPlan) -> None:
    """Of a cut parameter a part, as it is itself: outside of the step, in hooks on it, and after one that fails."""
    reference, model = both(plan, Net, norm=False)
    x, y = batch()

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            raise ValueError("no")

    shoal.elementwise_optimizer(Failing)
    seen: list[Any] = []
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        nets = [net.b.weight, net.head.bias]
        torch.autograd.graph.register_multi_grad_hook(nets, lambda grads: seen.append(len(grads)))
        learn(net, own, classes)
        fused = torch.optim.Adagrad(net.parameters(), lr=0.01, fused=True)
        fused.step()
        fused.step()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["params"][2].grad))
        optimizer.step()
        seen.append(optimizer.state[net.b.weight]["momentum_buffer"])
        optimizer.step()
        with pytest.raises(ValueError, match="no"):
            Failing(net.parameters(), lr=0.1).step()
        seen.append(net.b.weight)
    same_states(model, reference)
    assert [count for count in seen if isinstance(count, int)] == [2, 2]
    for tensor in [tensor for tensor in seen if isinstance(tensor, Tensor)][4:]:
        if is_cut(model, "b.weight"):
            refused(RunError, "norm would see this rank's part of", lambda tensor=tensor: tensor.norm())  # type: ignore[misc]
        else:
            tensor.norm()
    if is_cut(model, "b.weight"):
        text = "the optimizer's momentum_buffer of parameter 'b.weight'"
        state = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state.step()
        refused(RunError, text, lambda: state.state[model.get_parameter("b.weight")]["momentum_buffer"].norm())
        text = "is put in the place of this rank's part of parameter 'b.weight'"
        refused(RunError, text, lambda: setattr(model.b.weight, "data", torch.zeros(6, 6, 3, 3)))
        text = "the norm of order -inf of gradients that are laid over ranks"
        infinity = float("-inf")
        refused(RunError, text, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=infinity))


def gradients_by_hand(plan: AnyPlan) -> None:
    """Functions of each element of `p.grad` are right on a part; a norm of one's own is not that of the whole."""
    reference, model = both(plan)
    x, y = batch()
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        velocity = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for _ in range(2):
            net.zero_grad(set_to_none=False)
            learn(net, own, classes)
            torch._foreach_mul_([parameter.grad for parameter in net.parameters()], 0.5)
            with torch.no_grad():
                for parameter, speed in zip(net.parameters(), velocity, strict=True):
                    parameter.grad.data.clamp_(-0.05, 0.05)
                    speed.mul_(0.9).add_(parameter.grad)
                    parameter -= 0.1 * speed + 0.1 * parameter.grad.tanh()
    same_states(model, reference)
    same_grads(model, reference)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    grad = model.get_parameter("b.weight").grad
    assert model.get_parameter("b.weight").grad is grad, "the same object at every look"
    assert type(pickle.loads(pickle.dumps(grad))) is Tensor
    norm = torch.nn.utils.get_total_norm([grad])
    close(norm, torch.linalg.vector_norm(reference.b.weight.grad))
    own_part = model.shards()["b.weight"].grad
    assert own_part is not None
    assert float((own_part - grad).abs().max()) == 0.0, "beside an ordinary tensor of its shape it is one, too"
    reads: dict[str, Callable[[Tensor], object]] = {
        "norm would see": lambda grad: grad.norm(),
        "mean would see": lambda grad: grad.abs().mean(),
        "all would see": lambda grad: grad.isfinite().all(),
        "item of a sum over": lambda grad: grad.square().sum().item(),
        "numel of": lambda grad: grad.numel(),
        "__getitem__ would see": lambda grad: grad[0],
        "numpy would see": lambda grad: grad.detach().numpy(),
        "all_reduce would see": lambda grad: torch.distributed.all_reduce(grad),
        "randn_like would fill": lambda grad: grad.add_(torch.randn_like(grad)),
        "item of a sum": lambda grad: (torch.zeros(()) + grad.square().sum()).item(),
        "_foreach_norm would see": lambda grad: torch._foreach_norm(torch._foreach_mul([grad], 0.5)),
        "_foreach_powsum would see": lambda grad: torch._foreach_powsum([grad], 2),
        "norm would see ": lambda grad: torch.zeros(grad.shape, dtype=grad.dtype).add_(grad).norm(),
        "norm would see  ": lambda grad: copy.copy(grad).norm(),
        "equal would see": lambda grad: torch.equal(grad, grad.clone()),
        "all_gather would see": lambda grad: torch.distributed.all_gather(
            [torch.empty(grad.shape, dtype=grad.dtype) for _ in range(2)], grad
        ),
    }
    for other in (grad.detach(), grad.clone()):
        close(torch.nn.utils.get_total_norm([other]), norm)
    asked = [torch.autograd.grad(loss(*of), of[0].b.weight) for of in ((reference, x, y), (model, mine(x), mine(y)))]
    close(*map(torch.nn.utils.get_total_norm, asked))
    looks: tuple[Callable[[], Any], ...] = (
        lambda: model.get_parameter("b.weight").grad,
        lambda: torch.autograd.grad(loss(model, mine(x), mine(y)), model.get_parameter("b.weight"))[0],
    )
    for text, read in reads.items():
        for look in looks:
            if is_cut(model, "b.weight"):
                refused(RunError, text.strip(), lambda look=look, read=read: read(look()))  # type: ignore[misc]
                refused(
                    RunError,
                    "the gradient of parameter 'b.weight'",
                    lambda look=look, read=read: read(look()),  # type: ignore[misc]
                )
            else:
                read(look())


def parts_of_buffers(plan: AnyPlan) -> None:
    """Running statistics of a batch norm that is cut: numbers of this rank's part of them are refused."""
    reference, model = both(plan)
    x, y = batch()
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        learn(net, own, classes)
        net.norm.running_mean.mul_(0.5).add_(0.1)
        net.norm.running_var.fill_(2.0)
        learn(net, own, classes)
    same_states(model, reference)
    if "norm.running_mean" in model.shards() and model.shards()["norm.running_mean"].tensor.shape != (6,):
        text = "mean would see this rank's part of buffer 'norm.running_mean' alone, not the whole"
        refused(RunError, text, lambda: model.norm.running_mean.mean())
    else:
        close(model.norm.running_mean.mean(), reference.norm.running_mean.mean())
    whole = model.state_dict()["norm.running_mean"]
    close(whole.mean(), reference.norm.running_mean.mean())
    again = shoal.parallelize(model, (6, 3, 8, 6), "data", bucket_bytes=1 << 16)
    close(again.norm.running_mean.mean(), reference.norm.running_mean.mean())


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
