"""An ordinary training loop whose replicas keep together by asynchronous servers.

torchrun --nproc-per-node 2 examples/exchange_script.py [downpour]
"""

import os
import sys

import torch
from torch.nn import functional as F

import shoal

EXCHANGE = sys.argv[1] if len(sys.argv) > 1 else "downpour"

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
torch.set_num_threads(1)
splits = shoal.data.load("digits")
model = shoal.zoo.lenet5(input=splits.train.shape, classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
order = shoal.data.BatchOrder(samples=len(splits.train), batch=32, seed=0)

with shoal.exchange(model, optimizer, EXCHANGE) as exchange:
    for step in range(order.steps_per_epoch // world):
        x, y = splits.train.batch(order.indices(0, step * world + rank))
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        exchange.step()  # in the place of optimizer.step()
    exchange.finish()  # all are done, and all have the same weights: any of them may save
    tally = exchange.take_tally()

x, y = splits.test.batch(shoal.data.first_indices(len(splits.test)))
right = (model.eval()(x).argmax(1) == y).float().mean().item()
print(f"rank {rank}: {tally.updates} updates, staleness {dict(tally.staleness)}, accuracy {right:.3f}", flush=True)
