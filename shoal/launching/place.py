"""Where the processes of a run are started: on this host, or wherever somebody else offers a place (`on_ray.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.launching.process import Process, environment, environment_of, start
from shoal.launching.world import LOOPBACK, World


class Table(Protocol):
    """Where processes of a run find each other, kept by the one that starts them."""

    url: str

    def close(self) -> None:
        """Once no process needs it any more."""


@dataclass(frozen=True)
class Gang:
    """Processes that are started together: all ranks of a run, or those of one of its replicas."""

    numbers: Sequence[int]
    """Theirs among all ranks of the run, one after the other."""
    everyone: int
    """Ranks of the whole run."""
    payload: bytes
    """What each is to do."""
    threads: int
    timeout: float
    device: str
    table: str
    """Where they meet."""
    is_replica: bool = False
    """Whether they are a group of their own."""
    patient: bool = False
    """Whether it waits for a place as long as that takes, since others train meanwhile."""

    def world(self, number: int, local_rank: int, here: int) -> World:
        """Who the process with this number is, on a host with so many of the gang."""
        size = len(self.numbers) if self.is_replica else self.everyone
        first = self.numbers[0] if self.is_replica else 0
        return World(
            number - first,
            size,
            local_rank,
            here,
            LOOPBACK,
            0,
            "shoal",
            first=first,
            group=f"replica{first // size}" if self.is_replica else "",
            group_here=here if self.is_replica else None,
            everyone=self.everyone if self.is_replica else 0,
            table=self.table,
        )


class Place(Protocol):
    """Who starts processes, and where."""

    address: str
    """At which they reach the process that starts them."""
    one_host: bool
    """Whether they are all on its host."""

    def table(self, timeout: float) -> Table:
        """A new table that all of them reach."""

    def start(self, gang: Gang, processes: list[Process]) -> None:
        """Start them and add each to `processes`, which the caller ends, also where this raises."""


class Here:
    """On this host."""

    address = LOOPBACK
    one_host = True

    def table(self, timeout: float) -> Table:  # noqa: ARG002  (a file answers at once)
        """Memory that only this user can open."""
        from shoal.transport.table import OwnTable

        return OwnTable()

    def start(self, gang: Gang, processes: list[Process]) -> None:
        """As children of this process."""
        with environment(**environment_of(gang.threads)):
            for number in gang.numbers:
                world = gang.world(number, number, len(gang.numbers))
                processes.append(start(world, gang.payload, gang.threads, gang.timeout, gang.device))


HERE = Here()
