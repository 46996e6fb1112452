"""The script `ddp_script.py` with one line changed: the network trains under any plan, with one device's losses.

torchrun --nproc-per-node 4 examples/shoal_script.py spatial
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal

PLAN = sys.argv[1] if len(sys.argv) > 1 else "data"
BATCH = 16

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)
splits = shoal.data.load("digits")
model = shoal.zoo.resnet18(input=splits.train.shape, classes=10).double()

model = shoal.parallelize(model, (BATCH, *splits.train.shape), plan=PLAN)

optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
order = shoal.data.BatchOrder(samples=len(splits.train), batch=BATCH, seed=0)
for step in range(4):
    share = order.indices(0, step)[rank * BATCH // world : (rank + 1) * BATCH // world]
    x, y = splits.train.batch(share)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x.double()), y)
    torch.autograd.backward(loss)
    optimizer.step()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}", flush=True)
dist.barrier()  # a rank that leaves while Gloo still holds a tensor of its own may be aborted by torch
dist.destroy_process_group()
