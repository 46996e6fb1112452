"""Gradients are autograd's: of inputs, of parameters, accumulated, kept, hooked."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import RunError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    Net,
    batch,
    both,
    built,
    cases_of,
    close,
    learn,
    mine,
    name_of,
    ordinary,
    own_part,
    parallel,
    rank,
    refused,
    same_grads,
    weight,
)

# Of inputs


def input_gradient(plan: AnyPlan) -> None:
    """Of this rank's loss, on shares of 4 and 2 samples, whether the input is a leaf or computed."""
    reference, model = both(plan)
    x, y = batch()
    whole = x.clone().requires_grad_()
    learn(reference, whole * 1, y)
    assert whole.grad is not None
    leaf = mine(x, 4).clone().requires_grad_()
    learn(model, leaf, mine(y, 4))
    assert leaf.grad is not None
    close(leaf.grad, mine(whole.grad, 4) / weight(x, 4))
    same_grads(model, reference)
    before = mine(x, 4).clone().requires_grad_()
    learn(model, before * 2 - before, mine(y, 4))
    assert before.grad is not None
    close(before.grad, leaf.grad)


def input_gradient_of_one_rank(plan: AnyPlan) -> None:
    """One rank asks for it and the other does not."""
    reference, model = both(plan)
    x, y = batch()
    whole = x.clone().requires_grad_()
    learn(reference, whole, y)
    own = mine(x).clone().requires_grad_(bool(torch.distributed.get_rank() == 0))
    learn(model, own, mine(y))
    if own.requires_grad:
        assert own.grad is not None
        assert whole.grad is not None
        close(own.grad, mine(whole.grad) * 2)
    same_grads(model, reference)


def input_gradient_io_whole(plan: AnyPlan) -> None:
    """Every rank passes the whole batch and gets one device's gradient."""
    reference, model = built(), parallel(built(), plan, io="whole")
    x, y = batch()
    whole, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    learn(reference, whole, y)
    learn(model, own, y)
    assert own.grad is not None
    assert whole.grad is not None
    close(own.grad, whole.grad)
    same_grads(model, reference)


def input_gradient_io_tile(plan: AnyPlan) -> None:
    """Every rank passes its tile; the loss is this rank's mean over its tile of the result."""
    reference, model = built(Maps), parallel(built(Maps), plan, io="tile")
    x, _ = batch()
    whole = x.clone().requires_grad_()
    torch.autograd.backward(reference(whole).square().mean())
    assert whole.grad is not None
    box = model.input_box
    if box is None:  # by channel, rank 0 has the whole input and result
        torch.autograd.backward(model(x[:0]).sum())
    else:
        tile = tuple(slice(span.start, span.stop) for span in box)
        own = x[tile].clone().requires_grad_()
        torch.autograd.backward(model(own).square().mean())
        assert own.grad is not None
        close(own.grad, whole.grad[tile] * (x.numel() / own.numel()))
    same_grads(model, reference)


class Maps(nn.Module):
    """From images to images."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return result


def chain(plan: AnyPlan) -> None:
    """D(G(z)), both over the ranks, on unequal shares: both get one device's gradient."""
    generator, discriminator = built(Maps), built(Net)
    ours, theirs = parallel(built(Maps), plan), parallel(built(Net), plan)
    z, y = batch()
    torch.autograd.backward(F.cross_entropy(discriminator(generator(z)), y))
    torch.autograd.backward(F.cross_entropy(theirs(ours(mine(z, 4))), mine(y, 4)))
    same_grads(ours, generator)
    same_grads(theirs, discriminator)


def stem_under_ddp(plan: AnyPlan) -> None:
    """A DDP network before it gets the gradient that it gets before a DDP network, on unequal shares."""
    stem = nn.Conv2d(3, 3, 3, padding=1)
    plain, wrapped = built(lambda: deepcopy(stem)), DistributedDataParallel(built(lambda: deepcopy(stem)))
    after, model = built(Net, norm=False), parallel(built(Net, norm=False), plan)
    x, y = batch()
    for one, other in zip(plain.parameters(), wrapped.module.parameters(), strict=True):
        one.data.copy_(other.data)  # rank 0's, as DDP took them
    losses = [F.cross_entropy(after(plain(x[part])), y[part]) for part in (slice(0, 4), slice(4, 6))]
    torch.autograd.backward((losses[0] + losses[1]) / 2)
    learn(lambda own: model(wrapped(own)), mine(x, 4), mine(y, 4))
    for one, other in zip(plain.parameters(), wrapped.module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        close(other.grad, one.grad)


def adversarial_step(plan: AnyPlan) -> None:
    """PGD: autograd.grad of the input in a loop leaves the parameters alone; then one ordinary step."""
    reference, model = both(plan)
    x, y = batch()

    def attacked(net: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        moved = images.clone()
        for _ in range(2):
            moved.requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(net(moved), classes), moved)
            moved = (moved + 0.1 * grad.sign()).detach()
        return moved

    expected, found = attacked(reference, x, y), attacked(model, mine(x), mine(y))
    close(found, mine(expected))
    assert all(parameter.grad is None for parameter in model.parameters())
    learn(reference, expected, y)
    learn(model, found, mine(y))
    same_grads(model, reference)


# Of chosen tensors


def grad_of_parameters(plan: AnyPlan) -> None:
    """torch.autograd.grad gives the parameters' gradients, averaged over the ranks, and writes none."""
    reference, model = both(plan)
    x, y = batch()
    expected = torch.autograd.grad(F.cross_entropy(reference(x), y), list(reference.parameters()))
    found = torch.autograd.grad(F.cross_entropy(model(mine(x)), mine(y)), list(model.parameters()))
    for (name, parameter), grad, full in zip(model.named_parameters(), found, expected, strict=True):
        assert parameter.grad is None
        if model.shards()[name].tensor.numel():
            close(grad, own_part(model, name, full))


def backward_of_chosen_inputs(plan: AnyPlan) -> None:
    """backward(inputs=[x]) fills x.grad alone; backward(inputs=[a parameter]) that parameter's alone."""
    reference, model = both(plan)
    x, y = batch()
    whole, own = x.clone().requires_grad_(), mine(x).clone().requires_grad_()
    torch.autograd.backward(F.cross_entropy(reference(whole), y), inputs=[whole])
    torch.autograd.backward(F.cross_entropy(model(own), mine(y)), inputs=[own])
    assert whole.grad is not None
    assert own.grad is not None
    close(own.grad, mine(whole.grad) * 2)
    same_grads(model, reference)  # none
    torch.autograd.backward(F.cross_entropy(reference(x), y), inputs=[reference.b.bias])
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)), inputs=[model.b.bias])
    same_grads(model, reference)


def two_passes_one_backward(plan: AnyPlan) -> None:
    """Two calls in one loss, and calls whose backward passes come in the other order."""
    reference, model = both(plan, Net, norm=False)
    (x, y), (z, _) = batch(seed=1), batch(seed=2)
    torch.autograd.backward(F.cross_entropy(reference(x) + 2 * reference(z), y))
    torch.autograd.backward(F.cross_entropy(model(mine(x)) + 2 * model(mine(z)), mine(y)))
    same_grads(model, reference)
    for net, own, other, classes in ((reference, x, z, y), (model, mine(x), mine(z), mine(y))):
        first, second = net(own), net(other)
        torch.autograd.backward(F.cross_entropy(first, classes))
        torch.autograd.backward(F.cross_entropy(second, classes))
    same_grads(model, reference)


def penalty_on_weights(plan: AnyPlan) -> None:
    """A penalty on the parameters in the loss: its gradient comes on top, once."""
    reference, model = both(plan)
    x, y = batch()
    for net, own, classes in ((reference, x, y), (model, mine(x), mine(y))):
        for _ in range(2):
            penalty = torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()
            torch.autograd.backward(F.cross_entropy(net(own), classes) + 0.1 * penalty)
    same_grads(model, reference)


def unused_parameters(plan: AnyPlan) -> None:
    """A parameter that took no part keeps no gradient; nothing needs to be said beforehand."""
    reference, model = both(plan, WithUnused)
    x, y = batch()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    assert model.unused.weight.grad is None
    same_grads(model, reference)


class WithUnused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def second_derivative(plan: AnyPlan) -> None:
    """create_graph=True is refused: a gradient penalty would have no gradient."""
    model = parallel(built(), plan)
    x, _ = batch()
    own = mine(x).clone().requires_grad_()
    refused(
        RunError,
        "create_graph=True asks for a second derivative through a network that is laid over ranks",
        lambda: torch.autograd.grad(model(own).sum(), own, create_graph=True),
    )


def backward_twice(plan: AnyPlan) -> None:
    """A second backward pass through one forward pass is refused, also with retain_graph=True."""
    model = parallel(built(), plan)
    x, y = batch()
    loss = F.cross_entropy(model(mine(x)), mine(y))
    torch.autograd.backward(loss, retain_graph=True)
    refused(RunError, "backward ran twice through one forward pass", lambda: torch.autograd.backward(loss))


# Accumulated, kept, hooked


def accumulation(plan: AnyPlan) -> None:
    """Passes under no_sync, then one outside; zero_grad(set_to_none=False) between; on top of synchronised ones."""
    reference, model = both(plan)

    def step(seed: int, *, sync: bool = True) -> None:
        x, y = batch(seed=seed)
        learn(reference, x, y)
        if sync:
            learn(model, mine(x), mine(y))
        else:
            with model.no_sync():
                learn(model, mine(x), mine(y))

    step(1)
    step(2, sync=False)
    for net in (reference, model):
        net.zero_grad(set_to_none=False)
    step(3)
    same_grads(model, reference)
    step(4, sync=False)
    step(5, sync=False)
    step(6)
    same_grads(model, reference)
    for net in (reference, model):
        net.zero_grad()
    step(7, sync=False)
    step(8)
    same_grads(model, reference)


def own_gradients_under_no_sync(plan: AnyPlan) -> None:
    """Under no_sync `.grad` of a parameter that is not cut holds what DDP's does; so does the next one outside."""
    model = parallel(built(Net, norm=False), plan)
    wrapped = DistributedDataParallel(built(Net, norm=False))
    for sync in (False, False, True, False, True):
        x, y = batch(seed=int(sync))
        for net in (model, wrapped):
            if sync:
                learn(net, mine(x), mine(y))
            else:
                with net.no_sync():
                    learn(net, mine(x), mine(y))
        if plan == "data" or sync:
            same_grads(model, wrapped.module)


def kept_gradients(plan: AnyPlan) -> None:
    """What a script keeps of an earlier step does not change: g = [p.grad ...]; zero_grad(); a second step."""
    model = parallel(built(), plan)
    for set_to_none in (True, False):
        x, y = batch(seed=1)
        learn(model, mine(x), mine(y))
        kept = [parameter.grad for parameter in model.parameters()]
        copies = [None if grad is None else ordinary(grad) for grad in kept]
        if set_to_none:
            model.zero_grad()
            learn(model, mine(-3 * x), mine(y))
            for grad, copy in zip(kept, copies, strict=True):
                assert grad is copy is None or (grad is not None and copy is not None and torch.equal(grad, copy))
        else:  # in place, as with any module
            model.zero_grad(set_to_none=False)
            assert all(grad is None or not ordinary(grad).any() for grad in kept)


def hooks_on_parameters(plan: AnyPlan) -> None:
    """register_hook may change the gradient, register_post_accumulate_grad_hook sees it; each once per backward."""
    reference, model = both(plan)
    seen: list[Tensor] = []

    def saw(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    for net in (reference, model):
        net.b.weight.register_hook(lambda grad: grad * 2)
    model.b.weight.register_post_accumulate_grad_hook(saw)
    model.head.bias.register_hook(lambda grad: seen.append(grad.clone()))
    for seed in (1, 2):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        same_grads(model, reference)
    assert len(seen) == 4
    assert model.b.weight.grad is not None
    assert torch.equal(ordinary(seen[2 if seen[2].ndim == 4 else 3]), model.b.weight.grad)
    x, y = batch(seed=3)
    learn(reference, x, y)
    with model.no_sync():
        learn(model, mine(x), mine(y))
    x, y = batch(seed=4)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    assert len(seen) == 8


def hooks_of_one_rank(plan: AnyPlan) -> None:
    """Rank 0 alone watches the gradients, as loggers do, also while they accumulate."""
    reference, model = both(plan)
    seen: list[Tensor] = []
    if rank() == 0:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: seen.append(grad.clone()))
    for seed in (1, 2, 3):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        with nullcontext() if seed != 2 else model.no_sync():
            learn(model, mine(x), mine(y))
    same_grads(model, reference)
    assert len(seen) == (3 * len(list(model.parameters())) if rank() == 0 else 0)


def backward_that_differs(plan: AnyPlan) -> None:
    """Another pass, other parameters, or no backward at all on one rank are refused on all, in the same words."""
    reference, model = both(plan)
    x, y = batch()
    first = rank() == 0

    def loss(sign: int = 1) -> Tensor:
        return F.cross_entropy(model(sign * mine(x)), mine(y))

    one, two = loss(), loss(-1)
    refused(
        RunError,
        "rank 0 goes back through forward pass 1 while rank 1 goes back through pass 2",
        lambda: torch.autograd.backward(one if first else two),
    )
    one = loss()
    refused(
        RunError,
        "ask for the gradients of different parameters: 'a.bias' on one of them only",
        lambda: torch.autograd.backward(one, inputs=[model.b.bias] if first else None),
    )
    one = loss()
    refused(
        RunError,
        "rank 0 called backward() while rank 1 called forward()",
        lambda: torch.autograd.backward(one) if first else model(mine(x)),
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


def optimizer_in_the_backward(plan: AnyPlan) -> None:
    """An optimizer per parameter that steps in its post-accumulate hook, as torch's tutorial does to save memory."""
    reference, model = both(plan)
    for net in (reference, model):
        for parameter in net.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_parameter: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for seed in (1, 2):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
    for name, parameter in reference.named_parameters():
        close(model.shards()[name].tensor, own_part(model, name, parameter.detach()))


def hooks_on_the_network(plan: AnyPlan) -> None:
    """Hooks of the parallel network itself fire: forward, backward, and those of its input and output tensors."""
    reference, model = both(plan)
    x, y = batch()
    seen: list[str] = []
    for net in (reference, model):
        net.register_forward_pre_hook(lambda _net, args: (args[0] * 2,))
        net.register_forward_hook(lambda _net, _args, result: result * 3)
        net.register_forward_hook(lambda _net, _args, _result: seen.append("forward"))
        net.register_full_backward_hook(lambda _net, _grads, _results: seen.append("backward"))
    whole, own = x.clone().requires_grad_(), mine(x).clone().requires_grad_()
    own.register_hook(lambda grad: grad * 5)  # type: ignore[no-untyped-call]
    learn(reference, whole, y)
    learn(model, own, mine(y))
    same_grads(model, reference)
    assert whole.grad is not None
    assert own.grad is not None
    close(own.grad, mine(whole.grad) * 2 * 5)
    assert seen == ["forward", "backward"] * 2


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_gradients(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
