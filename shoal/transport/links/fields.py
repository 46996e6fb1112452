"""Fields of what a peer says, checked before anything is done with them: a wrong one is a `LinkRefused`.

A peer that knows the token may still be of another version, or broken: it may lose its own link by that, nothing more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.transport.links.link import LinkRefused

LARGEST = 2**53
"""Larger integers are refused: nothing is counted as far as that."""


def refused(problem: str) -> LinkRefused:
    """What the peer said does not fit."""
    return LinkRefused(problem, "Both sides must have the same version of Shoal.")


def text(said: Mapping[str, Any], name: str, among: Sequence[str] | None = None) -> str:
    """A string, one of `among` where that is given."""
    value = said.get(name)
    if not isinstance(value, str) or (among is not None and value not in among):
        raise refused(f"{name} = {_short(value)} where {'a string' if among is None else ' or '.join(among)} belongs.")
    return value


def integer(said: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST) -> int:
    """An integer from `least` to `most`."""
    return as_integer(said.get(name), name, least, most)


def as_integer(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """The same check of a value that is not in a mapping."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise refused(f"{name} = {_short(value)} where an integer from {least} to {most} belongs.")
    return value


def number(said: Mapping[str, Any], name: str) -> float:
    """A finite number."""
    value = said.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise refused(f"{name} = {_short(value)} where a number belongs.")
    return float(value)


def flag(said: Mapping[str, Any], name: str) -> bool:
    """True or False."""
    value = said.get(name)
    if not isinstance(value, bool):
        raise refused(f"{name} = {_short(value)} where true or false belongs.")
    return value


def integers(said: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST) -> tuple[int, ...]:
    """A list of integers."""
    value = said.get(name)
    if not isinstance(value, list):
        raise refused(f"{name} = {_short(value)} where a list of integers belongs.")
    return tuple(as_integer(item, name, least, most) for item in value)


def address(said: Mapping[str, Any], name: str) -> tuple[str, int]:
    """A host and a port."""
    value = said.get(name)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise refused(f"{name} = {_short(value)} where a host and a port belong.")
    return value[0], as_integer(value[1], name, 1, 65535)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else f"{shown[:60]}..."
