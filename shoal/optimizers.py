"""Optimizers by name: what each can be told, and what it takes where nothing is said.

`--optimizer NAME --optimizer-options name=value,...` are torch's own names and meanings. Every one of these treats each
element of a parameter alone, so that it takes one device's steps under any plan.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ConfigError, suggestion

OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"]

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerOptions(BaseModel):
    """What an optimizer can be told beside rate, momentum and weight decay; and the usual values of those."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    torch_name: ClassVar[str]
    lr: ClassVar[float]
    momentum: ClassVar[float | None] = None
    """None: it has none of this name."""
    weight_decay: ClassVar[float] = 0.0

    def slots(self, momentum: float) -> int:
        """Tensors that it remembers of each parameter, of the parameter's size."""
        return int(momentum > 0)

    @classmethod
    def rate_for(cls, model: str) -> float:  # noqa: ARG003  (one rate for all, unless the optimizer knows better)
        """The rate where none is given, for a network of this name."""
        return cls.lr


GENTLER_RATES: Mapping[str, float] = {"alexnet": 0.01, "vgg16": 0.01, "acoustic": 0.03}
"""Of SGD, for networks of the zoo that have no batch norm. At the usual rate `acoustic` learned on one of three seeds
(benchmarks/exchange_accuracy); the other two have the rate of their papers, as we understand them."""


class Sgd(OptimizerOptions):
    """Of torch.optim.SGD."""

    torch_name = "SGD"
    lr, momentum, weight_decay = 0.05, 0.9, 5e-4
    nesterov: bool = False
    dampening: float = 0.0

    @classmethod
    def rate_for(cls, model: str) -> float:
        """The usual one, or what a network of the zoo bears.

        >>> Sgd.rate_for("lenet5"), Sgd.rate_for("acoustic")
        (0.05, 0.03)
        """
        return GENTLER_RATES.get(model, cls.lr)


class Adam(OptimizerOptions):
    """Of torch.optim.Adam."""

    torch_name = "Adam"
    lr = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    amsgrad: bool = False

    def slots(self, momentum: float) -> int:  # noqa: ARG002  (it has two moments of its own)
        """Two moments, and the largest second one."""
        return 2 + self.amsgrad


class AdamW(Adam):
    """Of torch.optim.AdamW, whose weight decay is no part of the gradient."""

    torch_name = "AdamW"
    weight_decay = 0.01


class RMSprop(OptimizerOptions):
    """Of torch.optim.RMSprop."""

    torch_name = "RMSprop"
    lr, momentum = 1e-3, 0.0
    alpha: Share = 0.99
    eps: float = Field(default=1e-8, ge=0)
    centered: bool = False

    def slots(self, momentum: float) -> int:
        """Mean square, mean, and momentum."""
        return 1 + self.centered + super().slots(momentum)


class Adagrad(OptimizerOptions):
    """Of torch.optim.Adagrad."""

    torch_name = "Adagrad"
    lr = 0.01
    lr_decay: float = Field(default=0.0, ge=0)
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-10, ge=0)

    def slots(self, momentum: float) -> int:  # noqa: ARG002  (it has none)
        """The sum of squares."""
        return 1


OPTIMIZERS: Mapping[OptimizerName, type[OptimizerOptions]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
}


def parse_optimizer(name: OptimizerName, options: Mapping[str, Any]) -> OptimizerOptions:
    """The options of the optimizer `name`; one that it does not have, or a bad value, is a `ConfigError`."""
    kind = OPTIMIZERS[name]
    for option in options:
        if option in ("lr", "momentum", "weight_decay"):
            raise ConfigError(
                f"optimizer_options: {option} is a setting of its own.", f"Give --{option.replace('_', '-')}."
            )
        if option not in kind.model_fields:
            raise ConfigError(
                f"the optimizer {name!r} has no option {option!r}.", suggestion(option, kind.model_fields)
            )
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        detail = error.errors()[0]
        field = str(detail["loc"][0])
        reason = detail["msg"].removeprefix("Input should be ")
        raise ConfigError(
            f"optimizer {name!r}: {field} = {options[field]!r} does not work: it should be {reason}.",
            f"Such as --optimizer-options '{field}={_shown(kind.model_fields[field].default)}', as torch has it.",
        ) from None


def _shown(value: object) -> str:
    """As it is written on a command line."""
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value).lower()
