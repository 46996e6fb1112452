"""When replicas die and come back: both drawn from exponential distributions, seeded."""

from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.units import parse_quantity

_WRITE = "Write lifetime and away, such as --churn lifetime=3600,away=600, or --churn none."


@dataclass(frozen=True)
class Churn:
    """Mean seconds that a replica lives, and that pass until another comes in its place; 0: none ever does."""

    lifetime: float
    away: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Churn | None":
        """From `lifetime=3600,away=600`; None of `none`. What cannot be read is a `ConfigError`.

        >>> Churn.parse("lifetime=3600,away=60"), Churn.parse("none")
        (Churn(lifetime=3600.0, away=60.0), None)
        """
        if text.strip() == "none":
            return None
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = float(parse_quantity(value.strip(), "seconds"))
            except ValueError:
                raise ConfigError(f"churn = {text!r}: {value!r} is not a time.", _WRITE) from None
        if (
            not {"lifetime"} <= set(values) <= {"lifetime", "away"}
            or values["lifetime"] <= 0
            or min(values.values()) < 0
        ):
            raise ConfigError(f"churn = {text!r} does not say how long replicas live.", _WRITE)
        return cls(**values)
