"""How good a network is on a whole split."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.data import DataSet, sequential_batches


@dataclass(frozen=True)
class Evaluation:
    """Means over every sample (classification) or every pixel (segmentation) of a split."""

    loss: float
    accuracy: float
    iou: float | None
    """Segmentation: intersection over union of the pixels that are not background (class 0)."""


def evaluate(
    model: nn.Module,
    data: DataSet,
    *,
    batch: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Test `model` on every sample of `data`, in evaluation mode; None if `stop` said so meanwhile.

    Leaves the network in training mode and the random state untouched.
    """
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    model.eval()
    try:
        with torch.inference_mode():
            for x, y in sequential_batches(data, batch):
                if stop():
                    return None
                totals += _counts(model(x.to(device)), y.to(device))
    finally:
        model.train()
    loss, right, count, overlap, union = totals.tolist()
    iou = (overlap / union if union else 1.0) if data.task == "segment" else None
    return Evaluation(loss / count, right / count, iou)


def _counts(scores: Tensor, truth: Tensor) -> Tensor:
    """(sum of losses, right answers, answers, foreground intersection, foreground union)."""
    guess = scores.argmax(1)
    right = guess == truth
    foreground = (guess > 0) | (truth > 0)
    return torch.stack(
        [
            F.cross_entropy(scores, truth, reduction="sum").double(),
            right.sum().double(),
            torch.tensor(float(truth.numel()), dtype=torch.float64, device=truth.device),
            (right & foreground).sum().double(),
            foreground.sum().double(),
        ]
    )
