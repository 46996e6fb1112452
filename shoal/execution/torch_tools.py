"""torch's own tools that look at parameters and gradients as if they were whole, told what a shard is.

Where a plan cuts parameters, each rank sees a part of them. These of torch's tools would each see another network:

    clip_grad_norm_, get_total_norm     the norm is taken over all shards, each counted once; a collective
    GradScaler                          an infinite gradient on one rank skips the step on all; a collective
    optimizers                          those that treat each element alone are right on a shard as they are; others
                                        (Adafactor, Muon, LBFGS, LAMB) are refused when they step
    their step                          sees ordinary parameters, without the refusals of cut_parameters.py
    optimizer.state_dict()              gives whole tensors, as the network's does; a collective
    optimizer.load_state_dict()         takes whole tensors; each rank keeps its shards, when it next steps
    optimizers that stepped already     go on when the network is laid anew: what they remember becomes whole with it

Nothing is changed until the first network with cut parameters is made, and nothing for tensors that are not shards.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from shoal.errors import RunError
from shoal.execution.cut_parameters import Cut, CutValue, mark, mark_again, plainly, unmark
from shoal.execution.module import ParallelModule
from shoal.execution.whole import grad_norm, norm_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=type[Optimizer])

_ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
}  # fmt: skip

_known: list["weakref.ref[ParallelModule]"] = []
"""Networks with cut parameters, in the order in which they were made, which is that of all ranks."""
_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_unmarked: "weakref.WeakKeyDictionary[Optimizer, list[Tensor]]" = weakref.WeakKeyDictionary()
"""Parameters, gradients and what is remembered of them, which are ordinary tensors while an optimizer steps."""


def elementwise_optimizer(kind: AnyOptimizer) -> AnyOptimizer:
    """Say that an optimizer class treats every element of a parameter alone, so that it may step on shards.

    Also as a decorator. A class that does not, and is said to, trains another network than one device would.
    """
    _ELEMENTWISE.add(kind)
    _mark_again_after_errors(kind)
    return kind


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is known to treat each element alone, so that what it remembers of a parameter has its shape."""
    return type(optimizer) in _ELEMENTWISE


def tell_torch(network: ParallelModule) -> None:
    """Let torch's tools know a network with cut parameters."""
    _tell_once()
    _known[:] = [known for known in _known if known() is not None]
    _known.append(weakref.ref(network))
    network._before_whole.append(_make_states_whole)


def _networks() -> list[ParallelModule]:
    """Those that are not laid anew since."""
    return [network for known in _known if (network := known()) is not None and not network._passes.ended]


@cache
def _tell_once() -> None:
    clip_grad._get_total_norm = clip_grad.get_total_norm = nn.utils.get_total_norm = _norm_of_shards(  # type: ignore[attr-defined]
        clip_grad._get_total_norm
    )
    GradScaler._unscale_grads_ = _agreed_infinities(GradScaler._unscale_grads_)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_before_step)
    for kind in _ELEMENTWISE:
        _mark_again_after_errors(kind)
    Optimizer.load_state_dict = _taking(Optimizer.load_state_dict)  # type: ignore[method-assign]


# Norms


def _norm_of_shards(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(grad): (network, name) for network, name, grad in _gradients()}
        for tensor in given:
            if id(tensor) not in owners and (owner := _owner_of(tensor)) is not None:
                owners[id(tensor)] = owner
        if any(id(tensor) in owners for tensor in given) and not norm_type > 0:
            raise RunError(
                f"the norm of order {norm_type} of gradients that are laid over ranks is not known here.",
                "Use a norm_type above 0.",
            )
        if not any(id(tensor) in owners for tensor in given):
            return plain(given, norm_type, error_if_nonfinite, foreach)
        others = [tensor for tensor in given if id(tensor) not in owners]
        norms = [float(plain(others, norm_type, False, foreach))] if others else []
        for network in _in_order(owners[id(tensor)][0] for tensor in given if id(tensor) in owners):
            own = {owners[id(t)][1]: t for t in given if id(t) in owners and owners[id(t)][0] is network}
            norms.append(grad_norm(network, own, float(norm_type)))
        total = torch.tensor(norm_of(norms, float(norm_type)), dtype=given[0].dtype, device=given[0].device)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}: it cannot be clipped"
            )
        return total

    return get_total_norm


def _gradients() -> Iterator[tuple[ParallelModule, str, Tensor]]:
    for network in _networks():
        for name, state in network._states.tensors().items():
            with plainly():
                grad = state.grad
            if grad is not None:
                yield network, name, grad


def _owner_of(tensor: Tensor) -> tuple[ParallelModule, str] | None:
    """The network and parameter that a part belongs to which is not `.grad` itself, such as a copy of it."""
    if not isinstance(tensor, CutValue) or tensor._cut.summed:
        return None
    cut = tensor._cut
    return next(
        (
            (network, cut.name)
            for network in _networks()
            if network._states.layouts.get(cut.name) == cut.layout and network._states[cut.name].size() == tensor.size()
        ),
        None,
    )


def _in_order(networks: Iterable[ParallelModule]) -> list[ParallelModule]:
    """Each once, in the order in which they come: the same on all ranks."""
    return list({id(network): network for network in networks}.values())


# Scaled losses


def _agreed_infinities(plain: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        with plainly():
            infinities = plain(scaler, optimizer, *args, **kwargs)
        for network in _in_order(network for network, _, _ in _shards(optimizer)):
            mine = max((float(flag) for flag in infinities.values()), default=0.0)
            if any(row[0] for row in network._transport.gather_numbers([mine])):
                for flag in infinities.values():
                    flag.fill_(1.0)
        return infinities

    return unscale


# Optimizers


def _shards(optimizer: Optimizer) -> list[tuple[ParallelModule, str, Tensor]]:
    """(network, name, parameter) of the parameters of networks with cut ones that an optimizer trains."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        (network, name, parameter)
        for network in _networks()
        for name, parameter in network._states.tensors().items()
        if id(parameter) in trained
    ]


def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if not _known:
        return
    cut = [shard for shard in _shards(optimizer) if shard[0]._states.is_cut(shard[1])]
    if not cut:
        return
    if not is_elementwise(optimizer):
        known = ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE))
        raise RunError(
            f"{type(optimizer).__name__} may look at a parameter as a whole, and this rank holds only a part of "
            f"{cut[0][1]!r}.",
            f"Use one that treats each element alone ({known}), or a plan that cuts no parameters, such as 'data' "
            "or 'spatial', and the optimizer's state whole. If yours does treat each element alone, say so: "
            f"shoal.elementwise_optimizer({type(optimizer).__name__}).",
        )
    if optimizer not in _seen:
        _seen.add(optimizer)
        optimizer.register_state_dict_post_hook(_whole_state)
        optimizer.register_step_pre_hook(_unmark_for_step)
        optimizer.register_step_post_hook(_mark_after_step)
    for network in _in_order(network for network, _, _ in cut):
        if not any(known() is optimizer for known in network._optimizers):
            network._optimizers.append(weakref.ref(optimizer))
    _take_shards(optimizer, cut)
    # A script's own hooks see parts: the step alone, between the last hook before it and the first after it, does not.
    before: Any = optimizer._optimizer_step_pre_hooks
    before.move_to_end(next(key for key, hook in before.items() if hook is _unmark_for_step))
    after: Any = optimizer._optimizer_step_post_hooks
    after.move_to_end(next(key for key, hook in after.items() if hook is _mark_after_step), last=False)


def _unmark_for_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cut = [shard for shard in _shards(optimizer) if shard[0]._states.is_cut(shard[1])]
    _unmark_for(optimizer, cut)

    def marked_again(argument: Any) -> Any:
        """A closure, which is the script's own code, sees parts as it does outside of the step."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            _mark_after_step(optimizer)
            result = argument()
            _unmark_for(optimizer, cut)
            return result

        return closure

    return (args[0], *map(marked_again, args[1:])), {name: marked_again(given) for name, given in kwargs.items()}


def _unmark_for(optimizer: Optimizer, cut: Iterable[tuple[ParallelModule, str, Tensor]]) -> None:
    """Make ordinary tensors of cut parameters, their gradients and what the optimizer remembers of them."""
    for _, _, parameter in cut:
        with plainly():
            tensors = [parameter] if parameter.grad is None else [parameter, parameter.grad]
        tensors += [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        _unmarked.setdefault(optimizer, []).extend(tensor for tensor in tensors if unmark(tensor))


def _mark_after_step(optimizer: Optimizer, *_: object) -> None:
    for tensor in _unmarked.pop(optimizer, ()):
        mark_again(tensor)
    for network, name, parameter in _shards(optimizer):
        if network._states.is_cut(name):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.size() == parameter.size():
                    mark(value, Cut(name, network._states.layouts[name], kind=f"the optimizer's {key} of parameter"))


def _mark_again_after_errors(kind: type[Optimizer]) -> None:
    """Let a step that fails, after which torch calls no hook, leave parts as it found them."""
    step = kind.step

    @wraps(step)
    def wrapped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(optimizer, *args, **kwargs)
        except BaseException:
            _mark_after_step(optimizer)
            raise

    kind.step = wrapped  # type: ignore[assignment, method-assign]


def _take_shards(optimizer: Optimizer, cut: Iterable[tuple[ParallelModule, str, Tensor]]) -> None:
    """Of whole tensors that an optimizer remembers, having loaded them, keep this rank's shards."""
    for network, name, parameter in cut:
        shape = network._states.shapes[name]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape and value.shape != parameter.shape:
                optimizer.state[parameter][key] = network._states.shard_of(name, value, network._transport.rank)


def _whole_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`optimizer.state_dict()` with tensors of cut parameters put together; the optimizer's own stay as they are."""
    numbers = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        numbers.update({id(p): number for p, number in zip(group["params"], saved["params"], strict=True)})
    states = dict(state_dict["state"])
    cut = [shard for shard in _shards(optimizer) if shard[0]._states.is_cut(shard[1])]
    _take_shards(optimizer, cut)
    for network, name, parameter in cut:
        whole = _put_together(network, name, parameter, optimizer)
        if whole:
            states[numbers[id(parameter)]] = whole
        for key, value in whole.items():
            if isinstance(value, Tensor) and value is not optimizer.state.get(parameter, {}).get(key):
                network._states.given.note(f"{key} of {name}", value, "optimizer")
    return {**state_dict, "state": states}


def _taking(plain: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        plain(optimizer, state_dict)
        for network in _networks():
            if network._states.given:
                for value in tree_leaves(state_dict["state"]):
                    if isinstance(value, Tensor):
                        network._states.given.taken(value)

    return load_state_dict


def _make_states_whole(network: ParallelModule) -> None:
    """What optimizers remember of a network's cut parameters, whole, before these become so. A collective.

    One that is gone on some rank is nobody's any more, and stays as it is.
    """
    alive = network._transport.gather_objects([known() is not None for known in network._optimizers])
    for known, everywhere in zip(network._optimizers, zip(*alive, strict=False), strict=False):
        optimizer = known()
        if optimizer is None or not all(everywhere):
            continue
        cut = [shard for shard in _shards(optimizer) if shard[0] is network and network._states.is_cut(shard[1])]
        _take_shards(optimizer, cut)
        for _, name, parameter in cut:
            whole = _put_together(network, name, parameter, optimizer)
            if whole:
                optimizer.state[parameter] = whole


def _put_together(network: ParallelModule, name: str, parameter: Tensor, optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer remembers of a cut parameter, its shards put together. A collective.

    Numbers, such as a count of steps, are this rank's, or those of the first that has any.
    """
    own = optimizer.state.get(parameter, {})
    kinds = {key: _Kind(value, parameter) for key, value in own.items()}
    everyone = [theirs for theirs in network._transport.gather_objects(kinds) if theirs]
    whole: dict[str, Any] = {}
    for key, kind in (everyone[0] if everyone else {}).items():
        if kind.shard:
            whole[key] = network._states.gather_one(name, network._transport, own.get(key), rank0_only=False)
        else:
            whole[key] = own.get(key, kind.value)
    return whole


class _Kind:
    """Whether something that an optimizer remembers is laid out as its parameter is; if not, the thing itself."""

    def __init__(self, value: Any, parameter: Tensor) -> None:
        self.shard = isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
        self.value = None if self.shard else value
