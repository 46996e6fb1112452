"""What a network's code asks about the call that it is in, and what a capture answers.

A capture is made once, for calls of many kinds. Code that asks which kind it is in (`if torch.is_grad_enabled():`) gets
the answer of the call that it is captured for; the question is remembered, and another answer is another variant.

    asked                                              answered
    torch.is_grad_enabled(), requires_grad             as in the call: another variant
    an input's dtype, .float() and the like            as in the call: another variant
    strides, is_contiguous()                           as in the call: another variant
    os.environ                                         as it is: another variant
    torch.compiler.is_compiling(), is_exporting()      no: whoever runs the network does not compile it
    torch.is_autocast_enabled() and the like           no; a call under torch.autocast is refused then
    torch.is_inference_mode_enabled()                  no; a call under torch.inference_mode is refused then

A loss is asked for in the same way. Torch's own code gets torch's own answers.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.capturing.place import CAPTURING, TORCH

GRAD_MODE = "whether gradients are recorded"
REQUIRES_GRAD = "whether a tensor requires a gradient"
DTYPE = "the type of a tensor"
LAYOUT = "the strides of a tensor"
AUTOCAST = "whether torch.autocast is on"
INFERENCE = "whether torch.inference_mode is on"
_VARIABLE = "os.environ "

_OF_TENSORS = {
    **dict.fromkeys(("dtype", "itemsize"), DTYPE),
    **dict.fromkeys(("to", "type", "float", "double", "half", "bfloat16", "int", "long", "element_size"), DTYPE),
    **dict.fromkeys(("is_contiguous", "stride"), LAYOUT),
    "requires_grad": REQUIRES_GRAD,
}
"""Attributes and methods of tensors that tell what they were called with."""

OF_TORCH: Sequence[tuple[Any, str, str]] = (
    (torch, "is_grad_enabled", GRAD_MODE),
    *((torch, name, AUTOCAST) for name in ("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype")),
    (torch, "is_inference_mode_enabled", INFERENCE),
    *((torch.compiler, name, "") for name in ("is_compiling", "is_exporting")),
    (torch._utils, "is_compiling", ""),
)
"""Functions that tell it: (where, name, question); without a question the answer is always no."""

_DYNAMO = ("torch._dynamo",)
"""What may not be imported yet, and has an `is_compiling` of its own."""
_NOBODYS = {"torch", "shoal", "numpy", "sympy", *sys.stdlib_module_names}
"""Packages that no network's code is in."""


def askable() -> list[tuple[tuple[Any, str], str]]:
    """Every place of such a function, with its question: torch's own, and where somebody imported it by its name."""
    known = [*OF_TORCH, *((sys.modules[name], "is_compiling", "") for name in _DYNAMO if name in sys.modules)]
    questions = {id(getattr(owner, name)): question for owner, name, question in known}
    places: list[tuple[Any, str]] = [(owner, name) for owner, name, _ in known]
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] not in _NOBODYS:
            content = getattr(module, "__dict__", {})
            places += [(module, name) for name, value in list(content.items()) if id(value) in questions]
    return [(place, questions[id(getattr(*place))]) for place in places]


def question_of(function: Any) -> str | None:
    """The question that a call of a tensor's method, or a look at its attribute, asks."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return _OF_TENSORS.get(name)


def from_network(depth: int = 2) -> bool:
    """Whether the caller of our caller is the network's own code: neither torch's nor ours."""
    return not sys._getframe(depth).f_code.co_filename.startswith((TORCH, CAPTURING))


def variable(name: object) -> str:
    """The question for a variable of the environment."""
    return f"{_VARIABLE}{name}"


def answer(question: str, tensors: Sequence[Tensor]) -> object:
    """The answer in a call of these tensors, now."""
    if question.startswith(_VARIABLE):
        return os.environ.get(question.removeprefix(_VARIABLE))
    answers: dict[str, Callable[[], object]] = {
        GRAD_MODE: torch.is_grad_enabled,
        REQUIRES_GRAD: lambda: (torch.is_grad_enabled(), *(one.requires_grad for one in tensors)),
        DTYPE: lambda: tuple(str(one.dtype) for one in tensors),
        LAYOUT: lambda: tuple(map(order_of, tensors)),
    }
    return answers[question]() if question in answers else None


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's dims from the outermost to the innermost in memory."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


def laid(size: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor whose dims lie in this order in memory."""
    inner = torch.empty([size[dim] for dim in order], dtype=dtype, device=device)
    return inner.permute([list(order).index(dim) for dim in range(len(order))])
