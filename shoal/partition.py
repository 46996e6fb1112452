"""How one layer's output is cut over ranks. Integers only: no tensors, no processes."""

import re
from dataclasses import dataclass
from math import prod
from typing import Self

from shoal.errors import PlanError

DIMS = "nckdhw"
"""Sample, channel, contracted input channel, depth, height, width: the order in which a cut is written."""

_TERM = re.compile(r"([a-z])(\d+)")


@dataclass(frozen=True)
class Cut:
    """Into how many parts each dim is cut; dims that are not named stay whole.

    >>> Cut.parse("h2n2"), Cut.parse("n2h2").parts, str(Cut.parse("n1"))
    (Cut(degrees=(('n', 2), ('h', 2))), 4, '1')
    """

    degrees: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """A cut from its short form: `n2h2` is two parts by sample times two by height, `1` is whole."""
        terms = _TERM.findall(text)
        degrees = {dim: int(degree) for dim, degree in terms}
        spelled = "".join(dim + degree for dim, degree in terms)
        well_formed = spelled == text and len(degrees) == len(terms) > 0 and set(degrees) <= set(DIMS)
        if text != "1" and not well_formed:
            raise PlanError(
                f"{text!r} is not a cut.",
                f"Write a dim of {', '.join(DIMS)} and a number of parts for each dim that is cut, such as "
                "n4, c2 or n2h2; 1 leaves the layer whole.",
            )
        if 0 in degrees.values():
            raise PlanError(f"cut {text!r} asks for 0 parts.", "Each dim has at least 1 part.")
        return cls(tuple((dim, degrees[dim]) for dim in DIMS if degrees.get(dim, 1) > 1))

    @property
    def parts(self) -> int:
        """Ranks that the cut uses."""
        return prod(degree for _, degree in self.degrees)

    def __str__(self) -> str:
        return "".join(f"{dim}{degree}" for dim, degree in self.degrees) or "1"
