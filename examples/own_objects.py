"""Train your own module on your own data with your own loss and optimizer, on two workers.

python examples/own_objects.py
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal


class Stripes(Dataset[tuple[Tensor, int]]):
    """Noisy images with stripes: across is class 0, down is class 1. Any map-style data set will do."""

    classes = ("across", "down")

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.sin(torch.arange(16.0) * 1.5 + index).expand(1, 16, 16)
        image = image if index % 2 else image.transpose(1, 2)
        return image + torch.randn(1, 16, 16), index % 2  # other noise in every epoch, the same on any rank


class Tell(shoal.Listener):
    def logged(self, metrics: Mapping[str, Any]) -> None:
        if metrics["event"] == "test":
            print(f"epoch {metrics['epoch']}: test accuracy {metrics['test_accuracy']:.3f}")


net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
out = Path(mkdtemp()) / "run"
result = shoal.train(
    listener=Tell(),
    model=net,
    data=(Stripes(512), Stripes(128)),
    loss=lambda scores, target: F.cross_entropy(scores, target, label_smoothing=0.1),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    workers=2,
    plan="data",
    batch=32,
    epochs=3,
    out=out,
)
print(f"{result.workers} workers, test accuracy {result.test_accuracy:.3f}, results in {out}")
