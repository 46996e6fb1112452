"""A custom `torch.autograd.Function` in a network becomes one operator of our own, with its own backward.

torch.export would follow its forward and forget its backward. While it traces, every call is instead

    run on shapes alone   to know its results, and that it does nothing a graph could not say
    written down          as `shoal.autograd_function`, with the class and its other arguments kept beside it

Refuses, by the function's name and the line of its call: arguments changed in place, tensors read that are not among
its arguments, random numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.capturing.place import line_now, line_of_error
from shoal.errors import CaptureError
from shoal.operators.user_function import ALL, NAMESPACE, NUMBER, TENSOR, WORD, UserFunction, widest

_VIEW = f"{WORD}_view"
"""The same for a function whose result may be its argument's own memory."""
_SCHEMA = "(str call, Tensor[] tensors, int[] numbers, int picked) -> Tensor"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Result:
    """One result of a function, as torch.export shall see it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    """Whether it has a gradient."""


@dataclass(frozen=True)
class _Traced:
    function: UserFunction
    results: tuple[_Result | None, ...]
    """None for a result that is no tensor."""

    def shape(self, picked: int) -> _Result:
        result = self.results[picked] if picked != ALL else None
        if result is not None:
            return result
        learning = [output for output in self.results if output is not None and output.learns]
        dtype = widest([torch.empty(0, dtype=output.dtype, device="meta") for output in learning])
        return _Result((sum(prod(output.size) for output in learning),), (1,), dtype, learns=True)


_traced: dict[str, _Traced] = {}
"""The calls of the trace that is under way, or was last: torch.export runs one at a time."""


def _shaped(call: str, tensors: list[Tensor], _numbers: list[int], picked: int) -> Tensor:
    result = _traced[call].shape(picked)
    return torch.empty_strided(result.size, result.stride, dtype=result.dtype, device=tensors[0].device)


for _word in (WORD, _VIEW):
    _library.define(_word + _SCHEMA)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{_word}", _shaped, lib=_library)


def function_of(call: str) -> UserFunction:
    """The call that a node of the last trace names."""
    return _traced[call].function


def is_function(op: str) -> bool:
    """Whether an operator is one of ours."""
    return op.startswith((f"{NAMESPACE}.{WORD}.", f"{NAMESPACE}.{_VIEW}."))


def may_be_its_input(op: str) -> bool:
    """Whether an operator is one of ours and may return an argument's own memory."""
    return op.startswith(f"{NAMESPACE}.{_VIEW}.")


class Tracing:
    """Takes the place of `Function.apply` for the length of one trace."""

    def __init__(self) -> None:
        self._running: str | None = None
        """The function that is being run on shapes."""
        self._kept_none = False
        _traced.clear()

    def apply(self, cls: type[torch.autograd.Function], plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What `cls.apply(*arguments)` gives; `plain` is torch's own."""
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if self._running is not None or not tensors:
            return plain(*arguments)
        name = cls.__qualname__.rpartition("<locals>.")[2]
        self._refuse_inner_tensors(name, arguments)
        self._running, self._kept_none = name, False
        try:
            results, is_single, views = self._shapes(name, plain, arguments)
        finally:
            self._running = None
        learning = tuple(place for place, result in enumerate(results) if isinstance(result, _Result) and result.learns)
        if self._kept_none and len(learning) > 1:
            raise self._error(
                name, "asks for no zeros in the place of missing gradients", "Leave set_materialize_grads"
            )
        kept = tuple(
            TENSOR if isinstance(value, Tensor) else NUMBER if type(value) is int else value for value in arguments
        )
        call = f"{name}#{len(_traced)}"
        shapes = tuple(result if isinstance(result, _Result) else None for result in results)
        _traced[call] = _Traced(UserFunction(cls, kept, learning), shapes)
        numbers = [value for value in arguments if type(value) is int]
        operator = getattr(getattr(torch.ops, NAMESPACE), _VIEW if views else WORD)

        def run(picked: int) -> Tensor:
            output: Tensor = operator(call, tensors, numbers, picked)
            return output

        returned = list(results)
        for place, shape in enumerate(shapes):
            if shape is not None and not (shape.learns and len(learning) > 1):
                returned[place] = run(place) if shape.learns else run(place).detach()
        if len(learning) > 1:
            flat, start = run(ALL), 0
            for place in learning:
                result = results[place]
                rows = prod(result.size)
                piece = flat[start : start + rows].view(result.size)
                returned[place] = piece if piece.dtype == result.dtype else piece.to(result.dtype)
                start += rows
        return returned[0] if is_single else tuple(returned)

    def _shapes(self, name: str, plain: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[Any], bool, bool]:
        """(results, whether it is one and no tuple, whether some result is an argument's memory), run on shapes."""
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.enable_grad():
            stand_ins = [_stand_in(value) for value in arguments]
            given = [value for value in stand_ins if isinstance(value, Tensor)]
            versions = [tensor._version for tensor in given]
            try:
                with _Reads(name, given):
                    returned = plain(*stand_ins)
            except CaptureError:
                raise
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise CaptureError(
                    f"the autograd function {name} cannot be run on shapes alone{line_of_error(error)}: "
                    f"{(lines or [type(error).__name__])[0].rstrip('.')}.",
                    "Write its forward with torch operators whose results have a shape that does not depend on values.",
                ) from error
            if [tensor._version for tensor in given] != versions:
                raise self._error(name, "changes its argument in place", "Write the new values to a new tensor")
            results = returned if isinstance(returned, tuple) else (returned,)
            memory = {tensor.untyped_storage()._cdata for tensor in given}
            views = any(isinstance(result, Tensor) and result.untyped_storage()._cdata in memory for result in results)
            return [_result(value) for value in results], not isinstance(returned, tuple), views

    def _refuse_inner_tensors(self, name: str, arguments: tuple[Any, ...]) -> None:
        inner = [leaf for value in arguments if not isinstance(value, Tensor) for leaf in pytree.tree_leaves(value)]
        if any(isinstance(leaf, Tensor) for leaf in inner):
            raise self._error(
                name, "is given tensors inside of a list or dict, which have no gradient", "Pass each by itself"
            )

    def mark_dirty(self) -> None:
        """A function says that it changed its argument."""
        if self._running is not None:
            raise self._error(self._running, "changes its argument in place", "Write the new values to a new tensor")

    def set_materialize_grads(self, value: bool) -> None:
        """A function says whether it wants zeros for gradients that are missing."""
        self._kept_none = not value

    def batched(self, cls: type[torch.autograd.Function]) -> None:
        """A function is called under torch.vmap or another transform of torch.func."""
        raise self._error(cls.__qualname__, "is called under torch.func", "Call it on the whole batch")

    @staticmethod
    def _error(name: str, problem: str, remedy: str) -> CaptureError:
        return CaptureError(
            f"the autograd function {name} {problem}{line_now()}, which cannot be captured.",
            f"{remedy}, or leave that part of the network outside of shoal.parallelize.",
        )


def _stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _result(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Result(tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.requires_grad)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that a function's forward runs."""

    def __init__(self, name: str, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.kept: list[Tensor] = []
        """Results, so that their memory keeps its number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Tracing._error(
                self.name, f"draws random numbers by {func}, which ranks would draw differently", "Pass them in"
            )
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.known:
                raise Tracing._error(
                    self.name, "reads a tensor that is not among its arguments", "Pass it as an argument"
                )
        result = func(*args, **kwargs)
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.known.add(value.untyped_storage()._cdata)
                self.kept.append(value)
        return result
