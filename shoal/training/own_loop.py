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
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import ConfigError
from shoal.exchanges import ExchangeOptions, Served, parse_exchange
from shoal.exchanging import (
    Meeting,
    MeetingPlace,
    Replica,
    Seat,
    Tally,
    join,
    serve_in_threads,
    server_count,
)
from shoal.execution import ParallelModule
from shoal.launching import World, surrounding, table_of
from shoal.linking import LOOPBACK

TIMEOUT = 120.0
_meetings = count()
"""Exchanges of this process, counted alike in all replicas."""


def exchange(model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "allreduce", **options: Any) -> "OwnLoop":
    """Make this process one replica of several, which torchrun or srun started; alone, it is the only one.

    `name` and `options` as for `--exchange` and `--exchange-options`, but for `warm_start`: who trains first, the loop
    itself says. The weights of rank 0 become everybody's. With servers that step (`downpour` with n_sync 1,
    `backup`, `dasgd`) the optimizer must be plain SGD: its rate, momentum and weight decay are taken over, its own
    `step` is not called. All replicas call this.

    A replica is one process: replicas that are groups under a plan are for `shoal train`.

    Raises `ConfigError` for an unknown name, option, network or optimizer.
    """
    if isinstance(model, ParallelModule):
        raise ConfigError(
            "this network is laid over several ranks by shoal.parallelize, and here every rank is a replica.",
            "Train replicas that are groups with: shoal train --replicas R --workers N --plan P --exchange NAME",
        )
    parsed = parse_exchange(name, options)
    if isinstance(parsed, Served) and parsed.warm_start:
        raise ConfigError(
            f"warm_start = {parsed.warm_start} is for shoal train, which hands out the batches.",
            "Leave it away, let rank 0 train some steps alone, and have the others settle() before their first.",
        )
    world = surrounding()
    if world is not None and world.size == 1:
        world = None
    if world is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "the processes of this world were not started by torchrun or srun.",
            "Start them so: replicas find each other through what these tell them.",
        )
    parsed.check_replicas(1 if world is None else world.size)
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
        self._ending = ExitStack()
        """What to close, last opened first."""
        self._closed = False
        self._place: MeetingPlace | None = None
        self._replicas = 1 if world is None else world.size
        number = 0 if world is None else world.rank
        try:
            replica = Replica(dict(model.named_parameters()), optimizer)
            self._seat = self._meet(options, world, replica, number)
            self._ending.callback(self._seat.hang_up)
            self._seat.live(number)
            welcome = self._seat.welcome
            if welcome["kind"] == "threads":
                server = serve_in_threads(self._seat, number, welcome["servers"])
                if server is not None:
                    self._ending.callback(server.close)
            self._exchange = join(options, replica, self._seat, number)
            self._ending.callback(self._exchange.close)
            self._exchange.begin(first=number == 0)
        except ValueError as error:
            self._end()
            raise ConfigError(
                f"this optimizer cannot be used with {options.name!r}: {error}.", "Use torch.optim.SGD."
            ) from None
        except BaseException:
            self._end()
            raise

    def step(self) -> bool | None:
        """After backward, in the place of `optimizer.step()`; at the rates of the optimizer's groups.

        False if what this replica did was dropped (too late, or too stale); None if it is pushed with a later step.
        """
        return self._exchange.step(None)

    def settle(self) -> None:
        """Make this replica's weights the common ones, to be tested or saved."""
        self._exchange.settle()

    def take_tally(self) -> Tally:
        """What happened since the last time: updates, staleness, time spent waiting, bytes."""
        return self._exchange.take_tally()

    def close(self) -> None:
        """Leave, after what is not pushed yet. Rank 0, where the others meet, waits until they left or were lost."""
        if self._closed:
            return
        try:
            self._exchange.flush()
            if self._seat.welcome["kind"] == "threads":
                self._seat.ask({"ask": "farewell"})
            self._seat.leave()
            if self._place is not None:
                coordinator = self._place.coordinator
                with coordinator.changed:
                    coordinator.changed.wait_for(
                        lambda: len(coordinator.members) >= self._replicas and not coordinator.active(), timeout=TIMEOUT
                    )
        finally:
            self._end()

    def _end(self) -> None:
        """Without a word to the others, who see it as a loss unless it was told before. Leaves nothing behind."""
        self._closed = True
        self._ending.close()

    def _meet(self, options: ExchangeOptions, world: World | None, replica: Replica, number: int) -> Seat:
        """Rank 0 opens the meeting place and tells the others where it is."""
        size = sum(weight.nbytes for weight in replica.weights)
        if world is None:
            meeting = self._open(options, LOOPBACK, size, one_host=True, store=None)
        else:
            table, key = _table(world), f"shoal/exchange/{next(_meetings)}"
            if world.rank == 0:
                one_host, host, store = world.on_one_host, world.listens_at, (world.host, world.port)
                meeting = self._open(options, host, size, one_host=one_host, store=store)
                table.set(key, meeting.to_json())
            else:
                meeting = Meeting.from_json(table.get(key).decode())
        return Seat(meeting, rank=0, replica=number, pids=[os.getpid()], heartbeat=options.heartbeat)

    def _open(
        self, options: ExchangeOptions, host: str, size: int, *, one_host: bool, store: tuple[str, int] | None
    ) -> Meeting:
        held = server_count(options, self._replicas, one_host=one_host, weight_bytes=size)
        self._place = MeetingPlace(options, self._replicas, held, host=host, store=store, timeout=TIMEOUT)
        self._ending.callback(self._place.close)
        self._place.start_servers()
        return self._place.meeting

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end()
