"""Whole tensors that a state dict was given in the place of shards, and whether somebody wrote to them.

The tensors of a plain module's state dict are its own: `for v in model.state_dict().values(): v.copy_(...)` changes the
module. One that was put together from shards is a copy, and what is written to it would be lost.
"""

import weakref
from itertools import count

from torch import Tensor

from shoal.capturing.attributes import version_of


class Given:
    """Copies that were handed out; each is known for as long as somebody has it, and holds no memory of its own."""

    def __init__(self) -> None:
        self._numbers = count()
        self._living: dict[int, tuple[tuple[str, str], Tensor, int]] = {}
        self._written: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._living)

    def note(self, name: str, tensor: Tensor, owner: str = "model") -> None:
        """A copy of `name` goes out, in a state dict of `owner`."""
        number, alias = next(self._numbers), tensor.detach()  # which counts changes with it
        self._living[number] = ((owner, name), alias, version_of(alias))
        weakref.finalize(tensor, self._look, number).atexit = False

    def taken(self, tensor: Tensor) -> None:
        """A tensor is loaded: what was written to it is not lost."""
        self._living = {
            number: (name, one, version_of(one) if one.data_ptr() == tensor.data_ptr() else before)
            for number, (name, one, before) in self._living.items()
        }

    def _look(self, number: int) -> None:
        """At one that nobody has any more."""
        name, alias, before = self._living.pop(number)
        if version_of(alias) != before:
            self._written.append(name)

    def written(self) -> tuple[str, str] | None:
        """(owner, name) of one that was written to; told once."""
        found = [*self._written, *(name for name, one, before in self._living.values() if version_of(one) != before)]
        if not found:
            return None
        self._written.clear()
        self._living = {number: (name, one, version_of(one)) for number, (name, one, _) in self._living.items()}
        return found[0]
