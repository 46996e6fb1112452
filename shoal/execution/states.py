"""The parameters and buffers of one rank: which shard of each it holds, and how they come together again.

State dicts of the modules are whole all the same: hooks gather on saving, which is a collective, and cut on loading.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.building import Draft
from shoal.errors import CheckpointError
from shoal.execution.cut_parameters import Cut, bare, forget, mark, plainly
from shoal.execution.given import Given
from shoal.execution.transfer import begin_transfer
from shoal.lowering.placement import sharers
from shoal.moves import Layout, Move, add_moves
from shoal.operators.base import Need
from shoal.partition import Box, slices, whole
from shoal.transport import Transport

PURPOSE = "states"
_MESSAGE = 64 << 20
"""Bytes of weights that travel at a time."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter or buffer."""

    tensor: Tensor
    box: Box | None
    """Which part of the whole it is; None for a rank that holds nothing of it."""
    shape: tuple[int, ...]
    """Of the whole."""
    grad: Tensor | None = None
    """This rank's part of its gradient, where it has one."""


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
    """This rank's shards, in the place of the whole tensors of a tree of modules.

    `in_place`: parameters stay the same objects, as an optimizer may know them; else they are copies. `whole_shapes`:
    of every tensor, where the tree holds shards already. `uses`: what layers read, where that is more. A rank
    without a part of some tensor has an empty one under its name, so that all ranks list the same names.
    """

    def __init__(
        self,
        root: nn.Module,
        layouts: Mapping[str, Layout],
        rank: int,
        *,
        in_place: bool,
        whole_shapes: Mapping[str, tuple[int, ...]] | None = None,
        uses: Mapping[str, Layout] | None = None,
    ) -> None:
        self._rank, self._filled = rank, whole_shapes is not None
        self._places: dict[str, _Place] = {}
        self.given = Given()
        everything = _tensors(root)
        first: dict[int, str] = {}
        for name, (_, _, tensor) in everything.items():
            first.setdefault(id(tensor), name)
        self.names_of = {name: first[id(tensor)] for name, (_, _, tensor) in everything.items()}
        """For every name of a tensor its first name, which is its name in the graph."""
        self.keys = {key: self.names_of[key] for key in root.state_dict() if key in self.names_of}
        """For every tensor of the original state dict the name under which the graph knows it."""
        held = {name: tuple(everything[name][2].shape) for name in first.values()}
        self.shapes = held if whole_shapes is None else {name: whole_shapes[name] for name in held}
        self.layouts: dict[str, Layout] = {name: layouts[name] for name in self.shapes}
        """Which box of every tensor each rank keeps."""
        self.uses: dict[str, Layout] = {name: (uses or layouts)[name] for name in self.shapes}
        """Which box of it each rank's layers read."""
        made: dict[str, Tensor] = {}
        for name, (owner, leaf, tensor) in everything.items():
            own = self.names_of[name]
            if own not in made:
                made[own] = self._taken_over(own, tensor) if in_place else self._copied(own, tensor)
                self._places[own] = _Place(owner, leaf)
            kept = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
            kept[leaf] = cast(Any, made[own])

    def _taken_over(self, name: str, tensor: Tensor) -> Tensor:
        if self._filled or not self.is_cut(name):
            return tensor
        shard = self.shard_of(name, tensor.detach(), self._rank)
        if not isinstance(tensor, nn.Parameter):
            return shard
        grad, tensor.grad = tensor.grad, None
        tensor.data = shard
        if grad is not None:
            tensor.grad = self.shard_of(name, grad, self._rank)
        return tensor

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        shard = self.shard_of(name, tensor.detach(), self._rank)
        return nn.Parameter(shard, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shard

    def mark_cut(self) -> None:
        """Let every parameter and buffer that is cut refuse what would see this rank's part of it alone."""
        for name, tensor in self.tensors().items():
            if self.is_cut(name):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                mark(tensor, Cut(name, self.layouts[name], kind=kind))

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].tensor()

    def bare(self, name: str) -> Tensor:
        """A shard's memory, as an ordinary tensor without a gradient."""
        return bare(self[name])

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def is_cut(self, name: str) -> bool:
        """Whether some rank holds less than all of it."""
        return any(box != whole(self.shapes[name]) for box in self.layouts[name])

    def cut_leaves(self) -> dict[str, dict[str, str]]:
        """The modules, by path, that hold cut tensors: for each the tensors' own names and those in the graph."""
        by_path: dict[str, dict[str, str]] = {}
        for name, own in self.names_of.items():
            if self.is_cut(own):
                path, _, leaf = name.rpartition(".")
                by_path.setdefault(path, {})[leaf] = own
        return by_path

    def shards(self) -> dict[str, Shard]:
        """Every tensor of this rank, with its place in the whole one."""
        with plainly():
            return {
                name: Shard(
                    bare(tensor),
                    self.layouts[name][self._rank],
                    self.shapes[name],
                    None if tensor.grad is None else bare(tensor.grad),
                )
                for name, tensor in self.tensors().items()
            }

    def tensors(self) -> dict[str, Tensor]:
        """Every shard as it is now; the module may have been moved or converted since."""
        return {name: place.tensor() for name, place in self._places.items()}

    def buffers(self) -> list[tuple[str, Mapping[str, Tensor | None], str]]:
        """Where every buffer is kept: (its name, its module's buffers, its name there)."""
        places = self._places.items()
        return [
            (name, place.owner._buffers, place.leaf)
            for name, place in places
            if place.leaf not in place.owner._parameters
        ]

    def learning(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of these states that learn."""
        states = {name: self[name] for name in names if name in self}
        with plainly():
            return {name: state for name, state in states.items() if state.requires_grad}

    def frozen(self) -> list[str]:
        """Parameters that do not learn."""
        with plainly():
            states = self.tensors().items()
            return [name for name, state in states if isinstance(state, nn.Parameter) and not state.requires_grad]

    def ranks_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as `rank`."""
        box = self.layouts[name][rank]
        return (rank,) if box is None else sharers(self.layouts[name])[box]

    def names(self) -> list[str]:
        """Every tensor's name in the graph."""
        return list(self._places)

    def gather(self, transport: Transport, *, rank0_only: bool) -> dict[str, Tensor]:
        """All tensors whole, under the original keys; empty on other ranks if `rank0_only`. A collective."""
        kept = set(self.keys.values())
        full = {
            name: self.gather_one(name, transport, self.bare(name), rank0_only=rank0_only)
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
        transport.label = "states"
        with plainly():
            like = self.bare(name) if shard is None else shard
            full = begin_transfer(
                shard, mine, readers[transport.rank], moves, transport, tag=0, like=like, add=False
            ).wait()
            return None if full is None else full.clone()

    def make_whole(self, transport: Transport) -> None:
        """Put whole tensors, and whole gradients where a rank has one, in the place of the shards. A collective."""
        for own in self.cut_leaves().values():
            for name in own.values():
                tensor = self[name]
                forget(tensor)
                grad, tensor.grad = tensor.grad, None
                tensor.data = self._everywhere(name, transport, tensor.detach())
                if any(transport.gather_objects(grad is not None)):
                    missing = torch.zeros_like(self[name]) if grad is None else grad
                    tensor.grad = self._everywhere(name, transport, missing)

    def _everywhere(self, name: str, transport: Transport, shard: Tensor) -> Tensor:
        full = self.gather_one(name, transport, shard, rank0_only=False)
        assert full is not None
        return full

    def shard_of(self, name: str, full: Tensor, rank: int) -> Tensor:
        """This rank's part of a tensor that is laid out as the state `name` is; empty where it has none."""
        return shard_of(full, self.layouts[name][rank])

    def load(self, full: Mapping[str, Tensor], rank: int) -> None:
        """Take this rank's shards out of whole tensors; a state of another module is a `CheckpointError`."""
        for key, problem in _differences(full, {key: self.shapes[name] for key, name in self.keys.items()}):
            raise CheckpointError(
                f"the state does not belong to this network: {key!r} {problem}.",
                "Load a state of the same module, as full_state_dict or module.state_dict() gives it.",
            )
        self.load_parts(lambda key, box: full[key][slices(box, whole(full[key].shape))], rank)

    def load_parts(self, read: Callable[[str, Box], Tensor], rank: int) -> None:
        """Take this rank's shards as `read` gives them for a key of the state dict and a box of its tensor."""
        with torch.no_grad(), plainly():
            for key, name in self.keys.items():
                box = self.layouts[name][rank]
                if box is None:
                    torch.autograd.graph.increment_version(self[name])  # changed, as on the ranks that have some of it
                else:
                    self[name].copy_(read(key, box))


def shard_of(full: Tensor, box: Box | None) -> Tensor:
    """A box of a whole tensor, in memory of its own; empty where there is none."""
    if box is None:
        return full.new_empty([0] * max(full.ndim, 1))
    return full[slices(box, whole(full.shape))].clone(memory_format=torch.contiguous_format)


def shard_tree(
    root: nn.Module,
    homes: Mapping[str, Layout],
    transport: Transport,
    *,
    uses: Mapping[str, Layout],
    in_place: bool,
    draft: Draft | None,
) -> ShardedStates:
    """Make the tensors of a tree of modules this rank's shards, laid out as `homes` says. A collective if `in_place`.

    `draft`: of a network that is not built yet; only this rank's boxes of it are then built. `in_place`: all ranks take
    rank 0's weights first, and parameters stay the same objects.
    """
    if draft is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
        cut = [name for name, shape in shapes.items() if any(box != whole(shape) for box in homes[name])]
        draft.fill({name: homes[name][transport.rank] for name in cut})
        return ShardedStates(root, homes, transport.rank, in_place=True, whole_shapes=shapes, uses=uses)
    if in_place:
        take_rank0s(root, homes, transport)
    return ShardedStates(root, homes, transport.rank, in_place=in_place, uses=uses)


def keep_state_dicts_whole(root: nn.Module, states: ShardedStates, transport: Transport) -> list[RemovableHandle]:
    """Let modules give whole tensors to state dicts, and take whole ones from them; handles to end that."""
    return [
        handle
        for path, leaves in states.cut_leaves().items()
        for handle in _whole_in_state_dict(root.get_submodule(path), leaves, states, transport)
    ]


def _whole_in_state_dict(
    owner: nn.Module, leaves: Mapping[str, str], states: ShardedStates, transport: Transport
) -> list[RemovableHandle]:
    """Of one module; `leaves`: the names of its cut tensors there and in the graph."""

    def give(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
        transport.header("state_dict")
        for leaf, name in leaves.items():
            if prefix + leaf in state_dict:
                full = states._everywhere(name, transport, states.bare(name))
                states.given.note(prefix + leaf, full)
                state_dict[prefix + leaf] = full

    def take(
        _module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        _metadata: object,
        _strict: object,
        _missing: object,
        _unexpected: object,
        errors: list[str],
    ) -> None:
        for leaf, name in leaves.items():
            full = state_dict.get(prefix + leaf)
            if not isinstance(full, Tensor):
                continue
            if tuple(full.shape) != states.shapes[name]:
                errors.append(
                    f"size mismatch for {prefix + leaf}: the state has {tuple(full.shape)}, the network, whole, "
                    f"{states.shapes[name]}."
                )
                del state_dict[prefix + leaf]
            else:
                states.given.taken(full)
                state_dict[prefix + leaf] = states.shard_of(name, full.detach(), transport.rank)

    return [
        owner._register_state_dict_hook(give),  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(take),  # type: ignore[no-untyped-call]
    ]


def take_rank0s(root: nn.Module, layouts: Mapping[str, Layout], transport: Transport) -> None:
    """Copy rank 0's weights into the whole tensors of `root` on every rank; where it will be cut, the rank's box alone.

    A collective. What every rank holds whole is sent to all at once, 64 MiB at a time.
    """
    if transport.world == 1:
        return
    everyone = tuple(range(transport.world))
    transport.make_groups([(PURPOSE, everyone)])
    transport.label = "states"
    common: dict[torch.dtype, list[Tensor]] = {}
    seen: set[int] = set()
    for name, (_, _, tensor) in _tensors(root).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        full, layout = tensor.detach(), layouts[name]
        everything = whole(full.shape)
        if all(box == everything for box in layout):
            common.setdefault(full.dtype, []).append(full)
            continue
        held = (everything, *(None for _ in everyone[1:]))
        moves = [Move(0, rank, box) for rank, box in enumerate(layout) if rank and box is not None]
        mine = layout[transport.rank] if transport.rank else None
        wanted = None if mine is None else Need(mine)
        new = begin_transfer(full, held[transport.rank], wanted, moves, transport, tag=0, like=full, add=False).wait()
        if new is not None and mine is not None:
            full[slices(mine, everything)].copy_(new)
    for tensors in common.values():
        for group in _by_size(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            transport.tell(flat, everyone, PURPOSE)
            if transport.rank:
                parts = torch.split(flat, [tensor.numel() for tensor in group])
                for tensor, part in zip(group, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))


def _by_size(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(member.nbytes for member in group) + tensor.nbytes > _MESSAGE:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _tensors(root: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """(owner, its name there, tensor) of every parameter, then every buffer, under all names."""
    modules = list(root.named_modules(remove_duplicate=False))
    return {
        f"{path}.{leaf}" if path else leaf: (module, leaf, tensor)
        for kind in ("_parameters", "_buffers")
        for path, module in modules
        for leaf, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def _differences(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    for key, shape in wanted.items():
        if key not in given:
            yield key, "is missing"
        elif tuple(given[key].shape) != shape:
            yield key, f"has the shape {tuple(given[key].shape)}, not {shape}"
    for key in given.keys() - wanted.keys():
        yield key, "is not one of its tensors"
