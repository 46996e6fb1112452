"""An ordinary PyTorch loop over Shoal's networks and data sets: everything is usable on its own.

python examples/plain_loop.py
"""

import torch
from torch.nn import functional as F

import shoal
from shoal.data import BatchOrder, Loader

splits = shoal.data.load("digits")
model = shoal.zoo.lenet5(input=splits.train.shape, classes=splits.train.classes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = Loader(splits.train, BatchOrder(samples=len(splits.train), batch=64, seed=0))

for epoch in range(2):
    for x, y in loader.epoch(epoch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
