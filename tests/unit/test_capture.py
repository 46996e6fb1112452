"""The promise of capture: the graph computes what the module computes. What it cannot follow it refuses."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.capturing import capture, capture_with_states
from shoal.errors import CaptureError
from shoal.execution import full_state_dict, load_full_state_dict
from shoal.execution.laying import capture_modes, lay
from shoal.graph import LayerGraph
from shoal.transport import Transport
from shoal.transport.memory import run_ranks
from tests.unit.capture_check import (
    EVERY_PLAN,
    ONE_RANK,
    Net,
    assert_captured,
    assert_same_step,
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


# In-place operators


def chain(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y += 0.25
    y.mul_(1.5).sub_(0.1)
    return F.relu(F.hardtanh_(y, -1.0, 1.2), inplace=True)


def number_powers(m: Net, x: Tensor) -> Any:
    return m.conv(x).pow_(2).clamp_(0.1, 1.1)


def residual(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    z = m.bn(y)
    z += y
    return z.relu_()


def rows_to_zero(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y[:, :2] = 0
    return y * m.gain


def column_plus_one(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y[..., 0].add_(1)
    return y.relu()


def rows_from_rows(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y[:, :2] = y[:, 2:] * 2
    y[:, :, 1] = m.table[:, 0]
    return y


def made_and_filled(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    out = torch.empty_like(y)
    out[:, :2] = y[:, 2:]
    out[:, 2].zero_()
    out[:, 3].fill_(2.0)
    return out * y


def elements_by_index(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y[:, [0, 2]] = 1.0
    y[y > 0.5] = 0.25
    return y


def view_before(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    before = y.view(y.shape[0], -1)
    y.relu_()
    return before


def view_of_a_view(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    view = y.view(y.shape[0], 2, 2, 6, 6)[:, 1].permute(0, 2, 3, 1)
    y.mul_(2)
    view.add_(1)
    later = view[:, 0]
    view.relu_()
    return y + later.sum()


def permuted(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y.permute(0, 2, 3, 1).transpose(1, 2).add_(torch.arange(4, dtype=x.dtype))
    return y


def expanded(m: Net, x: Tensor) -> Any:
    y = m.conv(x).mean((2, 3), keepdim=True)
    wide = y.expand(-1, -1, 6, 6)
    y.add_(1)
    return wide * 2


def base_of_a_chunk(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    with torch.no_grad():  # autograd forbids to change what chunk returned
        made = torch.ones_like(y)
        first, second = made.chunk(2, 1)
        first.mul_(3)
        made.unbind(0)[1].zero_()
        torch.split(second, 1, 1)[0].add_(2)
    return y * made


def a_copy_of_its_input(m: Net, x: Tensor) -> Any:
    x = x.clone()
    before = x[:, :1]
    x.mul_(2)
    return m.conv(x) + before


def derived_from_a_parameter(m: Net, x: Tensor) -> Any:
    weight = m.conv.weight * 2
    part = weight[:2]
    weight.clamp_(-0.5, 0.5).mul_(3)
    return F.conv2d(x, weight, padding=1) + part.sum()


def dropout_that_is_its_input(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    F.dropout(y, 0.5, training=False).add_(1)
    return y


def turned(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    return y.unsqueeze_(1).squeeze_(1).transpose_(2, 3)


def wider_type(m: Net, x: Tensor) -> Any:
    y = m.conv(x).float()
    y.mul_(m.table)  # float32 stays float32
    y[:, 0] = x[:, 0]
    return y


def several_at_once(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    torch._foreach_add_([y], 1.0)
    return y


def together(*functions: Function) -> Function:
    """Several in one network: one capture instead of many."""

    def function(m: Net, x: Tensor) -> Any:
        return torch.cat([one(m, x * 1).flatten(1) for one in functions], 1)

    return function


IN_PLACE: dict[str, Function] = {
    "renamed": together(chain, number_powers, residual, turned),
    "rows": together(rows_to_zero, column_plus_one, rows_from_rows, made_and_filled, elements_by_index),
    "views": together(view_before, view_of_a_view, permuted, expanded),
    "chunks": together(base_of_a_chunk, dropout_that_is_its_input, several_at_once),
    "input": a_copy_of_its_input,
    "parameter": derived_from_a_parameter,
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_operators_are_followed(function: Function) -> None:
    x = images()
    before = x.clone()
    assert_captured(net(function), x)
    assert x.equal(before), "the caller's tensor is never changed"


def test_in_place_operators_keep_the_type() -> None:
    assert_captured(net(wider_type), images(), tolerance=1e-6)


def test_dropout_in_place_draws_a_mask() -> None:
    def drop(m: Net, x: Tensor) -> Any:
        return F.dropout(m.conv(x), 0.5, training=True, inplace=True)

    model, x = net(drop), images()
    captured = assert_captured_alike(model, x)
    ratio = captured / model.conv(x)
    assert ((ratio - 2).abs().lt(1e-9) | ratio.eq(0)).all()
    assert 0 < ratio.eq(0).double().mean() < 1


def assert_captured_alike(model: nn.Module, x: Tensor) -> Tensor:
    """For networks with random draws: all plans draw alike."""
    captured = capture_modes(model, x)
    steps = [laid_step(captured, x, world, plan) for world, plan in EVERY_PLAN]
    for step in steps[1:]:
        assert_same_step(step, steps[0], "plans")
    return steps[0].output


# What autograd sees


def without_grad(m: Net, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.conv(x).relu_()
    return m.bn(y) * m.gain


def without_grad_and_hidden_writes(m: Net, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.conv(x)
    z = y * m.gain
    view = z.view(-1)
    z.add_(1)
    return z + view.sum()


def detached(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    apart = y.detach()
    y.relu_()
    return y * m.gain + apart


def gradient_through_complex(m: Net, x: Tensor) -> Any:
    return torch.fft.rfft2(m.conv(x)).abs()


@pytest.mark.parametrize(
    "function",
    [without_grad, together(without_grad, without_grad_and_hidden_writes, detached), gradient_through_complex],
)
def test_gradients_stop_where_autograd_stops(function: Function) -> None:
    assert_captured(net(function), images())


# Buffers, constants, parameters


def norm_twice(m: Net, x: Tensor) -> Any:
    return m.bn(m.bn(m.conv(x)).relu_())


def norm_twice_hidden_writes(m: Net, x: Tensor) -> Any:
    y = m.bn(m.conv(x))
    view = y.view(-1)
    y.add_(1)
    return m.bn(y) + view.sum()


def norm_for_its_statistics_only(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    m.bn(y)
    return y * 2


def conv_of_two_sizes(m: Net, x: Tensor) -> Any:
    return m.conv(x).sum((2, 3)) + m.conv(x[:, :, :3]).sum((2, 3))


def number_plus_one(m: Net, x: Tensor) -> Any:
    return m.conv(x) * (m.number + 1)  # a parameter, not a counter


def counter(m: Net, x: Tensor) -> Any:
    m.calls += 1
    y = m.conv(x) + m.calls
    m.calls += 1
    return y + m.calls


def constants(m: Net, x: Tensor) -> Any:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
    scale[1] = 7
    return m.conv(x) * scale.view(4, 1, 1) + torch.ones(4, 1, 1, dtype=x.dtype) * m.hidden + m.table


def table_only(m: Net, x: Tensor) -> Any:
    return x[:, :1] * m.table


BUFFERS = [
    *(norm_twice, norm_twice_hidden_writes, norm_for_its_statistics_only, conv_of_two_sizes),
    *(number_plus_one, counter, constants, table_only),
]


@pytest.mark.parametrize("function", BUFFERS)
def test_states_are_followed(function: Function) -> None:
    assert_captured(net(function), images())


def test_statistics_chain_where_a_norm_is_used_twice() -> None:
    graph = capture(net(norm_twice), images())
    assert graph.counters == {"bn.num_batches_tracked": 2}


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    model = net(lambda m, x: m.bn(m.conv(x)))
    model.conv.weight.requires_grad_(False)
    wanted = eager_step(model, images())
    assert {name for name, grad in wanted.grads.items() if grad is None} == {"gain", "number", "conv.weight"}
    assert_captured(model, images())


class Tied(nn.Module):
    """Two layers with one weight, under names that sort the other way round; and one module under two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(4, 4, dtype=torch.float64)
        self.a = nn.Linear(4, 4, dtype=torch.float64)
        self.a.weight = self.z.weight
        self.by_name = nn.ModuleDict({"again": self.a})
        self.register_buffer("one", torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("two", self.one)

    one: Tensor
    two: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.z(F.relu(self.a(self.by_name["again"](x)))) * self.two
        return result


def test_tied_tensors_are_one_and_keep_all_their_names() -> None:
    model = Tied()
    x = torch.randn(4, 4, dtype=torch.float64)
    captured = assert_captured(model, x, runs=((1, "data"), (2, "data"), (2, "model")))
    assert sorted(captured.graphs[True].states) == ["a.bias", "one", "z.bias", "z.weight"]

    def round_trip(transport: Transport) -> dict[str, Tensor]:
        laid = lay(captured, "model", transport, io="whole", seed=0)
        assert [name for name, _ in laid.named_parameters()].count("a.weight") == 0
        state = full_state_dict(laid)
        load_full_state_dict(laid, {name: tensor + 1 for name, tensor in state.items()})
        return full_state_dict(laid)

    loaded = run_ranks(2, round_trip)[0]
    assert list(loaded) == list(model.state_dict())
    assert all(loaded[name].equal(tensor + 1) for name, tensor in model.state_dict().items())


class Shadow(nn.Module):
    """Names that our own code uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Conv2d(3, 4, 1)
        self.plan = nn.Conv2d(4, 4, 1)
        self.relu_2 = nn.ReLU()
        self.counted = nn.Parameter(torch.ones(4, 1, 1))
        self.target = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.relu(self.x(x)) - 0.1)
        result: Tensor = self.target(self.relu_2(self.plan(y)) * self.counted)
        return result


def test_names_of_the_network_never_meet_ours() -> None:
    captured = assert_captured(Shadow().double(), images())
    graph = captured.graphs[True]
    assert [layer.name for layer in graph.layers] == [
        *("x", "relu", "sub", "relu_3", "plan", "relu_2", "mul", "target"),
    ]
    assert list(graph.inputs) == ["x_2"]


# Containers, modes, types, shapes


class Block(nn.Module):
    def __init__(self, channels: int, *, norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True))
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.body(x) + x)
        return result


def deep() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(4, norm=True), Block(4, norm=False)])
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(4 * 36, 5)).double()


def test_layers_are_named_by_their_modules() -> None:
    model = deep()
    names = ["0", "1.0.body.0", "1.0.body.1", "1.0.body.2", "1.0.add", "1.0.norm", "1.1.body.0", "1.1.body.1",
             "1.1.body.2", "1.1.add", "2", "3"]  # fmt: skip
    graph = capture(model, images())
    assert [layer.name for layer in graph.layers] == names
    assert capture(model, images()) == graph, "a capture is a value"
    assert [layer.name for layer in capture(model.eval(), images()).layers] == names


def test_a_frozen_part_stays_frozen_in_training() -> None:
    model = deep()
    model.get_submodule("1.0").eval()
    assert_captured(model, images())


class TwoFaced(nn.Module):
    """Another path, other parameters and other constants in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.train_conv = nn.Conv2d(3, 4, 3, padding=1)
        self.eval_conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2, 3, 4] if self.training else [5.0, 6, 7, 8], dtype=x.dtype).view(4, 1, 1)
        y = (self.train_conv(x) if self.training else self.eval_conv(x)) * scale
        result: Tensor = self.head(y)
        return result


def test_training_and_evaluation_are_two_graphs() -> None:
    torch.manual_seed(0)
    model, x = TwoFaced().double(), images()
    captured = capture_modes(model, x)
    assert model.training
    for mode in (True, False):
        wanted = eager_step(model.train(mode), x)
        for world, plan in EVERY_PLAN:
            assert_same_step(laid_step(captured, x, world, plan), wanted, f"training={mode}, plan {plan}")


@pytest.mark.parametrize("model", [nn.Flatten(), nn.MaxPool2d(2), nn.Identity(), nn.Sequential()])
def test_networks_without_parameters(model: nn.Module) -> None:
    assert_captured(model, images())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_types(dtype: torch.dtype, tolerance: float) -> None:
    model = deep().to(dtype)
    captured = assert_captured(model, images().to(dtype), runs=((1, "data"), (2, "model")), tolerance=tolerance)
    assert {spec.dtype for spec in captured.graphs[True].specs.values()} == {str(dtype).removeprefix("torch.")}


def test_several_inputs() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
            return (x + y.mul(2)) * scale

    x, y, scale = torch.ones(4, 3), torch.full((4, 3), 2.0), torch.tensor(3.0)
    graph, states = capture_with_states(Sum(), x, y, scale)
    assert list(graph.inputs) == ["x", "y", "scale"]
    assert run_graph(graph, states, x, y, scale).equal(torch.full((4, 3), 15.0))
    assert run_graph(graph.at_batch(2), states, x[:2], y[:2], scale).shape == (2, 3)


# Other numbers of samples


def fold(m: Net, x: Tensor) -> Any:
    folded = x.reshape(-1, 1, 6, 6).expand(-1, 3, -1, -1)
    return m.conv(folded).view(x.shape[0], 3, -1).sum(1)


def shuffle(m: Net, x: Tensor) -> Any:
    n, c, h, w = (y := m.conv(x)).shape
    return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


def divided_by_samples(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    return y - y.sum(0, keepdim=True) / x.shape[0] + torch.zeros(x.shape[0], 1, 1, 1, dtype=x.dtype)


@pytest.mark.parametrize("function", [fold, shuffle, divided_by_samples, residual])
def test_other_batches_without_a_new_capture(function: Function) -> None:
    model = net(function)
    captured = assert_captured(model, images(4), runs=ONE_RANK)
    for batch in (1, 2, 5, 8):
        x = images(batch)
        wanted = eager_step(model, x)
        for world, plan in ((1, "data"), (2, "data"), (2, "model")):
            assert_same_step(laid_step(captured, x, world, plan), wanted, f"batch {batch}, plan {plan}")


def test_stochastic_depth_takes_any_batch() -> None:
    def drop_path(m: Net, x: Tensor) -> Any:
        keep = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype).bernoulli_(0.5).div_(0.5)
        return m.conv(x) * keep

    model = net(drop_path)
    graph = capture(model, images(4))
    assert graph.any_batch
    assert graph.at_batch(7).specs[graph.output].shape == (7, 4, 6, 6)
    for batch in (4, 7):
        x = images(batch)
        ratio = assert_captured_alike(model, x) / model.conv(x)
        whole_samples = [set(sample.round(decimals=9).flatten().tolist()) for sample in ratio]
        assert all(values in ({0.0}, {2.0}) for values in whole_samples)


FIXED: dict[str, Function] = {
    "view": lambda m, x: m.conv(x).view(4, -1).matmul(x.new_ones(144, 2)),
    "branch": lambda m, x: m.conv(x) * (2 if x.shape[0] == 4 else 3),
    "float": lambda m, x: m.conv(x) * (1 / x.shape[0]),
    "half": lambda m, x: m.conv(x)[: x.shape[0] // 2],
    "constant": lambda m, x: m.conv(x) * torch.tensor([1.0 + x.shape[0]], dtype=x.dtype),
    "made": lambda m, x: m.conv(x) + torch.ones(4, 1, 1, 1, dtype=x.dtype),
}


@pytest.mark.parametrize("function", FIXED.values(), ids=FIXED)
def test_a_network_that_fixes_its_batch_does_for_others_what_it_itself_does(function: Function) -> None:
    model = net(function)
    captured = assert_captured(model, images(4), runs=ONE_RANK)
    assert not captured.graphs[True].any_batch
    for batch in (3, 6):
        try:
            wanted = eager_step(model, images(batch))
        except RuntimeError:  # it cannot do so by itself either
            with pytest.raises(CaptureError, match="cannot be captured at"):
                laid_step(captured, images(batch), 1, "data")
            continue
        for world, plan in ((1, "data"), (2, "data")):
            assert_same_step(laid_step(captured, images(batch), world, plan), wanted, f"batch {batch}, {plan}")


def test_a_network_that_reads_rows_by_number_does_so_for_every_batch() -> None:
    model = net(lambda m, x: m.conv(x) + m.conv(x[1:3]).sum(0))
    captured = assert_captured(model, images(4), runs=ONE_RANK)
    for batch in (6, 2):
        assert_same_step(
            laid_step(captured, images(batch), 2, "data"), eager_step(model, images(batch)), f"batch {batch}"
        )


# Refusals


def decides(m: Net, x: Tensor) -> Any:
    y: Tensor = m.conv(x)
    return y if y.mean() > 0 else -y  # here


def takes_a_number(m: Net, x: Tensor) -> Any:
    return m.conv(x) * x.mean().item()


def returns_nothing(m: Net, x: Tensor) -> Any:
    m.conv(x)


def ignores_its_input(m: Net, x: Tensor) -> Any:
    return m.gain * x.shape[0]


def writes_unseen(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    with torch.no_grad():
        y.clamp_(0)
    return y


def writes_through_detach(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    y.detach().view(-1).clamp_(0)
    return y


def changes_a_parameter(m: Net, x: Tensor) -> Any:
    with torch.no_grad():
        m.gain.clamp_(-1, 1)
    return m.conv(x) * m.gain


def changes_its_input(m: Net, x: Tensor) -> Any:
    before = x[:, :1]
    x.mul_(2)
    return m.conv(x) + before


def changes_a_buffer(m: Net, x: Tensor) -> Any:
    m.table.mul_(0.9)
    return m.conv(x) * m.table


def may_be_its_input(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    torch.einsum("nchw->nhwc", y).add_(1)
    return y * 2


def drops_attention(m: Net, x: Tensor) -> Any:
    y = m.conv(x)
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)


def draws(m: Net, x: Tensor) -> Any:
    return m.conv(x) + torch.randn_like(x)[:, :1]


def does_not_run(m: Net, x: Tensor) -> Any:
    return m.conv(x[:, :2])


REFUSED: dict[Function, str] = {
    decides: r"test_capture.py:\d+ \(return y if y.mean\(\) > 0 else -y  # here\): what it does next depends on the "
    r"values of a tensor(.|\n)*torch.where",
    takes_a_number: r"takes a number out of a tensor(.|\n)*x.mean\(\) instead of x.mean\(\).item",
    returns_nothing: r"returns no tensor",
    ignores_its_input: r"does not use its input",
    writes_unseen: r"in place where autograd does not see it(.|\n)*y.clamp\(0\) instead of",
    writes_through_detach: r"in place where autograd does not see it",
    changes_a_parameter: r"in place where autograd does not see it",
    changes_its_input: r"changes its input 'x' in place at (.|\n)*x.clone\(\)",
    changes_a_buffer: r"forward writes buffer 'table' at .*\.py:\d+ \(.*\) \(such as (.|\n)*outside of forward",
    may_be_its_input: r"may be another tensor too",
    drops_attention: r"'scaled_dot_product_attention' draws random numbers",
    draws: r"'randn_like' draws random numbers",
    does_not_run: r"test_capture.py:\d+ (.|\n)*runs on an input of shape \(4, 3, 6, 6\)",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_followed_is_refused(function: Function, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[function]):
        capture(net(function), images())
    assert capfd.readouterr() == ("", ""), "one message, and it is ours"


def test_a_refusal_names_the_line_of_the_users_code() -> None:
    lines, first = inspect.getsourcelines(decides)
    here = first + next(index for index, line in enumerate(lines) if "# here" in line)
    with pytest.raises(CaptureError, match=rf"tests/unit/test_capture.py:{here} "):
        capture(net(decides), images())


def test_a_cumulative_average_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=None))
    with pytest.raises(CaptureError, match="batch norm '1' has momentum=None"):
        capture(model, images().float())
    assert isinstance(capture(model.eval(), images().float()), LayerGraph)
