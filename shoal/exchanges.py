"""Exchanges by name: how several replicas of one network keep together, and what each can be told.

`--exchange NAME --exchange-options name=value,...` on the command line and `shoal.exchange(...)` in a script are the
fields of an exchange's `Options` and no others. Everything about a kind of exchange is in its one file: its options,
what it promises, and what it does. Here is what all have in common, and where to find them.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ConfigError, suggestion

EXCHANGE_NAMES = (
    *("allreduce", "sync", "backup"),
    *("downpour", "dasgd", "softsync", "hogwild"),
    *("easgd", "admm", "gossip", "local"),
)
EXCHANGES: Mapping[str, str] = {name: f"shoal.exchanging.{name}" for name in EXCHANGE_NAMES}
"""The file of each exchange, loaded when somebody asks for it: it needs torch, and settings are read without."""


Place = Literal["none", "direct", "processes", "threads"]
"""Where common weights are: nowhere but in the replicas, in memory that they share, with servers that are processes, or
with servers that are threads of replicas."""


class Holding(NamedTuple):
    """Where the common weights of a run are held, and by how many servers."""

    place: Place
    servers: int = 0


class Rates(NamedTuple):
    """Rate and momentum of a run."""

    lr: float
    momentum: float

    def remembering(self, share: float) -> "Rates":
        """With momentum that remembers this share of the updates that it was told to remember: 1 / (1 - momentum).

        >>> [round(Rates(0.05, momentum).remembering(1 / 2).momentum, 3) for momentum in (0.95, 0.9, 0.5, 0.0)]
        [0.9, 0.8, 0.0, 0.0]
        """
        return Rates(self.lr, max(0.0, 1 - (1 - self.momentum) / share))

    def told(self, given: "Rates") -> str | None:
        """For people: what an exchange does with the rates that were given; None where it takes them as they are.

        >>> Rates(0.025, 0.6).told(Rates(0.05, 0.9))
        'uses lr 0.025 instead of 0.05 and momentum 0.6 instead of 0.9'
        """
        changes = [
            f"{name} {now:g} instead of {before:g}"
            for name, now, before in (("lr", self.lr, given.lr), ("momentum", self.momentum, given.momentum))
            if now != before
        ]
        return f"uses {' and '.join(changes)}" if changes else None


class ExchangeOptions(BaseModel):
    """What every exchange can be told, and the facts of its kind that a training loop goes by."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )
    name: ClassVar[str]
    same_batch: ClassVar[bool] = False
    """Whether each replica trains on its share of one batch, so that all take the same number of steps."""
    averages_every_step: ClassVar[bool] = False
    """Whether all replicas have the same weights after every step: none is ever stale."""
    survives: ClassVar[bool] = True
    """Whether training goes on when a replica is lost."""
    takes_late: ClassVar[bool] = True
    """Whether a replica may join a run that is under way."""
    asks_ahead: ClassVar[bool] = True
    """Whether a replica may ask for its next batch before this one is done; not where a step may wait for the batches
    of other replicas."""
    asynchronous: ClassVar[bool] = False
    """Whether the common weights go on while a replica waits, so that a gradient of those it has would be stale."""
    keeps_own: ClassVar[bool] = False
    """Whether replicas go on with weights of their own, which are not the common ones."""
    counts_received: ClassVar[bool] = False
    """Whether what replicas receive counts as sent between them: servers are no replicas."""
    registers: ClassVar[bool] = False
    """Whether replicas that share memory must see there who takes part now."""

    heartbeat: float = Field(default=5.0, gt=0)
    """Seconds without a sign of life after which a replica counts as frozen and its batches go to others; and after
    which people are told of a server that is frozen."""

    rates: Literal["auto", "given"] = "auto"
    """What --lr and --momentum are: those of one worker at --batch, which this exchange turns into its own (auto), or
    already this exchange's own (given)."""

    def tuned(self, given: Rates, replicas: int) -> Rates:
        """The rates that this exchange has where one worker has those that are given."""
        return self.own_rates(given, replicas) if self.rates == "auto" and replicas > 1 else given

    def own_rates(self, given: Rates, replicas: int) -> Rates:  # noqa: ARG002
        """Of so many replicas, from those of one worker; the same where every update is by a whole batch."""
        return given

    @property
    def lone_batches(self) -> int:
        """Batches that one replica trains on alone before the others begin."""
        return 0

    @property
    def drops(self) -> bool:
        """Whether a step may be refused because it comes too late. Its batch is then trained on again."""
        return False

    @property
    def hands_in(self) -> bool:
        """Whether a replica has something that nobody else has: weights of its own, or what it has not sent yet.

        A checkpoint has a slot for each then.
        """
        return self.keeps_own

    @property
    def own_in_words(self) -> str:
        """For people: what a replica has of its own."""
        return "weights of their own" if self.keeps_own else "what they had not sent yet"

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:  # noqa: ARG002
        """What crosses between a replica and others in one step, of so many bytes of weights.

        `in_memory`: replicas share the memory of the weights. None where it depends on values, or on who is late.
        """
        return None

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:  # noqa: ARG002
        """Where the common weights of a run are; a `ConfigError` where there is no room for them."""
        return Holding("none")

    def gradients_per_update(self, replicas: int) -> int:  # noqa: ARG002
        """Gradients that the coordinator lets count for one update; 0 where it does not choose among them."""
        return 0

    def parts_of_batch(self, replicas: int) -> int:
        """Replicas whose gradients make up one batch."""
        return replicas

    def check_replicas(self, replicas: int) -> None:
        """A `ConfigError` where so many replicas cannot do what the options say."""

    def among(self, replicas: int) -> Self:  # noqa: ARG002
        """The same options for so many replicas: what was not given and goes by their number is settled."""
        return self

    def warnings(self, replicas: int, *, lr: float, momentum: float) -> list[str]:  # noqa: ARG002
        """What may surprise in these settings, for people."""
        return []


def parse_exchange(name: str, options: Mapping[str, Any]) -> ExchangeOptions:
    """The options of the exchange `name`; an unknown name, an unknown option or a bad value is a `ConfigError`."""
    if name not in EXCHANGES:
        raise ConfigError(f"there is no exchange {name!r}.", suggestion(name, EXCHANGES))
    kind: type[ExchangeOptions] = import_module(EXCHANGES[name]).Options
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
