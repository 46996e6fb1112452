"""What torch.export would lose or freeze: followed exactly, or refused with the place. Nothing is silent."""

# ruff: noqa: ARG004  (torch's own signatures)
# mypy: disable-error-code="no-untyped-call"

import copy
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shoal.capturing import capture, capture_with_states, place
from shoal.errors import CaptureError, RunError
from shoal.execution.precision import value_types
from shoal.graph import fingerprint, same_graph
from tests.unit.capture_check import (
    EVERY_PLAN,
    ONE_RANK,
    Guided,
    Net,
    assert_captured,
    capture_one,
    eager_step,
    images,
    laid_step,
    net,
    run_graph,
)

Function = Callable[[Net, Tensor], Any]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "shoal")


# Custom autograd functions


class Reverse(torch.autograd.Function):
    """Gradient reversal, which returns its argument as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.weight * grad, None


class Round(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Unit(torch.autograd.Function):
    """A gradient of length 1: it must see all of it at once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = grad / grad.norm()
        return result


class Several(torch.autograd.Function):
    """Several results: with a gradient, without one, no tensor; and a backward that needs both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, sizes: tuple[int, ...]) -> Any:
        assert sizes == (1, 2)
        chosen = x.argmax(1)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(x, gain)
        return x * gain, chosen, x.sum((2, 3)), None, "text"

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gain = ctx.saved_tensors
        sign = (grads[0].sum() * grads[2].sum()).sign()
        of_x = (grads[0] * gain + grads[2][..., None, None]) * sign
        return of_x, (grads[0] * x).sum((0, 2, 3)).view(4, 1, 1) * 2, None


class Shrink(torch.autograd.Function):
    """A number that follows the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: int) -> Tensor:
        ctx.samples = samples
        return x / samples

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.samples, None


reverse = Reverse.apply  # bound long before the capture


def reversed_gradient(m: Any, x: Tensor) -> Any:
    return reverse(m.bn(m.conv(x)), 0.3) * m.gain


def rounded_weights(m: Any, x: Tensor) -> Any:
    return F.conv2d(x, Round.apply(m.conv.weight * 8) / 8, m.conv.bias)


def guided(m: Any, x: Tensor) -> Any:
    return F.conv2d(Guided.apply(m.conv(x)), (m.gain * m.table.view(1, 4, 1)).unsqueeze(-1))


def unit_gradients(m: Any, x: Tensor) -> Any:
    return F.conv2d(Unit.apply(m.conv(x)), (Unit.apply(m.gain) * m.table.view(1, 4, 1)).unsqueeze(-1))


def several_results(m: Any, x: Tensor) -> Any:
    product, chosen, total, nothing, text = Several.apply(m.conv(x), m.gain, (1, 2))
    assert (nothing, text) == (None, "text")
    return product * chosen.unsqueeze(1) + total[..., None, None]


def written_after(m: Any, x: Tensor) -> Any:
    y = Round.apply(m.conv(x))
    y.mul_(2)
    return y + y.view(-1).sum()


FUNCTIONS = [reversed_gradient, rounded_weights, guided, unit_gradients, several_results, written_after]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_custom_function_keeps_its_own_backward(function: Function) -> None:
    captured = assert_captured(net(function), images(), runs=(*EVERY_PLAN, (4, "2x2")))
    assert any(layer.op.startswith("shoal.autograd_function.") for layer in captured.graphs[True].layers)


def test_a_number_given_to_a_function_follows_the_batch() -> None:
    model = net(lambda m, x: Shrink.apply(m.conv(x), x.shape[0]))
    graph, states = capture_with_states(model, images(4))
    assert graph.any_batch
    x = images(3)
    torch.testing.assert_close(run_graph(graph.at_batch(3), states, x), model(x))


class Setting:
    """An object without a name of its own."""

    def __init__(self) -> None:
        self.slope = 0.1


def test_functions_have_names_that_all_processes_share() -> None:
    def local(weight: float) -> type[torch.autograd.Function]:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, told: Any) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                return grad * weight, None

        return Scaled

    def graph_of(cls: type[torch.autograd.Function]) -> Any:
        return capture(net(lambda m, x: cls.apply(m.conv(x), [2.0, Setting()])), images())

    one, other = graph_of(local(2)), graph_of(local(3))
    assert [layer.op for layer in one.layers][-1] == "shoal.autograd_function.Scaled"
    assert fingerprint(one) == fingerprint(other), "no address, no counter of the process"
    assert "call=Scaled" in str(same_graph(one, other)), "but two classes are two"


class Dirty(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()


class Sly(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round_().clone()


class Outside(Round):
    table = torch.ones(4, 1, 1, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Outside.table


class Noise(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Looks(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Listed(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor, more: list[Tensor]) -> Tensor:  # type: ignore[override]
        return x + more[0]


class KeepsNone(Several):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return x * 1, x * 2


def not_among_its_arguments(m: Any, x: Tensor) -> Any:
    class Reads(Round):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * m.gain

    return Reads.apply(m.conv(x))


# Hooks


def hook_on_a_tensor(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 100)  # here
    return y


def hook_that_is_caught(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    try:
        y.register_hook(lambda grad: grad * 100)
    except Exception:
        return y * 2
    return y


def keeps_a_gradient(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y.retain_grad()
    return y


def hook_on_a_node(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y.grad_fn.register_hook(lambda *_: None)
    return y


def own_backward(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return y + torch.autograd.grad(y.sum(), m.conv.weight, create_graph=True)[0].sum()


def changes_what_is_saved(m: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return m.conv(x)


# Python's own state


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


def numpys() -> float:
    return float(np.random.rand())  # noqa: NPY002


def seeded() -> float:
    torch.manual_seed(3)
    return 1.0


def counts(m: Any, x: Tensor) -> Any:
    m.steps = getattr(m, "steps", 0) + 1
    return m.conv(x) * m.steps


def counts_inside(m: Any, x: Tensor) -> Any:
    m.conv.about = getattr(m.conv, "about", [])
    m.conv.about.append(1)
    return m.conv(x)


def starts_once(m: Any, x: Tensor) -> Any:
    if not getattr(m, "started", False):
        m.started = True
        return m.conv(x) * 2
    return m.conv(x)


def keeps_an_activation(m: Any, x: Tensor) -> Any:
    m.seen = m.conv(x)
    return m.seen * 2


def keeps_it_in_a_dict(m: Any, x: Tensor) -> Any:
    m.table.about = {}  # an attribute of a tensor, which nobody sees
    m.bn.features = {"conv": m.conv(x)}
    return m.bn.features["conv"]


def replaces_a_parameter(m: Any, x: Tensor) -> Any:
    m.gain = nn.Parameter(m.gain * 1)
    return m.conv(x) * m.gain


class CountsInItsClass(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        CountsInItsClass.calls += 1
        result: Tensor = self.conv(x)
        return result


GENERATOR = np.random.default_rng(1)
PASSES = 0


def hidden_generator(m: Any, x: Tensor) -> Any:
    return m.conv(x) * float(GENERATOR.random())


def hidden_counter(m: Any, x: Tensor) -> Any:
    global PASSES
    PASSES += 1
    return m.conv(x) * float(PASSES)


# Shapes, numpy, transforms


def chooses_rows(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return y[y > 0].sum() + y


def finds_indices(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return y + torch.nonzero(y > 0).shape[0]


def vmapped(m: Any, x: Tensor) -> Any:
    return torch.vmap(lambda sample: m.conv(sample[None])[0])(x)


def by_numpy(m: Any, x: Tensor) -> Any:
    return m.conv(x) + torch.from_numpy(np.tanh(x.detach().numpy())).mean()


def by_array(m: Any, x: Tensor) -> Any:
    return m.conv(x) * float(np.mean(np.asarray(x)))


def checkpointed_norm(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: m.bn(m.conv(y)), x * m.number, use_reentrant=False)


def checkpointed_without_gradient(m: Any, x: Tensor) -> Any:
    return checkpoint(m.conv, x, use_reentrant=True) * m.gain


def no_grad_in_autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu"), torch.no_grad():
        return m.conv(x) * m.gain


def einsum_in_autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        return torch.einsum("nchw,cde->nhw", m.conv(x), m.gain).unsqueeze(1)


def apply(cls: Any, *more: Any) -> Function:
    return lambda m, x: cls.apply(m.conv(x), *more)


HERE = r" at \S*test_capture_watching.py:\d+ \("
REFUSED: dict[str, tuple[Function, str]] = {
    "dirty": (apply(Dirty), rf"autograd function Dirty changes its argument in place{HERE}(.|\n)*new tensor"),
    "sly": (apply(Sly), rf"autograd function Sly changes its argument in place{HERE}"),
    "outside": (apply(Outside), rf"Outside reads a tensor that is not among its arguments{HERE}(.|\n)*Pass it"),
    "parameter": (not_among_its_arguments, rf"Reads reads a tensor that is not among its arguments{HERE}"),
    "noise": (apply(Noise), rf"Noise draws random numbers by aten.rand_like.*{HERE}"),
    "looks": (apply(Looks), rf"function Looks cannot be run on shapes alone{HERE}return x if x.sum\(\) > 0 else -x"),
    "listed": (lambda m, x: Listed.apply(m.conv(x), [x[:, :1]]), rf"Listed is given tensors inside of a list.*{HERE}"),
    "none": (lambda m, x: sum(KeepsNone.apply(m.conv(x))), rf"KeepsNone asks for no zeros.*{HERE}"),
    "func": (lambda m, x: torch.vmap(Unit.apply)(m.conv(x)), rf"torch.vmap or another transform of torch.func{HERE}"),
    "hook": (hook_on_a_tensor, rf"puts a hook on a tensor{HERE}y.register_hook.*# here(.|\n)*torch.autograd.Function"),
    "caught": (hook_that_is_caught, rf"puts a hook on a tensor{HERE}"),
    "retain": (keeps_a_gradient, rf"keeps the gradient of an inner tensor{HERE}y.retain_grad"),
    "node": (hook_on_a_node, rf"looks into autograd's own graph{HERE}"),
    "grad": (own_backward, rf"runs a backward pass of its own{HERE}"),
    "saved": (changes_what_is_saved, rf"changes what autograd keeps{HERE}"),
    "counts": (counts, r"the network Net changes its 'steps' in its forward pass: nothing becomes 1, which would be"),
    "counts inside": (counts_inside, r"module 'conv' changes its 'about' in its forward pass: nothing becomes a list"),
    "starts": (starts_once, r"two passes of the network on the same input differ: .* 'started' in its forward pass"),
    "keeps": (keeps_an_activation, r"changes its 'seen' in its forward pass: nothing becomes a tensor(.|\n)*further"),
    "keeps dict": (keeps_it_in_a_dict, r"module 'bn' changes its 'features' in its forward pass: nothing becomes a d"),
    "replaces": (replaces_a_parameter, r"the network Net sets its parameter 'gain' anew in its forward pass"),
    "generator": (hidden_generator, r"two passes of the network on the same input differ: layer 'mul' has other=0"),
    "counter": (hidden_counter, r"two passes of the network on the same input differ"),
    "rows": (chooses_rows, rf"shape of a tensor depends on the values of another{HERE}return y\[y(.|\n)*torch.where"),
    "indices": (finds_indices, rf"shape of a tensor depends on the values of another{HERE}return y \+ torch.nonzero"),
    "vmap": (vmapped, rf"uses torch.vmap or another transform of torch.func{HERE}return torch.vmap"),
    "numpy": (by_numpy, rf"hands a tensor to numpy{HERE}"),
    "array": (by_array, rf"hands a tensor to numpy{HERE}"),
    "norm": (checkpointed_norm, r"module 'bn' keeps running statistics inside of torch.utils.checkpoint(.|\n)*recomp"),
    "reentrant": (checkpointed_without_gradient, rf"use_reentrant=True on tensors without a gradient{HERE}"),
    "no_grad": (no_grad_in_autocast, rf"switches gradients off inside of torch.autocast{HERE}"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "text"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_lost_is_refused(function: Function, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = net(function)
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(CaptureError, match=text):
        capture(model, images())
    assert capfd.readouterr() == ("", ""), "one message, and it is ours"
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before, "and nothing stays behind"


@pytest.mark.parametrize("draw", [random.random, numpys, seeded])
def test_random_numbers_of_python_are_refused_by_the_module(draw: Callable[[], float]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), Draws(draw)))
    numpys_state: Any = np.random.get_state
    states = random.getstate(), numpys_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"module '1\.1' draws random numbers(.|\n)*torch.bernoulli"):
        capture(model, images().float())
    after = random.getstate(), numpys_state()[1].tolist(), torch.get_rng_state()
    assert states[:2] == after[:2], "generators are left as they were"
    assert states[2].equal(after[2])


def test_a_class_that_counts_is_refused() -> None:
    with pytest.raises(
        CaptureError, match="class CountsInItsClass changes its 'calls' in its forward pass: 0 becomes 1"
    ):
        capture(CountsInItsClass(), images())
    assert CountsInItsClass.calls == 0


def test_hooks_of_modules_are_refused_by_their_path() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU())).double()

    def noop(*_: Any) -> None: ...

    for register, kind in (
        (nn.Module.register_full_backward_hook, "backward hook"),
        (nn.Module.register_full_backward_pre_hook, "backward hook"),
        (nn.Module.register_forward_hook, "forward hook"),
        (nn.Module.register_forward_pre_hook, "forward hook"),
    ):
        hooked = model()
        handle = register(hooked[1][0], noop)  # type: ignore[index]
        with pytest.raises(CaptureError, match=rf"module '1\.0' has a {kind} \(.*noop\)"):
            capture(hooked, images())
        handle.remove()
        capture(hooked, images())
    handle = nn.modules.module.register_module_forward_hook(noop)
    with pytest.raises(CaptureError, match="a hook on all modules"):
        capture(model(), images())
    handle.remove()
    with pytest.raises(CaptureError, match=r"module '0' has parameters without a shape(.|\n)*Run the network once"):
        capture(nn.Sequential(nn.LazyConv2d(4, 3)), images())


# What works


class Old(nn.Module):
    """torch's own hooks, which set a plain attribute in every pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with pytest.warns(FutureWarning):
            self.conv = nn.utils.weight_norm(nn.Conv2d(3, 4, 3, dtype=torch.float64))
        self.pruned = nn.Linear(4, 4, dtype=torch.float64)
        prune.l1_unstructured(self.pruned, "weight", 0.5)

    def __deepcopy__(self, memo: object) -> "Old":
        return Old()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.pruned(self.conv(x).mean((2, 3)))
        return result


def test_old_weight_norm_and_pruning() -> None:
    model, x = Old(), images()
    model(x).sum().backward()
    before = model.conv.weight
    assert_captured(model, x, runs=((1, "data"), (2, "data"), (2, "model")))
    assert model.conv.weight is before


def remembers_a_size(m: Any, x: Tensor) -> Any:
    m.size = tuple(x.shape[2:])
    return m.conv(x)


def caches_a_table(m: Any, x: Tensor) -> Any:
    tables = m.__dict__.setdefault("tables", {})
    if x.shape not in tables:
        tables[x.shape] = torch.arange(6, dtype=x.dtype) * m.gain
    return m.conv(x) * tables[x.shape]


def counts_in_a_buffer(m: Any, x: Tensor) -> Any:
    m.calls = m.calls + 1
    return m.conv(x) + m.calls


def checkpointed(m: Any, x: Tensor) -> Any:
    y = checkpoint(m.conv, x, use_reentrant=False)
    y = checkpoint(lambda z: z * m.gain, y, use_reentrant=True)
    return checkpoint_sequential([nn.ReLU(), nn.Tanh()], 2, y, use_reentrant=False)


def inference(m: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        table = m.conv(x)
    return m.bn(x[:, :1] * m.gain + table.clone()) + inference_by_decorator(m, x).clone()


@torch.inference_mode()
def inference_by_decorator(m: Any, x: Tensor) -> Any:
    return m.conv(x) * m.number


def without_autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = m.conv(x)
        with torch.no_grad():
            y = y + m.conv(x)
    return m.bn(y)


def one_value_per_channel(m: Any, x: Tensor) -> Any:
    return m.bn(m.conv(x).mean((2, 3), keepdim=True)) + torch.cumsum(x[:, :1], 1).mean()


def parts_of_complex(m: Any, x: Tensor) -> Any:
    spectrum = torch.fft.rfft2(m.conv(x))
    spectrum[:, :, 1:] = 0
    return torch.fft.irfft2(spectrum[:, :, :, :2]).real


WORKS = [remembers_a_size, caches_a_table, counts_in_a_buffer, checkpointed, inference, without_autocast,
         one_value_per_channel, parts_of_complex]  # fmt: skip


@pytest.mark.parametrize("function", WORKS)
def test_what_is_followed(function: Function) -> None:
    model = net(function)
    captured = assert_captured(model, images())
    assert captured.graphs[True].any_batch
    assert not {"size", "tables"} & {name for name, value in vars(model).items() if value}


def test_what_a_network_remembers_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def remembers(m: Any, x: Tensor) -> Any:
        m.width = x.shape[-1]
        return m.conv(x)

    caplog.set_level(logging.WARNING, "shoal")
    capture(net(remembers), images())
    assert "changes its 'width' in its forward pass: nothing becomes 6; in a parallel network it stays" in caplog.text


def test_an_autocast_of_the_network_is_followed() -> None:
    def lowered(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.conv(x).relu()
            with torch.autocast("cpu", enabled=False):
                y = y.float() * m.gain
            return F.linear(y.flatten(1), m.gain.flatten().repeat(36).unsqueeze(0))

    model, x = net(lowered).float(), images().float()
    captured = capture_one(model, x)
    graph = captured.graphs[True]
    assert [layer.output.dtype for layer in graph.layers if layer.op.split(".")[1] in ("conv2d", "mul", "linear")] == [
        "bfloat16", "float32", "bfloat16",
    ]  # fmt: skip
    wanted, found = eager_step(model, x), laid_step(captured, x, 1, "data")
    assert found.output.equal(wanted.output)
    for name, grad in wanted.grads.items():
        other = found.grads[name]
        assert (grad is None) == (other is None)
        if grad is not None and other is not None:
            torch.testing.assert_close(other, grad, rtol=0.02, atol=0.02)
    with pytest.raises(CaptureError, match=r"aten.einsum.default under torch.autocast.*casts cannot be followed"):
        capture(net(einsum_in_autocast).float(), x)
    with torch.autocast("cpu"), pytest.raises(RunError, match=r"sets torch.autocast itself at .*under another one"):
        value_types(graph, x)
    with torch.autocast("cpu"):
        assert same_graph(capture(model, x), graph) is None, "the caller's autocast is none of the network's"


def test_the_caller_is_not_disturbed() -> None:
    """Functions of torch are replaced for the time of a trace only, whatever happens."""
    before = {
        (owner, name): vars(owner).get(name)
        for owner in (torch.autograd.Function, torch.autograd.function._SingleLevelFunction, torch.inference_mode)
        for name in ("apply", "__enter__", "__exit__")
    }
    with pytest.raises(CaptureError):
        capture(net(hook_on_a_tensor), images())
    capture(net(reversed_gradient), images())
    assert {key: vars(key[0]).get(key[1]) for key in before} == before
    assert not torch._C._is_torch_function_mode_enabled()
    assert not nn.modules.module._global_forward_hooks


# Comparing graphs


def test_where_two_graphs_differ() -> None:
    graph = capture(net(lambda m, x: F.relu(m.conv(x)) * 2), images())
    again = capture(net(lambda m, x: F.relu(m.conv(x)) * 2), images())
    assert same_graph(graph, again) is None
    assert fingerprint(graph) == fingerprint(again)
    tripled = capture(net(lambda m, x: F.relu(m.conv(x)) * 3), images())
    assert same_graph(graph, tripled) == "layer 'mul' has other=2 and 3"
    other = capture(net(lambda m, x: torch.tanh(m.conv(x)) * 2), images())
    assert same_graph(graph, other) == "layer 'relu' (aten.relu.default) is 'tanh' (aten.tanh.default)"
    longer = replace(graph, layers=(*graph.layers, replace(graph.layers[-1], name="more")))
    assert same_graph(graph, longer) == "layer 'more' is only in one of them"
    assert str(same_graph(graph, graph.at_batch(5))).startswith("batch is 4 and 5")
    assert len({fingerprint(one) for one in (graph, tripled, other, longer, graph.at_batch(5))}) == 5


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = net(caches_a_table)
    before = copy.deepcopy(model.state_dict())
    assert_captured(model, images(), runs=ONE_RANK)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert "tables" not in vars(model)


def test_what_torch_and_imports_read_of_the_environment_is_not_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun tells every rank another LOCAL_RANK, which torch reads when some of its modules are first imported."""
    plain = os._Environ.__getitem__
    read: list[tuple[str, bool]] = []
    scope: dict[str, Any] = {"plain": plain, "read": read, "read_by_network": place.read_by_network}
    source = "def getitem(env, name):\n    read.append((name, read_by_network()))\n    return plain(env, name)\n"
    exec(compile(source, f"{place.CAPTURING}/as_if_it_were_there.py", "exec"), scope)
    monkeypatch.setenv("SHOAL_TEST", "1")
    monkeypatch.setattr(os._Environ, "__getitem__", scope["getitem"])
    torch.distributed.is_torchelastic_launched()
    os.environ.get("SHOAL_TEST")
    exec(compile("import os; os.environ.get('SHOAL_TEST')", "<frozen importlib._bootstrap>", "exec"), {})
    monkeypatch.undo()
    ours = [seen for name, seen in read if name == "SHOAL_TEST"]
    assert ours == [True, False]
    assert [seen for name, seen in read if name == "TORCHELASTIC_RUN_ID"] == [False]
