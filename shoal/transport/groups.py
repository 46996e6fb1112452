"""Groups of ranks with connections of their own, named by ourselves.

torch names a group by counting the groups that a process knows. The halves of a world, and groups that overlap, count
differently: two groups get one name, or one group two, and its ranks wait for each other in vain. So the ranks of a
given group agree on a token, once, over that group; every group among them is named by the token, its purpose and its
ranks, and made by its members alone. Nothing enters torch's tables: a script's own groups keep their names, and its own
messages and sums on the given group never meet ours.
"""

import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from shoal.errors import ConfigError

Backend = Any
"""c10d's own: `allreduce`, `allgather`, `broadcast`, `send` and `recv`, each of which gives a work to wait for."""


@dataclass
class Circle:
    """All ranks of one given group, which count themselves from 0, and the groups among them."""

    members: tuple[int, ...]
    """Their ranks in the world."""
    rank: int
    device: torch.device
    patience: timedelta
    """How long one waits for another: the given group's time-out."""
    name: str
    store: Any
    networks: int = 0
    """How many transports talk here so far; each takes its number at its first call, which all ranks make."""
    _made: dict[tuple[str, tuple[int, ...]], Backend] = field(default_factory=dict)

    def group(self, purpose: str, ranks: tuple[int, ...]) -> Backend:
        """The group of these ranks, this one among them; made once: it has threads and sockets, networks come and go.

        A collective of `ranks`. Whoever makes several must take them in one order on all ranks.
        """
        if (purpose, ranks) not in self._made:
            name = f"{self.name}/{purpose}/{'-'.join(map(str, ranks))}"
            own = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]  # torch exports it by assignment
            self._made[purpose, ranks] = self._connect(own, ranks.index(self.rank), len(ranks))
        return self._made[purpose, ranks]

    def _connect(self, store: Any, rank: int, size: int) -> Backend:
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, size, self.patience)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.patience
        return dist.ProcessGroupNCCL(store, rank, size, options)


@dataclass
class _Known:
    """The circles of this process, and the world they belong to. Another world has other connections."""

    world: Any = None
    """A weak reference: a world that was left may go."""
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
    return [one for one in sorted(set(wanted)) if len(one[1]) > 1 and rank in one[1]]
