"""Parameters and buffers of which every rank holds a part, in a script's own expressions.

Such a parameter is still the script's own object, of the class `CutParameter`. What torch computes with it would see
this rank's part alone, so only what comes out right all the same is let through:

    functions of each element, in place or not       p.mul_(0.9), p.clamp_(-c, c), (p - old).square(), p.clone()
    sums over all elements, in a loss                0.1 * p.square().sum(): every part gets its own gradient
    what does not look at elements                   shapes, types, `.grad`, hooks, `requires_grad_`
    new constants like it                            torch.zeros_like(p): also a part, as a momentum of one's own is

Everything else (norms, products, means, indices, random numbers, `numel`) is a `RunError` with the parameter's name.
It depends on nothing but the call, so that all ranks refuse alike. What is computed from a part is a `CutValue`, for
which the same holds. So are buffers, and gradients: `p.grad`, what `torch.autograd.grad` gives for a parameter, and
what a hook on it gets; what an optimizer remembers of it; and an ordinary tensor into which a part is written. Compared
with an ordinary tensor of its own shape (`p.grad - mine`, torch.equal, torch.testing) a part is one, too: whoever has
such a tensor knows that it is of a part.

The engine, states and optimizers look at the tensors themselves: within `plainly()`, none of this is in the way.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.errors import RunError
from shoal.moves import Layout

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

plainly = torch._C.DisableTorchFunctionSubclass
"""Within, cut parameters are ordinary tensors, at no cost."""

_FREE = {
    *("size", "dim", "ndimension", "stride", "storage_offset", "__len__", "get_device", "element_size"),
    *("data_ptr", "untyped_storage", "storage", "__repr__", "__hash__", "result_type"),
    *("_has_compatible_shallow_copy_type", "requires_grad_", "retain_grad", "backward", "grad"),
    *("register_post_accumulate_grad_hook", "new_tensor"),
}  # fmt: skip
"""They look at no element. What they return is no part of the parameter. So with all that are called `is_...`."""
_MAKES = {
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}
"""They make a new tensor: of a part's shape it is one of a part, too, into which nothing must be drawn."""
_FORMS = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "permute", "transpose", "t", "contiguous"),
    *("unsqueeze", "squeeze", "movedim", "detach", "detach_", "clone", "to", "type", "type_as", "cpu", "cuda"),
    *("float", "double", "half", "bfloat16", "bool", "int", "long"),
}
"""The same elements, in another form."""
_FILLS = {"copy_", "zero_", "fill_", "constant_", "share_memory_"}
_VIEWS = {"data", "T", "mT", "H", "mH"}
"""Attributes that are the same elements."""
_COUNTS = {"numel", "nelement", "nbytes"}
_COMPARES = {
    "sub",
    "subtract",
    "rsub",
    "__sub__",
    "__rsub__",
    "eq",
    "ne",
    "__eq__",
    "__ne__",
    "isclose",
    "allclose",
    "equal",
}
_REDUCES = {"max", "min", "equal"}
"""torch calls them pointwise because some of their forms are."""
_FUSED = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}
_SAME_AS = {
    "rdiv": "div", "rpow": "pow", "floordiv": "div", "rfloordiv": "div", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "absolute": "abs", "negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div",
    "truediv": "div", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "fix": "trunc",
}  # fmt: skip
"""Other words for operators."""
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


_GRADIENT = "the gradient of parameter"


@dataclass(frozen=True)
class Cut:
    """Of what a tensor is a part."""

    name: str
    """Of the parameter or buffer."""
    layout: Layout
    summed: bool = False
    """Whether it is this rank's share of a sum over all elements."""
    readable: bool = False
    """Whether a script may read its number: something else was added to that sum, as a loss is."""
    kind: str = "parameter"

    @property
    def whole(self) -> str:
        """What it is a part of, for messages."""
        return f"{self.kind} {self.name!r}"

    @property
    def is_gradient(self) -> bool:
        """Whether it is a part of a gradient."""
        return self.kind == _GRADIENT

    def of_gradient(self) -> "Cut":
        """That of the parameter's gradient."""
        return replace(self, kind=_GRADIENT)


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

    def __copy__(self) -> Tensor:
        """Also a part."""
        with plainly():
            return mark(nn.Parameter(self.data, requires_grad=self.requires_grad), self._cut)

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
        made = memo[id(self)] = mark(bare(self).clone(), self._cut)
        return made

    def __copy__(self) -> Tensor:
        """Also a part."""
        return mark(bare(self), self._cut)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary tensor."""
        return bare(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_MARKED: dict[type[Tensor], type[Tensor]] = {nn.Parameter: CutParameter, Tensor: CutValue}
_ORDINARY = {marked: ordinary for ordinary, marked in _MARKED.items()}


def mark(tensor: AnyTensor, cut: Cut) -> AnyTensor:
    """Make a tensor, in place, one of which this rank holds a part. Those of a class of their own are left alone."""
    if type(tensor) in _MARKED:
        tensor.__class__ = _MARKED[type(tensor)]  # type: ignore[assignment]
        tensor._cut = cut  # type: ignore[attr-defined]
    return tensor


def unmark(tensor: Tensor) -> bool:
    """Make it an ordinary one; whether it was marked."""
    marked = type(tensor) in _ORDINARY
    if marked:
        tensor.__class__ = _ORDINARY[type(tensor)]
    return marked


def mark_again(tensor: Tensor) -> None:
    """After `unmark`, unless it was made whole since."""
    if "_cut" in tensor.__dict__ and type(tensor) in _MARKED:
        tensor.__class__ = _MARKED[type(tensor)]


def forget(tensor: Tensor) -> None:
    """Make it an ordinary one for good: it becomes whole."""
    unmark(tensor)
    tensor.__dict__.pop("_cut", None)


def bare(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor without a gradient, also of a part: whoever asks knows what it is."""
    with plainly():
        return tensor.detach()


# What is called


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, args)
    if func is torch.autograd.grad:
        return _gradients(_run(func, args, kwargs), kwargs["inputs"] if "inputs" in kwargs else args[1])
    if name in _FREE or (name.startswith(("is_", "_is_")) and name not in _READS):
        return _run(func, args, kwargs)
    tensors = _tensors([args, *kwargs.values()])
    parts = [tensor for tensor in tensors if isinstance(tensor, CutParameter | CutValue)]
    others = [tensor for tensor in tensors if not isinstance(tensor, CutParameter | CutValue)]
    cut = parts[0]._cut
    if name in _MAKES:
        made = _run(func, args, kwargs)
        return mark(made, cut) if not cut.summed and made.size() == parts[0].size() else made
    if name == "__format__" and not cut.summed:  # as str() shows it
        return _run(func, args, kwargs)
    if name == "register_hook" and not cut.summed:
        return _run(func, (args[0], _seeing_a_part(args[1], cut)), kwargs)
    learning = any(_learns(tensor) for tensor in others)
    if any(part._cut.summed for part in parts):
        return _of_sums(func, parts, args, kwargs, learning=learning)
    if name.startswith("_foreach_") and _keeps_elements(name) and not learning and _beside_their_own(args):
        return _of_lists(_run(func, args, kwargs), args)
    of_its_shape = any(other.ndim and other.size() == parts[0].size() for other in others)
    if name in _COMPARES and of_its_shape and not any(map(_learns, tensors)):
        return bare(result) if isinstance(result := _run(func, args, kwargs), CutValue) else result
    if name in _COUNTS:
        raise _counting(name, cut)
    if name == "sum" and len(args) == 1 and kwargs.keys() <= {"dtype"}:
        return mark(_run(func, args, kwargs), replace(cut, summed=True))
    if name == "__setitem__" and _fills_where(*args) and parts[-1]._cut.layout == cut.layout:
        return _run(func, args, kwargs)
    if not _keeps_elements(name) or learning or any(part._cut.layout != cut.layout for part in parts):
        raise _unseen(name, cut)
    result = _run(func, args, kwargs)
    if name not in _FORMS and any(part.size() != made.size() for part in parts for made in _tensors([result])):
        raise _unseen(name, cut)  # each element was put beside several others
    return _marked(result, cut)


def _attribute(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    owner, attribute = args[0], func.__self__.__name__
    if kind == "__set__":
        if attribute == "data" and isinstance(owner, CutParameter | CutValue) and args[1].size() != owner.size():
            raise RunError(
                f"a tensor of shape {tuple(args[1].size())} is put in the place of this rank's part of "
                f"{owner._cut.whole}, which has {tuple(owner.size())}.",
                "Load whole tensors by model.load_state_dict(state), which cuts them.",
            )
        return _run(func, (owner, _plain(args[1])), {})
    if attribute in _COUNTS:
        raise _counting(attribute, owner._cut)
    result = _run(func, args, {})
    if not isinstance(owner, CutParameter | CutValue) or result is None:
        return result
    if attribute == "grad":  # the same object at every look, which torch's tools may know
        return mark(result, owner._cut.of_gradient())
    return mark(result, owner._cut) if attribute in _VIEWS else result


def _gradients(results: tuple[Tensor | None, ...], inputs: Any) -> tuple[Tensor | None, ...]:
    """Of `torch.autograd.grad`: parts where they are those of cut parameters."""
    asked = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(
        mark(result, owner._cut.of_gradient())
        if result is not None and isinstance(owner, CutParameter | CutValue)
        else result
        for result, owner in zip(results, asked, strict=True)
    )


def _beside_their_own(args: Iterable[Any]) -> bool:
    """Whether lists of tensors have, at each place, nothing but parts that are laid out alike."""
    for beside in zip(*(arg for arg in args if isinstance(arg, list | tuple)), strict=False):
        layouts = [part._cut.layout for part in beside if isinstance(part, CutParameter | CutValue)]
        if any(layout != layouts[0] for layout in layouts):
            return False
    return True


def _of_lists(results: Any, args: tuple[Any, ...]) -> Any:
    """What a function of lists gave, or wrote to: parts where it got one at that place."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    for made, *beside in zip(lists[0] if results is None else results, *lists, strict=False):
        part = next((tensor for tensor in beside if isinstance(tensor, CutParameter | CutValue)), None)
        if part is not None:
            mark(made, part._cut)
    return results


def _fills_where(_tensor: object, where: object, value: object) -> bool:
    """Whether an item that is set is a number in all places of a mask."""
    return isinstance(where, CutValue) and where.dtype == torch.bool and isinstance(value, int | float)


def _of_sums(
    func: Callable[..., Any],
    parts: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    learning: bool,
) -> Any:
    """Functions of sums: the gradient is right where they are linear. `learning`: whether one of other tensors learns.

    The number of a sum may be read once something that learns was added to it, as a loss does; not that of gradients.
    """
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
        way_out = (
            "Add such sums to the loss, multiplied by a number. Take other functions, and numbers to read, of whole "
            f"tensors, which model.state_dict() gives; or lay the network by a plan that does not cut this {cut.kind}."
        )
        raise RunError(
            f"{name} of a sum over {cut.whole} would be that of this rank's share of the sum.",
            _norms_of_gradients(cut) if cut.is_gradient else way_out,
        )
    readable = readable or (learning and name in _ADDS | _SUMS and not cut.is_gradient)
    return _marked(_run(func, args, kwargs), replace(cut, summed=True, readable=readable))


def _learns(tensor: Tensor) -> bool:
    """Whether a gradient would flow to it, which would be that of this rank's part alone."""
    return torch.is_grad_enabled() and tensor.requires_grad


@cache
def _keeps_elements(name: str) -> bool:
    """Whether a function is one of each element alone."""
    if name in _FORMS or name in _FILLS or name in _FUSED:
        return True
    if name.startswith("_foreach_"):
        return _keeps_elements(name.removeprefix("_foreach_"))
    return name not in _REDUCES and not _draws(name) and any(torch.Tag.pointwise in tags for tags in _tags(name))


@cache
def _draws(name: str) -> bool:
    return any(torch.Tag.nondeterministic_seeded in tags for tags in _tags(name))


def _tags(name: str) -> Iterator[Iterable[torch.Tag]]:
    """What torch says of each operator of a name, as Python's operators have names: `__rsub__` is `rsub`."""
    word = name.strip("_") if name.startswith("__") else name
    plain = word.removeprefix("i") if name.startswith("__") else word.removesuffix("_")
    for called in {word, plain}:
        operator = getattr(torch.ops.aten, _SAME_AS.get(called, called), None)
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
        return mark(result, cut)
    return type(result)(_marked(one, cut) for one in result) if isinstance(result, list | tuple) else result


def _plain(value: Any) -> Any:
    """An ordinary tensor with the same memory and the same place in autograd's graph."""
    with plainly():
        return value.as_subclass(Tensor) if isinstance(value, CutValue) else value


def _seeing_a_part(hook: Callable[[Tensor], Tensor | None], cut: Cut) -> Callable[[Tensor], Tensor | None]:
    """A hook on a parameter, which gets the gradient of this rank's part."""

    def call(grad: Tensor) -> Tensor | None:
        result: Tensor | None = _plain(hook(mark(grad, cut.of_gradient())))
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
            f"{called} would fill this rank's part of {cut.whole} as if it were the whole, and draw the "
            "same numbers for the parts of other ranks.",
            "Initialise before shoal.parallelize, or pass it a function that makes the network; later, make whole "
            "tensors that are the same on all ranks and call model.load_state_dict(state).",
        )
    problem = f"{called} would see this rank's part of {cut.whole} alone, not the whole."
    if cut.is_gradient:
        return RunError(problem, f"Functions of each element may be used. {_norms_of_gradients(cut)}")
    return RunError(
        problem,
        "Functions of each element, and sums of these over all elements (p.square().sum()) in a loss, may be used. "
        "Take others of whole tensors, which model.state_dict() gives, or lay the network by a plan that does not cut "
        f"this {cut.kind}; where this rank's part is meant, it is in model.shards().",
    )


def _norms_of_gradients(cut: Cut) -> str:
    return (
        "Take norms, after backward and on all ranks, by torch.nn.utils.get_total_norm([p.grad]), or clip by "
        "clip_grad_norm_: they know all parts. Where this rank's part is meant, it is "
        f"model.shards()[{cut.name!r}].grad. Or lay the network by a plan that does not cut this parameter."
    )


def _counting(name: str, cut: Cut) -> RunError:
    if _called(name) != name:
        return _unseen(name, cut)
    return RunError(
        f"{name} of {cut.whole} would be that of this rank's part of it.",
        "Count before shoal.parallelize, or over model.shards(), which knows the whole shapes: "
        "sum(math.prod(shard.shape) for shard in model.shards().values()).",
    )
