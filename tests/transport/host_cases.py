"""What ranks of one host do in test_one_host.py, in worlds of their own. Importable by spawned processes."""

import errno
import os
import random
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.transport import Transport, one_host
from shoal.transport.one_host import CHUNK_BYTES, MESSAGE_BYTES, HostGroup
from tests.transport.jobs import counting

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
EDGES = [0, 1, 3, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 9]
"""Sizes in bytes, near which something changes."""

LATER, NOW = "shared gradient", "shared layer"
"""Purposes of their own: other tests have these ranks too."""


def share(transport: Transport) -> None:
    """Groups of all ranks that sum through shared memory."""
    ranks = tuple(range(transport.world))
    transport.make_groups([(LATER, ranks), (NOW, ranks)])
    assert transport._on_host(LATER, ranks) is not None


def many_sums(seed: int) -> int:
    """Random sums, several in flight, begun and waited for after random delays; waited for in an order of this rank's.

    All values are small whole numbers, so that the result is exact in every type. How many were right.
    """
    transport, common, own = Transport(), random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    ranks = tuple(range(transport.world))
    share(transport)
    right = 0
    for turn in range(25):
        flying: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        for _ in range(common.randrange(1, 5)):
            kind, size = common.choice(KINDS), common.choice([*EDGES, common.randrange(4 * CHUNK_BYTES)])
            shift, largest = common.randrange(5), size // kind.itemsize
            base = torch.arange(largest) % 7 + shift
            tensor = (base * (transport.rank + 1)).to(kind)
            wanted = (base * sum(rank + 1 for rank in ranks)).to(kind)
            time.sleep(own.choice([0, 0, 0.001, 0.004]))
            if common.random() < 0.3:
                transport.sum(tensor, ranks, common.choice([LATER, NOW]))
                flying.append((None, tensor, wanted))
            else:
                flying.append((transport.sum_later(tensor, ranks, LATER, label="x"), tensor, wanted))
        own.shuffle(flying)
        for work, tensor, wanted in flying:
            if work is not None:
                work.wait()
            assert torch.equal(tensor, wanted), (turn, tensor.dtype, tensor.numel())
            right += 1
    return right


def noise(how: str) -> list[bytes]:
    """Sums or maxima of random floats, small and large, as bytes."""
    transport, found = Transport(), []
    ranks = tuple(range(transport.world))
    share(transport)
    torch.manual_seed(transport.rank)
    for kind in KINDS[:3]:
        for size in (5, 1001, 300_007):
            tensor = torch.randn(size).to(kind)
            getattr(transport, how)(tensor, ranks, NOW)
            found.append(bytes(tensor.view(torch.uint8).numpy().tobytes()))
    strided = torch.randn(40, 60).t()
    getattr(transport, how)(strided, ranks, NOW)
    return [*found, strided.contiguous().numpy().tobytes()]


def joined(trouble: str) -> str:
    """What the ranks are told when they join, with `trouble` on one of them: a group, or the reason why not."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine)
        return rows

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before, host, patience = os.posix_fallocate, one_host._host, one_host.JOIN_SECONDS
    try:
        if trouble == "off" and rank == 1:
            os.environ[one_host.SWITCH] = "gloo"
        if trouble == "full":
            one_host.JOIN_SECONDS = 3.0  # for which the others wait
        if trouble == "full" and rank == 0:
            os.posix_fallocate = no_room
        if trouble == "hosts":
            one_host._host = lambda: f"host {rank}"
        group = one_host.join(gather, rank, size, timedelta(seconds=20))
    finally:
        os.environ.pop(one_host.SWITCH, None)
        os.posix_fallocate, one_host._host, one_host.JOIN_SECONDS = before, host, patience
    if isinstance(group, str):
        return group
    dist.barrier()
    group.close()
    return "a group"


def sum_until(folder: str, fault: str, at: int) -> None:
    """Sum; the last rank fails at its `at`-th message of the group. The others leave what they raise."""
    here = Path(folder)
    (here / f"rank{dist.get_rank()}").write_text(str(os.getpid()))
    transport = Transport()
    transport.label = "sums"
    ranks = tuple(range(transport.world))
    transport.make_groups([("gradient", ranks)])
    dist.barrier()
    if transport.rank == transport.world - 1:
        left = [at]
        for seam in ("_send", "_receive"):
            setattr(HostGroup, seam, counting(getattr(HostGroup, seam), left, fault, here))
    try:
        for turn in range(10_000):
            tensors = [torch.ones(size) for size in (100, 900_000, 20_000)]
            works = [transport.sum_later(tensor, ranks, "gradient", label="sums") for tensor in tensors]
            if turn % 2:
                transport.sum(torch.ones(10), ranks, "gradient")
            for work in works:
                assert work is not None
                work.wait()
    except Exception as error:
        (here / f"said{dist.get_rank()}").write_text(f"{type(error).__name__}\n{traceback.format_exc()}")
        raise
