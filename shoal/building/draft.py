"""A network that is known, but not held; then this rank's parts of it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from shoal.building.factory_journal import CHUNK, Filled, Memory, Place, overwrites
from shoal.building.playing import Whole, held_elements, obstacle, stream
from shoal.building.recording import CPU, Recorder, become
from shoal.errors import ModelError, suggestion
from shoal.partition import Box, whole

log = logging.getLogger("shoal")

SMALL = 2**14
"""Tensors of no more elements are simply made: to describe them would take as much memory."""

_INSTEAD = "Pass the function that makes the network instead of the network."


def draft(source: nn.Module | Callable[[], nn.Module], *, small: int = SMALL, chunk: int = CHUNK) -> "Draft":
    """A network on the meta device, and how every tensor of it comes to its first values.

    source   a function that makes the network, or a network on the meta device
    small    tensors of no more elements are made while the function runs
    chunk    elements computed at a time, a multiple of 16

    Promise: `Draft.fill` gives the weights that the function gives on one device with the same seed, bit for bit, and
    the CPU's generators end where they end there. A network on the meta device gets the weights of `to_empty` and then
    each module's `reset_parameters()`, in the order of `modules()`. Tensors that the function itself puts on a GPU are
    made whole, as it says; that is untested.
    Cost: every large random tensor is drawn here and dropped, a chunk at a time, and drawn again by `fill`.
    Failure: a `ModelError` for what cannot be followed, and for a tensor on the meta device that no
    `reset_parameters` fills.
    """
    if chunk <= 0 or chunk % 16:
        raise ValueError(f"chunk={chunk} is no multiple of 16")
    recorder = Recorder(small, chunk)
    if isinstance(source, nn.Module):
        _refuse_unfinished(source)
        _reset(source, recorder)
        return Draft(source, recorder)
    with recorder:
        model = source()
    if not isinstance(model, nn.Module):
        raise ModelError(f"the function that makes the network gave a {type(model).__name__}.", "Return an nn.Module.")
    _refuse_unfinished(model)
    return Draft(model, recorder)


def build(source: nn.Module | Callable[[], nn.Module], boxes: Mapping[str, Box | None]) -> nn.Module:
    """The network with its parameters and buffers cut to this rank's `boxes`, as `Draft.fill` does it."""
    return draft(source).fill(boxes)


class Draft:
    """A network whose parameters and buffers are on the meta device until `fill` makes them."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.model = model
        """The network itself: `fill` puts values into these very modules and parameters."""
        self._recorder = recorder
        twins: dict[int, torch.UntypedStorage] = {}
        for tensor in _distinct(_named(model).values()):
            if tensor.device == CPU:
                self._put_away(tensor, twins)

    def _put_away(self, tensor: Tensor, twins: dict[int, torch.UntypedStorage]) -> None:
        """Describe a small tensor that was made already; tensors that share memory go on sharing it."""
        address = tensor.untyped_storage()._cdata
        if address not in twins:
            twins[address] = self._recorder.described(tensor.detach()).untyped_storage()
        become(tensor, Place.of(tensor).tensor(twins[address]))

    def fill(self, boxes: Mapping[str, Box | None]) -> nn.Module:
        """Make every tensor: of those named in `boxes` only that box (None: an empty tensor), all others whole.

        A parameter with several names may be named by any of them. Cost: the tensors and some chunks. A cut tensor
        whose first values cannot be computed in parts (`orthogonal_`, a loaded state) is there whole for a moment,
        with what it was made of, and the log says so. Cut tensors that share memory with others are a `ModelError`.
        To be called once.
        """
        cuts = self._cuts(boxes)
        held_whole = []
        for group in self._by_memory():
            if len(group) > 1:
                self._fill_shared(group, cuts)
                continue
            ((name, tensor),) = group.items()
            if (reason := self._fill_one(name, tensor, cuts)) is not None:
                held_whole.append(f"{name} ({reason})")
        if held_whole:
            log.warning("these tensors are cut, but were whole for a moment while built: %s", ", ".join(held_whole))
        self._recorder = Recorder(0, CHUNK)  # what was kept of the old one is free
        return self.model

    def _cuts(self, boxes: Mapping[str, Box | None]) -> dict[int, Box | None]:
        """Boxes by the identity of the tensor."""
        named = _named(self.model)
        for name, box in boxes.items():
            if name not in named:
                raise ModelError(f"the network has no tensor {name!r} to be cut.", suggestion(name, named))
            inside = box is None or (
                len(box) == named[name].ndim
                and all(0 <= s.start <= s.stop <= n for s, n in zip(box, named[name].shape, strict=True))
            )
            if not inside:
                raise ModelError(
                    f"{box} is no box of {name!r}, which has the shape {tuple(named[name].shape)}.",
                    "Give one span inside the tensor for each of its dims.",
                )
        return {id(named[name]): box for name, box in boxes.items()}

    def _by_memory(self) -> list[dict[str, Tensor]]:
        """Every tensor to be made under its first name, those that share memory together."""
        groups: dict[Memory, dict[str, Tensor]] = {}
        seen = set()
        for name, tensor in {**_named(self.model), **_attributes(self.model)}.items():
            if id(tensor) not in seen and self._recorder.known(tensor):
                seen.add(id(tensor))
                groups.setdefault(self._recorder.ref(tensor).memory, {})[name] = tensor
        return list(groups.values())

    def _fill_one(self, name: str, tensor: Tensor, cuts: Mapping[int, Box | None]) -> str | None:
        """Make a tensor that has its memory for itself. Gives the reason for which a cut one had to be whole."""
        ref, cut = self._recorder.ref(tensor), id(tensor) in cuts
        box = cuts.get(id(tensor), whole(ref.place.size))
        if ref.memory.history(ref.version) == (Filled(), []):
            log.warning("%s was never given a value", name)
        if box is None:
            become(tensor, torch.empty([0] * max(tensor.ndim, 1), dtype=tensor.dtype))
            return None
        reason = obstacle(ref)
        if reason is None and (cut or ref.covers):
            made = torch.empty(tuple(map(len, box)), dtype=tensor.dtype)
            stream(ref, made, ref.place.part(box), self._recorder.chunk)
        else:
            made = Whole(self._recorder.chunk).tensor(ref)
            if cut:
                made = made[tuple(slice(span.start, span.stop) for span in box)]
                made = made.clone(memory_format=torch.contiguous_format)
        become(tensor, made)
        if reason is None and held_elements(ref) > max(self._recorder.small, self._recorder.chunk):
            reason = "given whole"
        return reason if cut else None

    def _fill_shared(self, group: Mapping[str, Tensor], cuts: Mapping[int, Box | None]) -> None:
        """Make several tensors in one memory."""
        for name, tensor in group.items():
            if id(tensor) in cuts:
                others = ", ".join(repr(other) for other in group if other != name)
                raise ModelError(
                    f"{name!r} is to be cut, and shares its memory with {others}.",
                    "Give each a tensor of its own, or make both the same parameter.",
                )
        values = Whole(self._recorder.chunk)
        for tensor in group.values():
            become(tensor, values.tensor(self._recorder.ref(tensor)))


def _reset(model: nn.Module, recorder: Recorder) -> None:
    """Give every meta tensor the values of its modules' own resets; the first that gets none is refused."""
    tensors = _named(model)
    for tensor in _distinct(tensors.values()):
        if tensor.is_meta and not recorder.known(tensor):
            recorder.begin(tensor, Filled())
    modules = [module for module in model.modules() if _on_meta(module)]
    with recorder:
        for module in modules:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "reset_running_stats", None)
            if callable(reset):
                reset()
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            continue
        start, writes = recorder.ref(tensor).memory.history(recorder.ref(tensor).version)
        if start == Filled() and not (writes and overwrites(writes[0])):
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ModelError(
                f"{name!r} is on the meta device and no reset_parameters() of its {type(owner).__name__} fills it.",
                _INSTEAD,
            )
    log.info("the network was on the meta device: its weights are those of each module's reset_parameters()")


def _on_meta(module: nn.Module) -> bool:
    """Whether a reset touches nothing that has values already, or the module has a tensor of its own without."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(t.is_meta for t in own) or all(t.is_meta for t in [*module.parameters(), *module.buffers()])


def _refuse_unfinished(model: nn.Module) -> None:
    for name, tensor in _named(model).items():
        if is_lazy(tensor):
            raise ModelError(f"{name!r} has no shape before the first forward pass.", "Give its layer all its sizes.")


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _attributes(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules have as plain attributes, also in lists and dicts."""
    registers = ("_parameters", "_buffers", "_modules")
    by_name: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for word, value in vars(module).items():
            leaves: Iterable[Any] = () if word in registers else tree_leaves(value)
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            by_name.update({f"{path}.{word}[{at}]".lstrip("."): tensor for at, tensor in enumerate(tensors)})
    return by_name


def _distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    yield from {id(tensor): tensor for tensor in tensors}.values()
