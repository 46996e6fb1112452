"""What a pass of the engine keeps: values and tiles in forward, gradients in backward, and the tape between them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from shoal.execution.route import Route
from shoal.execution.transfer import Arriving
from shoal.lowering.program import Program


class Saved:
    """A tensor that autograd saved, where it can be replaced by another with the same content.

    As with those that autograd keeps itself, a change in place before it is read is an error in torch's words.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """The tensor, or what replaces it."""
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)

    def unpack(self) -> Tensor:
        """The tensor as autograd reads it again; an error if it was changed in place since."""
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)}"
            )
        return self._tensor


def _version(tensor: Tensor) -> int:
    """How often torch has seen it changed; of a tensor made in inference mode it does not know."""
    return -1 if tensor.is_inference() else tensor._version


def saving(saved: list[Saved]) -> saved_tensors_hooks:
    """Within, `saved` gets everything that autograd saves."""

    def pack(tensor: Tensor) -> Saved:
        saved.append(Saved(tensor))
        return saved[-1]

    return saved_tensors_hooks(pack, Saved.unpack)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


@dataclass
class GraphInputs:
    """The inputs of a graph that want a gradient."""

    tiles: list[tuple[int, GradientEdge]] = field(default_factory=list)
    """With the Fetch that brought them; layers of a chain may read the same one."""
    states: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, tuple[Saved, GradientEdge]] = field(default_factory=dict)
    """By weight whose gradient ranks find from each other's factors: what its layer read, and where it gave it."""


@dataclass
class Record:
    """One layer, or a chain of them, as it was run on this rank."""

    inputs: GraphInputs
    output: GradientEdge
    zeros: Callable[[], Tensor]
    """Makes the gradient of an output that nobody used."""


@dataclass
class Live:
    """What forward holds at one point of the list."""

    values: dict[str, Tensor]
    tiles: dict[int, Tensor | Arriving | None] = field(default_factory=dict)
    saved: dict[int, list[Saved]] = field(default_factory=dict)
    """What autograd saved of a value, by the one Fetch that reads it."""
    chains: dict[str, GraphInputs] = field(default_factory=dict)
    """Values that still hang on the graph which the next layer goes on with, and that graph's inputs so far."""

    def tile(self, key: int) -> Tensor | None:
        """A tile, waited for."""
        tile = self.tiles[key]
        if isinstance(tile, Arriving):
            tile = self.tiles[key] = tile.wait()
        return tile

    def wait(self) -> None:
        """Until everything under way has arrived, here and where it was sent."""
        for key in self.tiles:
            self.tile(key)

    def copy(self) -> "Live":
        """The same tensors, for a second run from here."""
        self.wait()
        return Live(dict(self.values), dict(self.tiles))


@dataclass
class Back:
    """What backward holds at one point of the list."""

    wanted: frozenset[str]
    """States whose gradients are asked for."""
    flowing: frozenset[str]
    """Values that have a gradient."""
    values: dict[str, list[Tensor | Arriving]] = field(default_factory=dict)
    tiles: dict[int, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By weight: what its layer read, and the gradient of what it gave."""
    leaving: list[Arriving] = field(default_factory=list)
    """Messages of this rank to others."""

    def value(self, name: str) -> Tensor | None:
        """The gradient of a value, all contributions added up in the program's order; taken out."""
        total: Tensor | None = None
        for piece in self.values.pop(name, ()):
            grad = piece.wait() if isinstance(piece, Arriving) else piece
            assert grad is not None
            total = grad if total is None else total + grad
        return total


@dataclass
class Tape:
    """What backward needs of one forward pass."""

    route: Route
    types: Mapping[str, torch.dtype]
    step: str
    states: Mapping[str, Tensor]
    """The parameters and buffers that the pass read."""
    precision: Callable[[], AbstractContextManager[object]] = nullcontext
    """The autocast of the forward pass."""
    records: dict[int, Record] = field(default_factory=dict)
    """By the index of the instruction."""
    kept: list[Live] = field(default_factory=list)
    """What lived at the start of every segment that was not recorded."""
    used: bool = False
    samples: Sequence[int] | None = None
    """Which sample of the batch each row is, where the program runs a part of one."""
    lapped: "RanInLaps | None" = None
    """Of a pass with its linear layers in laps: what these left. This tape itself then has no records."""

    @property
    def program(self) -> Program:
        """What was run."""
        return self.route.program

    @property
    def recorded(self) -> "Tape":
        """The tape that backward walks."""
        return self if self.lapped is None else self.lapped.front


@dataclass
class RanInLaps:
    """What is left of a pass whose linear layers ran in laps, forward and backward, for a loss that counts once."""

    front: Tape
    """Of the network before them."""
    features: Mapping[str, Tensor]
    """The gradient of this rank's rows of what the front gave, by value."""
    parameters: dict[str, Tensor]
    """Of their parameters that learn, until backward takes them; none where these stepped after every lap."""
