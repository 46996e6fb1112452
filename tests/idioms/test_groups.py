"""Several networks in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    Net,
    batch,
    built,
    cases_of,
    learn,
    mine,
    name_of,
    parallel,
    rank,
    same_grads,
    same_states,
)


def two_networks(plan: AnyPlan) -> None:
    """Two networks, interleaved: forward of both, backward of both in the other order, a step of each."""
    references = [built(), built(Net, norm=False)]
    models = [parallel(built(), plan), parallel(built(Net, norm=False), "model")]
    for seed in (1, 2):
        x, y = batch(seed=seed)
        for nets, own, classes in ((references, x, y), (models, mine(x), mine(y))):
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
            losses = [F.cross_entropy(net(own), classes) for net in nets]
            for loss in reversed(losses):
                torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_([p for net in nets for p in net.parameters()], 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for model, reference in zip(models, references, strict=True):
        same_states(model, reference)


def shared_loss(plan: AnyPlan) -> None:
    """Distillation: a teacher in evaluation without gradients and a student, in one loss."""
    teacher, student = built(), built(Net, norm=False)
    theirs, ours = parallel(built(), "spatial").eval(), parallel(built(Net, norm=False), plan)
    teacher.eval()
    x, _ = batch()
    for slow, fast, own in ((teacher, student, x), (theirs, ours, mine(x))):
        with torch.no_grad():
            wanted = slow(own)
        torch.autograd.backward(F.mse_loss(fast(own), wanted))
    same_grads(ours, student)


def masks_of_two_networks(plan: AnyPlan) -> None:
    """Two networks of one architecture draw different dropout masks; the same seed gives the same."""
    x, y = batch()
    results = []
    for seed in (None, None, 5, 5):
        model = parallel(built(Net, dropout=0.5), plan, seed=seed)
        results.append(float(learn(model, mine(x), mine(y))))
    assert results[0] != results[1]
    assert results[2] == results[3]


def half_of_the_ranks(plan: AnyPlan) -> None:
    """`group=`: a network in some of the ranks only, while the others do something else."""
    group = dist.new_group([0])
    everyone, reference = parallel(built(), plan), built()
    x, y = batch()
    if rank() == 0:
        alone, plain = parallel(built(), "data", group=group), built()
        learn(plain, x, y)
        learn(alone, x, y)
        same_grads(alone, plain)
    learn(reference, x, y)
    learn(everyone, mine(x), mine(y))
    same_grads(everyone, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_groups(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
