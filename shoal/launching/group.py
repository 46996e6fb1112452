"""Join the ranks of a world in one process group, with a time-out, and leave it again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from shoal.launching.world import LOOPBACK, World
from shoal.machine import interface_at

TIMEOUT = 120.0
"""Seconds that a rank waits for another before it gives up. Steps are shorter; torch's thirty minutes are too long."""

_turns = count()
"""Numbers the worlds that this process joins and the texts that it is told: the same number on all ranks."""


@contextmanager
def joined(world: World, device: str = "cpu", timeout: float = TIMEOUT) -> Iterator[None]:
    """This process as `world.rank` of a process group: Gloo on CPU, NCCL on CUDA with this host's own device.

    A rank that waits longer than `timeout` seconds for another gets torch's error. Leaving without an error waits for
    the other ranks. After an error the group is left as it is, because closing it may wait for messages that will
    never come: the process should end, which closes its connections and so tells the others.
    """
    import torch

    from shoal.transport.groups import enter_world, leave_world
    from shoal.transport.table import all_are_here, all_may_come, under

    stay_on_host(world)
    on = torch.device("cuda", world.local_rank) if torch.device(device).type == "cuda" else torch.device("cpu")
    if world.group and world.size == 1:  # a replica of one rank needs no group
        if on.type == "cuda":
            torch.cuda.set_device(on)
        yield
        all_may_come()
        return
    # What an earlier group of these ranks wrote would lead to connections that are gone.
    table = under(table_of(world, timeout), f"{world.group or 'world'}/{next(_turns)}")
    enter_world(world.rank, world.size, table, timeout, on)
    if not world.group:
        all_are_here()
    yield
    leave_world()
    all_may_come()


def stay_on_host(world: World) -> None:
    """Where all ranks are on this host, let Gloo listen there alone."""
    if world.on_one_host and (interface := interface_at(LOOPBACK)):
        # Gloo takes the interface of the host's name, which in a container may be none that works.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def table_of(world: World, timeout: float) -> Any:
    """The table in which all ranks of a run find each other, of which `world` may be a group."""
    from shoal.transport.table import serve_table, table_at, table_of_torchrun

    if world.table:
        return table_at(world.table, timeout)
    if world.origin == "torchrun":
        table = table_of_torchrun(world.number, world.everyone or world.size, timeout)
        if table is not None:
            return table
    if world.number == 0:
        return serve_table(world.host, world.port, timeout, one_host=world.run_on_one_host)
    return table_at(world.url, timeout)


def told_to_all(world: World, table: Any, text: str | None, timeout: float = TIMEOUT, *, last: bool = False) -> str:
    """Rank 0's `text` on every rank of a world, not through the table, which others may read. All ranks call it.

    `last`: nobody will come to the table any more, until a world that was `joined` since is left.
    """
    from shoal.transport.groups import told_by_first
    from shoal.transport.table import all_are_here

    stay_on_host(world)
    name = f"shoal/told/{next(_turns)}"
    told = told_by_first(table, name, world.rank, world.size, text, timeout, world.listens_at)
    if last:
        all_are_here()
    return told


def assembled(world: World, table: Any, timeout: float = TIMEOUT) -> Any:
    """All ranks of a world, to begin something together: an `Assembly`. All ranks call it."""
    from shoal.transport.groups import Assembly

    stay_on_host(world)
    return Assembly(table, f"shoal/assembly/{next(_turns)}", world.rank, world.size, timeout, world.listens_at)
