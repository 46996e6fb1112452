"""What a trained network says of samples, batch by batch.

Scores    to classify: the probability of each class (softmax of the network's scores). To segment: the share of the
          sample's pixels that each class has, and the mask of them.
Costs     memory for one batch of samples and its scores; files are read in a few threads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from os import PathLike
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.data.pixels import in_threads
from shoal.errors import DataError, ModelError
from shoal.inference import Inference
from shoal.using.by_windows import mask_by_windows
from shoal.using.transform import Sample, Size, Transform, name_of

MOST = 64
"""Samples of a batch unless told otherwise; fewer where they are large:"""
VALUES = 4_000_000
"""numbers in the samples of a batch."""

OnProgress = Callable[[str, int, int], None]
"""Hears how many files, or windows of a file, are done, and of how many."""


@dataclass(frozen=True)
class Prediction:
    """What the network says of one sample."""

    source: str
    """The file, or what the sample was."""
    classes: tuple[str, ...]
    scores: Tensor
    """Of each class: its probability, or its share of the pixels."""
    mask: Tensor | None = None
    """To segment: the class of each pixel."""

    @property
    def name(self) -> str:
        """The class with the highest score."""
        return self.classes[int(self.scores.argmax())]

    @property
    def score(self) -> float:
        """The highest score."""
        return float(self.scores.max())

    def top(self, count: int) -> list[tuple[str, float]]:
        """The classes with the highest scores, the highest first."""
        scores, places = self.scores.topk(min(count, len(self.classes)))
        return [(self.classes[place], score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]


def predictions(
    module: nn.Module,
    inference: Inference,
    samples: Sequence[Sample],
    *,
    batch: int | None = None,
    size: Size | Literal["windows"] | None = None,
    unreadable: Callable[[str, DataError], None] | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Iterator[Prediction]:
    """One for each sample, in order. `unreadable` hears of samples that cannot be read, which are left out; without it
    the first of them is raised.
    """
    transform = Transform(inference)
    if size == "windows" and (inference.task != "segment" or len(inference.input) != 3):
        raise DataError(
            'size = "windows" is for networks that give each pixel of an image a class, and this one does not.',
            "Leave --size out.",
        )
    if isinstance(samples, str | PathLike) or hasattr(samples, "convert"):  # a single one
        samples = [samples]

    if size == "windows":
        count = batch or _usual_batch(inference)
        yield from _by_windows(module, transform, samples, count, unreadable, on_progress)
        return

    def prepared(sample: Sample) -> Tensor | DataError:
        try:
            return transform(sample, size=size)
        except DataError as error:
            return error

    count = batch or _usual_batch(inference)
    for start in range(0, len(samples), count):
        chosen = samples[start : start + count]
        read: list[tuple[Sample, Tensor]] = []
        for sample, x in zip(chosen, in_threads(prepared, chosen), strict=True):
            if isinstance(x, Tensor):
                read.append((sample, x))
            elif unreadable is None:
                raise x
            else:
                unreadable(name_of(sample), x)
        for _, alike in groupby(read, key=lambda item: item[1].shape):
            same, tensors = zip(*alike, strict=True)
            scores = _scores(module, name_of(same[0]), torch.stack(tensors))
            if inference.task == "classify":
                for sample, row in zip(same, scores.float().softmax(1).cpu(), strict=True):
                    yield Prediction(name_of(sample), inference.classes, row)
                continue
            for sample, mask in zip(same, scores.argmax(1).cpu(), strict=True):
                own = transform.own_size(sample) if size == "training" else None
                yield _segmented(name_of(sample), inference.classes, mask, own)
        on_progress("files", min(start + count, len(samples)), len(samples))


def _usual_batch(inference: Inference) -> int:
    return max(1, min(MOST, VALUES // prod(inference.input)))


def _by_windows(
    module: nn.Module,
    transform: Transform,
    samples: Sequence[Sample],
    count: int,
    unreadable: Callable[[str, DataError], None] | None,
    on_progress: OnProgress,
) -> Iterator[Prediction]:
    for sample in samples:
        name = name_of(sample)
        try:
            mask = mask_by_windows(
                transform,
                sample,
                partial(_scores, module, name),
                batch=count,
                on_windows=partial(on_progress, f"windows of {name}"),
            )
        except DataError as error:
            if unreadable is None:
                raise
            unreadable(name, error)
        else:
            yield _segmented(name, transform.inference.classes, mask, None)


def _scores(module: nn.Module, name: str, x: Tensor) -> Tensor:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            scores: Tensor = module(x.to(device))
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"the network cannot take {name}, of the shape {tuple(x.shape[1:])}: {reason}.",
            "Give samples of the shape in training, or --size training, which resizes.",
        ) from error
    return scores


def _segmented(name: str, classes: tuple[str, ...], mask: Tensor, own: tuple[int, ...] | None) -> Prediction:
    """With the mask of an image that was resized brought back to its own size, by the nearest pixel."""
    if own is not None and tuple(mask.shape) != own:
        mask = F.interpolate(mask[None, None].float(), size=own, mode="nearest-exact")[0, 0].long()
    shares = torch.bincount(mask.flatten(), minlength=len(classes)) / mask.numel()
    return Prediction(name, classes, shares, mask)
