"""Memory for copies of a state, kept from one checkpoint to the next.

Fresh memory costs several times the copy itself, because the system hands it out page by page. So it is made once,
beside training, and each copy goes into the same place: one pass over the state.
"""

import mmap
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shoal.training.checkpoints.disk_file import PAGE
from shoal.training.checkpoints.tensor_files import Part, Parts, in_file_order


class Staging:
    """One copy at a time: who takes the next overwrites the last.

    Costs the memory of one copy for as long as this lives; more only where a later copy needs more.
    """

    def __init__(self) -> None:
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)

    def make_room(self, size: int) -> None:
        """Have so many bytes at hand (`room_for`). Other threads go on meanwhile."""
        if len(self._memory) < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
            self._memory = fresh_memory(size)

    def take(self, kinds: Mapping[str, Parts]) -> dict[str, dict[str, Part]]:
        """Copies of these parts, each kind in one stretch of memory as it will lie in its file."""
        begins = _begins(kinds)
        self.make_room(begins[-1])
        return {
            kind: _copied(in_file_order(parts), self._memory[begin:])
            for (kind, parts), begin in zip(kinds.items(), begins, strict=False)
        }


def room_for(kinds: Mapping[str, Parts]) -> int:
    """Bytes that a copy of these parts takes."""
    return _begins(kinds)[-1]


def _begins(kinds: Mapping[str, Parts]) -> list[int]:
    """Where the stretch of each kind begins, and where the last one ends: at multiples of a page."""
    sizes = (sum(part.tensor.nbytes for part in parts.values()) for parts in kinds.values())
    return list(accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=0))


def _copied(ordered: list[tuple[str, Part]], memory: Tensor) -> dict[str, Part]:
    copies, begin = {}, 0
    for name, part in ordered:
        tensor = part.tensor.detach()
        stretch = memory[begin : begin + tensor.nbytes]
        copies[name] = Part(stretch.view(tensor.dtype).view(tensor.shape).copy_(tensor), part.place)
        begin += tensor.nbytes
    return copies


def fresh_memory(size: int) -> Tensor:
    """So many bytes that begin at a page, every page of them there; in large pages where the system has them."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if sys.platform == "win32":
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[::PAGE] = 0  # by numpy, which takes no more threads for it than this one
    return torch.frombuffer(memory, dtype=torch.uint8)
