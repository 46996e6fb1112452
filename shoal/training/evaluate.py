"""How good a network is on a whole split."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.data import DataSet, sequential_batches
from shoal.training.network import Criterion, Network


@dataclass(frozen=True)
class Evaluation:
    """Means over every sample (classification) or every pixel (segmentation) of a split."""

    loss: float
    accuracy: float
    iou: float | None
    """Segmentation: intersection over union of the pixels that are not background (class 0)."""


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
    with network.evaluating() as (model, part), torch.inference_mode():
        for x, y in sequential_batches(data, batch, part):
            if stop():
                return None
            totals += _counts(model(x.to(device)), y.to(device), criterion)
    loss, right, count, overlap, union = map(sum, zip(*network.gather(totals.tolist()), strict=True))
    iou = (overlap / union if union else 1.0) if data.task == "segment" else None
    return Evaluation(loss / count, right / count, iou)


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
