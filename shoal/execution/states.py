"""The parameters and buffers of one rank: which shard of each it holds, and how they come together again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError
from shoal.execution.transfer import begin_transfer
from shoal.lowering.placement import sharers
from shoal.moves import Layout, add_moves
from shoal.operators.base import Need
from shoal.partition import slices, whole
from shoal.transport import Transport


@dataclass(frozen=True)
class _Place:
    """Where a tensor lives in a tree of modules."""

    owner: nn.Module
    leaf: str

    def tensor(self) -> Tensor:
        # not by getattr: the network's names may be those of our own attributes, such as `plan`
        tensors = self.owner._parameters if self.leaf in self.owner._parameters else self.owner._buffers
        return cast(Tensor, tensors[self.leaf])


class ShardedStates:
    """Shards under the original module's names, planted in a tree of plain modules below `root`.

    A rank without a part of some tensor has an empty one under its name, so that all ranks list the same names.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        full: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        rank: int,
    ) -> None:
        self.layouts = layouts
        self.shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self.keys = _keys_of(model)
        """For every key of the original state dict the name under which the graph knows the tensor."""
        self._places: dict[str, _Place] = {}
        for name, tensor in full.items():
            self._plant(root, name, tensor, rank, persistent=name in self.keys)

    def _plant(self, root: nn.Module, name: str, tensor: Tensor, rank: int, *, persistent: bool) -> None:
        shard = self.shard_of(name, tensor.detach(), rank)
        *path, leaf = name.split(".")
        owner = root
        for word in path:
            if word not in owner._modules:
                owner._modules[word] = nn.Module()
            owner = cast(nn.Module, owner._modules[word])
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = nn.Parameter(shard, requires_grad=tensor.requires_grad)
        else:
            owner._buffers[leaf] = shard
            owner._non_persistent_buffers_set.update([] if persistent else [leaf])
        self._places[name] = _Place(owner, leaf)

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].tensor()

    def tensors(self) -> dict[str, Tensor]:
        """Every shard as it is now; the module may have been moved or converted since."""
        return {name: place.tensor() for name, place in self._places.items()}

    def ranks_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as `rank`."""
        box = self.layouts[name][rank]
        return (rank,) if box is None else sharers(self.layouts[name])[box]

    def any_trainable(self) -> bool:
        """Whether anything here wants a gradient."""
        return any(place.tensor().requires_grad for place in self._places.values())

    def names(self) -> list[str]:
        """Every tensor's name in the graph."""
        return list(self._places)

    def gather(self, transport: Transport, *, rank0_only: bool) -> dict[str, Tensor]:
        """All tensors whole, under the original keys; empty on other ranks if `rank0_only`. A collective."""
        kept = set(self.keys.values())
        full = {
            name: self.gather_one(name, transport, self[name].detach(), rank0_only=rank0_only)
            for name in self.shapes
            if name in kept
        }
        return (
            {} if rank0_only and transport.rank else {key: cast(Tensor, full[name]) for key, name in self.keys.items()}
        )

    def gather_one(self, name: str, transport: Transport, shard: Tensor | None, *, rank0_only: bool) -> Tensor | None:
        """A tensor whole, from shards laid out as the state `name` is. A rank that holds none of it may pass None."""
        owners = {ranks[0]: box for box, ranks in sharers(self.layouts[name]).items()}
        owned = tuple(owners.get(rank) for rank in range(transport.world))
        mine, everything = owned[transport.rank], Need(whole(self.shapes[name]))
        readers = tuple(everything if rank == 0 or not rank0_only else None for rank in range(transport.world))
        moves = add_moves(owned, tuple(None if need is None else need.box for need in readers))
        like = self[name].detach() if shard is None else shard
        transport.label = "states"
        full = begin_transfer(
            shard, mine, readers[transport.rank], moves, transport, tag=0, like=like, add=False
        ).wait()
        return None if full is None else full.clone()

    def shard_of(self, name: str, full: Tensor, rank: int) -> Tensor:
        """This rank's part of a tensor that is laid out as the state `name` is; empty where it has none."""
        box = self.layouts[name][rank]
        if box is None:
            return full.new_empty([0] * max(full.ndim, 1))
        return full[slices(box, whole(self.shapes[name]))].clone(memory_format=torch.contiguous_format)

    def load(self, full: Mapping[str, Tensor], rank: int) -> None:
        """Take this rank's shards out of whole tensors; a state of another module is a `CheckpointError`."""
        for key, problem in _differences(full, {key: self.shapes[name] for key, name in self.keys.items()}):
            raise CheckpointError(
                f"the state does not belong to this network: {key!r} {problem}.",
                "Load a state of the same module, as full_state_dict or module.state_dict() gives it.",
            )
        with torch.no_grad():
            for key, name in self.keys.items():
                box = self.layouts[name][rank]
                if box is not None:
                    self[name].copy_(full[key][slices(box, whole(self.shapes[name]))])


def _differences(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    for key, shape in wanted.items():
        if key not in given:
            yield key, "is missing"
        elif tuple(given[key].shape) != shape:
            yield key, f"has the shape {tuple(given[key].shape)}, not {shape}"
    for key in given.keys() - wanted.keys():
        yield key, "is not one of its tensors"


def _keys_of(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)
    every = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {key: first[id(every[key])] for key in model.state_dict()}
