"""In-place operators and views put together at random: the captured graph is what the module is, or is refused."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.capturing import capture_with_states
from shoal.errors import CaptureError
from tests.unit.capture_check import run_graph

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "relu_": lambda t: t.relu_(),
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(1.5),
    "sub_ mean": lambda t: t.sub_(t.mean()),
    "clamp_": lambda t: t.clamp_(-0.5, 2.0),
    "pow_": lambda t: t.pow_(2),
    "first rows = 0": lambda t: t.__setitem__(slice(None, 1), 0.0),
    "last column += 1": lambda t: t[..., -1].add_(1),
    "copy_": lambda t: t.copy_(t.flip(0) * 2),
    "zero_ half": lambda t: t[..., ::2].zero_(),
    "masked_fill_": lambda t: t.masked_fill_(t > 1, 0.25),
    "index_put_": lambda t: t.__setitem__(torch.tensor([0]), 3.0),
    "neg_": lambda t: t.neg_(),
    "dropout_": lambda t: nn.functional.dropout(t, 0.5, training=False, inplace=True).add_(0.5),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "flatten": lambda t: t.flatten(),
    "transpose": lambda t: t.transpose(0, -1),
    "first": lambda t: t[:1],
    "inner": lambda t: t[..., 1:],
    "every second": lambda t: t[::2],
    "unsqueeze": lambda t: t.unsqueeze(1),
    "chunk": lambda t: t.chunk(2, 0)[-1],
    "split": lambda t: torch.split(t, 1, -1)[0],
    "unbind": lambda t: t.unbind(-1)[-1].unsqueeze(-1),
    "detach": lambda t: t.detach(),
    "dropout": lambda t: nn.functional.dropout(t, 0.5, training=False),
    "a new one": lambda t: t * 2,
    "contiguous": lambda t: t.contiguous(),
    "expand": lambda t: t.unsqueeze(0).expand(1, *t.shape).squeeze(0),
}


@dataclass(frozen=True)
class Line:
    """One line of a made-up forward: look at tensor `source` in some way, and change tensor `target` in some way."""

    view: str
    source: int
    change: str
    target: int


class Random(nn.Module):
    """Runs the lines without autograd's rules, which forbid some of them, and returns every tensor it has seen."""

    def __init__(self, lines: list[Line], *, on_input: bool) -> None:
        super().__init__()
        self.lines, self.on_input = lines, on_input

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x if self.on_input else x * 1]
        for line in self.lines:
            tensors.append(VIEWS[line.view](tensors[line.source % len(tensors)]))
            CHANGES[line.change](tensors[line.target % len(tensors)])
        return torch.cat([tensor.flatten() for tensor in tensors])


lines = st.builds(
    Line, st.sampled_from(list(VIEWS)), st.integers(0, 5), st.sampled_from(list(CHANGES)), st.integers(0, 5)
)


@settings(max_examples=8)
@given(st.lists(lines, min_size=1, max_size=4), st.booleans())
def test_views_and_changes_in_any_order(lines: list[Line], on_input: bool) -> None:
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)
    model = Random(lines, on_input=on_input)
    wanted = model(x.clone())
    try:
        graph, states = capture_with_states(model, x)
    except CaptureError:
        event("refused")
        return
    given_x = x.clone()
    torch.testing.assert_close(run_graph(graph, states, given_x), wanted, rtol=1e-12, atol=1e-12)
    assert given_x.equal(x), "the caller's tensor is never changed"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "shoal")
