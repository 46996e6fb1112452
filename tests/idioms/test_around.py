"""What a script puts around a call of the network: checkpoints, compilers, transforms, exporters."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
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
    everyones,
    learn,
    mine,
    name_of,
    parallel,
    rank,
    refused,
    same_grads,
    same_states,
)
from tests.idioms.test_tensors import Parts


def checkpoint_around(plan: AnyPlan) -> None:
    """torch.utils.checkpoint around the whole network: refused before anything is counted twice; all can go on."""
    reference, model = both(plan)
    x, y = batch()
    for reentrant in (True, False):
        own = mine(x).requires_grad_()
        refused(
            RunError,
            "torch.utils.checkpoint around a network that is laid over ranks would run it twice",
            partial(checkpoint, model, own, use_reentrant=reentrant),
        )
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)
    own = mine(x).requires_grad_()
    attempt: Callable[[], Any] = lambda: checkpoint(model, own, use_reentrant=False) if rank() else model(own)  # noqa: E731
    refused(RunError, "rank 1: torch.utils.checkpoint around a network", attempt)  # also where one rank does so


def changed_before_backward(plan: AnyPlan) -> None:
    """With recompute=True the forward pass is run again: what it reads must be what it was. Gradients are checked."""
    reference, model = built(), parallel(built(), plan, recompute=True)
    x, y = batch()

    def changing(what: Callable[[Tensor], Tensor], everywhere: bool) -> None:
        own = mine(x).clone()
        loss = F.cross_entropy(model(own), mine(y))
        if everywhere or rank() == 1:
            with torch.no_grad():
                what(own).add_(1.0)
        torch.autograd.backward(loss)

    for everywhere in (True, False):
        first = 0 if everywhere else 1
        text = f"was changed in place on rank {first} between a forward pass with recompute=True and its backward pass"
        refused(RunError, f"'x' {text}", lambda all_of=everywhere: changing(lambda own: own, all_of))  # type: ignore[misc]
        refused(RunError, f"'a.weight' {text}", lambda all_of=everywhere: changing(lambda _: model.a.weight, all_of))  # type: ignore[misc]
    model.load_state_dict(reference.state_dict())
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)


ALONE = shoal.Plan(
    name="alone",
    ranks=2,
    layers=(("a", shoal.Cut.parse("n2")), ("b*", shoal.Cut.parse("1")), ("head", shoal.Cut.parse("n2"))),
)
"""Rank 0 alone has `b`."""

NEEDED = "modified by an inplace operation"


def weights_changed_before_backward(plan: AnyPlan) -> None:
    """What torch refuses in the midst of backward, on the rank that comes to it, is refused on all before it begins."""
    for one in (plan, ALONE):
        reference, model = built(), parallel(built(), one)
        x, y = batch()

        def changing(
            change: Callable[[], object], somewhere: bool = False, net: nn.Module = model, x: Tensor = x, y: Tensor = y
        ) -> None:
            loss = F.cross_entropy(net(mine(x)), mine(y))
            if not somewhere or rank() == 0:
                with torch.no_grad():
                    change()
            torch.autograd.backward(loss)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        learn(model, mine(x), mine(y))
        changes: list[Callable[[], object]] = [
            optimizer.step,
            partial(model.load_state_dict, reference.state_dict()),
            partial(model.b.weight.mul_, 1.0),
        ]
        needed = "one of the variables needed for gradient computation has been modified by an inplace operation"
        for change in changes:
            refused(RunError, needed, partial(changing, change))
        text = f"'b.weight' was changed in place on rank 0 between a forward pass and its backward pass: {needed}"
        refused(RunError, text, partial(changing, changes[-1], somewhere=True))
        model.load_state_dict(reference.state_dict())
        model.zero_grad()
        learn(reference, x, y)
        changing(partial(model.b.bias.add_, 1.0))  # which no gradient depends on, as on one device
        same_grads(model, reference)


class Heads(Parts):
    """Two results; what autograd keeps of them is the result itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.maps(x)
        return torch.sigmoid(self.head(maps.mean((2, 3)))), torch.tanh(self.head(maps.amax((2, 3))))


def results_changed_before_backward(plan: AnyPlan) -> None:
    """A result changed in place: refused on all ranks or right on all, also where one rank alone does so."""
    reference, model = both(plan, Heads)
    x, _ = batch()
    torch.autograd.backward(reference(x)[1].square().mean())

    def changing(which: int, ranks: tuple[int, ...]) -> None:
        results = model(mine(x))
        if rank() in ranks:
            with torch.no_grad():
                results[which].zero_()
        torch.autograd.backward(results[1].square().mean() if which == 0 else results[1].sum())

    for ranks in ((0, 1), (0,), (1,)):
        try:
            changing(1, ranks)
        except RunError as error:
            said = str(error)
            assert f"was changed in place on rank {ranks[0]} between a forward pass" in said
            assert NEEDED in said
        else:
            said = ""
        assert len(set(everyones(said))) == 1
        model.zero_grad()
        changing(0, ranks)  # of which nobody asks for a gradient
        same_grads(model, reference)


class Scores(Parts):
    """Two results that autograd keeps nothing of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.maps(x)
        return self.scores(maps), self.head(maps.amax((2, 3)))


def results_edited(plan: AnyPlan) -> None:
    """`logits /= 2`, `logits[:, 0] = ...` and the like, of one result and of several."""
    for one in (plan, ALONE):
        reference, model = both(one, Scores)
        x, _ = batch()
        for net, own in ((reference, x), (model, mine(x))):
            first, second = net(own)
            first /= 2
            first.sigmoid_()
            second[:, 0] = 3.0
            torch.autograd.backward(first.mean() + second.square().mean())
        same_grads(model, reference)


class TwoMaps(Parts):
    """Calls its layers twice: under the mixed plan one of the calls reads the caller's own memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(self.maps(x)), torch.tanh(self.b(self.a(x)))


def changed_without_recompute(plan: AnyPlan) -> None:
    """Without recompute: torch's own words, or the gradient of what was passed; never that of the new values."""
    reference, model = both(plan, TwoMaps)
    x, _ = batch()
    torch.autograd.backward(reference(x)[1].square().mean())
    for ranks in ((0, 1), (0,), (1,)):
        own = mine(x).clone()
        loss = model(own)[1].square().mean()
        if rank() in ranks:
            own.mul_(2)
        said = ""
        model.zero_grad()
        try:
            torch.autograd.backward(loss)
        except RunError as error:
            said = str(error)
            assert NEEDED in said
            assert plan not in ("model", "spatial"), "whose tiles are memory of their own"
        else:
            same_grads(model, reference)
        assert len(set(everyones(said))) == 1


def default_device(plan: AnyPlan) -> None:
    """`with torch.device(...)` around calls, backward passes, steps and states: where new tensors go is not theirs."""
    reference, model = built(dropout=0.5), parallel(built(dropout=0.5), plan, seed=1)
    for net in (reference, model):
        net.drop.eval()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (reference, model)]
    for seed in (1, 2):
        x, y = batch(4 + seed, seed=seed)
        learn(reference, x, y)
        with torch.device("meta"):
            learn(model, mine(x), mine(y))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        close(norm.to(torch.float64), nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        for optimizer in optimizers:
            optimizer.step()
        with torch.device("meta"):
            state = model.state_dict()
            model.load_state_dict(state)
        same_states(model, reference)
    x, y = batch()
    model.drop.train()
    with torch.device("meta"):
        learn(model, mine(x), mine(y))
    plain = built()
    with torch.device("meta"):
        other = parallel(plain, plan)
        scores = other(mine(x))
    close(scores, mine(built()(x)))


def compiled(plan: AnyPlan) -> None:
    """torch.compile of the network, of a function that calls it, and model.compile(): called as it is."""
    reference, model = both(plan)
    compiled_model = torch.compile(model, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def loss_of(images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(2 * model(torch.tanh(images)), classes)

    for seed in (1, 2):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        learn(compiled_model, mine(x), mine(y))
        own, whole = mine(x).requires_grad_(), x.clone().requires_grad_()
        torch.autograd.backward(F.cross_entropy(2 * reference(torch.tanh(whole)), y))
        torch.autograd.backward(loss_of(own, mine(y)))
        assert own.grad is not None
        assert whole.grad is not None
        close(own.grad, mine(whole.grad) * 2)
    same_grads(model, reference)
    model.compile(backend="aot_eager")
    for net, shared in ((reference, False), (model, True)):
        x, y = batch(seed=3)
        learn(net, mine(x) if shared else x, mine(y) if shared else y)
    same_grads(model, reference)
    same_states(model, reference)
    for net in (reference, model):
        net.eval()
    x, _ = batch(4, seed=5)  # another number of samples
    with torch.no_grad():
        close(compiled_model(mine(x)), mine(reference(x)))


def transforms(plan: AnyPlan) -> None:
    """torch.func, forward-mode derivatives and batches of gradients: refused on all ranks, which can go on."""
    reference, model = both(plan)
    x, y = batch()
    own = mine(x)

    def loss_of(images: Tensor) -> Tensor:
        return F.cross_entropy(model(images), mine(y))

    def dual() -> Tensor:
        with forward_ad.dual_level():
            return loss_of(forward_ad.make_dual(own, torch.ones_like(own)))

    attempts: list[Callable[[], Any]] = [
        lambda: torch.func.grad(loss_of)(own),
        lambda: torch.func.jacrev(loss_of)(own),
        lambda: torch.func.jvp(loss_of, (own,), (own,)),
        lambda: torch.func.vmap(model)(own[None]),
        lambda: torch.func.grad(loss_of)(own) if rank() else loss_of(own),
    ]
    for attempt in attempts:
        refused(RunError, "torch.func (grad, vmap, jvp, jacrev, ...) cannot see through a network", attempt)
    refused(RunError, "has no forward-mode derivative: an input is a dual tensor", dual)
    others = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    refused(
        RunError,
        "is not what it was when the network was laid over the ranks",
        lambda: torch.func.functional_call(model, others, (own,)),
    )
    many = "a backward pass with many gradients at once (torch.vmap, is_grads_batched=True, vectorize=True)"
    refused(RunError, many, lambda: torch.autograd.functional.jacobian(model, own, vectorize=True))
    model.load_state_dict(reference.state_dict())  # the last one's forward pass has run
    learn(reference, x, y)
    learn(model, own, mine(y))
    same_grads(model, reference)
    same_states(model, reference)


def exporters(plan: AnyPlan) -> None:
    """torch.jit, torch.export, torch.fx and torch.onnx would write down one rank's part; whoever asks is refused."""
    reference, model = both(plan)
    x, _ = batch()
    own = mine(x)
    attempts: dict[str, Callable[[], Any]] = {
        "torch.jit.trace": lambda: torch.jit.trace(model, own),
        "torch.jit.script": lambda: torch.jit.script(model),
        "torch.export": lambda: torch.export.export(model, (own,)),
        "torch.fx": lambda: torch.fx.symbolic_trace(model),
    }
    for name, attempt in attempts.items():
        text = f"{name} would write down this rank's part of a network that is laid over ranks"
        refused(RunError, text, attempt)
        if rank() == 0:  # nobody waits for the others
            with pytest.raises(RunError, match=name):
                attempt()
    for holder in (nn.Sequential(model), nn.Sequential(nn.Identity(), model)):
        refused(RunError, "torch.jit.trace would write down", partial(torch.jit.trace, holder, own))
    refused(RunError, "cannot run in a FakeTensorMode", lambda: _on_fakes(model, own))
    close(model(own), mine(reference(x)))


def _on_fakes(model: Any, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)


def inside_of_another(plan: AnyPlan) -> None:
    """A parallel network as a part of a plain module: used as it is, laid again only by itself."""
    reference, model = both(plan)
    holder = nn.Sequential(nn.Identity(), model)
    text = "module '1' of Sequential is laid over ranks already, as a network of its own"
    refused(RunError, text, lambda: parallel(holder, "data"))
    x, y = batch()
    learn(reference, x, y)
    learn(holder, mine(x), mine(y))
    same_grads(model, reference)


def ddp_around(plan: AnyPlan) -> None:
    """The old line left in the script."""
    model = nn.parallel.DistributedDataParallel(parallel(built(), plan))
    x, _ = batch()
    refused(RunError, "DistributedDataParallel around a network that is laid over ranks", lambda: model(mine(x)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_around(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
