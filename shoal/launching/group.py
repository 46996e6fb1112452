"""Join the ranks of a world in one process group, with a time-out, and leave it again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from shoal.launching.world import LOOPBACK, World
from shoal.machine import loopback_interface

TIMEOUT = 120.0
"""Seconds that a rank waits for another before it gives up. Steps are shorter; thirty minutes help nobody."""


@contextmanager
def joined(world: World, device: str = "cpu", timeout: float = TIMEOUT) -> Iterator[None]:
    """This process as `world.rank` of a process group: Gloo on CPU, NCCL on CUDA with this host's own device.

    A rank that waits longer than `timeout` seconds for another gets torch's error. Leaving without an error waits for
    the other ranks. After an error the group is left as it is, because closing it may wait for messages that will
    never come: the process should end, which closes its connections and so tells the others.
    """
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {"backend": "gloo"}
    if torch.device(device).type == "cuda":
        own = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(own)
        options = {"backend": "nccl", "device_id": own}
    if world.on_one_host and (interface := loopback_interface()):
        # Gloo takes the interface of the host's name, which in a container may be none that works.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world.group and world.size == 1:  # a replica that has nobody to talk to inside
        yield
        return
    patience = timedelta(seconds=timeout)
    if world.group:
        options["store"] = dist.PrefixStore(world.group, table_of(world, timeout))  # type: ignore[attr-defined]
    elif world.origin == "shoal":  # the launcher keeps the store, so that it outlives every rank
        options["store"] = store(world.port, timeout, serves=False)
    else:
        options["init_method"] = _url(world)
    dist.init_process_group(rank=world.rank, world_size=world.size, timeout=patience, **options)
    yield
    if dist.is_initialized():  # unless the caller left already
        dist.barrier()
        dist.destroy_process_group()


def store(port: int, timeout: float, *, serves: bool) -> Any:
    """The table on this host in which ranks find each other; port 0 lets the system choose a free one to serve at."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it by assignment
        LOOPBACK, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


@cache
def table_of(world: World, timeout: float) -> Any:
    """The table in which all ranks of a run find each other, of which `world` is a group. Made once per process."""
    import torch.distributed as dist

    if world.origin == "shoal":
        return store(world.port, timeout, serves=False)
    patience = timedelta(seconds=timeout)
    return next(iter(dist.rendezvous(_url(world), world.number, world.everyone, timeout=patience)))[0]  # type: ignore[attr-defined]


def _url(world: World) -> str:
    # torchrun's own agent may keep the store, which only env:// knows
    return "env://" if world.origin == "torchrun" else f"tcp://{world.host}:{world.port}"
