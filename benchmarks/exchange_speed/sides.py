"""The exchanges that take turns, by name, and what is asked of each. Pure: nothing is started here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.comparing.timing import whole_periods
from shoal.exchanges import parse_exchange

WAIT_FOR_ALL = ("allreduce", "sync", "backup", "local")
"""Exchanges whose replicas wait for the slowest: they take equally many steps."""
GOAL = 0.92
"""Of the throughput of two replicas that exchange nothing, for every exchange as it is unless told otherwise."""
GOAL_BESIDE_SLOW = 0.95
"""The same where one replica is slower, for exchanges that wait for nobody."""


@dataclass(frozen=True)
class Side:
    """An exchange that takes turns."""

    exchange: str
    options: Mapping[str, Any] = field(default_factory=dict)
    untold: bool = False
    """Whether it is as a user has it who says nothing but its name."""
    before: bool = False
    """Whether it is the other checkout's."""

    @property
    def waits_for_all(self) -> bool:
        """Whether its replicas take equally many steps."""
        return self.exchange in WAIT_FOR_ALL

    def whole_periods(self, steps: int) -> int:
        """At least so many steps, such that every step's part of the exchange is paid."""
        return whole_periods(parse_exchange(self.exchange, self.options), steps)

    def goal(self, slow: float) -> float | None:
        """Least share of the ceiling; None where none is set."""
        if not self.untold:
            return None
        if slow == 1:
            return GOAL
        return None if self.waits_for_all else GOAL_BESIDE_SLOW


UNTOLD = {
    "allreduce": Side("allreduce", untold=True),
    "sync": Side("sync", untold=True),
    "backup, none late": Side("backup", {"backups": 0}, untold=True),
    "downpour": Side("downpour", untold=True),
    "dasgd": Side("dasgd", untold=True),
    "softsync": Side("softsync", untold=True),
    "hogwild": Side("hogwild", untold=True),
    "easgd": Side("easgd", untold=True),
    "admm": Side("admm", untold=True),
    "gossip": Side("gossip", untold=True),
    "local": Side("local", untold=True),
}
"""Every exchange as it is unless told otherwise; of two replicas none can be a backup."""
PERIODS = {"downpour n_sync 4": Side("downpour", {"n_sync": 4})}
LINKS = {
    "downpour, server process": Side("downpour", {"servers": "processes"}),
    "downpour, server process, n_sync 5": Side("downpour", {"servers": "processes", "n_sync": 5}),
    "downpour, threads, n_sync 5": Side("downpour", {"servers": "threads", "n_sync": 5}),
    "dasgd, server process": Side("dasgd", {"servers": "processes"}),
    "dasgd, server process, n_sync 5": Side("dasgd", {"servers": "processes", "n_sync": 5}),
}
ON_ONE_HOST = {"untold": UNTOLD, "links": LINKS, "all": {**UNTOLD, **PERIODS, **LINKS}}
BETWEEN_HOSTS = {"allreduce": Side("allreduce"), **LINKS}


def by_servers(counts: list[int]) -> dict[str, Side]:
    """`sync` and `downpour` by so many servers, which are processes on all hosts in turn (Campos et al. 2017)."""
    return {
        f"{exchange}, {count} server{'s' if count > 1 else ''}": Side(
            exchange, {"servers": "processes", "shards": count}
        )
        for exchange in ("sync", "downpour")
        for count in counts
    }


def with_before(sides: Mapping[str, Side]) -> dict[str, Side]:
    """Each beside what it was in another checkout."""
    both: dict[str, Side] = {}
    for name, side in sides.items():
        both[name] = side
        both[f"{name}, before"] = Side(side.exchange, side.options, before=True)
    return both


def without_waiting(sides: Mapping[str, Side]) -> tuple[dict[str, Side], list[str]]:
    """Those that do not wait for a slow replica, and the names of the others."""
    free = {name: side for name, side in sides.items() if not side.waits_for_all}
    return free, [name for name in sides if name not in free]
