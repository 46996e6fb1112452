"""What a network is called with and what it returns: structures of tensors, taken apart and put together again.

A call's arguments are bound to `forward`'s own signature, so that it does not matter which were given by name. What is
no tensor (a flag, a number, None) is part of the capture: another value is another network.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart."""

    tensors: tuple[Tensor, ...]
    """In the order in which torch.export lists them."""
    spec: pytree.TreeSpec
    plain: tuple[Any, ...]
    """Every leaf; None in the place of each tensor."""
    follows: tuple[bool, ...] | None = None
    """Which tensors have samples in dim 0; None: those that are as long there as the first."""
    records: bool = True
    """Whether gradients are recorded around it."""

    @property
    def form(self) -> tuple[object, ...]:
        """What must be equal for a capture to serve: the structure, and whatever is no tensor."""
        kinds = tuple("tensor" if place in self._places else type(leaf) for place, leaf in enumerate(self.plain))
        return (str(self.spec), kinds, tuple(map(repr, self.plain)))

    @property
    def _places(self) -> frozenset[int]:
        return frozenset(place for place, leaf in enumerate(self.plain) if leaf is _TENSOR)

    @property
    def samples(self) -> int:
        """The number of samples: dim 0 of the first tensor."""
        return self.tensors[0].shape[0] if self.tensors and self.tensors[0].ndim else 1

    @property
    def following(self) -> tuple[bool, ...]:
        """Which tensors have samples in dim 0."""
        if self.follows is not None:
            return self.follows
        return tuple(tensor.shape[:1] == (self.samples,) for tensor in self.tensors)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the same call with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.plain]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class _Mark:
    def __repr__(self) -> str:
        return "tensor"


_TENSOR: Any = _Mark()


def bind(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call of `model`, its arguments where `forward` has them. A `TypeError` for arguments that do not fit it."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return Call(tensors, spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))


@dataclass(frozen=True)
class Returned:
    """How the values that a graph returns make up the network's result."""

    spec: pytree.TreeSpec
    leaves: tuple[int | None, ...]
    """For every leaf which of the graph's outputs it is; None where it is no tensor."""
    plain: tuple[Any, ...]
    """For every leaf its value where it is no tensor."""

    def build(self, tensors: Sequence[Any]) -> Any:
        """The result as the network itself would return it; `tensors`: those, or what stands for each."""
        leaves = [
            value if index is None else tensors[index] for index, value in zip(self.leaves, self.plain, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def same_as(self, other: "Returned") -> bool:
        """Whether both are the same structure."""
        return (str(self.spec), self.leaves, self.plain) == (str(other.spec), other.leaves, other.plain)


def single() -> Returned:
    """A network that returns one tensor."""
    return Returned(pytree.tree_flatten(0)[1], (0,), (None,))
