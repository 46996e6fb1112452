"""How good a network is on a whole split."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.data import DataSet, sequential_batches
from shoal.training.network import Criterion, Network

MOST_CLASSES = 100
"""Up to so many classes a result has the whole matrix: of 1,000 it would have a million numbers."""


@dataclass(frozen=True)
class Evaluation:
    """Means over every sample (classification) or every pixel (segmentation) of a split."""

    loss: float
    accuracy: float
    iou: float | None
    """Segmentation: intersection over union of the pixels that are not background (class 0)."""
    samples: tuple[int, ...] = ()
    """Of each class."""
    right: tuple[int, ...] = ()
    """Of those, how many the network found."""
    confusion: tuple[tuple[int, ...], ...] | None = None
    """How often each class (row) was taken for each (column); None with more than `MOST_CLASSES`."""

    def better_than(self, score: float | None) -> bool:
        """Whether accuracy, or `iou` in segmentation, is above this score; anything is above None."""
        return score is None or (self.accuracy if self.iou is None else self.iou) > score


def evaluate(
    network: Network,
    data: DataSet,
    *,
    batch: int,
    device: torch.device,
    criterion: Criterion = F.cross_entropy,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Test `network` on every sample of `data`, in evaluation mode; None if `stop` said so meanwhile.

    Ranks share each batch as in training; their counts are summed once, at the end. Leaves the network in training
    mode and the random state untouched.
    """
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    by_class = _ByClass(data.classes, device)
    with network.evaluating() as (model, part), torch.inference_mode():
        for x, y in sequential_batches(data, batch, part):
            if stop():
                return None
            scores, truth = model(x.to(device)), y.to(device)
            totals += _counts(scores, truth, criterion)
            by_class.add(scores, truth)
    loss, right, count, overlap, union = map(sum, zip(*network.gather(totals.tolist()), strict=True))
    iou = (overlap / union if union else 1.0) if data.task == "segment" else None
    return Evaluation(loss / count, right / count, iou, *by_class.over(network))


class _ByClass:
    """Labels and answers of each class, of this rank's part of every batch."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._rows = classes if classes <= MOST_CLASSES else 2
        self._counts = torch.zeros(self._rows * classes, dtype=torch.int64, device=device)

    def add(self, scores: Tensor, truth: Tensor) -> None:
        """Count the labels of a batch: by answer, or where classes are many, those alone that were right and all."""
        guess, truth = scores.argmax(1).flatten(), truth.flatten()
        if self._rows == self._classes:
            found = truth * self._classes + guess
        else:
            found = torch.cat([truth[guess == truth], truth + self._classes])
        self._counts += torch.bincount(found, minlength=len(self._counts))

    def over(self, network: Network) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...] | None]:
        """Samples and right answers of each class, and the matrix, of all ranks together. Collective."""
        rows = torch.tensor(network.gather(self._counts.tolist()), dtype=torch.float64)
        table = rows.sum(0).long().view(self._rows, self._classes)
        if self._rows != self._classes:
            right, samples = table.tolist()
            return tuple(samples), tuple(right), None
        return tuple(table.sum(1).tolist()), tuple(table.diag().tolist()), tuple(map(tuple, table.tolist()))


def _counts(scores: Tensor, truth: Tensor, criterion: Criterion) -> Tensor:
    """(sum of losses, right answers, answers, foreground intersection, foreground union).

    Of a loss of one's own that weighs its samples differently, the means of batches are added by their samples.
    """
    guess = scores.argmax(1)
    right = guess == truth
    foreground = (guess > 0) | (truth > 0)
    return torch.stack(
        [
            _sum_of_losses(scores, truth, criterion).double(),
            right.sum().double(),
            torch.tensor(float(truth.numel()), dtype=torch.float64, device=truth.device),
            (right & foreground).sum().double(),
            foreground.sum().double(),
        ]
    )


def _sum_of_losses(scores: Tensor, truth: Tensor, criterion: Criterion) -> Tensor:
    if criterion is F.cross_entropy or not truth.numel():
        return F.cross_entropy(scores, truth, reduction="sum")
    return criterion(scores, truth) * truth.numel()
