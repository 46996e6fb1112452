"""Which rank this process is, from the environment that torchrun or srun gave it. Pure: no torch, no network."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shoal.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORTS = range(10_000, 30_000)
"""Ports for srun's worlds: above the reserved ones, below those that systems hand out to clients."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int
    """Among the ranks of this host."""
    local_size: int | None
    """Ranks of this host; None where it is not known."""
    host: str
    """Where the ranks meet."""
    port: int
    origin: Literal["shoal", "torchrun", "srun"]
    """Who started the ranks."""
    first: int = 0
    """Where ranks are grouped in replicas: the number of this group's first rank in the run."""
    group: str = ""
    """Such a group's name; ranks of one name meet."""
    group_here: int | None = None
    """How many of its ranks are on this host; None where it is not known."""
    everyone: int = 0
    """Where ranks are grouped: the ranks of all groups together."""
    table: str = ""
    """Where ranks that Shoal started meet; they have no host and port."""

    @property
    def number(self) -> int:
        """This rank among all ranks of the run."""
        return self.first + self.rank

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks, where they are grouped those of this group, are surely on this host."""
        here = self.group_here if self.group else self.local_size
        return here is not None and here >= self.size

    @property
    def run_on_one_host(self) -> bool:
        """Whether the ranks of all groups are surely on this host."""
        return self.local_size is not None and self.local_size >= (self.everyone or self.size)

    @property
    def url(self) -> str:
        """The table at which the ranks meet."""
        return self.table or f"tcp://{self.host}:{self.port}"

    @property
    def listens_at(self) -> str:
        """The name or address of rank 0's host at which it can be reached by the others."""
        return LOOPBACK if self.on_one_host else self.host

    def in_replica(self, ranks: int) -> "World":
        """This process among the ranks of its replica, where every `ranks` of this world are one."""
        replica, rank = divmod(self.rank, ranks)
        first = replica * ranks
        return replace(
            self,
            rank=rank,
            size=ranks,
            first=first,
            group=f"replica{replica}",
            group_here=None if self.local_size is None else self._on_host_in(first, first + ranks),
            everyone=self.size,
        )

    def _on_host_in(self, first: int, end: int) -> int:
        """How many of the ranks from `first` to `end` are on this host, which has its ranks one after the other."""
        assert self.local_size is not None
        begin = self.rank - self.local_rank
        return max(0, min(end, begin + self.local_size) - max(first, begin))

    def workers(self, asked: int | None) -> int:
        """Its size; a `ConfigError` where the user asked for another number of workers. None: nobody asked."""
        if asked not in (None, self.size):
            raise ConfigError(
                f"workers = {asked}, but {self.origin} started {self.size} ranks.",
                f"Leave --workers out, or give {self.origin} another number.",
            )
        return self.size


def surrounding(environ: Mapping[str, str] | None = None) -> World | None:
    """The world that `environ` (this process's own unless given) describes, or None where this process is alone.

    torchrun's variables win over srun's, since torchrun may run below srun. A description that is incomplete or
    not made of numbers is a `ConfigError` that names the variable.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and _slurm_tasks(environ) > 1:
        return _from_srun(environ)
    return None


def _from_torchrun(environ: Mapping[str, str]) -> World:
    size = _number(environ, "WORLD_SIZE")
    return _checked(
        World(
            rank=_number(environ, "RANK"),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", default=_number(environ, "RANK")),
            local_size=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None,
            host=_text(environ, "MASTER_ADDR", default=LOOPBACK if size == 1 else None),
            port=_number(environ, "MASTER_PORT", default=0 if size == 1 else None),
            origin="torchrun",
        )
    )


def _from_srun(environ: Mapping[str, str]) -> World:
    hosts = hosts_of(_text(environ, "SLURM_STEP_NODELIST", default=environ.get("SLURM_JOB_NODELIST")))
    alone = len(hosts) == 1
    size = _slurm_tasks(environ)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    here = _number(environ, "SLURM_NODEID", default=0)
    per_host = tasks_per_host(counts) if counts else []
    job = _number(environ, "SLURM_JOB_ID", default=0)
    step = _number(environ, "SLURM_STEP_ID")
    return _checked(
        World(
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_size=size if alone else per_host[here] if here < len(per_host) else None,
            host=environ.get("MASTER_ADDR", LOOPBACK if alone else hosts[0]),
            # Steps of one job may run side by side, so the step counts too.
            port=_number(environ, "MASTER_PORT", default=PORTS[(31 * job + step) % len(PORTS)]),
            origin="srun",
        )
    )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of this step; an allocation of four tasks may hold a step of one, such as a shell."""
    return _number(environ, "SLURM_STEP_NUM_TASKS", default=_number(environ, "SLURM_NTASKS", default=1))


def hosts_of(nodes: str) -> list[str]:
    """Slurm's list of hosts, written out.

    >>> hosts_of("login,node[01-03,07]-ib")
    ['login', 'node01-ib', 'node02-ib', 'node03-ib', 'node07-ib']
    """
    return [host for group in _split_outside_brackets(nodes) for host in _expanded(group)]


def _split_outside_brackets(text: str) -> list[str]:
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)


def _expanded(group: str) -> list[str]:
    """One name with any number of bracketed ranges."""
    bracket = re.search(r"\[([^\]]*)\]", group)
    if bracket is None:
        return [group]
    before, after = group[: bracket.start()], group[bracket.end() :]
    return [f"{before}{number}{rest}" for number in _numbers(bracket[1]) for rest in _expanded(after)]


def _numbers(ranges: str) -> list[str]:
    """`01-03,07` as 01, 02, 03, 07: leading zeros are part of a name."""
    expanded = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        expanded += [str(number).zfill(len(first)) for number in numbers]
    return expanded


def tasks_per_host(counts: str) -> list[int]:
    """Slurm's tasks for each host, written out.

    >>> tasks_per_host("2(x3),1")
    [2, 2, 2, 1]
    """
    terms = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in terms for _ in range(int(times or 1))]


def _text(environ: Mapping[str, str], name: str, *, default: str | None = None) -> str:
    value = environ.get(name, default)
    if not value:
        raise ConfigError(
            f"the environment describes a world of several ranks, but {name} is not set.",
            f"Start the ranks with torchrun or srun, or set {name}; without RANK and WORLD_SIZE this process is alone.",
        )
    return value


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = _text(environ, name, default=None if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"the environment sets {name} = {text!r}, not a number.", f"Correct or unset {name}.")
    return int(text)


def _checked(world: World) -> World:
    if world.size < 1 or world.rank >= world.size:
        raise ConfigError(
            f"the environment describes rank {world.rank} of {world.size} ranks.",
            "Ranks count from 0: RANK is below WORLD_SIZE.",
        )
    return world
