"""The sides of both comparisons, by name: DDP, and exchanges with the options that they have here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

DDP = "ddp"
PERIOD = 10


@dataclass(frozen=True)
class Side:
    """An exchange, its options, and how many steps make up one whole period of it."""

    exchange: str
    options: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1
    link_copies: float = 1.0
    """Copies of the weights that pass the link one after the other per step, about: to tell how long a run lasts."""


SIDES = {
    "local": Side("local", {"period": PERIOD}, PERIOD, 2 / PERIOD),
    "allreduce": Side("allreduce"),
    "allreduce int8": Side("allreduce", {"compress": "int8"}, link_copies=0.25),
    "allreduce topk": Side("allreduce", {"compress": "topk"}, link_copies=0.02),
    "gossip": Side("gossip", {}, PERIOD, 0.25),
    "downpour": Side("downpour", {"n_sync": PERIOD}, PERIOD, 2 / PERIOD),
    "easgd": Side("easgd", {}, 4, 2 / 4),
}


def chosen(names: str) -> dict[str, Side]:
    """Those whose names are given, with semicolons between."""
    return {name: SIDES[name] for name in names.split(";")}


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def link_seconds(size: float, link: str) -> float:
    """How long so many bytes take at such as 100mbit.

    >>> link_seconds(12_500_000, "100mbit")
    1.0
    """
    for unit, bits in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if link.endswith(unit):
            return 8 * size / (float(link.removesuffix(unit)) * bits)
    raise ValueError(f"{link} is no speed such as 100mbit or 1gbit")
