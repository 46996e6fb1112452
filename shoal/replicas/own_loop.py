"""`shoal.exchange`: an exchange between replicas in a training loop of one's own.

torchrun --nproc-per-node 2 script.py

with shoal.exchange(model, optimizer, "downpour", n_sync=4) as exchange:
    for x, y in batches:                     # this replica's own
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        exchange.step()                      # in the place of optimizer.step()
                                             # now all replicas are done, and all have the same weights
"""

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import ConfigError, PeerError, RunError, show_ranks
from shoal.exchanges import parse_exchange
from shoal.exchanging import (
    Kind,
    Meeting,
    MeetingPlace,
    Replica,
    Tally,
    join,
    serve_in_threads,
    take_seat,
)
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.exchanging.replica import TAKEN_OVER, bare
from shoal.execution import ParallelModule
from shoal.execution.whole import another_transport, ranks_of
from shoal.launching import World, assembled, surrounding, table_of
from shoal.replicas.finishing import Rendezvous
from shoal.replicas.in_step import InStep
from shoal.replicas.roll_call import Presence, replicas_of
from shoal.training.laid import replica_of
from shoal.transport.agreement import agree
from shoal.transport.links import LOOPBACK, LinkLost
from shoal.transport.table import all_are_here, all_may_come

TIMEOUT = 120.0
LOOK_SECONDS = 0.1
"""Time between two checks who is still there."""
ATTEMPTS = 20
"""Attempts to find all replicas with the same weights: one that was frozen may push between."""


def exchange(model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "allreduce", **options: Any) -> "OwnLoop":
    """Make this process one replica of a world that torchrun or srun started, or part of one; alone, the only one.

    model      a module of one's own: then every rank is a replica. Or what `shoal.parallelize(..., group=...)` gave on
               this rank: then the ranks of each group are one replica, and all groups together are all ranks. Replicas
               count by their lowest rank
    optimizer  of the model's parameters. Where replicas make all steps themselves (`allreduce`, `easgd`, `admm`,
               `gossip`, `local`; `downpour` with rule="add" or n_sync over 1; `dasgd`, unless momentum is at the
               server or n_sync 1) any one, with any groups. Where servers step (`sync`, `backup`, `softsync`,
               `hogwild`, `downpour` and `dasgd` otherwise) torch.optim.SGD, whose rate, momentum and weight decay, the
               same in all groups, are taken over; its own `step` is not called. With rule="adagrad", which has no
               momentum, also torch.optim.Adagrad
    name, options  as for `--exchange` and `--exchange-options`, but for `warm_start`: who trains first, the loop says

    What the optimizer trains is exchanged, and begins everywhere as replica 0 has it. Frozen parameters must be the
    same on all replicas; buffers stay each one's own. A collective: all ranks of the world call it. Where no torchrun
    keeps the port at which ranks find each other, it hears nobody new until the exchange is closed: call
    torch.distributed.init_process_group, if you need it, before.

    Raises `ConfigError`, in the same words on all ranks, for an unknown name, option or optimizer, and for networks
    that overlap, are of different size or differ; `PeerError` where a rank does not come within 120 seconds.
    """
    world = surrounding()
    if world is not None and world.size == 1:
        world = None
    if world is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "the processes of this world were not started by torchrun or srun.",
            "Start them so: replicas find each other through what these tell them.",
        )
    return OwnLoop(model, optimizer, name, options, world)


def _table(world: World) -> Any:
    """Where replicas find each other: the table of the process group, if there is one, since only one can be served."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return table_of(world.in_replica(1), TIMEOUT)


def _parsed(name: str, options: Mapping[str, Any]) -> Kind:
    parsed = parse_exchange(name, options)
    assert isinstance(parsed, Kind)
    if parsed.lone_batches:
        raise ConfigError(
            f"warm_start = {parsed.lone_batches} is for shoal train, which hands out the batches.",
            "Do without it: let rank 0 train some steps alone, and have the others settle() before their first.",
        )
    return parsed


def _ranks_of(model: nn.Module, world: World | None) -> tuple[int, ...]:
    """The ranks of the world that a network is laid over."""
    own = 0 if world is None else world.rank
    if not isinstance(model, ParallelModule) or ranks_of(model) == (0,) or not dist.is_initialized():
        return (own,)
    if world is None or (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise ConfigError(
            f"torch.distributed knows this process as rank {dist.get_rank()} of {dist.get_world_size()}, and whoever "
            f"started it as rank {own} of {1 if world is None else world.size}.",
            "Call torch.distributed.init_process_group without rank and world_size, which torchrun has set.",
        )
    return ranks_of(model)


def _replica(model: nn.Module, optimizer: torch.optim.Optimizer) -> Replica:
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise ConfigError(
            f"the optimizer has {strange} parameter{'s' if strange > 1 else ''} that the network does not have: nobody "
            "would exchange them.",
            "Make them part of the network, or give them an optimizer of their own.",
        )
    if isinstance(model, ParallelModule):
        if model.cuts_optimizer_state:
            raise ConfigError(
                'a network with optimizer_state="cut" cannot be exchanged: its ranks keep rows, not whole parts.',
                'Leave optimizer_state out of shoal.parallelize: "whole" is what it is unless told.',
            )
        return replica_of(model, optimizer, another_transport(model))
    return Replica(named, optimizer)


class _Alone:
    """The assembly of a world of one."""

    world = 1

    def gather_objects(self, value: Any, operation: str = "") -> list[Any]:  # noqa: ARG002
        return [value]

    def show(self, ranks: Any) -> str:
        return show_ranks(ranks)

    def close(self) -> None:
        """Nothing to do: there is no other rank."""


class OwnLoop:
    """This rank's side of an exchange. Use it in a `with` statement: left in good order it is `finish`ed and closed.

    All ranks of a replica call the same methods in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
        options: Mapping[str, Any],
        world: World | None,
    ) -> None:
        self._ending = ExitStack()
        """What to close, last opened first."""
        self._closed = False
        self._place: MeetingPlace | None = None
        self._finished = False
        """Whether no step came after the last `finish`."""
        assembly: Any = _Alone() if world is None else assembled(world, _table(world), TIMEOUT)
        try:
            self._begin(model, optimizer, name, options, world, assembly)
        except BaseException:
            self._end()
            raise

    def _begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
        options: Mapping[str, Any],
        world: World | None,
        assembly: Any,
    ) -> None:
        own = 0 if world is None else world.rank

        def look() -> tuple[Kind, Replica, Presence]:
            parsed, ranks, replica = _parsed(name, options), _ranks_of(model, world), _replica(model, optimizer)
            parsed.taken_over(optimizer)
            return parsed, replica, _presence(model, replica, ranks, parsed)

        parsed, replica, presence = agree(assembly, look)
        present: list[Presence] = assembly.gather_objects(presence)
        self._ranks = replicas_of(present)
        self.replicas = len(self._ranks)
        """How many there are."""
        self.number = self._ranks.index(presence.ranks)
        """Which of them this rank is part of."""
        parsed.check_replicas(self.replicas)
        parsed = parsed.among(self.replicas)
        self._options, self._optimizer, self._transport = parsed, optimizer, replica.transport
        self._in_step = InStep(parsed.name, self.number, self._show, survives=parsed.survives)
        self._taken, self._count = parsed.taken_over(optimizer), _count(optimizer)
        self._checked: list[Any] = []
        """The optimizer's settings as they were last found to be those that servers took over."""
        size = sum(present[rank].weight_bytes for rank in self._ranks[0])
        told = agree(assembly, lambda: self._open(world, size) if own == 0 else None)
        meeting = next(answer for answer in assembly.gather_objects(told) if answer is not None)
        pids = [present[rank].pid for rank in presence.ranks]
        self._seat = take_seat(Meeting.from_json(meeting), self._transport, self.number, pids, parsed.heartbeat)
        self._ending.callback(self._seat.hang_up)
        if not parsed.survives:
            self._seat.listen(self.number, lambda notice: self._in_step.hear(notice, self._interrupt))
        assembly.close()  # all are seated: from here on the coordinator sees who is gone
        all_are_here()
        self._ending.callback(all_may_come)
        welcome = self._seat.welcome
        if welcome["kind"] == "threads":
            server = serve_in_threads(self._seat, self.number, welcome["servers"])
            if server is not None:
                self._ending.callback(server.close)
        self._exchange = join(parsed, replica, self._seat, self.number)
        self._ending.callback(self._exchange.close)
        self._exchange.begin(first=self.number == 0)

    def step(self) -> bool | None:
        """After backward, in the place of `optimizer.step()`; at the rates of the optimizer's groups.

        False if what this replica did was dropped (too late, or too stale); None if it is pushed with a later step.

        With `allreduce` and `sync` all replicas take the same steps: a `RunError` on all, at once, where one takes
        another step after one has finished, and a `PeerError` that names a replica which is gone.
        """
        self._check_optimizer()
        self._finished = False
        with self._in_step.step(self._tell_of_step):
            done = self._exchange.step(None)
        self._optimizer.__dict__["_opt_called"] = True  # torch's schedules warn if `step` was never called
        return done

    def settle(self) -> None:
        """Make this replica's weights the common ones as they are now. Waits for nobody; the others may train on.

        To test or save on the way. With asynchronous exchanges no two replicas have the same weights after it: when
        all are done, call `finish`.
        """
        self._exchange.settle()

    def finish(self) -> bool | None:
        """Wait until every replica has done this too; then all have the same weights, bit for bit.

        What is not pushed yet is pushed before: False if it was dropped as too stale, None if there was nothing.
        May be called more than once, such as at the end of each epoch: training goes on when all have the weights.
        Leaving the `with` block calls it, unless no step came since the last one.

        Promise   the same on all replicas: weights, compared by a digest, and momentum that servers keep. Not batch
                  norm's running statistics, which are each replica's own.
        Cost      time until the slowest is done; with servers a copy of the weights to each replica; a digest of them.
        Failure   a replica that is lost, has left, or is frozen for longer than `heartbeat`, is not awaited; one that
                  wakes meanwhile is. With `allreduce` and `sync` a replica that takes more steps than another is a
                  `RunError` on all, at once. Weights that differ though nobody pushes (with `allreduce`, by optimizers
                  that are set differently) are a `RunError`. If rank 0 is gone, where all meet, a `PeerError`.
        """
        pushed = self._exchange.flush()
        self._exchange.rest()
        for _ in range(ATTEMPTS):
            said, _ = self._meet("done")
            if {words["phase"] for words in said.values()} != {"done"}:
                continue
            self._exchange.settle()
            said, number = self._meet("same", self._marks())
            if {words["phase"] for words in said.values()} == {"same"} and _all_alike(said):
                self._exchange.wake(complete=len(said) == self.replicas)
                self._in_step.go_on(number)
                self._finished = True
                return pushed
        raise RunError(
            f"replicas {', '.join(said)} are done and have different weights.",
            "Give their optimizers the same settings, and change weights on all of them alike.",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank needs to go on beside network and optimizer: copies, for every rank to save its own.

        What was not sent yet (`compress`, `dasgd`), and momentum or weights that are each replica's own. Waits for
        nobody. Take it after the `settle` or `finish` that makes the weights which are saved, since those may send some
        of it; but before where replicas have weights of their own (easgd, admm, gossip, local), which end with it.
        """
        return {name: value.detach().clone() for name, value in self._exchange.own_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state_dict` gave on the same rank; before the first step. `{}` begins with nothing.

        A `ValueError` where it is of another network, or of one that was laid by another plan.
        """
        if state:
            self._exchange.put_own_state(state)

    def wait_until_sent(self) -> None:
        """Return when nothing is on its way that `gossip` sends beside the training: for whoever times steps."""
        self._exchange.wait_until_sent()

    def take_tally(self) -> Tally:
        """What happened since the last time: updates, staleness, time spent waiting, bytes."""
        return self._exchange.take_tally()

    def close(self) -> None:
        """Leave, after what is not pushed yet, without waiting for others to be done.

        Rank 0, where they meet, waits until they left or were lost. One that is frozen it waits for as long as the
        time-out says.
        """
        if self._closed:
            return
        try:
            self._exchange.flush()
            if self._seat.welcome["kind"] == "threads" and self._seat.rank == 0:
                self._seat.ask({"ask": "farewell"})
            self._seat.leave()
            if self._place is not None:
                self._wait_for_others(self._place.coordinator)
        finally:
            self._end()

    # Being done together

    def _meet(self, phase: str, marks: list[str] | None = None) -> tuple[Mapping[str, Mapping[str, Any]], int]:
        """What every replica says that is there, by its number, and in which round; the same on all ranks of all."""
        question = {"ask": "meet", "phase": phase, "steps": self._in_step.steps, "marks": marks}
        reply: Mapping[str, Any] = {"again": True}
        while "again" in reply:
            mine = agree(self._transport, lambda: self._seat.ask(question).head if self._seat.rank == 0 else None)
            reply = next(answer for answer in self._transport.gather_objects(mine) if answer is not None)
        if "said" in reply:
            return reply["said"], reply["round"]
        if reply.get("uneven"):
            replica, step = reply["uneven"]
            raise self._in_step.uneven(self.number, self._in_step.steps, replica, step)
        raise PeerError("the other replicas are gone.", "Look at what rank 0 says, where replicas meet.")

    def _marks(self) -> list[str]:
        """Digests of this replica's weights, one of each of its ranks."""
        return self._transport.gather_objects(self._exchange.replica.mark())

    def _interrupt(self) -> None:
        self._exchange.interrupt()

    def _tell_of_step(self) -> None:
        """Tell those who have finished that this replica takes another step."""
        if self._seat.rank == 0:
            with suppress(LinkLost):  # rank 0, where all meet, may end on this news before it answers
                self._seat.ask({"ask": "meet", "phase": "step", "steps": self._in_step.steps})

    def _show(self, replica: int) -> str:
        return f"replica {replica} ({show_ranks(self._ranks[replica])})"

    def _check_optimizer(self) -> None:
        """Check that the optimizer is as at the beginning: a schedule or the script may have changed it."""
        if _count(self._optimizer) != self._count:
            raise ConfigError(
                f"the optimizer has {_count(self._optimizer)} parameters, and had {self._count} at the beginning.",
                "Give it all parameters that are ever to be trained, and then call shoal.exchange.",
            )
        if self._taken is None:
            return
        group, *others = self._optimizer.param_groups
        settings = [group.get(name) for name in TAKEN_OVER]
        if settings == self._checked and not others:  # several groups must have one rate, which may be any
            return
        if (now := self._options.taken_over(self._optimizer)) != self._taken:
            assert now is not None
            changed = next(name for name in now if now[name] != self._taken[name])
            raise ConfigError(
                f"{changed} of the optimizer is {now[changed]:g}; when servers took it over it was "
                f"{self._taken[changed]:g}.",
                "Leave it as it is (the rate may change), or use 'allreduce', where every replica steps by itself.",
            )
        self._checked = settings

    # Beginning and end

    def _open(self, world: World | None, size: int) -> str:
        """The place where replicas meet, on rank 0; what the others must know of it."""
        host, store = (LOOPBACK, None) if world is None else (world.listens_at, world.url)
        one_host = world is None or world.on_one_host
        held = self._options.holding(self.replicas, one_host=one_host, weight_bytes=size)
        rendezvous = Rendezvous(in_step=not self._options.survives)
        self._place = MeetingPlace(
            self._options,
            self.replicas,
            held,
            host=host,
            store=store,
            timeout=TIMEOUT,
            answer=rendezvous.answer,
            on_event=rendezvous.on_event,
        )
        self._ending.callback(self._place.close)
        rendezvous.open(self._place.coordinator)
        self._ending.callback(rendezvous.close)
        self._place.start_servers(on_end=self._place.coordinator.lose_server)
        return self._place.meeting.to_json()

    def _wait_for_others(self, coordinator: Coordinator) -> None:
        """Wait while one gives signs of life; when none does, for the time-out, in which a frozen one may wake."""
        alive = time.monotonic()
        with coordinator.changed:
            while time.monotonic() < alive + TIMEOUT:
                states = {member.state for member in coordinator.members.values()}
                if not states & {"active", "frozen"}:
                    return
                if "active" in states:
                    alive = time.monotonic()
                coordinator.changed.wait(LOOK_SECONDS)

    def _end(self) -> None:
        """Close everything without saying goodbye: the others count this replica as lost, unless it has left before."""
        self._closed = True
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._end()
            return
        try:
            if not self._closed and not self._finished:
                self.finish()
            self.close()
        except BaseException:
            self._end()
            raise


def _presence(model: nn.Module, replica: Replica, ranks: tuple[int, ...], options: Kind) -> Presence:
    given = ", ".join(f"{name}={value!r}" for name, value in options.model_dump(exclude_unset=True).items())
    frozen = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen.update(f"{name}{tuple(parameter.shape)}".encode())
            frozen.update(bare(parameter).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Presence(
        ranks=ranks,
        exchange=f"{options.name!r}{f' ({given})' if given else ''}",
        shards=tuple(
            (name, tuple(replica.parameters[name].shape), str(replica.parameters[name].dtype)) for name in replica.names
        ),
        weight_bytes=sum(weight.nbytes for weight in replica.weights),
        frozen=frozen.hexdigest(),
        pid=os.getpid(),
    )


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _all_alike(said: Mapping[str, Mapping[str, Any]]) -> bool:
    marks = [words["marks"] for words in said.values()]
    return all(mark == marks[0] for mark in marks)
