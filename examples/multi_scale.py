"""Training at several image sizes: a new size is captured when it first comes, and remembered.

torchrun --nproc-per-node 2 examples/multi_scale.py spatial
"""

import torch
from ranks import digits, finish, mine, parallel, report
from torch import nn
from torch.nn import functional as F

BATCH, SIZES = 8, (28, 36, 20, 28)

torch.manual_seed(0)
images, labels = digits(BATCH)
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
)  # fmt: skip
model = parallel(network, (BATCH, 1, 28, 28))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, size in enumerate(SIZES):
    x = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(mine(x)), mine(labels))
    torch.autograd.backward(loss)
    optimizer.step()
    report(step, loss)
finish()
