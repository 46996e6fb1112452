"""What the ranks of these tests do. Importable, so that spawned processes find it."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.transport import Transport

SEAMS = ("_begin", "_reduce_later", "_begin_gather")
"""Where a transport calls the network."""


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(512, 6))


def strike(fault: str, folder: Path) -> None:
    """This rank fails; that it did is left in the folder."""
    (folder / "fired").touch()
    if fault == "raise":
        raise ValueError("the weights\nare too heavy")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault])


def counting(method: Callable[..., Any], at: list[int], fault: str, folder: Path) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        at[0] -= 1
        if at[0] == 0:
            strike(fault, folder)
        return method(*args, **options)

    return counted


def train_until(folder: str, fault: str, at: int, plan: str) -> None:
    """Train; the last rank fails at its `at`-th call of the network. The others leave what they raise."""
    here = Path(folder)
    (here / f"rank{dist.get_rank()}").write_text(str(os.getpid()))
    model = shoal.parallelize(network(), (6, 3, 8, 8), plan, bucket_bytes=4096)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        left = [at]
        for seam in SEAMS:
            setattr(Transport, seam, counting(getattr(Transport, seam), left, fault, here))
    try:
        for _ in range(1000):
            torch.autograd.backward(model(torch.ones(6 // dist.get_world_size(), 3, 8, 8)).sum())
            model.zero_grad()
    except Exception as error:
        (here / f"said{dist.get_rank()}").write_text(f"{type(error).__name__}\n{traceback.format_exc()}")
        raise


def begin_again(folder: str) -> list[float]:
    """Leave the world and make another of the same ranks, twice; networks of each work, old connections are left."""
    rank, world, sums = dist.get_rank(), dist.get_world_size(), []
    for turn in range(3):
        if turn:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=rank, world_size=world)
        model = shoal.parallelize(network(), (6, 3, 8, 8), "model")
        out = model(torch.ones(6 // world, 3, 8, 8))
        torch.autograd.backward(out.sum())
        sums.append(float(out.detach().sum()))
    return sums
