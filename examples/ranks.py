"""What the scripts here share: who this process is, its samples of a batch, and the mean of a number over the ranks.

python examples/gan.py                                         one device, plain torch
torchrun --nproc-per-node 2 examples/gan.py spatial            the same network over two ranks, the same numbers
"""

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal

PLAN = sys.argv[1] if len(sys.argv) > 1 else "data"
ALONE = "RANK" not in os.environ

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
if not ALONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ALONE else (dist.get_rank(), dist.get_world_size())


def digits(samples: int) -> tuple[Tensor, Tensor]:
    """The first images of the digits that come with the package, and their labels."""
    images, labels = shoal.data.load("digits").train.batch(np.arange(samples))
    return images.double(), labels


def parallel(model: nn.Module, example: Any) -> nn.Module:
    """The network over all ranks as the plan says; on one device the network itself."""
    return model if ALONE else shoal.parallelize(model, example, plan=PLAN)


def mine(tensor: Tensor) -> Tensor:
    """This rank's share of a batch."""
    return tensor.tensor_split(world)[rank]


def report(step: int, *losses: Tensor) -> None:
    """Print the mean over the ranks of each loss; the last number of the line is the sum."""
    mean = torch.stack([loss.detach() for loss in losses]) / world
    if not ALONE:
        dist.all_reduce(mean)
    if rank == 0:
        print("step", step, *(f"{value:.12f}" for value in [*mean.tolist(), mean.sum().item()]), flush=True)


def finish() -> None:
    """Part in good order."""
    if not ALONE:
        dist.destroy_process_group()
