"""Groups of ranks with connections of their own, named by ourselves.

torch names a group by counting the groups that a process knows. The halves of a world, and groups that overlap, count
differently: two groups get one name, or one group two, and its ranks wait for each other for ever. So the ranks of a
given group agree on a token, once, over that group; every group among them is named by the token, its purpose and its
ranks, and made by its members alone. Nothing enters torch's tables: a script's own groups keep their names, and its own
messages and sums on the given group never meet ours.

Below them: the world of a run that Shoal conducts, groups that need no world, and what is told over one.
"""

import atexit
import logging
import os
import pickle
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from shoal.errors import ConfigError, PeerError, of_network, show_ranks
from shoal.transport.links.door import own_address
from shoal.transport.one_host import HostGroup, join
from shoal.transport.strangers import hear_nobody, noted
from shoal.transport.table import Store

Backend = Any
"""c10d's own: `allreduce`, `allgather`, `broadcast`, `send` and `recv`, each of which gives a work to wait for."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Circle:
    """All ranks of one given group, which count themselves from 0, and the groups among them."""

    members: tuple[int, ...]
    """Their ranks in the world."""
    rank: int
    device: torch.device
    patience: timedelta
    """How long one waits for another: the given group's time-out."""
    name: str
    store: Store
    networks: int = 0
    """How many transports talk here so far; each takes its number at its first call, which all ranks make."""
    _made: dict[tuple[str, tuple[int, ...]], Backend] = field(default_factory=dict)
    _on_host: dict[tuple[str, tuple[int, ...]], HostGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _circles.add(self)

    def close(self) -> None:
        """Let go of the groups: their threads end, once what is under way is done."""
        while self._on_host:
            self._on_host.popitem()[1].close()
        self._made.clear()

    def on_host(self, purpose: str, ranks: tuple[int, ...]) -> HostGroup | None:
        """The same ranks as `group`, which was made before, through memory that they share; None where they cannot."""
        return self._on_host.get((purpose, ranks))

    def group(self, purpose: str, ranks: tuple[int, ...], *, sums: bool) -> Backend:
        """The group of these ranks, this one among them; made once: it has threads and sockets, networks come and go.

        A collective of `ranks`. Whoever makes several must take them in one order on all ranks. With `sums` ranks of
        one host get `on_host` too.
        """
        if (purpose, ranks) not in self._made:
            name = f"{self.name}/{purpose}/{'-'.join(map(str, ranks))}"
            own = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]  # torch exports it by assignment
            self._made[purpose, ranks] = self._connect(own, ranks.index(self.rank), len(ranks))
            if sums and self.device.type == "cpu":
                self._share(purpose, ranks)
        return self._made[purpose, ranks]

    def _share(self, purpose: str, ranks: tuple[int, ...]) -> None:
        def gather(mine: torch.Tensor) -> list[torch.Tensor]:
            rows = [torch.empty_like(mine) for _ in ranks]
            self._made[purpose, ranks].allgather([rows], [mine]).wait()
            return rows

        joined = join(gather, ranks.index(self.rank), len(ranks), self.patience)
        if isinstance(joined, HostGroup):
            self._on_host[purpose, ranks] = joined
        else:
            _log.info("Sums (%s) of %s go through Gloo: %s.", purpose, show_ranks(ranks), joined)

    def _connect(self, store: Any, rank: int, size: int) -> Backend:
        if self.device.type == "cpu":
            return gloo_group(store, rank, size, self.patience)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.patience
        return dist.ProcessGroupNCCL(store, rank, size, options)


_circles: "weakref.WeakSet[Circle]" = weakref.WeakSet()
MOMENT_SECONDS = 0.05
"""What Gloo's threads get to let go of their tensors, where they cannot be ended."""
CLOSE_SECONDS = 1.0
"""How long the end of the interpreter waits for threads of groups; one may wait for a rank that failed."""


@atexit.register
def _end_threads() -> None:
    """End the threads of all Gloo groups of ours before the interpreter ends; a script's open world gets a moment.

    A thread of Gloo lets go of a tensor a moment after all have its sum. If the interpreter is ending by then, torch
    aborts the process (seen once in some 60 short scripts): `terminate called without an active exception`.

    Costs nothing where all messages have arrived. Where one is still under way, its thread is left as it is after
    `CLOSE_SECONDS`. Groups of NCCL, which has no such threads, are left alone, and so are those that a script made: a
    world that it never left has `MOMENT_SECONDS` to let go.
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(MOMENT_SECONDS)
    circles = [circle for circle in _circles if circle.device.type == "cpu"]
    if not circles:
        return

    def close() -> None:
        for circle in circles:
            circle.close()

    closing = threading.Thread(target=close, name="shoal-closing", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # from Python 3.12 on no thread begins any more: give those of Gloo a moment instead
        time.sleep(MOMENT_SECONDS)
    else:
        closing.join(CLOSE_SECONDS)


@dataclass
class _Known:
    """The circles of this process, and the world that they belong to: another world has other connections."""

    world: Any = None
    """A weak reference, so that a world that was left can be freed."""
    circles: dict[tuple[tuple[int, ...], timedelta], Circle] = field(default_factory=dict)


_known = _Known()


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of a group, all ranks without one. A ConfigError where this process is in no such group."""
    if group is not None and not dist.is_initialized():
        raise ConfigError(
            "a group was passed, but this process is in no world.",
            "Call torch.distributed.init_process_group first, and make the group after it.",
        )
    if cast(Any, group) == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the group that it passed.",
            "Call this on the ranks of the group alone, or pass each rank the group that it is in.",
        )
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        raise ConfigError(
            f"rank {dist.get_rank()} passed a group that is no longer there.",
            "A group ends with destroy_process_group, and with the world that it was made in: make it anew.",
        ) from None


def meet(group: dist.ProcessGroup | None, members: tuple[int, ...], device: torch.device) -> Circle:
    """The circle of a group's ranks; new ones agree on their token, a small gather over the group itself."""
    world = dist.group.WORLD
    if _known.world is None or _known.world() is not world:  # the processes were initialised anew
        for left in _known.circles.values():
            left.close()
        _known.world, _known.circles = weakref.ref(world), {}
    given = cast(Any, world if group is None else group)
    patience: timedelta = given._get_backend(device).options._timeout
    key = (members, patience)
    if key not in _known.circles:
        # a new token each time: the store of a world that was initialised anew may still hold the old one's keys
        mine = torch.tensor([secrets.randbits(60)], device=device)
        tokens = [torch.empty_like(mine) for _ in members]
        dist.all_gather(tokens, mine, group=group)
        _known.circles[key] = Circle(
            members=members,
            rank=members.index(dist.get_rank()),
            device=device,
            patience=patience,
            name=f"shoal/{int(tokens[0]):015x}",
            store=dist.distributed_c10d._get_default_store(),
        )
    return _known.circles[key]


def in_order(wanted: Sequence[tuple[str, tuple[int, ...]]], rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """Those of the wanted groups that `rank` is in, in the one order of all ranks.

    So nobody waits in a circle: of the groups that are not yet made, the first one's members all come to it next.
    """
    return [group for group in sorted(set(wanted)) if len(group[1]) > 1 and rank in group[1]]


# The world of a run, and groups without one


def enter_world(rank: int, size: int, table: Store, timeout: float, device: torch.device) -> None:
    """Make this process `rank` of torch's own world: Gloo on CPU, NCCL on a CUDA device, which is this rank's own.

    A collective of all ranks. `torch.distributed` knows the world from here until `leave_world`.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    with noted() as opened:
        dist.init_process_group(rank=rank, world_size=size, store=table, timeout=timedelta(seconds=timeout), **options)
    hear_nobody(opened)


def neighbours(ranks: int) -> dist.ProcessGroup:
    """This rank's group, where every `ranks` of the world, in order, are one. Collective of the world."""
    made: tuple[dist.ProcessGroup, list[dist.ProcessGroup]] = dist.new_subgroups(ranks)  # type: ignore[no-untyped-call]
    return made[0]


def leave_world() -> None:
    """Wait for all ranks, and let torch forget the world; nothing, where the caller left it already."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


_opening = threading.Lock()
"""Held while a port is opened: a port that another thread opens then would be closed before its group is connected."""


def gloo_group(store: Store, rank: int, size: int, patience: timedelta, towards: str | None = None) -> Backend:
    """Gloo between the processes that make this group in `store`; a collective of theirs.

    It listens on the interfaces of GLOO_SOCKET_IFNAME. Without: at the address from which this host reaches `towards`;
    without that too, where torch would.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make: Any = dist.ProcessGroupGloo  # torch's own types leave half of it out
    options = make._Options()
    options._timeout = patience
    with _opening, noted() as opened:
        if interfaces:
            options._devices = [make.create_device(interface=name) for name in interfaces]
        elif towards is not None:
            options._devices = [make.create_device(hostname=own_address(towards))]
        else:
            options._devices = [make.create_default_device()]
    group = make(store, rank, size, options)
    hear_nobody(opened)
    return group


def named_group(store: Store, name: str, rank: int, size: int, timeout: float, towards: str) -> Backend:
    """A group of its own for processes that find each other in `store` by `name`, which no other group may have."""
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return gloo_group(own, rank, size, timedelta(seconds=timeout), towards)


def told_by_first(store: Store, name: str, rank: int, size: int, text: str | None, timeout: float, towards: str) -> str:
    """What rank 0 gives as `text`, on every rank. A collective: it connects all `size` processes, and lets go of them.

    It goes from process to process. In the store, which others may read, stand addresses alone.
    """
    group = named_group(store, name, rank, size, timeout, towards)
    said = (text or "").encode()
    length = torch.tensor([len(said)], device="cpu")
    _broadcast(group, length)
    content = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    if rank == 0:
        content.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    _broadcast(group, content)
    group.barrier().wait()  # nobody closes the group while another still receives
    return content.numpy().tobytes().decode()


def _broadcast(group: Backend, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


class Assembly:
    """All processes of a world for as long as they begin something together, whether or not torch knows the world.

    They find each other in `store` by `name`, which no other group may have. What they say goes from process to
    process: strangers who read the store find addresses alone. All must call the same methods in the same order. One
    that ends meanwhile, or does not come within `timeout` seconds, is a `PeerError` on the others.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: float, towards: str) -> None:
        self.rank, self.world, self._timeout = rank, size, timeout
        self._group = self._failing_well(lambda: named_group(store, name, rank, size, timeout, towards))

    def gather_objects(self, value: Any, operation: str = "assembly") -> list[Any]:  # noqa: ARG002  (as of a transport)
        """Something that pickles, from every process to every process."""
        packed = pickle.dumps(value)
        lengths = [int(row) for row in self._gathered(torch.tensor([len(packed)], device="cpu"))]
        mine = torch.frombuffer(bytearray(packed.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        rows = self._gathered(mine)
        return [pickle.loads(row.numpy().tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """Close the group. All call it, so that nobody closes while another still receives."""
        self._failing_well(lambda: self._group.barrier().wait())
        del self._group

    def show(self, ranks: Sequence[int]) -> str:
        """Ranks for people."""
        return show_ranks(ranks)

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        self._failing_well(lambda: self._group.allgather([rows], [mine]).wait())
        return rows

    def _failing_well(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if not of_network(error):
                raise
            raise PeerError(
                f"not all {self.world} ranks came together: one is gone, or did not come within {self._timeout:g} "
                "seconds.",
                "Call this on all ranks. If you do, look at the message of the one that failed first.",
            ) from None
