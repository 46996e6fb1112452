"""Random masks that depend on seed, layer and step, and on nothing else.

Every sample has a generator of its own, so a rank draws only for the samples it has, and the same numbers
whatever the plan, the ranks or the other samples.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.partition import Box

_GLOBAL = threading.Lock()
"""Held while torch's own generators are ours: ranks may be threads of one process."""


class LayerRandom:
    """The draws of one layer in one step."""

    def __init__(self, seed: int, layer: str, step: int | str, samples: Sequence[int] | None = None) -> None:
        """`samples`: which sample of the batch each row is; row by row unless given."""
        self._key = f"{seed}/{layer}/{step}"
        self._samples = samples

    def box(self, shape: tuple[int, ...], box: Box, *, keep: float, like: Tensor) -> Tensor:
        """The box's part of a mask over the whole shape: 1 with probability `keep`, else 0."""
        generator = torch.Generator()
        if not shape:
            return self._draw((), 0, keep, generator).to(like)
        rows = [
            self._draw(shape[1:], sample, keep, generator)[tuple(slice(s.start, s.stop) for s in box[1:])]
            for sample in (range(box[0].stop) if self._samples is None else self._samples)[box[0].start : box[0].stop]
        ]
        return torch.stack(rows).to(like)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Within, torch's own generators draw the same on every rank; they are left as they were."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with _GLOBAL, torch.random.fork_rng(devices):
            torch.manual_seed(self._seed("whole"))
            yield

    def _seed(self, what: object) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._key}/{what}".encode(), digest_size=7).digest(), "big")

    def _draw(self, shape: tuple[int, ...], sample: int, keep: float, generator: torch.Generator) -> Tensor:
        generator.manual_seed(self._seed(sample))
        return torch.rand(shape, generator=generator, device=generator.device).lt_(keep)
