"""Parameters of which every rank holds a part, in a script's own expressions.

Such a parameter is still the script's own object, of the class `CutParameter`. What torch computes with it would see
this rank's part alone, so only what comes out right all the same is let through:

    functions of each element, in place or not       p.mul_(0.9), p.clamp_(-c, c), (p - old).square(), p.clone()
    sums over all elements, in a loss                0.1 * p.square().sum(): every part gets its own gradient
    what does not look at elements                   shapes, types, `.grad`, hooks, `requires_grad_`, new zeros like it

Everything else (norms, products, means, indices, random numbers, `numel`) is a `RunError` with the parameter's name.
It depends on nothing but the call, so that all ranks refuse alike. What is computed from a part is a `CutValue`, for
which the same holds. So is the gradient that a hook on the parameter gets, of which it may read any number, as loggers
do, but not make another gradient by it.

The engine, states and optimizers look at the tensors themselves: within `plainly()`, none of this is in the way.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RunError
from shoal.moves import Layout

plainly = torch._C.DisableTorchFunctionSubclass
"""Within, cut parameters are ordinary tensors, at no cost."""

_FREE = {
    *("size", "dim", "ndimension", "stride", "storage_offset", "__len__", "get_device", "element_size"),
    *("data_ptr", "untyped_storage", "storage", "__repr__", "__hash__", "result_type"),
    *("_has_compatible_shallow_copy_type", "requires_grad_", "retain_grad", "backward", "grad"),
    *("register_post_accumulate_grad_hook", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}  # fmt: skip
"""They look at no element. What they return is no part of the parameter. So with all that are called `is_...`."""
_FORMS = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "permute", "transpose", "t", "contiguous"),
    *("unsqueeze", "squeeze", "detach", "detach_", "clone", "to", "type", "type_as", "cpu", "cuda"),
    *("float", "double", "half", "bfloat16"),
}
"""The same elements, in another form."""
_FILLS = {"copy_", "zero_", "fill_", "constant_", "share_memory_"}
_VIEWS = {"data", "T", "mT", "H", "mH"}
"""Attributes that are the same elements."""
_COUNTS = {"numel", "nelement", "nbytes"}
_SUMS = {"sum", "mean", "stack", "cat"}
_ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "neg"}
_TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
_DIVIDES = {"div", "div_", "__div__", "__truediv__", "__itruediv__", "__idiv__", "true_divide"}
_READS = {
    *("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__format__", "__str__"),
    *("isnan", "isinf", "isfinite", "lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__eq__", "__ne__", "detach", "is_nonzero"),
}
"""What a script does with the number of its loss."""


@dataclass(frozen=True)
class Cut:
    """Of what a tensor is a part."""

    name: str
    """Of the parameter."""
    layout: Layout
    summed: bool = False
    """Whether it is this rank's share of a sum over all elements."""
    readable: bool = False
    """Whether a script may read its number: something else was added to that sum, as a loss is, or it is for a log."""
    gradient: bool = False
    """Whether it is the gradient that a hook gets."""


class CutParameter(nn.Parameter):
    """A parameter of which this rank holds a part. Parameters become and cease to be such: see `mark` and `unmark`."""

    _cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what is right on a part."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Also a part."""
        with plainly():
            made = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        memo[id(self)] = mark(made, self._cut)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary parameter: whoever loads it has no ranks."""
        with plainly():
            return nn.Parameter(self.data, requires_grad=self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class CutValue(Tensor):
    """What was computed from a part of a parameter."""

    _cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what is right on a part."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Also a part."""
        made = memo[id(self)] = _value(_plain(self).clone(), self._cut)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary tensor."""
        return _plain(self).__reduce_ex__(protocol)


def mark(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Make a parameter, in place, one of which this rank holds a part. Those of a class of their own are left alone."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = CutParameter
        parameter._cut = cut  # type: ignore[attr-defined]
    return parameter


def unmark(parameter: Tensor) -> bool:
    """Make it an ordinary parameter; whether it was marked."""
    marked = type(parameter) is CutParameter
    if marked:
        parameter.__class__ = nn.Parameter
    return marked


def mark_again(parameter: Tensor) -> None:
    """After `unmark`, unless it was made whole since."""
    if "_cut" in parameter.__dict__:
        parameter.__class__ = CutParameter


def forget(parameter: Tensor) -> None:
    """Make it an ordinary parameter for good: it becomes whole."""
    unmark(parameter)
    parameter.__dict__.pop("_cut", None)


# What is called


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, args)
    if name in _FREE or (name.startswith(("is_", "_is_")) and name not in _READS):
        return _run(func, args, kwargs)
    tensors = _tensors([args, *kwargs.values()])
    parts = [tensor for tensor in tensors if isinstance(tensor, CutParameter | CutValue)]
    cut = parts[0]._cut
    if name == "register_hook" and not cut.summed:
        return _run(func, (args[0], _seeing_a_part(args[1], cut)), kwargs)
    learning = [tensor for tensor in tensors if not isinstance(tensor, CutParameter | CutValue) and _learns(tensor)]
    if any(part._cut.summed for part in parts):
        others = len(tensors) > len(parts)
        return _of_sums(func, parts, args, kwargs, others=others, learning=bool(learning))
    if cut.gradient and not _keeps_elements(name) and not _draws(name):
        return _marked(_run(func, args, kwargs), replace(cut, summed=True, readable=True))
    if name in _COUNTS:
        raise _counting(name, cut)
    if name == "sum" and len(args) == 1 and kwargs.keys() <= {"dtype"}:
        return _value(_run(func, args, kwargs), replace(cut, summed=True))
    if not _keeps_elements(name) or learning or any(part._cut.layout != cut.layout for part in parts):
        raise _unseen(name, cut)
    if name.startswith("_f"):  # lists of tensors, each for itself
        return _run(func, args, kwargs)
    result = _run(func, args, kwargs)
    if name not in _FORMS and any(part.size() != made.size() for part in parts for made in _tensors([result])):
        raise _unseen(name, cut)  # each element was put beside several others
    return _marked(result, cut)


def _attribute(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    owner, attribute = args[0], func.__self__.__name__
    if kind == "__set__":
        return _run(func, (owner, _plain(args[1])), {})
    if attribute in _COUNTS:
        raise _counting(attribute, owner._cut)
    result = _run(func, args, {})
    return _value(result, owner._cut) if attribute in _VIEWS and isinstance(owner, CutParameter | CutValue) else result


def _of_sums(
    func: Callable[..., Any],
    parts: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    others: bool,
    learning: bool,
) -> Any:
    """Functions of sums: the gradient is right where they are linear. `others`: whether other tensors are given too."""
    name, cut = func.__name__, parts[0]._cut
    readable = any(part._cut.readable for part in parts)
    if name in _READS and readable:
        return _run(func, args, kwargs)
    alone = len(parts) == 1 and not learning
    linear = (
        name in _ADDS | _SUMS | _FORMS | {"register_hook"}
        or (name in _TIMES and alone)
        or (name in _DIVIDES and alone and args[0] is parts[0])
    )
    if not linear or not all(part._cut.summed for part in parts):
        if cut.gradient:
            raise _of_gradient(cut)
        raise RunError(
            f"{name} of a sum over parameter {cut.name!r} would be that of this rank's share of the sum.",
            "Add such sums to the loss, multiplied by a number. Take other functions, and numbers to read, of whole "
            "tensors, which model.state_dict() gives; or lay the network by a plan that does not cut this parameter.",
        )
    readable = readable or (others and name in _ADDS | _SUMS)
    return _marked(_run(func, args, kwargs), replace(cut, summed=True, readable=readable))


def _learns(tensor: Tensor) -> bool:
    """Whether a gradient would flow to it, which would be that of this rank's part alone."""
    return torch.is_grad_enabled() and tensor.requires_grad


@cache
def _keeps_elements(name: str) -> bool:
    """Whether a function is one of each element alone."""
    if name in _FORMS or name in _FILLS:
        return True
    if name.startswith(("_foreach_", "_fused_")):
        return not any(name.startswith(f"_foreach_{whole}") for whole in ("norm", "max"))
    return any(torch.Tag.pointwise in tags for tags in _tags(name))


@cache
def _draws(name: str) -> bool:
    return any(torch.Tag.nondeterministic_seeded in tags for tags in _tags(name))


def _tags(name: str) -> Iterator[Iterable[torch.Tag]]:
    """What torch says of each operator of a name, as Python's operators have names: `__rsub__` is `rsub`."""
    word = name.strip("_") if name.startswith("__") else name
    operator = getattr(torch.ops.aten, {"rdiv": "div", "rpow": "pow"}.get(word, word), None)
    for overload in operator.overloads() if operator is not None else ():
        yield getattr(operator, overload).tags


# Parts and what they are of


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those among values, also in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _tensors(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _marked(result: Any, cut: Cut) -> Any:
    if isinstance(result, Tensor):
        return _value(result, cut)
    return type(result)(_marked(one, cut) for one in result) if isinstance(result, list | tuple) else result


def _value(tensor: Tensor, cut: Cut) -> Tensor:
    if isinstance(tensor, CutParameter | CutValue) and tensor._cut == cut:
        return tensor
    with plainly():
        made = tensor.as_subclass(CutValue)
    made._cut = cut
    return made


def _plain(value: Any) -> Any:
    with plainly():
        return value.as_subclass(Tensor) if isinstance(value, CutValue) else value


def _seeing_a_part(hook: Callable[[Tensor], Tensor | None], cut: Cut) -> Callable[[Tensor], Tensor | None]:
    """A hook on a parameter, which gets the gradient of this rank's part."""

    def call(grad: Tensor) -> Tensor | None:
        new = hook(_value(grad, replace(cut, gradient=True)))
        if isinstance(new, CutValue) and new._cut.summed:
            raise _of_gradient(cut)
        result: Tensor | None = _plain(new)
        return result

    return call


# Refusals


def _called(name: str) -> str:
    """What the script has called: a function of torch.nn.init where one is on the way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.nn.init", "torch.overrides"):
        if frame.f_globals["__name__"] == "torch.nn.init" and not frame.f_code.co_name.startswith("_"):
            name = f"torch.nn.init.{frame.f_code.co_name}"
        frame = frame.f_back
    return name


def _unseen(name: str, cut: Cut) -> RunError:
    called = _called(name)
    if _draws(name) or called.startswith("torch.nn.init."):
        return RunError(
            f"{called} would fill this rank's part of parameter {cut.name!r} as if it were the whole, and draw the "
            "same numbers for the parts of other ranks.",
            "Initialise before shoal.parallelize, or pass it a function that makes the network; later, make whole "
            "tensors that are the same on all ranks and call model.load_state_dict(state).",
        )
    return RunError(
        f"{called} would see this rank's part of parameter {cut.name!r} alone, not the whole.",
        "Functions of each element, and sums of these over all elements (p.square().sum()) in a loss, may be used. "
        "Take others of whole tensors, which model.state_dict() gives, or lay the network by a plan that does not cut "
        "this parameter; where this rank's part is meant, it is in model.shards().",
    )


def _of_gradient(cut: Cut) -> RunError:
    return RunError(
        f"a hook makes the gradient of parameter {cut.name!r} by more than functions of each element: it sees that of "
        "this rank's part alone.",
        "Change gradients element by element in hooks. Clip by torch.nn.utils.clip_grad_norm_, which knows all parts, "
        "or lay the network by a plan that does not cut this parameter.",
    )


def _counting(name: str, cut: Cut) -> RunError:
    if _called(name) != name:
        return _unseen(name, cut)
    return RunError(
        f"{name} of parameter {cut.name!r} would be that of this rank's part of it.",
        "Count before shoal.parallelize, or over model.shards(), which knows the whole shapes: "
        "sum(math.prod(shard.shape) for shard in model.shards().values()).",
    )
