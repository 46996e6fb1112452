"""Ranks that do the same at the same time, found before anything is played: thousands of ranks are often a few classes.

Ranks start as one class and are told apart by what differs: their work and bytes, and then, until nothing changes, by
the classes of those that they meet in moves, in sums and behind a card. What remains alike is alike at every moment.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.simulating.flows import Bools, Ints


def classes_of(ranks: int, features: Iterable[Ints], meetings: Sequence[Bools], groupings: Sequence[Ints]) -> Ints:
    """For every rank the number of its class, counted by first appearance.

    `features`: numbers by rank that tell ranks apart; `meetings`: (ranks, ranks), who gets something from whom, in
    either direction; `groupings`: for every rank the number of the group that it is in, -1 for none.
    """
    colours = _numbered(np.column_stack([np.zeros(ranks, dtype=np.int64), *features]))
    directions = [side.astype(np.float32) for meeting in meetings for side in (meeting, meeting.T)]
    stacked = np.concatenate(directions) if directions and ranks * ranks * len(directions) <= 1 << 24 else None
    while True:
        count = int(colours.max()) + 1
        if count == ranks:
            return colours
        each = np.eye(count, dtype=np.float32)[colours]
        told = [colours[:, None].astype(np.float32)]
        if stacked is not None:
            told.append((stacked @ each).reshape(len(directions), ranks, count).transpose(1, 0, 2).reshape(ranks, -1))
        else:
            told += [_numbered(direction @ each)[:, None].astype(np.float32) for direction in directions]
        for grouping in groupings:
            sums = np.zeros((int(grouping.max()) + 2, count), dtype=np.float32)
            np.add.at(sums, grouping, each)
            told.append(sums[grouping])
        finer = _numbered(np.concatenate(told, axis=1))
        if int(finer.max()) + 1 == count:
            return colours
        colours = finer


def _numbered(rows: NDArray[Any]) -> Ints:
    """Equal rows have equal numbers, counted by first appearance."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in np.ascontiguousarray(rows)], dtype=np.int64)
