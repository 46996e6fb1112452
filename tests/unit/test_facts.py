"""What rules state about their operators is what torch does."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.capturing import capture
from shoal.operators.registry import draws, facts_of
from tests.unit.operator_cases import EXAMPLES, WITHOUT_RULE, Example, random

SAVE_MORE_OR_LESS = {
    "adaptive_avg_pool": "to one row it is a mean, which saves nothing",
    "pad": "reflection saves its input, constants do not",
    "cross_entropy_loss": "it saves the logarithms of its input's softmax instead, which are as many",
    "l1_loss": "it saves the signs of the differences instead, which are as many",
    "dropout": "it saves its mask, which is as large as its output",
    "native_dropout": "likewise",
    "addcmul": "it saves what is multiplied, not what it is added to",
    "addcdiv": "likewise",
    "scaled_dot_product_attention": "it may save its arguments scaled",
    "sgn": "it saves both",
}
"""Operators, by how their words begin, whose kernels save other tensors than their facts say, of about that size."""
COMPARED = [
    example
    for example in EXAMPLES
    if example.x.is_floating_point() and not example.blank and not example.word.startswith(tuple(SAVE_MORE_OR_LESS))
]


def ids(example: Example) -> str:
    return f"{example.op}{example.note and '*'}"


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def run(example: Example, x: Tensor) -> Tensor:
    arguments, states = example._arguments()
    return example._run(arguments, x, states)


@pytest.mark.parametrize("example", COMPARED, ids=ids)
def test_what_backward_reads_is_what_autograd_saves(example: Example) -> None:
    x, saved = example.x.clone().requires_grad_() + 0, list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(example, x)
    facts = facts_of(f"aten.{example.op}")
    of_input = any(memory(one) == memory(x) and one.numel() >= x.numel() for one in saved)
    of_output = any(memory(one) == memory(out) != memory(x) for one in saved)
    if out.is_floating_point():
        assert (facts.saves_input, facts.saves_output) == (of_input, of_output)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.data], ids=ids)
def test_views_are_those_that_look_at_their_input(example: Example) -> None:
    """`contiguous` is one only of what is contiguous; `_unsafe_view` says nothing of it, but is."""
    x = example.x.clone()
    out = run(example, x)
    if example.word not in ("contiguous", "to"):
        assert facts_of(f"aten.{example.op}").view == (memory(out) == memory(x))


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.x.is_floating_point()], ids=ids)
def test_autocast_lowers_what_rules_say(example: Example) -> None:
    def single(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(single, value))
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    arguments, states = example._arguments()
    arguments = {name: torch.float32 if value is torch.float64 else value for name, value in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        states = {name: single(state) for name, state in states.items()}  # type: ignore[misc]
        out = example._run(arguments, example.x.float(), states)
    if example.word != "prelu":  # on this device only
        assert (facts_of(f"aten.{example.op}").autocast == "lower") == (out.dtype == torch.bfloat16)


@pytest.mark.parametrize("example", [*EXAMPLES, *WITHOUT_RULE], ids=ids)
def test_states_that_change_are_named(example: Example) -> None:
    arguments, states = example._arguments()
    before = {name: state.detach().clone() for name, state in states.items()}
    with torch.no_grad():
        example._run(arguments, example.x.clone(), states)
    changed = [name for name, state in states.items() if not torch.equal(state, before[name])]
    assert sorted(facts_of(f"aten.{example.op}").updates(example.subject.graph.layers[0])) == sorted(changed)


def test_instance_norm_changes_its_running_statistics() -> None:
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    for layer in capture(norm, random(2, 3, 4)).layers:
        assert facts_of(layer.op).updates(layer) == ("running_mean", "running_var")
    for layer in capture(norm.eval(), random(2, 3, 4)).layers:
        assert facts_of(layer.op).updates(layer) == ()


@pytest.mark.parametrize(
    ("operator", "arguments", "does"),
    [
        (torch.ops.aten.dropout.default, {"p": 0.5, "train": True}, True),
        (torch.ops.aten.dropout.default, {"p": 0.0, "train": True}, False),
        (torch.ops.aten.dropout_.default, {"p": 0.5, "train": False}, False),
        (torch.ops.aten.alpha_dropout.default, {"p": 0.5, "train": True}, True),
        (torch.ops.aten.native_dropout.default, {"p": 0.5, "train": None}, True),
        (torch.ops.aten.bernoulli.p, {"p": 0.5}, True),
        (torch.ops.aten.rand_like.default, {}, True),
        (torch.ops.aten.relu.default, {}, False),
        (torch.ops.aten.scaled_dot_product_attention.default, {"dropout_p": 0.0}, False),
        (torch.ops.aten.scaled_dot_product_attention.default, {}, False),
        (torch.ops.aten.scaled_dot_product_attention.default, {"dropout_p": 0.1}, True),
    ],
    ids=str,
)
def test_when_operators_draw(operator: torch._ops.OpOverload, arguments: dict[str, object], does: bool) -> None:
    assert draws(operator, arguments) is does


def test_an_operator_of_somebody_else_has_no_facts_of_torchs() -> None:
    assert facts_of("mine.linear.default") is facts_of("aten.not_there.default") is facts_of("getitem")
    assert facts_of("aten.linear.default").dense


def test_an_operator_in_place_has_the_facts_of_its_twin() -> None:
    assert facts_of("aten.relu_.default") is facts_of("aten.relu.default")
