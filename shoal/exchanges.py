"""Exchanges by name, and what each can be told: how several replicas of one network keep together.

`--exchange NAME --exchange-options name=value,...` on the command line and `shoal.exchange(...)` in a script are these
fields and no others. Each field's text says what it does and which paper it is from.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import ConfigError, suggestion

Servers = Literal["auto", "direct", "processes", "threads"]


class ExchangeOptions(BaseModel):
    """What every exchange can be told."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )
    name: ClassVar[str]
    lockstep: ClassVar[bool] = False
    """Whether all replicas take every step together, each on its share of one batch."""
    survives: ClassVar[bool] = True
    """Whether training goes on when a replica is lost."""

    heartbeat: float = Field(default=5.0, gt=0)
    """Seconds without a sign of life after which a replica counts as frozen and its batches go to others; and after
    which people are told of a server that is frozen."""

    def parts_of_batch(self, replicas: int) -> int:
        """Replicas whose gradients make up one batch."""
        return replicas

    def check_replicas(self, replicas: int) -> None:
        """A `ConfigError` where so many replicas cannot do what the options say."""


class Allreduce(ExchangeOptions):
    """Every step all replicas take the mean of their gradients. Exact: R replicas are one with R times the batch."""

    name = "allreduce"
    lockstep = True
    survives = False

    bucket_bytes: int = Field(default=25 << 20, gt=0)
    """Bytes of gradients that are summed at a time."""


class Backup(ExchangeOptions):
    """Of N + b replicas the first N gradients of a version count, the others are dropped (Chen et al. 2016)."""

    name = "backup"

    backups: int = Field(default=1, ge=0)
    """b: replicas that a step need not wait for. 0 waits for all."""

    def parts_of_batch(self, replicas: int) -> int:
        """Without the backups: whichever replicas are late."""
        return replicas - self.backups

    def check_replicas(self, replicas: int) -> None:
        """Somebody's gradient must count."""
        if self.backups >= replicas:
            raise ConfigError(
                f"backups = {self.backups} leaves none of {replicas} replicas to wait for.",
                "Give more replicas, or fewer backups.",
            )


class Served(ExchangeOptions):
    """What exchanges by asynchronous parameter servers have in common."""

    period: ClassVar[int] = 1
    """Steps between exchanges unless told otherwise."""

    n_sync: int | None = Field(default=None, gt=0)
    """Steps from one push and fetch to the next (Paine et al. 2013). Sets n_push and n_fetch. Unless given, 1; of dasgd
    4, because selecting takes time."""
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

    @property
    def push_every(self) -> int:
        """Steps from one push to the next."""
        return self.n_push or self.n_sync or self.period

    @property
    def fetch_every(self) -> int:
        """Steps from one fetch to the next."""
        return self.n_fetch or self.n_sync or self.period

    def check_replicas(self, replicas: int) -> None:
        """A replica's threads hold one shard."""
        if self.servers == "threads" and (self.shards or 0) > replicas:
            raise ConfigError(
                f"shards = {self.shards} with servers = 'threads', but there are {replicas} replicas to hold them.",
                f"Give at most shards={replicas}, or servers=processes.",
            )

    @model_validator(mode="after")
    def _check_periods(self) -> "Served":
        if self.n_sync is not None and (self.n_push or self.n_fetch):
            raise ConfigError(
                f"n_sync = {self.n_sync} and n_push or n_fetch both say how often replicas exchange.",
                "Give n_sync alone, or n_push and n_fetch.",
            )
        return self


class Downpour(Served):
    """Asynchronous parameter servers: whoever has a gradient pushes it, nobody waits (Dean et al. 2012)."""

    name = "downpour"

    rule: Literal["auto", "sgd", "adagrad", "add"] = "auto"
    """What servers do: sgd (with the run's momentum), adagrad (Dean 2012), or add changes that replicas made
    themselves, with a momentum of their own (Paine 2013). auto: sgd when every step is pushed, else add."""

    @property
    def server_rule(self) -> Literal["sgd", "adagrad", "add"]:
        """The rule that `auto` stands for."""
        if self.rule != "auto":
            return self.rule
        return "sgd" if self.push_every == 1 else "add"


class Dasgd(Served):
    """Asynchronous servers with sparse gradients, momentum and decay with staleness (Chan & Lane 2014).

    With `sparse=none, decay=none` it is plain `downpour`, of `rule=add` with `momentum_at=worker`, else of `rule=sgd`.
    """

    name = "dasgd"
    period = 4

    sparse: Literal["none", "sampled", "topk", "threshold"] = "sampled"
    """Which elements of each tensor are pushed: the largest (topk: exactly; sampled: above a threshold that is
    estimated from a sample), those above a fixed threshold (Chan & Lane), or all."""
    density: float = Field(default=0.01, gt=0, le=1)
    """Share of each tensor that sampled and topk push."""
    density_back: float | None = Field(default=None, gt=0, le=1)
    """Share of each tensor that servers send back over links. Unless given four times `density`: what a replica is not
    told makes its next gradients stale, and with as little back as forth accuracy was lost."""
    threshold: float = Field(default=1e-4, gt=0)
    """Smallest magnitude that `sparse=threshold` pushes."""
    residual: bool = True
    """Keep what was not pushed and add it to the next gradient (Strom 2015), or drop it."""
    momentum_at: Literal["server", "worker"] = "worker"
    """Where the run's momentum is kept. At the server every weight changes with every push; at the worker and with
    n_sync over 1 the replica's own optimizer has it, and pushes how far it came."""
    decay: Literal["none", "exponential", "inverse"] = Field(
        default="exponential",
        description="How a stale gradient is weakened: decay_base ** staleness (Chan & Lane 2014), "
        "1 / staleness (Zhang et al. 2016).",
    )
    decay_base: float = Field(default=0.9, gt=0, le=1)
    """Base of the exponential decay."""

    @property
    def share_back(self) -> float:
        """Share of each tensor that servers send back over links."""
        return self.density_back or min(1.0, 4 * self.density)

    @model_validator(mode="after")
    def _check_sparse(self) -> "Dasgd":
        if self.push_every != self.fetch_every:
            raise ConfigError(
                f"dasgd pushes every {self.push_every} and fetches every {self.fetch_every} steps.",
                "Give n_sync: dasgd pushes and fetches in one go.",
            )
        return self


EXCHANGES: dict[str, type[ExchangeOptions]] = {kind.name: kind for kind in (Allreduce, Backup, Downpour, Dasgd)}


def parse_exchange(name: str, options: Mapping[str, Any]) -> ExchangeOptions:
    """The options of the exchange `name`; an unknown name, an unknown option or a bad value is a `ConfigError`."""
    if name not in EXCHANGES:
        raise ConfigError(f"there is no exchange {name!r}.", suggestion(name, EXCHANGES))
    kind = EXCHANGES[name]
    for option in options:
        if option not in kind.model_fields:
            raise ConfigError(f"the exchange {name!r} has no option {option!r}.", suggestion(option, kind.model_fields))
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        detail = error.errors()[0]
        field = str(detail["loc"][0])
        reason = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ConfigError(
            f"exchange {name!r}: {field} = {detail['input']!r} does not work: it should be {reason}.",
            f"{field}: {kind.model_fields[field].description}",
        ) from None
