"""The mean of what each replica sent last, in memory that the replicas of one host share: no server.

Keeps       as `consensus.py`: the mean is over those that take part now. What one that is lost or frozen had sent is
            dropped, and one that is back counts from its next push. One that has not sent yet counts with the present
            weights.
Gives up    to wait for others: a push is an update at once (as `least` 1 and `delay` 0 there).
Costs       for each replica one copy of the shard in shared memory; per push one copy and one pass over all of them.
            Who takes part is looked up where it changed: one number to read else.
Failure     a replica that is killed inside its own push leaves weights that are a mean in one part of a shard and the
            mean before in another; what it sent is dropped.

The coordinator writes who takes part into a file, the `Register`. Everybody has a place there, which is free again
for another when it is lost or has left: so there are never more copies than replicas at a time. And everybody has a
mark that nobody had before, anew when it is back from being frozen: a place holds the mark of whoever wrote there, so
that what is of no member now does not count.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.exchanging.servers.shard import VERSION, Outcome, Push, Shard

CHANGES = "register.changes"
ENTRIES = "register.json"


class Entry(NamedTuple):
    """A replica that takes part: where what it sends lies, and what shows that it is this one's."""

    place: int
    mark: int


class Register:
    """Who takes part, told by one process, the coordinator; read by any."""

    def __init__(self, folder: Path, changes: Tensor) -> None:
        """`changes`: one integer in memory that all share, which counts the changes."""
        self._folder, self._changes = folder, changes.numpy()
        self._entries: dict[int, Entry] = {}
        self._read = 0
        self._places: dict[int, int] = {}
        self._marks = 0

    def tell(self, active: Collection[int], away: Collection[int]) -> None:
        """From now on `active` take part; those `away` may be back. All others never come again."""
        places = {number: place for number, place in self._places.items() if number in active or number in away}
        for number in active:
            if number not in places:
                taken = set(places.values())
                places[number] = next(place for place in range(len(taken) + 1) if place not in taken)
        entries = {}
        for number in active:
            entry = self._entries.get(number)
            if entry is None:
                self._marks += 1
                entry = Entry(places[number], self._marks)
            entries[number] = entry
        if entries == self._entries and self._changes[0]:
            return
        self._places, self._entries = places, entries
        new = self._folder / f".{ENTRIES}"  # in memory, by one process: whole or absent is all that is needed
        new.write_text(json.dumps(sorted((number, *entry) for number, entry in entries.items())))
        new.replace(self._folder / ENTRIES)
        self._changes[0] += 1

    def entries(self) -> dict[int, Entry]:
        """By number, those that take part now; none before anybody was told of."""
        changes = int(self._changes[0])
        if changes != self._read:
            # The file may be newer than the count already: then it is read again, since the count differs once more.
            listed = json.loads((self._folder / ENTRIES).read_text())
            self._entries = {number: Entry(place, mark) for number, place, mark in listed}
            self._read = changes
        return self._entries


@dataclass
class Place:
    """What one replica sent last, and whose it is."""

    sent: list[Tensor]
    mark: Tensor


@dataclass
class SharedConsensus(Shard):
    """A shard whose weights are the mean of what each replica pushed last; each replica renews it with its push."""

    number: int = -1
    """The replica that pushes here."""
    register: Register | None = None
    place_of: Callable[[int], Place] | None = None
    """Maps the memory of a place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places: dict[int, Place] = {}

    def _apply(self, push: Push) -> Outcome:
        assert self.register is not None
        members = self.register.entries()
        own = members.get(self.number)
        if own is None:  # it was frozen, and the coordinator has not seen yet that it is back
            return Outcome(self.version)
        place = self._place(own.place)
        torch._foreach_copy_(place.sent, push.tensors)
        place.mark.fill_(own.mark)
        places = [(self._place(entry.place), entry.mark) for entry in members.values()]
        sent = [place.sent for place, mark in places if int(place.mark) == mark]
        self._take_mean(sent, len(members))
        self._counted[VERSION] += 1
        return Outcome(self.version)

    def _take_mean(self, sent: list[list[Tensor]], members: int) -> None:
        weights = list(self.weights)
        if silent := members - len(sent):
            torch._foreach_mul_(weights, silent)
            torch._foreach_add_(weights, sent[0])
        else:
            torch._foreach_copy_(weights, sent[0])
        for other in sent[1:]:
            torch._foreach_add_(weights, other)
        torch._foreach_div_(weights, members)

    def _place(self, number: int) -> Place:
        if number not in self._places:
            assert self.place_of is not None
            self._places[number] = self.place_of(number)
        return self._places[number]
