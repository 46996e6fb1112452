"""Time one part of a layer on this device: forward and backward, alone or while other ranks do the same."""

import time
from collections.abc import Callable, Mapping
from math import prod
from statistics import median

import torch
from torch import Tensor

from shoal.graph import State, Value
from shoal.operators.base import Call, Op, Part, Rule
from shoal.operators.registry import facts_of
from shoal.partition import Span
from shoal.profiling.roofline import flops

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
) -> tuple[float, float]:
    """Median seconds (forward, backward) of one part.

    `together` is called before each run, to start with others: with the seconds so far, and gives the most of any rank,
    so that all stop at once.
    """
    part, scale = _fewer_samples(op, rule, part)
    forward: list[float] = []
    backward: list[float] = []
    tensors = _tensors(op, rule, part, dtype, device, input_grad=input_grad)
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
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
        if together(sum(forward) + sum(backward)) > ENOUGH and repeat > 3:
            break
        start = _now(device)
        with torch.enable_grad():
            out = rule.run(call)
        middle = _now(device)
        grad = torch.ones_like(out) if grad is None else grad
        _forget(scratch, grad)
        again = _now(device)
        if wanted and out.requires_grad:
            torch.autograd.grad(out, wanted, grad, allow_unused=True)
        end = _now(device)
        if repeat:  # the first run makes what later ones find
            forward.append(middle - start)
            backward.append(end - again)
        del out
    return median(forward) * scale, median(backward) * scale


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
