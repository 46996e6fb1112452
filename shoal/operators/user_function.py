"""A user's own `torch.autograd.Function` as an operator: one call of it, with its own backward.

Nothing is known of what it computes, so it runs whole on every rank. Its backward need not be linear in the gradient
(guided backpropagation, clipped gradients), so it must see the whole gradient and not one rank's part of a sum:
`with_whole_gradient` adds the parts up before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

NAMESPACE, WORD = "shoal", "autograd_function"
ALL = -1
"""For `picked`: all outputs that have a gradient, one after the other in one flat tensor, so that one backward sees
the gradients of all."""


class _Place:
    """Where an argument of the layer stands among a function's arguments."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return self.kind


TENSOR, NUMBER = _Place("tensor"), _Place("number")


@dataclass(frozen=True, eq=False)
class UserFunction:
    """One call of a function: the class, and its arguments with places for tensors and whole numbers.

    Whole numbers are arguments of the layer, because they may follow the batch.
    """

    cls: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    outputs: tuple[int, ...]
    """Which of its results have a gradient."""

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[int], picked: int) -> Tensor:
        """One result of the call; or, for `ALL`, all that have a gradient."""
        given = {TENSOR: iter(tensors), NUMBER: iter(numbers)}
        arguments = [next(given[value]) if isinstance(value, _Place) else value for value in self.arguments]
        returned = self.cls.apply(*arguments)  # type: ignore[no-untyped-call]
        results: tuple[Any, ...] = returned if isinstance(returned, tuple) else (returned,)
        if picked == ALL:
            return packed([results[index] for index in self.outputs])
        result: Tensor = results[picked]
        return result

    @property
    def name(self) -> str:
        """The class as it is written."""
        return self.cls.__qualname__.rpartition("<locals>.")[2]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, UserFunction)
            and self.cls is other.cls
            and self.outputs == other.outputs
            and len(self.arguments) == len(other.arguments)
            and all(map(_same, self.arguments, other.arguments))
        )

    def __hash__(self) -> int:
        return hash((self.cls, len(self.arguments)))

    def __reduce__(self) -> tuple[object, ...]:  # between processes it is only looked at
        return str, (repr(self),)

    def __repr__(self) -> str:  # the same in every process, for fingerprints
        return f"{self.name}({', '.join(map(_told, self.arguments))})"


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other, flat, in the widest of their types."""
    return torch.cat([tensor.reshape(-1).to(widest(tensors)) for tensor in tensors])


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type that holds every value of all of them."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class FunctionOperator:
    """Stands where a torch operator stands: called with a layer's arguments by name."""

    tags: frozenset[torch.Tag] = frozenset()

    def __call__(self, call: UserFunction, tensors: Sequence[Tensor], numbers: Sequence[int], picked: int) -> Tensor:
        """Run the call."""
        return call(tensors, numbers, picked)


FUNCTION = FunctionOperator()


def _same(a: object, b: object) -> bool:
    """Whether two arguments do the same; for functions that are made anew in every pass, by their code."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        held = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (a, b)]
        return a.__code__ is b.__code__ and len(held[0]) == len(held[1]) and all(map(_same, *held))
    if type(a) is type(b) and type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        mine, theirs = vars(a), vars(b)
        return a is b or (mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine))
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:  # what it is compared with is the user's own
        return False


def _told(value: object) -> str:
    plain = isinstance(value, bool | int | float | complex | str | bytes | None | _Place | torch.dtype | torch.device)
    if plain:
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_told, value))}]"
    return getattr(value, "__qualname__", type(value).__qualname__)


# The whole gradient


class Summing(Protocol):
    """The ranks that all run the function."""

    def sum_now(self, tensor: Tensor, over: str) -> None:
        """Sum in place over them."""
        ...

    def count(self, over: str) -> int:
        """How many they are."""
        ...


def with_whole_gradient(
    run: Callable[[Mapping[str, Tensor]], Tensor], tensors: Mapping[str, Tensor], peers: Summing
) -> Tensor:
    """`run(tensors)`, whose backward gets the gradient of all ranks' losses; each then answers for its share of it.

    Every rank holds a copy of the tensors, and gradients of copies are added up later: so each returns 1/ranks.
    """
    ranks = peers.count("")
    if ranks == 1:
        return run(tensors)
    shared = {name: _Share.apply(tensor, ranks) for name, tensor in tensors.items()}  # type: ignore[no-untyped-call]
    whole: Tensor = _Join.apply(run(shared), peers)  # type: ignore[no-untyped-call]
    return whole


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Summing) -> Tensor:
        ctx.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.peers.sum_now(total, "")
        return total, None
