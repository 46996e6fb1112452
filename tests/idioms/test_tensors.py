"""More than one tensor in and out; flags, sizes and numbers of samples that change from call to call."""

import io
import os
from collections import OrderedDict
from contextlib import nullcontext, redirect_stderr
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

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
    built,
    cases_of,
    close,
    learn,
    mine,
    name_of,
    parallel,
    part,
    rank,
    refused,
    same_grads,
    same_states,
)


class Parts(nn.Module):
    """The layers of `Net`, for a forward of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def maps(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def scores(self, maps: Tensor) -> Tensor:
        result: Tensor = self.head(maps.mean((2, 3)))
        return result


# Inputs


class TwoInputs(Parts):
    """Two images, a number per class that all ranks share, and a factor."""

    def forward(self, x: Tensor, other: Tensor, *, bias: Tensor | None = None, factor: float = 1.0) -> Tensor:
        scores = self.scores(self.maps(x) + 2 * self.maps(other)) * factor
        return scores if bias is None else scores + bias


def several_inputs(plan: AnyPlan) -> None:
    """Positional and keyword inputs; one that all ranks share; each gets its gradient."""
    (x, y), (z, _) = batch(), batch(seed=9)
    bias = torch.linspace(-1, 1, 4, dtype=torch.float64)
    reference = built(TwoInputs)
    model = parallel(built(TwoInputs), plan, {"x": x, "other": z, "bias": bias})
    whole = [tensor.clone().requires_grad_() for tensor in (x, z, bias)]
    own = [tensor.clone().requires_grad_() for tensor in (mine(x), mine(z), bias)]
    torch.autograd.backward(F.cross_entropy(reference(whole[0], whole[1], bias=whole[2]), y))
    torch.autograd.backward(F.cross_entropy(model(own[0], other=own[1], bias=own[2]), mine(y)))
    same_grads(model, reference)
    for one, other in zip(own[:2], whole[:2], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        close(one.grad, mine(other.grad) * 2)
    assert own[2].grad is not None
    assert whole[2].grad is not None
    close(own[2].grad, whole[2].grad)
    close(model(mine(x), mine(z), factor=2.0), mine(reference(x, z, factor=2.0)))  # another form of the call
    refused(RunError, "the network cannot be called so: missing a required argument: 'other'", lambda: model(mine(x)))


class NestedInput(Parts):
    def forward(self, images: list[Tensor], more: dict[str, Tensor]) -> Tensor:
        return self.scores(self.maps(images[0]) * self.maps(images[1]) + self.maps(more["third"]))


def nested_inputs(plan: AnyPlan) -> None:
    """Lists and dicts of tensors."""
    images = [batch(seed=seed)[0] for seed in (1, 2, 3)]
    _, y = batch()
    reference = built(NestedInput)
    model = parallel(built(NestedInput), plan, ([images[0], images[1]], {"third": images[2]}))
    expected = reference(images[:2], {"third": images[2]})
    found = model([mine(images[0]), mine(images[1])], {"third": mine(images[2])})
    close(found, mine(expected))
    torch.autograd.backward(F.cross_entropy(expected, y))
    torch.autograd.backward(F.cross_entropy(found, mine(y)))
    same_grads(model, reference)


# Outputs


class Result(NamedTuple):
    scores: Tensor
    extra: Tensor | None


class Structures(Parts):
    """Returns one of many structures, as it is told."""

    def forward(self, x: Tensor, kind: str = "tuple") -> Any:
        maps = self.maps(x)
        scores = self.scores(maps)
        extra = maps.mean(3)
        return {
            "tuple": (scores, extra),
            "list": [scores, extra],
            "dict": {"out": scores, "aux": extra},
            "ordered": OrderedDict(out=scores, aux=extra),
            "named": Result(scores, extra),
            "nested": {"scores": [scores, (extra, None)], "classes": 4, "name": "net"},
            "none": Result(scores, None),
            "twice": (scores, extra, scores),
        }[kind]


def _leaves(thing: Any) -> list[Any]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(thing)
    return leaves


def structures_of_outputs(plan: AnyPlan) -> None:
    """tuple, list, dict, OrderedDict, namedtuple, nested, None, numbers, one tensor twice: the module's."""
    reference, model = both(plan, Structures)
    x, _ = batch()
    for kind in ("tuple", "list", "dict", "ordered", "named", "nested", "none", "twice"):
        expected, found = reference(x, kind), model(mine(x), kind)
        assert type(found) is type(expected)
        assert str(torch.utils._pytree.tree_structure(found)) == str(torch.utils._pytree.tree_structure(expected))
        for net in (reference, model):
            net.zero_grad()
        losses = []
        for result in (expected, found):
            tensors = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
            losses.append(torch.stack([tensor.square().mean() for tensor in tensors]).sum())
        for one, other in zip(_leaves(found), _leaves(expected), strict=True):
            if isinstance(other, Tensor):
                close(one, mine(other))
            else:
                assert one == other
        for loss in losses:
            torch.autograd.backward(loss)
        same_grads(model, reference)


class Kinds(Parts):
    """Values of different kinds: an unused one, integers, a scalar, the input itself, one that is read later."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.maps(x)
        scores = self.scores(maps)
        return {
            "maps": maps,
            "scores": scores,
            "classes": scores.argmax(1),
            "spread": scores.square().mean(),
            "input": x,
            "unused": maps.amax((2, 3)),
        }


def kinds_of_outputs(plan: AnyPlan) -> None:
    """A value that is read later, integers without a gradient, one number for the whole batch, the input."""
    reference, model = both(plan, Kinds)
    x, y = batch()
    expected, found = reference(x), model(mine(x))
    for key, value in expected.items():
        assert found[key].requires_grad == (value.requires_grad), key
        (close if value.is_floating_point() else torch.equal)(found[key], value if value.ndim == 0 else mine(value))
    torch.autograd.backward(
        F.cross_entropy(expected["scores"], y) + expected["spread"] + expected["maps"].square().mean()
    )
    torch.autograd.backward(F.cross_entropy(found["scores"], mine(y)) + found["spread"] + found["maps"].square().mean())
    same_grads(model, reference)
    own, whole = mine(x).clone().requires_grad_(), x.clone().requires_grad_()
    torch.autograd.backward(reference(whole)["input"].square().mean())
    torch.autograd.backward(model(own)["input"].square().mean())
    assert own.grad is not None
    assert whole.grad is not None
    close(own.grad, mine(whole.grad) * 2)


class TimeFirst(Parts):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.maps(x).mean(3)  # (N, C, T)
        result: Tensor = self.head(rows.permute(2, 0, 1))
        return result


def time_first(plan: AnyPlan) -> None:
    """(T, N, C) with T equal to the batch, and not: this rank's own samples, in dim 1."""
    for rows in (6, 7):
        x, _ = batch(6, size=(rows, 5))
        reference, model = built(TimeFirst), parallel(built(TimeFirst), plan, x)
        expected, found = reference(x), model(mine(x))
        assert found.shape == (rows, 3, 4)
        close(found, mine(expected, dim=1))
        torch.autograd.backward(expected.square().mean())
        torch.autograd.backward(found.square().mean())
        same_grads(model, reference)


class OwnLoss(Parts):
    """As torchvision's detection networks: the loss in training, scores in evaluation."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scores = self.scores(self.maps(x))
        return {"loss": F.cross_entropy(scores, y)} if y is not None else scores


def loss_inside(plan: AnyPlan) -> None:
    """A network that returns its loss: that of the whole batch, on every rank."""
    x, y = batch()
    reference, model = built(OwnLoss), parallel(built(OwnLoss), plan, (x, y))
    expected, found = reference(x, y)["loss"], model(mine(x), mine(y))["loss"]
    close(found, expected)
    torch.autograd.backward(expected)
    torch.autograd.backward(found)
    same_grads(model, reference)
    for net in (reference, model):
        net.eval()
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))


class Auxiliary(Parts):
    """As GoogLeNet: a second head in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        early = torch.tanh(self.a(x))
        scores = self.scores(torch.tanh(self.b(early)))
        return (scores, self.aux(early.mean((2, 3)))) if self.training else scores


def auxiliary_heads(plan: AnyPlan) -> None:
    """Another structure in training than in evaluation; a loss of both heads."""
    reference, model = both(plan, Auxiliary)
    x, y = batch()

    def loss(net: nn.Module, own: Tensor, classes: Tensor) -> Tensor:
        scores, aux = net(own)
        return F.cross_entropy(scores, classes) + 0.3 * F.cross_entropy(aux, classes)

    torch.autograd.backward(loss(reference, x, y))
    torch.autograd.backward(loss(model, mine(x), mine(y)))
    same_grads(model, reference)
    for net in (reference, model):
        net.eval()
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))


def loss_of_several(plan: AnyPlan) -> None:
    """`loss=` of several results and several inputs: the mean over ranks is one device's."""

    def loss(results: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(results[0], target) + 0.3 * F.cross_entropy(results[1], target)

    x, y = batch()
    reference, model = built(Auxiliary), parallel(built(Auxiliary), plan, x, loss=loss)
    expected = loss(reference(x), y)
    found = model(mine(x), mine(y))
    torch.autograd.backward(expected)
    torch.autograd.backward(found)
    same_grads(model, reference)
    total = found.detach().clone()
    torch.distributed.all_reduce(total)
    close(total / 2, expected.detach())
    (z, _), two = batch(seed=9), built(TwoInputs)
    pair = parallel(built(TwoInputs), plan, (x, z), loss=nn.CrossEntropyLoss())
    torch.autograd.backward(F.cross_entropy(two(x, z), y))
    torch.autograd.backward(pair(mine(x), mine(z), mine(y)))
    same_grads(pair, two)


# Calls that change


class Flagged(Parts):
    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        maps = self.maps(x)
        return maps if features else self.scores(maps)


def flag_argument(plan: AnyPlan) -> None:
    """model(x, features=True) takes another path, and back."""
    reference, model = both(plan, Flagged)
    x, _ = batch()
    for options in ({}, {"features": True}, {"features": False}, {"features": True}):
        close(model(mine(x), **options), mine(reference(x, **options)))
    for net, own in ((reference, x), (model, mine(x))):
        torch.autograd.backward(net(own, features=True).square().mean())
    same_grads(model, reference)


def other_sizes(plan: AnyPlan) -> None:
    """Multi-scale training: another image size is captured when it first comes, which rank 0 says, and remembered."""
    reference, model = both(plan)
    told = []
    for size in ((8, 6), (12, 10), (8, 6), (5, 7), (12, 10)):
        x, y = batch(size=size)
        for net in (reference, model):
            net.zero_grad()
        learn(reference, x, y)
        with redirect_stderr(io.StringIO()) as said:  # where Python's logging writes unless it is told otherwise
            learn(model, mine(x), mine(y))
            model.eval()(mine(x))
        model.train()
        told.append(said.getvalue())
        same_grads(model, reference)
    same_states(model, reference)
    if rank() == 0:
        assert "inputs of (3, 3, 12, 10) are of a new size: captured the network for it, which is remembered" in told[1]
    assert [text.count("of a new size") for text in told] == ([0, 1, 0, 1, 0] if rank() == 0 else [0] * 5)


class BatchRules(Parts):
    """A branch on the number of samples, and statistics over groups of min(N, 4) of them, as StyleGAN's."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        groups = min(maps.shape[0], 4)
        if maps.shape[0] % groups == 0:
            spread = maps.view(groups, -1, *maps.shape[1:]).var(0, unbiased=False).mean()
            maps = maps + spread
        if x.shape[0] > 5:
            maps = maps * 2
        return self.scores(maps)


def other_batches(plan: AnyPlan) -> None:
    """Other numbers of samples, where the network follows them and where it branches on them."""
    for kind in (Net, BatchRules):
        reference, model = both(plan, kind)
        for samples in (6, 4, 8, 3, 2):
            x, y = batch(samples)
            for net in (reference, model):
                net.zero_grad()
            learn(reference, x, y)
            learn(model, mine(x), mine(y))
            same_grads(model, reference)


class AlwaysDropped(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scores(F.dropout(self.maps(x), 0.5, training=True))


def monte_carlo_dropout(plan: AnyPlan) -> None:
    """F.dropout(training=True) in evaluation draws another mask in every pass, the same under every plan."""
    x, _ = batch()
    results = []
    for other in (plan, "data"):
        model = parallel(built(AlwaysDropped), other, seed=5).eval()
        with torch.no_grad():
            results.append([model(mine(x)) for _ in range(2)])
        assert not torch.equal(*results[-1])
    for one, two in zip(*results, strict=True):
        close(one, two)


# Ranks that differ


def ranks_that_differ(plan: AnyPlan) -> None:
    """Other sizes, modes, settings, grad modes or arguments on one rank are refused on all, in the same words."""
    reference, model = both(plan)
    x, _ = batch()
    wide = torch.zeros(3, 3, 8, 9, dtype=torch.float64)
    first = rank() == 0

    def without_grad() -> None:
        with torch.set_grad_enabled(first):
            model(mine(x))

    refused(RunError, "inputs of [(3, 3, 8, 6)] against [(3, 3, 8, 9)]", lambda: model(mine(x) if first else wide))
    model.train(first)
    refused(RunError, "called the network differently", lambda: model(mine(x)))
    model.train()
    model.drop.p = 0.5 if first else 0.25
    refused(RunError, "drop.p=0.5 against drop.p=0.25", lambda: model(mine(x)))
    model.drop.p = 0.0
    refused(RunError, "some ranks record gradients and some do not", without_grad)
    refused(RunError, "inputs of ['torch.float64'] against ['torch.float32']",
            lambda: model(mine(x) if first else mine(x).float()))  # fmt: skip
    model.a.requires_grad_(first)
    refused(RunError, "parameters that do not learn: [] against ['a.weight', 'a.bias']", lambda: model(mine(x)))
    model.a.requires_grad_()
    with nullcontext() if first else model.no_sync():
        refused(RunError, "no_sync False against True", lambda: model(mine(x)))
    with torch.autocast("cpu", enabled=first):
        refused(RunError, "autocast to torch.bfloat16 against None", lambda: model(mine(x)))
    refused(RunError, "cannot be called so", lambda: model(mine(x)) if first else model())
    refused(RunError, "has a hook", lambda: _with_hook(model, mine(x), hook=not first))
    refused(RunError, "the batch has no sample", lambda: model(x[:0]))
    close(model(mine(x)), mine(reference(x)))


def _with_hook(model: Any, x: Tensor, *, hook: bool) -> None:
    handle = model.b.register_forward_hook(lambda *_: None) if hook else None
    try:
        model(x)
    finally:
        if handle is not None:
            handle.remove()


class SeveralTiles(Parts):
    def forward(self, x: Tensor, other: Tensor, bias: Tensor) -> dict[str, Any]:
        maps = self.maps(x) + self.maps(other)
        return {"maps": maps, "scores": [self.scores(maps) + bias], "loss": maps.square().mean(), "name": "net"}


def tiles_of_several(plan: AnyPlan) -> None:
    """With io="tile" a rank passes its box of every input and gets its box of every result, in the same structure."""
    (x, _), (z, _) = batch(), batch(seed=9)
    bias = torch.linspace(-1, 1, 4, dtype=torch.float64)
    reference = built(SeveralTiles)
    model = parallel(built(SeveralTiles), plan, (x, z, bias), io="tile")
    boxes = model.input_box
    assert len(boxes) == 3
    expected = reference(x, z, bias)
    found = model(*map(part, (x, z, bias), boxes))
    tiles = model.output_box
    assert tiles["name"] == found["name"] == "net"
    pairs = [
        (found["maps"], expected["maps"], tiles["maps"]),
        (found["scores"][0], expected["scores"][0], tiles["scores"][0]),
        (found["loss"], expected["loss"], tiles["loss"]),
    ]
    for ours, theirs, box in pairs:
        if box is None:
            assert not ours.numel()
        else:
            close(ours, part(theirs, box))


def plans_for_several(plan: AnyPlan) -> None:
    """A plan is searched, and raced, for a network with several inputs and results."""
    if plan != "data":  # once is enough: it finds a plan of its own
        return
    (x, _), (z, _) = batch(), batch(seed=9)
    example = (x, z, torch.linspace(-1, 1, 4, dtype=torch.float64))
    found = shoal.find_plan(built(SeveralTiles), example, cluster="titan-4", ranks=2).plan
    reference = built(SeveralTiles)
    expected = reference(*example)
    torch.manual_seed(rank())  # what the race draws must not depend on it
    for searched in (found, "auto"):
        with TemporaryDirectory() as folder, patch.dict(os.environ, SHOAL_CACHE=folder):
            model = parallel(built(SeveralTiles), searched, example)
        results = model(mine(x), mine(z), example[2])
        close(results["maps"], mine(expected["maps"]))
        close(results["loss"], expected["loss"])


def other_types(plan: AnyPlan) -> None:
    """An input of another type than the weights: torch's own error on all ranks, refused where one rank passes it."""
    reference, model = both(plan, Net, norm=False)
    x, y = batch()
    torchs = "Input type (float) and bias type (double) should be the same"
    refused(RuntimeError, torchs, lambda: model(mine(x).float()))
    refused(RuntimeError, torchs, lambda: model(mine(x, 6).float()))  # a rank without samples too
    differently = "called the network differently: inputs of ['torch.float64'] against ['torch.float32']"
    refused(RunError, differently, lambda: model(mine(x).float() if rank() else mine(x)))
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_tensors(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
