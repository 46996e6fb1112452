"""A network that is laid over ranks as one whole: its states, and the norm of its gradients."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from shoal.execution.cut_parameters import bare, plainly
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.module import ParallelModule
from shoal.execution.states import Shard
from shoal.partition import Box
from shoal.transport import Transport


def full_state_dict(model: ParallelModule, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The original module's state dict: its keys and whole tensors. A collective.

    On every rank, or on rank 0 and empty elsewhere, which is what writing a file needs.
    """
    return model._states.gather(model._transport, rank0_only=rank0_only)


def state_parts(model: ParallelModule) -> dict[str, tuple[Shard, bool]]:
    """This rank's part of every tensor of the original state dict, and whether it is the first that holds this part."""
    rank, states, shards = model._transport.rank, model._states, model._states.shards()
    return {
        key: (shards[name], shards[name].box is not None and states.ranks_of(name, rank)[0] == rank)
        for key, name in states.keys.items()
    }


def load_parts(model: ParallelModule, read: Callable[[str, Box], Tensor]) -> None:
    """Take this rank's part of every tensor of the original state dict, as `read` gives it for a key and a box."""
    model._states.load_parts(read, model._transport.rank)


def load_full_state_dict(model: ParallelModule, full: Mapping[str, Tensor]) -> None:
    """Load what `full_state_dict`, or the original module's `state_dict()`, gave; each rank takes its shards."""
    model._states.load(full, model._transport.rank)


def ranks_of(model: ParallelModule) -> tuple[int, ...]:
    """The ranks of the world that a network is laid over, in the order in which they count in it; alone, (0,)."""
    return model._transport.members


def another_transport(model: ParallelModule) -> Transport:
    """Between the same ranks, for messages that are not the network's own. All of them call it."""
    return Transport(model._transport.group, alone=model._transport.world == 1)


def holders(model: ParallelModule) -> dict[str, tuple[int, ...]]:
    """For every parameter, the ranks that hold the same shard of it as this rank does."""
    rank = model._transport.rank
    return {name: model._states.ranks_of(name, rank) for name, _ in model.named_parameters()}


def tell_holders(model: ParallelModule, tensors: Mapping[str, Tensor]) -> None:
    """Tensors of parameters' shapes, as the first holder of each shard has them, on all its holders. Collective."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name, ranks in holders(model).items():
        if len(ranks) > 1 and name in tensors:
            groups.setdefault((ranks, tensors[name].dtype), []).append(tensors[name])
    with torch.no_grad():
        for (ranks, _), members in sorted(groups.items(), key=lambda group: (group[0][0], str(group[0][1]))):
            whole = torch.cat([member.reshape(-1) for member in members])  # one message for many small tensors
            model._transport.tell(whole, ranks, GRADIENT)
            for member, part in zip(members, torch.split(whole, [member.numel() for member in members]), strict=True):
                member.copy_(part.view(member.shape))


def clip_grad_norm_(model: ParallelModule, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients down so that their norm over the whole network is at most `max_norm`; returns the norm.

    A collective: each shard is counted once, wherever its copies are.
    """
    with plainly():
        grads = {name: state.grad for name, state in model._states.tensors().items() if state.grad is not None}
        norm = grad_norm(model, grads, norm_type)
        if norm > max_norm:
            for grad in grads.values():
                grad.mul_(max_norm / (norm + 1e-6))
    return torch.tensor(norm, device="cpu")


def grad_norm(model: ParallelModule, grads: Mapping[str, Tensor], norm_type: float) -> float:
    """The norm of gradients, by parameter, over all their shards. A collective."""
    rank, transport = model._transport.rank, model._transport
    owned = [bare(grad) for name, grad in grads.items() if model._states.ranks_of(name, rank)[0] == rank]
    norms = [float(torch.linalg.vector_norm(grad, norm_type).double()) for grad in owned if grad.numel()]
    table = transport.gather_numbers([norm_of(norms, norm_type)])
    return norm_of([row[0] for row in table], norm_type)


def norm_of(norms: Iterable[float], norm_type: float) -> float:
    """The norm of a vector, from the norms of its pieces."""
    if norm_type == float("inf"):
        return max(norms, default=0.0)
    return float(sum(norm**norm_type for norm in norms) ** (1 / norm_type))
