"""A network that is laid over ranks as one whole: its states, its optimizer's, and the norm of its gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.execution.cut_parameters import bare, plainly
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.module import ParallelModule
from shoal.transport import Transport


def full_state_dict(model: ParallelModule, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The original module's state dict: its keys and whole tensors. A collective.

    On every rank, or on rank 0 and empty elsewhere, which is what writing a file needs.
    """
    return model._states.gather(model._transport, rank0_only=rank0_only)


def full_optimizer_state(model: ParallelModule, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What an optimizer of `model.parameters()` remembers, by parameter and whole. A collective.

    On rank 0; empty elsewhere. Tensors of a parameter's shape come together from its shards; numbers, such as
    counts of steps, are the first holder's.
    """
    own = _remembered(model, optimizer)
    kinds = {name: {key: _scalar(value) for key, value in state.items()} for name, state in own.items()}
    table = model._transport.gather_objects(kinds)
    full: dict[str, dict[str, Any]] = {}
    for name in model._states.names():
        holder: dict[str, Any] = next((theirs[name] for theirs in table if name in theirs), {})
        for key, number in holder.items():
            shard = own.get(name, {}).get(key) if number is None else None
            value = (
                model._states.gather_one(name, model._transport, shard, rank0_only=True) if number is None else number
            )
            if model._transport.rank == 0:
                full.setdefault(name, {})[key] = value
    return full


def load_full_optimizer_state(
    model: ParallelModule, optimizer: Optimizer, full: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give an optimizer what `full_optimizer_state` gave; each rank takes its shards. Also under another plan."""
    parameters = dict(model.named_parameters())
    for name, state in full.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: model._states.shard_of(name, value, model._transport.rank).to(parameter.device)
            if isinstance(value, Tensor) and tuple(value.shape) == model._states.shapes[name]
            else value
            for key, value in state.items()
        }


def put_together(model: ParallelModule, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0 of parts that are cut as the parameters of these names are; empty elsewhere.

    A collective: all ranks give the same names.
    """
    rank, full = model._transport.rank, {}
    for name, part in parts.items():
        held = part if model._states.layouts[name][rank] is not None else None
        whole = model._states.gather_one(name, model._transport, held, rank0_only=True)
        if whole is not None:
            full[name] = whole
    return full


def parts_of(model: ParallelModule, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of whole tensors that are to be cut as the parameters of these names are."""
    return {name: model._states.shard_of(name, whole, model._transport.rank) for name, whole in full.items()}


def _remembered(model: ParallelModule, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """An optimizer's state of the parameters that this rank holds a part of."""
    rank = model._transport.rank
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state and model._states.layouts[name][rank] is not None
    }


def _scalar(value: Any) -> Any:
    """A number, or a tensor of one; None for a tensor that is cut as its parameter is."""
    return value if not isinstance(value, Tensor) or value.ndim == 0 else None


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
