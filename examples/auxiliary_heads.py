"""GoogLeNet's way of training: heads in the middle of the network have losses of their own, in training only.

torchrun --nproc-per-node 2 examples/auxiliary_heads.py model
"""

from typing import NamedTuple

import torch
from ranks import digits, finish, mine, parallel, report
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 8


class Scores(NamedTuple):
    """What the network returns; the second is None in evaluation."""

    logits: Tensor
    middle: Tensor | None


class Inception(nn.Module):
    """Four branches side by side, as in Szegedy 2014."""

    def __init__(self, channels: int, one: int, three: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, one, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, three // 2, 1), nn.ReLU(), nn.Conv2d(three // 2, three, 3, 1, 1))
        self.five = nn.Sequential(nn.Conv2d(channels, five // 2, 1), nn.ReLU(), nn.Conv2d(five // 2, five, 5, 1, 2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1))


class GoogLeNet(nn.Module):
    """Small: three blocks, and a head behind the second."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Inception(8, 4, 8, 4, 4), Inception(20, 8, 12, 6, 6))
        self.last = Inception(32, 12, 16, 8, 8)
        self.middle = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, classes))
        self.head = nn.Linear(44, classes)

    def forward(self, x: Tensor) -> Scores:
        x = self.blocks(self.stem(x))
        middle = self.middle(x) if self.training else None
        return Scores(self.head(self.last(x).mean((2, 3))), middle)


torch.manual_seed(0)
images, labels = digits(BATCH)
model = parallel(GoogLeNet(), (BATCH, 1, 28, 28))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

x, y = mine(images), mine(labels)
for step in range(4):
    optimizer.zero_grad()
    scores = model(x)
    loss = F.cross_entropy(scores.logits, y) + 0.3 * F.cross_entropy(scores.middle, y)
    torch.autograd.backward(loss)
    optimizer.step()
    report(step, loss)
model.eval()
assert model(x).middle is None
finish()
