"""What a comparison finds: the largest difference of everything that was compared."""

from collections.abc import Mapping
from typing import Literal

Kind = Literal[
    "output", "loss", "input gradient", "value", "value gradient", "gradient", "buffer", "evaluated value",
    "later state", "later evaluation",
]  # fmt: skip
"""What was compared: in the first pass and, `later`, after the steps. Values are layers' outputs."""

Differences = Mapping[tuple[Kind, str], float]
"""By kind, and the name of the layer or state; an empty name is the network's."""
