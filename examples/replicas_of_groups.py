"""Replicas that are groups of ranks: a plan inside each, an exchange between them.

torchrun --nproc-per-node 4 examples/replicas_of_groups.py [downpour] [model]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal

EXCHANGE = sys.argv[1] if len(sys.argv) > 1 else "downpour"
PLAN = sys.argv[2] if len(sys.argv) > 2 else "model"
BATCH = 32

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]  # every rank makes all groups
group, place = pairs[rank // 2], rank % 2

torch.manual_seed(0)
splits = shoal.data.load("digits")
net = shoal.zoo.lenet5(input=splits.train.shape, classes=10)
model = shoal.parallelize(net, (BATCH, *splits.train.shape), PLAN, group=group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
order = shoal.data.BatchOrder(samples=len(splits.train), batch=BATCH, seed=0)

with shoal.exchange(model, optimizer, EXCHANGE) as exchange:
    for step in range(order.steps_per_epoch // exchange.replicas):
        x, y = splits.train.batch(order.indices(0, step * exchange.replicas + exchange.number))
        x, y = x.chunk(2)[place], y.chunk(2)[place]  # this rank's samples of its replica's batch
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        exchange.step()
# The end of the block waits for all replicas: now all have the same weights.

state = model.state_dict()  # whole; all ranks of a replica call it
if rank == 0 and "SAVE" in os.environ:
    torch.save(state, os.environ["SAVE"])
plain = shoal.zoo.lenet5(input=splits.train.shape, classes=10)
plain.load_state_dict(state)
x, y = splits.test.batch(shoal.data.first_indices(len(splits.test)))
right = (plain.eval()(x).argmax(1) == y).float().mean().item()
print(f"rank {rank}, replica {exchange.number} of {exchange.replicas}: accuracy {right:.4f}", flush=True)
dist.destroy_process_group()
