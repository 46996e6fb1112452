"""Norms at their edges: half precision, statistics that only some ranks compute, one value per channel."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from shoal.capturing import capture, capture_with_states
from shoal.errors import CaptureError
from shoal.execution.laying import Captured, lay
from shoal.execution.module import ParallelModule
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.lowering.placement import op_of
from shoal.operators.registry import facts_of
from shoal.partition import Cut, Span
from shoal.plan import Plan
from shoal.planning.resolve import resolve
from shoal.transport.memory import run_ranks
from tests.unit.operator_cases import random

pytestmark = pytest.mark.usefixtures("one_thread")


def on_ranks(
    net: nn.Module,
    example: Tensor,
    cut: str,
    step: Callable[[ParallelModule], Any],
    *,
    batch_norm: Literal["exact", "local"] = "exact",
    recompute: bool = False,
) -> list[Any]:
    """`step` on every rank of a network that is cut alike everywhere that it can be."""

    def rank(transport: Any) -> Any:
        own = deepcopy(net)
        graph, states = capture_with_states(own, example)
        captured = Captured(own, {True: graph, False: graph}, states, None)
        plan = Plan(name="test", ranks=2, layers=(("*", Cut.parse(cut)),))
        return step(lay(captured, plan, transport, io="whole", batch_norm=batch_norm, recompute=recompute))

    return run_ranks(2, rank)


@pytest.mark.parametrize("cut", ["n2", "h2", "c2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4), nn.LayerNorm([4, 32, 30]), nn.Softmax(1)],
    ids=str,
)
def test_half_precision(norm: nn.Module, dtype: torch.dtype, cut: str) -> None:
    """As close to one device as half precision is, with sums that would overflow it."""
    one = deepcopy(norm).to(dtype)
    x = (10 * random(4, 4, 32, 30) + 5).to(dtype)
    cotangent = random(4, 4, 32, 30, seed=1).to(dtype)

    def step(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor], bool]:
        given = x.clone().requires_grad_()
        out = model(given)
        torch.autograd.backward((out * cotangent).sum())
        assert given.grad is not None
        states = model._states.tensors() if isinstance(model, ParallelModule) else dict(model.named_buffers())
        sent = isinstance(model, ParallelModule) and dict(model.predicted(input_grad=True)) == dict(model.counted)
        buffers = {name: state for name, state in states.items() if "running" in name}
        return out.detach(), given.grad, buffers, sent

    many = on_ranks(one, x, cut, step)
    out, grad, buffers, _ = step(one)
    limit = 4 * torch.finfo(dtype).eps
    for found in many:
        assert found[3], "predicted is not counted"
        torch.testing.assert_close(found[0], out, rtol=limit, atol=limit)
        torch.testing.assert_close(found[1], grad, rtol=limit, atol=limit * float(grad.abs().max()))
        for name, buffer in found[2].items():
            assert buffer.dtype == dtype
            if cut != "c2":
                torch.testing.assert_close(buffer, buffers[name], rtol=limit, atol=limit)


@pytest.mark.parametrize("recompute", [False, True])
def test_instance_norm_counts_its_statistics_once(recompute: bool) -> None:
    norms = [nn.InstanceNorm2d(3, track_running_stats=True) for _ in range(3)]
    layers = [module for norm in norms for module in (nn.Conv2d(3, 3, 3, padding=1), norm, nn.ReLU())]
    one, x = nn.Sequential(*layers).double(), random(4, 3, 5, 5)

    def step(model: Any) -> dict[str, Tensor]:
        torch.autograd.backward(model(x).square().mean())
        return dict(model._states.tensors()) if isinstance(model, ParallelModule) else one.state_dict()

    many = on_ranks(one, x, "n2", step, recompute=recompute)
    expected = step(one)
    for states in many:
        for name in expected:
            if "running" in name:
                torch.testing.assert_close(states[name], expected[name], rtol=1e-9, atol=0)


def test_a_program_names_all_statistics_that_it_changes() -> None:
    """So that ranks which had no part in a small batch get them too, whichever norm they are of."""
    net = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3)).double()
    for training in (True, False):
        graph = capture(net.train(training), random(4, 3, 5))
        cuts = dict(resolve("data", graph, 2).cuts)
        program = step_program(graph, cuts, Boundary("whole", 2), even_shares(4, 2), losses=False)
        wanted = {f"{place}.running_{what}" for place in (0, 1) for what in ("mean", "var")}
        assert set(program.changed) == (wanted if training else set())


ONE_VALUE = r"Expected more than 1 value per channel when training, got input size .*\[1, 4, 1, 1\]"


def one_value_per_channel() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()


@pytest.mark.parametrize("cut", ["n2", "c2"])
def test_one_value_per_channel_is_what_torch_refuses(cut: str) -> None:
    """Torch itself says it, when the new number of samples is traced."""

    def step(model: ParallelModule) -> None:
        with pytest.raises(CaptureError, match=ONE_VALUE):
            model(random(1, 3, 5, 5))

    on_ranks(one_value_per_channel(), random(4, 3, 5, 5), cut, step)


def test_one_value_per_channel_and_share_is_refused_on_every_rank() -> None:
    """Of three samples the first rank has two; the other alone would fail under DDP."""

    def step(model: ParallelModule) -> list[str]:
        with pytest.raises(ValueError, match=ONE_VALUE) as error:
            model(random(3, 3, 5, 5))
        return error.value.__notes__

    found = on_ranks(one_value_per_channel(), random(4, 3, 5, 5), "n2", step, batch_norm="local")
    assert found == [["in layer '2'"]] * 2


@pytest.mark.parametrize("local", [False, True])
def test_one_value_per_channel_is_refused_by_shapes_alone(local: bool) -> None:
    graph = capture(one_value_per_channel(), random(2, 3, 5, 5)).at_batch(1)
    op = op_of(graph.layers[-1], graph)
    with pytest.raises(ValueError, match=ONE_VALUE):
        facts_of(op.layer.op).check(op, [{"n": Span(0, 1)}, None], local=local)


@pytest.mark.parametrize(("training", "samples"), [(True, 2), (False, 1)])
def test_one_value_per_channel_and_share_is_enough_for_exact_statistics(training: bool, samples: int) -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)).double().train(training)
    x = random(samples, 3, 5, 5)
    outs = on_ranks(net, random(4, 3, 5, 5), "n2", lambda model: model(x).detach())
    for out in outs:
        torch.testing.assert_close(out, net(x), rtol=1e-9, atol=1e-12)
