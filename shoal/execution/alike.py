"""What all ranks must have alike: buffers, inputs that all pass. A mark of each, to find out where they do not.

Promise   a buffer that was changed in place or replaced since the last pass on some ranks alone, or otherwise on each,
          and an input that all ranks share and pass differently, is refused on all.
Cost      some 0.2 us for each buffer; 0.1 ms for each 64 KiB of a shared input. Of a larger one 16,384 elements are
          compared: ranks that pass different batches are found out, one changed pixel is not.
Blind     to a buffer changed through `.data` or numpy, which torch does not count as a change.
"""

from collections.abc import Collection
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from shoal.capturing.attributes import version_of
from shoal.capturing.sight import content_of
from shoal.errors import RunError
from shoal.execution.states import ShardedStates

_version = attrgetter("_version")

_SMALL = 64 << 10
"""Bytes of a tensor that are compared all."""
_SAMPLE = 16_384
"""Elements of a larger one that are."""


def mark_of(tensor: Tensor) -> str:
    """The same for equal tensors, and hardly ever for others."""
    if tensor.numel() * tensor.element_size() <= _SMALL:
        return content_of(tensor)
    step = (tensor.numel() // _SAMPLE) | 1  # odd: not always the same column of an image
    if tensor.is_contiguous():
        return content_of(tensor.detach().view(-1)[::step])
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return content_of(tensor.detach()[torch.unravel_index(places, tensor.shape)])


class Buffers:
    """This rank's buffers, and which of them a script has changed since the last pass."""

    def __init__(self, states: ShardedStates, *, local: bool) -> None:
        self._states, self._local = states, local
        self._places = states.buffers()
        self._own: set[str] = set()
        """Buffers of which every rank has its own: batch norm's, where statistics are local."""
        self._doubted = False
        self._tensors, self._versions = self._now()

    def _now(self) -> tuple[list[Tensor], list[int]]:
        tensors: list[Any] = [where.get(leaf) for _, where, leaf in self._places]
        try:
            return tensors, [*map(_version, tensors)]
        except AttributeError:
            name = next(name for name, where, leaf in self._places if where.get(leaf) is None)
            raise RunError(
                f"buffer {name!r} is gone, which was there when the network was laid over the ranks.",
                "Change the module first and call shoal.parallelize then.",
            ) from None
        except RuntimeError:  # of torch.inference_mode, which does not count
            return tensors, [*map(version_of, tensors)]

    def settle(self, changed: Collection[str]) -> None:
        """A pass is over: what is otherwise now the network itself has changed. `changed`: statistics that it keeps."""
        if self._local:
            self._own.update(changed)
        self._tensors, self._versions = self._now()
        self._doubted = False

    def doubt(self) -> None:
        """The ranks differ in something: at the next call compare all."""
        self._doubted = True

    def changed(self) -> list[str]:
        """The buffers that a script has changed, with marks. A `RunError` for one that has another shape now."""
        tensors, versions = self._now()
        if versions == self._versions and all(map(is_, tensors, self._tensors)) and not self._doubted:
            return []
        changed = []
        for number, (name, _, _) in enumerate(self._places):
            tensor, before = tensors[number], self._tensors[number]
            if tensor is before and versions[number] == self._versions[number] and not self._doubted:
                continue
            if tensor.shape != before.shape:
                raise RunError(
                    f"buffer {name!r} has the shape {tuple(tensor.shape)}; it had {tuple(before.shape)} when the "
                    "network was laid over the ranks.",
                    "Keep its shape, or change the module first and call shoal.parallelize then.",
                )
            comparable = name not in self._own and not self._states.is_cut(name)
            changed.append(f"{name} {mark_of(tensor)}" if comparable else name)
        return changed
