"""Two replicas meet in the middle by compressed messages: one end's memory of what they told each other. Pure.

    x, y     the weights of the two; z what both know, the same bits at both ends
    ask      u = C(x - z)  ──▶  the other end
    answer   v = C(y - z)  ◀──  and both know u and v: z += (u + v) / 2, x += (v - u) / 2, y += (u - v) / 2

Keeps     what one end gains the other loses, whatever the codec leaves out: the mean of the two stays, to rounding.
          What was left out is in the next difference from z (error feedback), and what was told is used once: no step
          size is needed for it to be stable. With a codec that loses nothing both are in the middle.
Costs     a copy of the weights (z) at each end. The first message of a pair, and the first after one that may have been
          lost, are whole: then z is the middle.
Failure   where an answer was lost, the end that gave it has moved and the other has not. Swaps have names; with the
          next whole message both say which was their last, and whoever is ahead takes its last move back. Until then
          the mean of the two is off by that move; for good where one of them is gone. Both may ask at once: then the
          higher number is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.exchanging.compression.packing import Packer


@dataclass(frozen=True)
class Said:
    """What one end says to the other, or answers."""

    name: str
    """Of the swap that it is part of."""
    turn: int
    """How many swaps the end that asks has asked for, with this one."""
    last: str
    """In a question the last swap that the end that asks was part of; in an answer the last that both were."""
    before: str
    """In a question the swap before that one; in an answer nothing."""
    whole: bool
    buffers: Sequence[Tensor]


@dataclass(frozen=True)
class Refusal:
    """The answer of an end that cannot take part now."""

    whole: bool
    """Whether a whole message would do: this end does not know what the difference is from."""


@dataclass(frozen=True)
class _Told:
    """What the other end and this one said in a swap."""

    theirs: Sequence[Tensor]
    own: Sequence[Tensor]
    whole: bool


class Swaps:
    """One end's side of a pair of replicas, whose numbers are `own` and `peer`.

    `ask` and `answer` take a copy of this end's weights, as flats, which they keep: nobody may change it. `answer` and
    `hear` give what is to be added to the weights.
    """

    def __init__(self, packer: Packer, own: int, peer: int) -> None:
        self._packer, self._own, self._peer = packer, own, peer
        self._middle: list[Tensor] | None = None
        """What both ends know; None where the next message must be whole."""
        self._last = self._before = ""
        self._unsure: _Told | None = None
        """The last swap, where this end answered and does not know yet whether that arrived."""
        self._asked: Said | None = None
        self._turns = self._turns_heard = 0
        """How many swaps this end asked for, and the other: an older question comes too late."""

    def ask(self, weights: Sequence[Tensor]) -> Said:
        """Begin a swap; then comes `hear` or `lose`."""
        self._turns += 1
        whole = self._middle is None
        buffers = self._packer.packed(self._news(weights), whole=whole)
        name = f"{self._own}.{self._turns}"
        self._asked = Said(name, self._turns, self._last, self._before, whole, buffers)
        return self._asked

    def answer(self, said: Said, weights: Sequence[Tensor]) -> tuple[Said | Refusal, list[Tensor]]:
        """Take part in a swap that the other end began: the answer, and the change of these weights.

        A `ValueError`, with nothing changed, where the message cannot be.
        """
        if (refusal := self._refusal(said)) is not None:
            return refusal, []
        theirs = self._packer.unpacked(said.buffers, whole=said.whole)
        agreed = self._agreed(said)
        assert agreed is not None, "it would have been refused"
        back = self._taken_back() if agreed != self._last else []
        if said.whole:
            self._middle = None
        own = self._packer.packed(self._news(_added(weights, back)), whole=said.whole)
        change = self._commit(theirs, self._packer.unpacked(own, whole=said.whole), said.name, agreed)
        self._unsure = _Told(said.buffers, own, said.whole)
        self._turns_heard = said.turn
        return Said(said.name, said.turn, agreed, "", said.whole, own), _added(change, back)

    def hear(self, answer: Said | Refusal) -> list[Tensor]:
        """The answer to `ask` came: the change of this end's weights. A `ValueError` where it cannot be the answer."""
        assert self._asked is not None, "nothing was asked"
        asked = self._asked
        if isinstance(answer, Refusal):
            self._asked = None
            self._middle = None if answer.whole else self._middle
            return []
        if (answer.name, answer.whole) != (asked.name, asked.whole):
            raise ValueError(f"an answer to {answer.name!r}, where {asked.name!r} was asked")
        theirs, own = (self._packer.unpacked(buffers, whole=asked.whole) for buffers in (answer.buffers, asked.buffers))
        if asked.whole:  # another swap may have set what both knew meanwhile
            self._middle = None
        back = self._taken_back() if answer.last == self._before != self._last else []
        self._asked = self._unsure = None
        return _added(self._commit(theirs, own, asked.name, answer.last), back)

    def lose(self) -> None:
        """No answer to `ask` will come; the other end may have heard it or not."""
        self._asked = self._middle = None

    def _refusal(self, said: Said) -> Refusal | None:
        """Why this end cannot take part in a swap now; None where it can."""
        if said.turn <= self._turns_heard:  # the other end gave it up and has asked again since
            return Refusal(whole=False)
        # Both asked: the lower number refuses. The higher one can answer, since its own question will be refused,
        # unless that was answered before: then it waits for the answer.
        if self._asked is not None and (self._own < self._peer or said.last == self._asked.name):
            return Refusal(whole=False)
        same = self._middle is not None and said.last == self._last
        if same or (said.whole and self._agreed(said) is not None):
            return None
        # It may have been asked before a swap that both know of by now: then all is well.
        overtaken = self._unsure is None and said.last == self._before
        return Refusal(whole=not overtaken)

    def _news(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What the other end does not know: all, or the difference from what it does."""
        if self._middle is None:
            return list(weights)
        return [weight - known for weight, known in zip(weights, self._middle, strict=True)]

    def _agreed(self, said: Said) -> str | None:
        """The last swap that both ends were part of: this end's last one, unless it is ahead; None if neither."""
        known = (said.last, said.before)
        if self._last in known:
            return self._last
        return self._before if self._unsure is not None and self._before in known else None

    def _taken_back(self) -> list[Tensor]:
        """The last change the other way, where this end answered and the other did not hear that."""
        if (told := self._unsure) is None:
            return []
        theirs, own = (self._packer.unpacked(buffers, whole=told.whole) for buffers in (told.theirs, told.own))
        return [-change for change in _towards(theirs, own)]

    def _commit(self, theirs: Sequence[Tensor], own: Sequence[Tensor], name: str, agreed: str) -> list[Tensor]:
        """Both ends know now what both said; the change of this end."""
        halves = [(there + here) * 0.5 for there, here in zip(theirs, own, strict=True)]
        self._middle = halves if self._middle is None else _added(self._middle, halves)
        self._before, self._last = agreed, name
        return _towards(theirs, own)


def _towards(theirs: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """Half of the way from this end to the other."""
    return [(there - here) * 0.5 for there, here in zip(theirs, own, strict=True)]


def _added(values: Sequence[Tensor], change: Sequence[Tensor]) -> list[Tensor]:
    return [value + more for value, more in zip(values, change, strict=True)] if change else list(values)
