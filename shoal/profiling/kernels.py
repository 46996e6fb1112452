"""Time one part of a layer on this device: forward and backward, alone or while other ranks do the same."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from shoal.graph import State, Value
from shoal.operators.base import Call, Op, Part, Rule
from shoal.operators.registry import facts_of
from shoal.partition import Span
from shoal.profiling.roofline import flops
from shoal.simulating.speeds import KernelTime

MOST_FLOPS = 6e9
"""Larger parts are timed with fewer samples, in proportion: seconds per tile, not minutes."""


CACHE_BYTES = 64 << 20
"""More than a processor's cache holds."""
ENOUGH = 0.2
"""After so many seconds, and three runs, a tile has been timed well enough."""


class _Alone:
    """Stands for the other parts of a layer: sums find nobody to add."""

    def __init__(self, parts: Mapping[str, int]) -> None:
        self._parts = parts

    def sum(self, tensor: Tensor, over: str) -> Tensor:  # noqa: ARG002
        return tensor

    def max(self, tensor: Tensor, over: str) -> Tensor:  # noqa: ARG002
        return tensor.detach().clone()

    def sum_now(self, tensor: Tensor, over: str) -> None:
        pass

    def count(self, over: str) -> int:
        return prod(self._parts.get(letter, 1) for letter in over)

    def index(self, over: str) -> int:  # noqa: ARG002
        return 0


def kernel_key(op: Op, rule: Rule, part: Part, cut: frozenset[str], dtype: str, *, input_grad: bool) -> str:
    """What the time of a part depends on, as text: equal keys take equal time."""
    needs = rule.needs(op, part)
    shapes = ",".join(f"{name}:{'x'.join(map(str, need.shape))}" for name, need in needs.items())
    others = ",".join(
        f"{name}={value}"
        for name, value in op.layer.arguments.items()
        if not isinstance(value, Value | State | tuple | None) or (isinstance(value, tuple) and _plain(value))
    )
    out = "x".join(str(len(span)) for span in rule.writes(op, part))
    joint = "joint" if rule.sums(op, part, cut, dict.fromkeys(cut, 2), local=False) else ""
    return f"{op.layer.op}({shapes};{others})->{out} {dtype} {'grad' if input_grad else 'nograd'} {joint}".rstrip()


def _plain(value: tuple[object, ...]) -> bool:
    return not any(isinstance(item, Value | State) for item in value)


def time_kernel(
    op: Op,
    rule: Rule,
    part: Part,
    cut: frozenset[str],
    dtype: torch.dtype,
    device: torch.device,
    random: Callable[[str], object],
    *,
    input_grad: bool,
    together: Callable[[float], float] = lambda seconds: seconds,
) -> KernelTime:
    """Seconds of one part, its two gradients apart where the engine may find them so; a low quantile of the repeats.

    `together` is called before each run, to start with others: with the seconds so far, and gives the most of any rank,
    so that all stop at once.
    """
    part, scale = _fewer_samples(op, rule, part)
    forward: list[float] = []
    to_input: list[float] = []
    to_weights: list[float] = []
    tensors = _tensors(op, rule, part, dtype, device, input_grad=input_grad)
    wanted = [[tensors[name] for name in names] for names in _wanted(op, rule, tensors)]
    call = Call(
        op=op,
        part=part,
        cut=cut,
        tensors=tensors,
        peers=_Alone(dict.fromkeys(cut, 2)),
        random=random(op.layer.name),  # type: ignore[arg-type]
    )
    grad: Tensor | None = None
    scratch = torch.zeros(CACHE_BYTES // 4) if device.type == "cpu" else None
    for repeat in range(6):
        if together(sum(forward) + sum(to_input) + sum(to_weights)) > ENOUGH and repeat > 3:
            break
        start = _now(device)
        with torch.enable_grad():
            out = rule.run(call)
        middle = _now(device)
        grad = torch.ones_like(out) if grad is None else grad
        _forget(scratch, grad)
        ends = [_now(device)]
        for number, some in enumerate(wanted if out.requires_grad else ()):
            found = torch.autograd.grad(out, some, grad, allow_unused=True, retain_graph=number + 1 < len(wanted))
            ends.append(_now(device))
            del found  # not within what is timed: a step keeps it until the optimizer
        if repeat:  # the first run makes what later ones find
            spent = [end - begin for begin, end in pairwise(ends)]
            forward.append(middle - start)
            to_input.append(spent[0] if spent else 0.0)
            to_weights.append(spent[1] if len(spent) > 1 else 0.0)
        del out
    return KernelTime(*(low(times) * scale for times in (forward, to_input, to_weights)))


def low(times: Sequence[float]) -> float:
    """The lower quartile: what is slow only since the machine was busy is not in it, nor is a single lucky time.

    >>> low([5.0, 1.0, 2.0, 3.0, 9.0])
    2.0
    """
    return sorted(times)[len(times) // 4]


def _wanted(op: Op, rule: Rule, tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Of which arguments the gradients are found together."""
    learning = [name for name, _ in op.layer.tensors if name in tensors and tensors[name].requires_grad]
    states = [name for name, reference in op.layer.tensors if name in learning and isinstance(reference, State)]
    others = [name for name in learning if name not in states]
    if rule.apart and states and others:
        return [others, states]
    return [learning] if learning else []


def _forget(scratch: Tensor | None, grad: Tensor) -> None:
    """Put what forward kept out of the processor's cache, as the layers between do in a real step; not the gradient."""
    if scratch is not None:
        scratch.add_(1)
        grad.mul_(1)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _fewer_samples(op: Op, rule: Rule, part: Part) -> tuple[Part, float]:
    work = flops(op, part, rule)
    rows = len(part["n"]) if "n" in part else 1
    if work <= MOST_FLOPS or rows < 2:
        return part, 1.0
    fewer = max(1, int(rows * MOST_FLOPS / work))
    start = part["n"].start
    return {**part, "n": Span(start, start + fewer)}, rows / fewer


def _tensors(
    op: Op, rule: Rule, part: Part, dtype: torch.dtype, device: torch.device, *, input_grad: bool
) -> dict[str, Tensor]:
    needs = rule.needs(op, part)
    tensors: dict[str, Tensor] = {}
    for argument, reference in op.layer.tensors:
        need = needs.get(argument)
        if need is None:
            continue
        is_state = isinstance(reference, State)
        if argument == "target":
            tensors[argument] = torch.zeros(need.shape, dtype=torch.int64, device=device)
            continue
        tensor = torch.rand(need.shape, dtype=dtype, device=device)
        updated = argument in facts_of(op.layer.op).updates(op.layer)
        tensors[argument] = tensor.requires_grad_((is_state and not updated) or (not is_state and input_grad))
    return tensors
