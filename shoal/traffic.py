"""Payload: what ranks send, as it is counted and as it is predicted."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """Payload that a rank sends."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.bytes + other.bytes, self.messages + other.messages)


def total(traffic: Mapping[str, Sent]) -> Sent:
    """All labels together."""
    return sum(traffic.values(), Sent())


def ring_bytes(size: int, ranks: int, index: int) -> int:
    """What one of `ranks` sends when a ring adds up `size` bytes; over all ranks exactly 2 (ranks-1) size.

    >>> [ring_bytes(10, 3, index) for index in range(3)]
    [13, 13, 14]
    """
    all_ranks = 2 * (ranks - 1) * size
    return all_ranks * (index + 1) // ranks - all_ranks * index // ranks
