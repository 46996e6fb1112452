"""Quantities with a unit, and how people read them."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NewType, Self

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)


def show_bytes(count: int) -> str:
    """A size for people, in binary units.

    >>> show_bytes(512), show_bytes(1536), show_bytes(25 * 2**30)
    ('512 B', '1.5 KiB', '25.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """A duration for people.

    >>> show_seconds(0.0123), show_seconds(7.25), show_seconds(200)
    ('12.3 ms', '7.2 s', '3 min 20 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_SIZES = {f"{prefix}B": Decimal(size) for prefix, size in {**_DECIMAL, **_BINARY}.items()}
_UNITS: dict[str, dict[str, Decimal]] = {
    "bytes": _SIZES,
    "bytes/s": {
        **{f"{unit}/s": size for unit, size in _SIZES.items()},
        **{f"{prefix}bit/s": Decimal(size) / 8 for prefix, size in _DECIMAL.items()},
    },
    "seconds": {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")},
    "FLOP": {f"{prefix}FLOP": Decimal(size) for prefix, size in _DECIMAL.items()},
    "FLOP/s": {f"{prefix}FLOP/s": Decimal(size) for prefix, size in _DECIMAL.items()},
}
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]{1,3})?) *([A-Za-z/]*)")


def parse_quantity(value: object, kind: str) -> float:
    """A number, alone or with a unit, in bytes, bytes/s, seconds, FLOP or FLOP/s, whichever `kind` says.

    Capitals matter: GB is a thousand million bytes, GiB 2**30, Gbit an eighth of a GB; Gb is refused, being read
    as either. Anything else is a `ValueError` that names the value and the units there are.

    >>> parse_quantity("16GiB", "bytes"), parse_quantity("100 Gbit/s", "bytes/s"), parse_quantity("5us", "seconds")
    (17179869184.0, 12500000000.0, 5e-06)
    >>> parse_quantity(9.3e12, "FLOP/s") == parse_quantity("9.3TFLOP/s", "FLOP/s")
    True
    >>> parse_quantity("56Gb/s", "bytes/s")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: '56Gb/s' is not a number of bytes/s; with a unit it ends in B/s, KB/s, MB/s, GB/s, ...
    """
    units = _UNITS[kind]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2] not in {"", *units}:
        raise ValueError(f"{value!r} is not a number of {kind}; with a unit it ends in {', '.join(units)}")
    return float(Decimal(found[1]) * units.get(found[2], Decimal(1)))


def show_quantity(value: float, kind: str) -> str:
    """The same number for people and for files, in the unit that leaves the fewest digits; reads back exactly.

    >>> show_quantity(12.5e9, "bytes/s"), show_quantity(2**34, "bytes"), show_quantity(5e-7, "seconds")
    ('100Gbit/s', '16GiB', '500ns')
    >>> show_quantity(1 / 3, "seconds")
    '0.3333333333333333'
    """
    found = []
    for unit, size in _UNITS[kind].items():
        number = f"{Decimal(repr(value)) / size:f}"
        number = number.rstrip("0").rstrip(".") if "." in number else number
        if len(number) < 12 and parse_quantity(number + unit, kind) == value:
            digits = len(number.replace(".", "").strip("0"))
            found.append((number.startswith("0"), digits, "bit" in unit, -size, number + unit))
    return min(found)[-1] if found else repr(value)


_PERIOD = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(steps?|epochs?|min(?:utes?)?|)")


@dataclass(frozen=True)
class Period:
    """How often something happens in a run: every so many steps, epochs or minutes."""

    count: float
    unit: Literal["steps", "epochs", "minutes"]

    @classmethod
    def parse(cls, value: object) -> Self:
        """A text such as 500steps, 1epoch or 10min; a number alone is one of epochs. Else a `ValueError`.

        >>> str(Period.parse("500 steps")), str(Period.parse(2)), str(Period.parse("0.5min"))
        ('500steps', '2epochs', '0.5min')
        """
        if isinstance(value, cls):
            return value
        text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
        found = _PERIOD.fullmatch(text)
        unit: Literal["steps", "epochs", "minutes"] = "epochs"
        if found is not None and found[2]:
            unit = "steps" if found[2][0] == "s" else "minutes" if found[2][0] == "m" else "epochs"
        if found is None or float(found[1]) <= 0 or (unit != "minutes" and "." in found[1]):
            raise ValueError("a number of steps, epochs or minutes above 0, such as 500steps, 1epoch or 10min")
        return cls(float(found[1]), unit)

    def __str__(self) -> str:
        word = {"steps": "step", "epochs": "epoch", "minutes": "min"}[self.unit]
        return f"{self.count:g}{word}" + ("s" if self.count != 1 and self.unit != "minutes" else "")

    def every(self, unit: str) -> int | None:
        """The count of this unit, of steps or epochs; None where it is in another."""
        return int(self.count) if self.unit == unit else None


GROW_SECONDS = 60.0
"""After a loss a run goes on for so long before it grows again, unless told otherwise."""
_WORKERS = re.compile(r"([0-9]+):([0-9]+)(?::([0-9]+(?:\.[0-9]+)?))?")


@dataclass(frozen=True)
class WorkerRange:
    """On how many workers a run may go on after a loss, and when lost ones are replaced."""

    least: int
    most: int
    seconds: float = GROW_SECONDS

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """A text such as 2:4, or 2:4:30 where lost workers are replaced after 30 seconds; none is None.

        >>> WorkerRange.parse("2:4"), str(WorkerRange.parse("2:4:30"))
        (WorkerRange(least=2, most=4, seconds=60.0), '2:4:30')
        """
        if isinstance(value, cls) or value in (None, "none"):
            return value if isinstance(value, cls) else None
        found = _WORKERS.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError("MIN:MAX workers, such as 2:4, or MIN:MAX:SECONDS")
        return cls(int(found[1]), int(found[2]), float(found[3] or GROW_SECONDS))

    def __str__(self) -> str:
        seconds = "" if self.seconds == GROW_SECONDS else f":{self.seconds:g}"
        return f"{self.least}:{self.most}{seconds}"
