"""Parameters, buffers and their files: whole tensors under the module's own names."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.errors import CheckpointError, RunError
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


def weights_of_rank_0(plan: AnyPlan) -> None:
    """Ranks that built different weights and buffers go on with rank 0's."""
    torch.manual_seed(100 + rank())
    net = Net().double()
    net.get_buffer("norm.running_mean").normal_()
    first = everyones({key: tensor.clone() for key, tensor in net.state_dict().items()})[0]
    model = parallel(net, plan)
    found = model.state_dict()
    assert all(torch.equal(found[key], first[key]) for key in first)
    for name, shard in model.shards().items():
        assert torch.equal(shard.tensor, own_part(model, name, first[name]))


class WithEverything(Net):
    """Tied weights, a buffer that is not saved, and a state of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(6, 6, 3, padding=1)
        self.again.weight = self.b.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.a(x)))
        result: Tensor = self.head(F.relu(self.again(self.b(x))).mean((2, 3))) * self.scale
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


TIED = shoal.Plan(
    name="tied",
    ranks=2,
    layers=(*PLANS["mixed"].layers, ("again", shoal.Cut.parse("c2"))),  # type: ignore[union-attr]
)


def extra_state_and_tied_weights(plan: AnyPlan) -> None:
    """`_extra_state`, tied weights and buffers that are not saved are as in the module; a file loads into it."""
    plan = TIED if isinstance(plan, shoal.Plan) else plan
    reference, model = both(plan, WithEverything)
    x, y = batch()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    model.module.epoch = reference.epoch = 7
    found, expected = model.state_dict(), reference.state_dict()
    assert list(found) == list(expected)
    assert found["_extra_state"] == {"epoch": 7}
    assert "scale" not in found
    for key in ("b.weight", "again.weight", "norm.running_var"):
        close(found[key], expected[key])
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    fresh = WithEverything().double()
    fresh.load_state_dict(torch.load(file))
    assert fresh.epoch == 7
    model.module.epoch = 0
    model.load_state_dict(expected)
    assert model.module.epoch == 7
    same_states_but_extra(model, reference)


def same_states_but_extra(model: shoal.ParallelModule, reference: nn.Module) -> None:
    found, expected = model.state_dict(), reference.state_dict()
    for key, tensor in expected.items():
        if isinstance(tensor, Tensor):
            close(found[key], tensor)


def whole_states(plan: AnyPlan) -> None:
    """state_dict and load_state_dict through the network, its module and a child give and take whole tensors."""
    reference, model = both(plan)
    x, y = batch()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, model)]
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    for optimizer in optimizers:
        optimizer.step()
    expected = reference.state_dict()
    for found in (model.state_dict(), model.module.state_dict(), shoal.full_state_dict(model)):
        assert list(found) == list(expected)
        for key, tensor in expected.items():
            close(found[key], tensor)
    close(model.b.state_dict()["weight"], expected["b.weight"])
    assert list(model.state_dict(prefix="net.")) == [f"net.{key}" for key in expected]
    torch.manual_seed(11)
    other = Net().double().state_dict()
    model.load_state_dict(other)
    model.eval()
    reference.load_state_dict(other)
    reference.eval()
    same_states(model, reference)
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))
    model.module.load_state_dict(expected)
    model.head.load_state_dict({"weight": other["head.weight"], "bias": other["head.bias"]})
    reference.load_state_dict({**expected, "head.weight": other["head.weight"], "head.bias": other["head.bias"]})
    same_states(model, reference)


def states_that_do_not_fit(plan: AnyPlan) -> None:
    """Missing, unexpected and wrong tensors are told as torch tells them; strict=False reports them."""
    model = parallel(built(), plan)
    state = OrderedDict(built().state_dict())
    del state["head.bias"]
    state["more"] = torch.zeros(1)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], ["more"])
    refused(RuntimeError, 'Missing key(s) in state_dict: "head.bias"', lambda: model.load_state_dict(state))
    state = OrderedDict(built().state_dict())
    state["b.weight"] = torch.zeros(3, 6, 3, 3)
    refused(RuntimeError, "size mismatch for b.weight", lambda: model.load_state_dict(state))
    refused(CheckpointError, "'a.weight' is missing", lambda: shoal.load_full_state_dict(model, {}))


def checkpoint_of_ddp(plan: AnyPlan) -> None:
    """A file that DDP wrote has `module.` before its names: torch's own function takes it off."""
    torch.manual_seed(5)
    wrapped = DistributedDataParallel(Net().double())
    state = wrapped.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    model = parallel(built(), plan)
    model.load_state_dict(state)
    same_states(model, wrapped.module)


def assigned_states(plan: AnyPlan) -> None:
    """load_state_dict(assign=True) puts other parameters in place, which nobody laid over the ranks: refused."""
    model = parallel(built(), plan)
    refused(RunError, "assign=True", lambda: model.load_state_dict(built().state_dict(), assign=True))
    x, y = batch()
    reference = built()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


def state_under_another_plan(plan: AnyPlan) -> None:
    """What one plan trained, another goes on with."""
    model = parallel(built(), plan)
    x, y = batch()
    learn(model, mine(x), mine(y))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = model.state_dict()
    fresh = built()
    fresh.load_state_dict(state)
    other = parallel(built(), "model" if plan != "model" else "spatial")
    other.load_state_dict(state)
    same_states(other, fresh)


def laid_twice(plan: AnyPlan) -> None:
    """Parallelize of a module that is laid already, by another plan: the weights are as trained; the first one ends."""
    net, reference = built(), built()
    first = parallel(net, "model")
    x, y = batch()
    learn(reference, x, y)
    learn(first, mine(x), mine(y))
    for one in (reference, first):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    second = parallel(net, plan)
    learn(reference, x, y)
    learn(second, mine(x), mine(y))
    same_grads(second, reference)
    same_states(second, reference)
    refused(RunError, "laid over the ranks anew by a later shoal.parallelize", lambda: first(mine(x)))
    third = parallel(second, "spatial")
    same_states(third, reference)


def state_dict_of_one_rank(plan: AnyPlan) -> None:
    """`if rank == 0: torch.save(model.state_dict())`: refused where parameters are cut."""
    reference, model = both(plan)
    x, _ = batch()
    if model.cuts_parameters:
        refused(
            RunError,
            "rank 0 called state_dict() while rank 1 called forward()",
            lambda: model.state_dict() if rank() == 0 else model(mine(x)),
        )
    elif rank() == 0:
        assert all(torch.equal(tensor, reference.state_dict()[key]) for key, tensor in model.state_dict().items())
    close(model(mine(x)), mine(reference(x)))


def built_in_parts(plan: AnyPlan) -> None:
    """A function that makes the network, or a network on the meta device: one device's weights, never whole here."""
    torch.manual_seed(3)
    reference = Net()
    torch.manual_seed(3)
    same_states(parallel(Net, plan), reference)
    with torch.device("meta"):
        empty = Net()
    torch.manual_seed(3)
    model = parallel(empty, plan)
    assert not any(parameter.is_meta for parameter in model.parameters())
    same_states(model, reference)


class Clashing(nn.Module):
    """Children, parameters and buffers with the names of a parallel network's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.plan = nn.Conv2d(6, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.module = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)
        self.steps = nn.Parameter(torch.ones(4))
        self.flag = nn.Parameter(torch.ones(4))
        self.counted: Tensor
        self.register_buffer("counted", torch.ones(4))
        self.bucket_bytes: Tensor
        self.register_buffer("bucket_bytes", torch.ones(4))
        self.shards = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(F.relu(self.module(self.plan(self.a(x)))))
        x = self.head(F.relu(x).mean((2, 3))) * self.steps + self.flag * self.counted
        result: Tensor = self.shards(x) * self.bucket_bytes
        return result


def clashing_names(plan: AnyPlan) -> None:
    """A module's own `plan`, `flag`, `steps`, ... train and are saved; model.module.plan is the module's."""
    reference, model = both(plan, Clashing)
    x, y = batch()
    for _ in range(2):
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
        same_grads(model, reference)
        for net in (reference, model):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
    same_states(model, reference)
    assert isinstance(model.module, Clashing)
    assert isinstance(model.plan, shoal.Plan)
    assert isinstance(model.module.plan, nn.Conv2d)
    assert model.steps == 2
    assert isinstance(model.module.steps, nn.Parameter)
    model.load_state_dict(reference.state_dict())
    text = str(model)
    assert all(f"({name})" in text for name in ("plan", "module", "shards"))


def copies(plan: AnyPlan) -> None:
    """deepcopy, pickle and torch.save of the network, and an averaged copy of it, are refused."""
    import copy
    import pickle

    model = parallel(built(), plan)
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.optim.swa_utils.AveragedModel(model),
    ):
        refused(RunError, "cannot be copied or pickled", attempt)
    if model.cuts_parameters:
        refused(RunError, "cannot be copied", lambda: copy.deepcopy(model.module))
    else:
        close(copy.deepcopy(model.module).get_parameter("head.weight").detach(), built().head.weight.detach())


def averaged_weights(plan: AnyPlan) -> None:
    """An exponential mean of the weights by hand: of shards, swapped in for a test and out again."""
    reference, model = both(plan)
    x, y = batch()

    def train(net: Any, own: Tensor, classes: Tensor) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mean = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        for _ in range(2):
            learn(net, own, classes)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in net.named_parameters():
                mean[name].lerp_(parameter.detach(), 0.1)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(mean[name])
        return mean

    train(reference, x, y)
    train(model, mine(x), mine(y))
    same_states(model, reference)


def written_states(plan: AnyPlan) -> None:
    """A loop that writes to the tensors of state_dict(): they are the module's own, or it is refused."""
    reference, model = both(plan)
    x, _ = batch()
    kept = model.state_dict()
    kept["norm.weight"] = kept["norm.weight"] * 2  # another tensor in the dict changes nothing
    close(model(mine(x)), mine(reference(x)))
    for net in (reference, model):
        for tensor in net.state_dict().values():
            tensor.mul_(2)
    if model.cuts_parameters:
        refused(RunError, "of a state_dict() in place, which is a copy here", lambda: model(mine(x)))
        model.load_state_dict(reference.state_dict())
    close(model(mine(x)), mine(reference(x)))
    same_states(model, reference)
    state = model.state_dict()
    state["head.weight"].zero_()
    model.load_state_dict(state)  # which is what it was written for
    reference.head.weight.data.zero_()
    close(model(mine(x)), mine(reference(x)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_states(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])


def loaded_where_a_rank_holds_nothing() -> None:
    whole = shoal.Plan(name="whole", ranks=2, layers=(("*", shoal.Cut()),))
    reference, model = both(whole)
    torch.manual_seed(11)
    other = Net().double().state_dict()
    shoal.load_full_state_dict(model, other)
    reference.load_state_dict(other)
    x, _ = batch()
    close(model(mine(x)), mine(reference(x)))
    same_states(model, reference)


def test_buffers_that_one_rank_holds_are_loaded_on_all(on_ranks: RunOnRanks) -> None:
    on_ranks(2, loaded_where_a_rank_holds_nothing)
