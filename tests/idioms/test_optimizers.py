"""torch's optimizers, norms and scalers on a rank's shards."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import RunError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    CUT_STATE,
    MIXED,
    PLANS,
    AnyPlan,
    Case,
    Net,
    batch,
    both,
    built,
    cases_of,
    close,
    everyones,
    learn,
    mine,
    name_of,
    own_part,
    parallel,
    rank,
    refused,
    same_grads,
    same_states,
)

Make = Callable[[Any], torch.optim.Optimizer]


def train(net: Any, optimizer: torch.optim.Optimizer, steps: int, *, shared: bool) -> None:
    """Some steps on batches that depend on the step alone; `shared`: this rank's samples of them."""
    for seed in range(steps):
        x, y = batch(seed=seed)
        optimizer.zero_grad()
        learn(net, mine(x) if shared else x, mine(y) if shared else y)
        optimizer.step()


def elementwise(plan: AnyPlan) -> None:
    """SGD with momentum, AdamW in two groups with a schedule, and Adam train the network that one device trains."""
    makes: list[Make] = [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda net: torch.optim.AdamW(_groups(net), lr=0.01),
        lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True, foreach=True),
    ]
    reference, model = both(plan, Net, norm=False)
    for make in makes:
        for net, shared in ((reference, False), (model, True)):
            optimizer = make(net)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            train(net, optimizer, 2, shared=shared)
            schedule.step()
            train(net, optimizer, 2, shared=shared)
    same_states(model, reference)


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    head = net.get_parameter("head.weight")
    others = [parameter for parameter in net.parameters() if parameter is not head]
    return [{"params": others}, {"params": [head], "weight_decay": 0.5}]


def made_before(plan: AnyPlan) -> None:
    """An optimizer that was made, and had stepped, before parallelize goes on with the same parameters and momentum."""
    reference, net = built(), built()
    nets = (reference, net)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in nets]
    for one, optimizer in zip(nets, optimizers, strict=True):
        train(one, optimizer, 1, shared=False)
    model = parallel(net, plan)
    train(reference, optimizers[0], 2, shared=False)
    train(model, optimizers[1], 2, shared=True)
    same_states(model, reference)


def clipping(plan: AnyPlan) -> None:
    """Torch's clip_grad_norm_ by the 2-norm, the 1-norm and the largest element: of the whole network."""
    reference, model = both(plan)
    for norm_type in (2.0, 1.0, float("inf")):
        for net in (reference, model):
            net.zero_grad()
        x, y = batch()
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        close(found, expected)
        same_grads(model, reference)
    for net in (reference, model):
        nn.utils.clip_grad_value_(net.parameters(), 1e-3)
    same_grads(model, reference)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    plain = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    close(nn.utils.get_total_norm(grads), nn.utils.get_total_norm(plain))
    for net in (reference, model):
        net.head.weight.grad.fill_(float("inf"))
    refused(RuntimeError, "norm", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))


def scaled_loss(plan: AnyPlan) -> None:
    """GradScaler: an infinite gradient in one shard skips the step on all ranks, and all go on with the same scale."""
    reference, model = both(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    x, y = batch()
    for broken in (True, False):
        torch.autograd.backward(scaler.scale(F.cross_entropy(model(mine(x)), mine(y))))
        if broken and (rank() == 1 or not model.cuts_parameters):
            own_part = model.shards()["b.weight"].grad
            assert own_part is not None
            own_part.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if broken:
            same_weights(model, reference)
            assert everyones(scaler.get_scale()) == [4.0, 4.0]
    learn(reference, x, y)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    same_weights(model, reference)
    assert everyones(scaler.get_scale()) == [8.0, 8.0]


def same_weights(model: shoal.ParallelModule, reference: nn.Module) -> None:
    for name, parameter in reference.named_parameters():
        close(model.shards()[name].tensor, own_part(model, name, parameter.detach()))


def optimizers_of_whole_tensors(plan: AnyPlan) -> None:
    """Adafactor, Muon and LBFGS look at parameters as a whole: right where none is cut, refused where one is."""
    reference, model = both(plan, Net, norm=False)
    linear = [name for name, parameter in reference.named_parameters() if parameter.ndim == 2]
    makes: dict[str, Make] = {
        "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
        "Muon": lambda net: torch.optim.Muon([net.get_parameter(name) for name in linear], lr=0.01),
    }
    cut = {name for name, shard in model.shards().items() if shard.tensor.shape != shard.shape}
    for kind, make in makes.items():
        wanted = linear if kind == "Muon" else [name for name, _ in reference.named_parameters()]
        if cut & set(wanted):
            optimizer = make(model)
            for _ in range(2):  # also when tried again
                refused(
                    RunError,
                    f"{kind} may look at a parameter as a whole, and this rank holds only a part of",
                    lambda optimizer=optimizer: train(model, optimizer, 1, shared=True),  # type: ignore[misc]
                )
        else:
            train(reference, make(reference), 2, shared=False)
            train(model, make(model), 2, shared=True)
            same_states(model, reference)


def lbfgs(plan: AnyPlan) -> None:
    """LBFGS calls a closure: right where nothing is cut and the loss is told to all, refused elsewhere."""
    reference, model = both(plan, Net, norm=False)
    x, y = batch()

    def closure(net: nn.Module, optimizer: torch.optim.Optimizer, own: Tensor, classes: Tensor) -> Callable[[], float]:
        def loss() -> float:
            optimizer.zero_grad()
            value = learn(net, own, classes)
            if net is model:
                torch.distributed.all_reduce(value)
                value /= 2
            return float(value)

        return loss

    ours: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    step = closure(model, ours, mine(x), mine(y))
    if model.cuts_parameters:
        refused(RunError, "LBFGS may look at a parameter as a whole", lambda: ours.step(step))
    else:
        theirs: Any = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=3)
        theirs.step(closure(reference, theirs, x, y))
        ours.step(step)
        same_states(model, reference)


class Signs(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad.sign())


def optimizers_of_ones_own(plan: AnyPlan) -> None:
    """A class that Shoal does not know may step on shards when it says that it treats each element alone."""
    reference, model = both(plan, Net, norm=False)
    kind = type("Signs", (Signs,), {})  # a class that no other case has told of
    optimizer = kind(model.parameters())
    if model.cuts_parameters:
        refused(RunError, "shoal.elementwise_optimizer(Signs)", lambda: train(model, optimizer, 1, shared=True))
        model.load_state_dict(reference.state_dict())
    shoal.elementwise_optimizer(kind)
    train(reference, kind(reference.parameters()), 2, shared=False)
    train(model, optimizer, 2, shared=True)
    same_states(model, reference)


def whole_optimizer_state(plan: AnyPlan) -> None:
    """optimizer.state_dict() is one device's, and loads under another plan and on one device."""
    reference, model = both(plan, Net, norm=False)
    makes: Make = lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)  # noqa: E731
    theirs, ours = makes(reference), makes(model)
    train(reference, theirs, 2, shared=False)
    train(model, ours, 2, shared=True)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        for key, tensor in state.items():
            close(found["state"][number][key], tensor)
    other = parallel(built(Net, norm=False), "model" if plan != "model" else "spatial")
    other.load_state_dict(model.state_dict())
    again = makes(other)
    again.load_state_dict(deepcopy(found))  # as from a file
    back = again.state_dict()  # before any step
    for number, state in expected["state"].items():
        for key, tensor in state.items():
            close(back["state"][number][key], tensor)
    ours.load_state_dict(deepcopy(found))  # what it is already
    close(ours.state_dict()["state"][2]["exp_avg"], expected["state"][2]["exp_avg"])
    for net, optimizer in ((model, ours), (other, again)):
        train(net, optimizer, 2, shared=True)
    train(reference, theirs, 2, shared=False)
    same_states(model, reference)
    same_states(other, reference)


def laid_anew(plan: AnyPlan) -> None:
    """An optimizer goes on when its network is laid by another plan: it remembers what it did."""
    makes: list[Make] = [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    ]
    for make in makes:
        reference, net = built(Net, norm=False), built(Net, norm=False)
        theirs, ours = make(reference), make(net)
        model: Any = None
        for other in (plan, "model", "data", MIXED, "spatial", plan):
            before, model = model, parallel(net if model is None else model, other)
            train(reference, theirs, 2, shared=False)
            train(model, ours, 2, shared=True)
            same_states(model, reference)
            del before  # which knows the same parameters until here
        found, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
        for number, state in expected.items():
            for key, tensor in state.items():
                close(found[number][key], tensor)


def written_optimizer_state(plan: AnyPlan) -> None:
    """A loop that writes to the tensors of optimizer.state_dict(): they are its own, or it is refused."""
    reference, model = both(plan)
    x, y = batch()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (reference, model)]

    def step() -> None:
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        for optimizer in optimizers:
            optimizer.step()

    step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    for state in states:
        for kept in state["state"].values():
            kept["momentum_buffer"].mul_(2)
    if model.cuts_parameters:
        text = "of optimizer.state_dict() in place, which is a copy here"
        refused(RunError, text, lambda: model(mine(x)))
        optimizers[1].load_state_dict(states[1])
    step()
    same_states(model, reference)
    states = [optimizer.state_dict() for optimizer in optimizers]
    for state, net in zip(states, (reference, model), strict=True):
        for kept in state["state"].values():
            kept["momentum_buffer"].zero_()
        other = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        other.load_state_dict(state)  # which is what it was written for
        optimizers.append(other)
    del optimizers[:2]
    step()
    same_states(model, reference)


@pytest.mark.parametrize("plan", [*PLANS, CUT_STATE])
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_optimizers(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS.get(plan, plan))
