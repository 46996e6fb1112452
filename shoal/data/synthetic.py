"""Made-up samples of any shape and class count, for benchmarks and dry runs only.

A sample is a wave along its height, whose phase in each channel tells the class, plus noise: a network can
learn it, but an accuracy on it says nothing about real data. The noise comes from a pool of at most 64 images
(fewer where they are large: the pool stays below 128 MiB unless a single sample is larger), so that a huge
shape does not need the memory of a huge data set. A batch costs one gather and one pass.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Splits, Task
from shoal.data.draws import Purpose, below, words
from shoal.errors import DataError
from shoal.inference import Preparation, numbered

SAMPLES = 2048
POOL = 64
POOL_BYTES = 128 * 2**20
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over the circle however many there are


class SyntheticData:
    """One split: `rows[i]` and `labels[i]` choose the noise and the wave of sample i."""

    prefetch = False

    def __init__(self, pool: Tensor, raw: NDArray[np.uint64], *, classes: int, task: Task) -> None:
        self.shape = tuple(pool.shape[1:])
        self.classes = classes
        self.class_names = numbered(classes)
        nothing = (0.0,) * self.shape[0], (1.0,) * self.shape[0]
        self.preparation = Preparation(values="numbers", shape=self.shape, mean=nothing[0], std=nothing[1])
        self.task: Task = task
        self._pool = pool
        self._rows = torch.from_numpy(below(raw[:, 0], len(pool)))
        self._labels = torch.from_numpy(below(raw[:, 1], classes))
        channels = torch.arange(1, self.shape[0] + 1)
        self._phase_step = channels * GOLDEN
        self._height = torch.arange(self.shape[1]) / self.shape[1]
        self._edges = torch.linspace(-1.5, 1.5, classes + 1)[1:-1]

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`."""
        chosen = torch.from_numpy(indices)
        y = self._labels[chosen]
        x = self._pool.index_select(0, self._rows[chosen])
        x += self._wave(y).view(*x.shape[:3], *[1] * (x.dim() - 3))
        if self.task == "segment":
            y = torch.bucketize(x[:, 0].contiguous(), self._edges)
        return x, y

    def _wave(self, labels: Tensor) -> Tensor:
        """(b, C, H): the mean of each sample's class."""
        cycles = (1 + labels % 3).view(-1, 1, 1) * self._height
        phase = (labels.view(-1, 1) + 1) * self._phase_step
        return torch.cos((cycles + phase.unsqueeze(-1)) * (2 * math.pi))


def load_synthetic(options: str, *, shape: tuple[int, ...], classes: int, seed: int) -> Splits:
    """`options` follows "synthetic:": a number of training samples, "segment", or both with a comma.

    There are a quarter as many test samples. With "segment" each pixel has a label, its own brightness.
    """
    samples, task = _options(options)
    if not 2 <= len(shape) <= 4 or min(shape) < 1:
        raise DataError(f"{shape} is not the shape of a sample.", "Give channels,height,width, for example 3,32,32.")
    if classes < 2:
        raise DataError(f"{classes} classes leave nothing to learn.", "Give at least 2 classes.")
    generator = torch.Generator().manual_seed(seed % 2**63)
    count = min(POOL, max(1, POOL_BYTES // (4 * math.prod(shape))))
    pool = torch.randn((count, *shape), generator=generator)
    tests = max(1, samples // 4)
    raw = words(2 * (samples + tests), seed=seed, epoch=0, purpose=Purpose.SYNTHETIC).reshape(-1, 2)
    return Splits(
        f"synthetic:{options}" if options else "synthetic",
        SyntheticData(pool, raw[:samples], classes=classes, task=task),
        SyntheticData(pool, raw[samples:], classes=classes, task=task),
        f"made up from seed {seed}, for benchmarks only",
    )


def _options(text: str) -> tuple[int, Task]:
    samples = SAMPLES
    task: Task = "classify"
    for word in filter(None, text.split(",")):
        if word == "segment":
            task = "segment"
        elif word.isascii() and word.isdigit() and int(word) > 0:
            samples = int(word)
        else:
            raise DataError(
                f"synthetic:{text} has the option {word!r}, which is no number of samples.",
                "Write synthetic:SAMPLES, for example synthetic:1024, or synthetic:SAMPLES,segment.",
            )
    return samples, task
