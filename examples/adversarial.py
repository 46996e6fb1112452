"""Adversarial training (PGD): each step first changes the images, by their own gradients, so that the loss grows.

torchrun --nproc-per-node 2 examples/adversarial.py model
"""

import torch
from ranks import digits, finish, mine, parallel, report
from torch import Tensor
from torch.nn import functional as F

import shoal

BATCH, FAR, PACE, STEPS = 8, 1.0, 0.5, 3


def shorter(change: Tensor, length: float) -> Tensor:
    """A change of each image, scaled down to at most this length."""
    norms = torch.linalg.vector_norm(change, dim=(1, 2, 3), keepdim=True)
    return change * torch.clamp(length / norms, max=1)


torch.manual_seed(0)
images, labels = digits(BATCH)
model = parallel(shoal.zoo.lenet5(), (BATCH, 1, 28, 28))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# some noise: in an even background all values of a pooling window are equal, and rounding decides which one learns
x, y = mine(images + 0.01 * torch.rand(images.shape)), mine(labels)
for step in range(4):
    attacked = x.clone()
    for _ in range(STEPS):
        attacked.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(attacked), y), attacked)
        attacked = x + shorter(attacked.detach() + shorter(1e6 * gradient, PACE) - x, FAR)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(attacked), y)
    torch.autograd.backward(loss)
    optimizer.step()
    report(step, loss)
finish()
