"""`shoal.exchange`: an exchange between replicas in a training loop of one's own.

torchrun --nproc-per-node 2 script.py

with shoal.exchange(model, optimizer, "downpour", n_sync=4) as exchange:
    for x, y in batches:                     # this replica's own
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        exchange.step()                      # in the place of optimizer.step()
    exchange.settle()                        # now the weights are the common ones
"""

import os
import subprocess
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import ConfigError
from shoal.exchanges import ExchangeOptions, parse_exchange
from shoal.exchanging import (
    Coordinator,
    Meeting,
    Replica,
    Seat,
    SharedFolder,
    Tally,
    join,
    serve_in_threads,
    server_count,
    start_server,
)
from shoal.launching import World, surrounding, table_of
from shoal.linking import LOOPBACK
from shoal.training.replicated import meeting_from, meeting_text

TIMEOUT = 120.0
_meetings = count()
"""Exchanges of this process, counted alike in all replicas."""


def exchange(model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "allreduce", **options: Any) -> "OwnLoop":
    """Make this process one replica of several, which torchrun or srun started; alone, it is the only one.

    `name` and `options` as for `--exchange` and `--exchange-options`. The first replica's weights become everybody's.
    With servers that step (`downpour` with n_sync 1, `backup`, `dasgd`) the optimizer must be plain SGD: its rate,
    momentum and weight decay are taken over, its own `step` is not called. All replicas call this.

    Raises `ConfigError` for an unknown name, option or optimizer.
    """
    parsed = parse_exchange(name, options)
    world = surrounding()
    if world is not None and world.size == 1:
        world = None
    if world is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "the processes of this world were not started by torchrun or srun.",
            "Start them so: replicas find each other through what these tell them.",
        )
    return OwnLoop(model, optimizer, parsed, world)


def _table(world: World) -> Any:
    """Where replicas find each other: the table of the process group, if there is one, since only one can be served."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return table_of(world.in_replica(1), TIMEOUT)


class OwnLoop:
    """This process's side of an exchange. Leave it with `close`, or use it in a `with` statement."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: ExchangeOptions, world: World | None
    ) -> None:
        self._optimizer = optimizer
        self._coordinator: Coordinator | None = None
        self._servers: list[subprocess.Popen[bytes]] = []
        self._shared: SharedFolder | None = None
        number = 0 if world is None else world.rank
        meeting = self._meet(options, world)
        self._seat = Seat(meeting, rank=0, ranks=1, replica=number, pids=[os.getpid()], heartbeat=options.heartbeat)
        self._seat.live(number)
        kind, servers = self._seat.welcome["kind"], self._seat.welcome["servers"]
        self._server = serve_in_threads(self._seat, number, servers) if kind == "threads" else None
        try:
            replica = Replica(dict(model.named_parameters()), optimizer)
            self._exchange = join(options, replica, self._seat, number)
        except ValueError as error:
            raise ConfigError(
                f"this optimizer cannot be used with {options.name!r}: {error}.", "Use torch.optim.SGD."
            ) from None
        self._exchange.begin(first=number == 0)

    def step(self) -> bool:
        """After backward, in the place of `optimizer.step()`; at the rate of the optimizer's first group.

        False if this gradient was dropped (too late, or too stale).
        """
        return self._exchange.step(self._optimizer.param_groups[0]["lr"])

    def settle(self) -> None:
        """Make this replica's weights the common ones, to be tested or saved."""
        self._exchange.settle()

    def take_tally(self) -> Tally:
        """What happened since the last time: updates, staleness, time spent waiting, bytes."""
        return self._exchange.take_tally()

    def close(self) -> None:
        """Leave. The replica that keeps the meeting place waits until all others left, or were lost."""
        self._seat.leave()
        self._exchange.close()
        if self._coordinator is not None:
            with self._coordinator.changed:
                self._coordinator.changed.wait_for(lambda: not self._coordinator.active())  # type: ignore[union-attr]
        if self._server is not None:
            self._server.close()
        self._end()

    def _end(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        for process in self._servers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        if self._shared is not None:
            self._shared.remove()

    def _meet(self, options: ExchangeOptions, world: World | None) -> Meeting:
        """Rank 0 opens the meeting place and tells the others where it is."""
        if world is None:
            return self._open(options, 1, LOOPBACK, one_host=True, store=None)
        table = _table(world)
        key = f"shoal/exchange/{next(_meetings)}"
        if world.rank == 0:
            host = LOOPBACK if world.on_one_host else world.host
            meeting = self._open(options, world.size, host, one_host=world.on_one_host, store=(world.host, world.port))
            table.set(key, meeting_text(meeting))
            return meeting
        return meeting_from(table.get(key).decode())

    def _open(
        self, options: ExchangeOptions, replicas: int, host: str, *, one_host: bool, store: tuple[str, int] | None
    ) -> Meeting:
        kind, servers = server_count(options, replicas, one_host=one_host)
        wanted = max(1, replicas - options.backups) if hasattr(options, "backups") else 0
        self._shared = SharedFolder.create() if kind == "direct" else None
        self._coordinator = coordinator = Coordinator(
            heartbeat=options.heartbeat,
            servers=servers,
            wanted=wanted,
            host=host,
            welcome=lambda _: {"kind": kind, "servers": servers},
        )
        if kind == "processes":
            self._servers = [start_server(coordinator.address, coordinator.token, number) for number in range(servers)]
        shared = None if self._shared is None else self._shared.path
        return Meeting(coordinator.address, coordinator.token, replicas, shared, store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end()
