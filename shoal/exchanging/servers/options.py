"""Options of the exchanges with asynchronous parameter servers."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from shoal.errors import ConfigError
from shoal.exchanges import Holding, Rates
from shoal.exchanging.base import Kind
from shoal.exchanging.servers.shared_memory import SharedFolder

Servers = Literal["auto", "direct", "processes", "threads"]
"""Where the user can have the common weights kept."""


class Served(Kind):
    """What exchanges by asynchronous parameter servers have in common."""

    period: ClassVar[int] = 1
    """Steps from one push and fetch to the next, unless an option says otherwise."""

    n_sync: int | None = Field(default=None, gt=0)
    """Steps from one push and fetch to the next (Paine et al. 2013). Sets n_push and n_fetch. Unless given, 1; of
    dasgd, where selecting takes time, 4 with two replicas and 2 with more."""
    n_push: int | None = Field(default=None, gt=0)
    """Steps from one push to the next (Dean et al. 2012)."""
    n_fetch: int | None = Field(default=None, gt=0)
    """Steps from one fetch to the next (Dean et al. 2012)."""
    max_staleness: int | None = Field(default=None, ge=0)
    """A gradient that is more updates behind than this is dropped, and its batch handed out again."""
    warm_start: int = Field(default=0, ge=0)
    """Batches that one replica trains on alone before the others begin (Dean et al. 2012, Paine et al. 2013)."""
    servers: Servers = "auto"
    """Where the weights are: direct (shared memory of one host), processes, threads (in the replicas)."""
    shards: int | None = Field(default=None, gt=0)
    """Into how many parts the weights are cut, each with a lock of its own; large tensors are split."""

    asynchronous = True
    counts_received = True

    @property
    def lone_batches(self) -> int:
        """`warm_start`."""
        return self.warm_start

    @property
    def drops(self) -> bool:
        """With `max_staleness`."""
        return self.max_staleness is not None

    @property
    def push_every(self) -> int:
        """Steps from one push to the next."""
        return self.n_push or self.n_sync or self.period

    @property
    def fetch_every(self) -> int:
        """Steps from one fetch to the next."""
        return self.n_fetch or self.n_sync or self.period

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:
        """With what the rule remembers."""
        return place_of_weights(self.servers, self.shards, replicas, one_host=one_host, needed=2 * weight_bytes)

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:  # noqa: ARG002
        """A copy of the weights with every push and with every fetch."""
        return 0 if in_memory else round(weights / self.push_every + weights / self.fetch_every)

    def check_replicas(self, replicas: int) -> None:
        """A replica's threads hold one shard."""
        check_threads(self.servers, self.shards, replicas)

    @model_validator(mode="after")
    def _check_periods(self) -> "Served":
        if self.n_sync is not None and (self.n_push or self.n_fetch):
            raise ConfigError(
                f"n_sync = {self.n_sync} and n_push or n_fetch both say how often replicas exchange.",
                "Give n_sync alone, or n_push and n_fetch.",
            )
        return self


def place_of_weights(servers: Servers, shards: int | None, replicas: int, *, one_host: bool, needed: int) -> Holding:
    """Where the weights go: `auto` is shared memory, on one host that has room for `needed` bytes.

    A `ConfigError` where they cannot be kept where the option says.
    """
    place = servers
    if place == "auto":
        place = "direct" if one_host and needed < SharedFolder.room() else "processes"
    if place != "direct":
        return Holding(place, shards or (replicas if place == "threads" else 1))
    if not one_host:
        raise ConfigError(
            "servers = 'direct' shares memory, but the replicas are on several hosts.",
            "Give servers=processes or servers=threads.",
        )
    no_room(needed, "servers = 'direct'", "Give servers=processes")
    return Holding("direct")


def no_room(needed: int, what: str, remedy: str) -> None:
    """A `ConfigError` where so many bytes of shared memory are not free."""
    room = SharedFolder.room()
    if needed >= room:
        raise ConfigError(
            f"{what} needs {needed >> 20} MiB of shared memory, of which {room >> 20} MiB are free.",
            f"{remedy}, or the system more (docker run --shm-size).",
        )


def asynchronous_rates(given: Rates, replicas: int, *, at_servers: bool) -> Rates:
    """Rates for updates that are each made from one replica's part of the batch, as it comes.

    There are R times as many updates as one worker makes, and a gradient is late by R - 1 of them: each goes 1 / R of
    the way. What momentum makes of that way, lr / (1 - momentum), is all that counts for whether late gradients are
    borne: up to 1 / curvature where they are late by one, whatever the momentum. One worker bears up to
    2 (1 + momentum) / curvature of lr itself; with momentum 0.9 that is a way 38 times as long. So momentum remembers a
    quarter of the updates it was told to. `at_servers`: where it mixes the gradients of all replicas. A replica that
    keeps it and pushes how far it came steps by gradients of its own that are not late: it remembers half.
    """
    return Rates(given.lr / replicas, given.momentum).remembering(1 / 4 if at_servers else 1 / 2)


def momentum_adds_up(replicas: int, lr: float, momentum: float) -> list[str]:
    """A warning, where servers step with momentum on the gradients of several replicas."""
    if not momentum or replicas == 1:
        return []
    return [
        f"momentum {momentum:g} at the server adds to that of {replicas} asynchronous replicas: a rate tuned for one "
        f"worker may diverge. If it does, lower --lr (now {lr:g}) or --momentum."
    ]


def check_threads(servers: str, shards: int | None, replicas: int) -> None:
    """A `ConfigError` where there are more shards than replicas whose threads could hold them."""
    if servers == "threads" and (shards or 0) > replicas:
        raise ConfigError(
            f"shards = {shards} with servers = 'threads', but there are {replicas} replicas to hold them.",
            f"Give at most shards={replicas}, or servers=processes.",
        )
