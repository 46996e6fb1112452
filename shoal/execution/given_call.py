"""One call of the network on one rank: what it was given, what it tells the others, how two ranks' calls differ."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.capturing.attributes import short
from shoal.capturing.sight import differing
from shoal.capturing.signature import Call

Key = tuple[Any, ...]
"""(mark of the modules' settings, form of the call, sizes of its tensors, training): what decides what code runs."""


@dataclass
class GivenCall:
    """A call as this rank was given it."""

    call: Call
    targets: tuple[Tensor, ...] = ()
    follows: tuple[bool, ...] = ()
    """Which tensors of the call have samples in dim 0."""
    key: Key = ()
    besides: tuple[tuple[str, object], ...] = ()
    """What ranks must have in common though no capture depends on it, each with words for a message."""
    weight: float = 0.0
    problem: Exception | None = None

    def digest(self) -> float:
        """A number that is the same for equal calls, exact in a float."""
        text = repr((self.key, self.besides))
        return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))

    def check(self) -> None:
        """Raise what is wrong with it."""
        if self.problem is not None:
            raise self.problem


@dataclass(frozen=True)
class Told:
    """What every rank tells the others at the start of a call."""

    samples: float
    weight: float
    """Of its targets in the mean loss."""
    wrong: float
    """Whether it cannot go on."""
    flag: float
    records: float
    """Whether gradients are recorded."""
    input_grads: float
    """A bit for each tensor that wants a gradient."""
    key: float
    """A digest of all that must be equal on all ranks."""


def numbers_of(row: Told) -> list[float]:
    """The fields in their order, as they are sent."""
    return [
        float(value) for value in (row.samples, row.weight, row.wrong, row.flag, row.records, row.input_grads, row.key)
    ]


def sizes_without_samples(
    shapes: Sequence[tuple[int, ...]], floats: Sequence[bool], follows: Sequence[bool]
) -> tuple[tuple[object, ...], ...]:
    """Sizes of inputs, the number of samples left out."""
    return tuple(
        (tuple(shape[1:]) if follow else tuple(shape), kind, follow)
        for shape, kind, follow in zip(shapes, floats, follows, strict=True)
    )


def difference_between(told: tuple[Any, ...], told2: tuple[Any, ...]) -> str:
    """What two ranks do not have in common, of (key, besides, shapes, settings), for people."""
    (key, besides, shapes, settings), (key2, besides2, shapes2, settings2) = told, told2
    if key[0] != key2[0]:
        difference = differing(settings, settings2)
        if difference is None:
            return "other attributes"
        name, value, value2 = difference
        return f"{name}={short(value)} against {name}={short(value2)}"
    if shapes != shapes2 and key != key2:
        return f"inputs of {shapes} against {shapes2}"
    if key[:4] == key2[:4] != ():
        answers = next(((a, b) for a, b in zip(key[4], key2[4], strict=True) if a != b), None)
        if answers is not None:
            return f"{answers[0][0]}: {answers[0][1]} against {answers[1][1]}"
    if key != key2:
        return f"arguments {key[1][-1]} against {key2[1][-1]}"
    words, first, second = next((a[0], a[1], b[1]) for a, b in zip(besides, besides2, strict=True) if a != b)
    if isinstance(first, list) and isinstance(second, list):
        first, second = [name for name in first if name not in second], [name for name in second if name not in first]
    return f"{words} {first} against {second}"
