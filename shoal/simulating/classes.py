"""Ranks that do the same at the same time, found before anything is played: thousands of ranks are often a few classes.

Ranks start as one class and are told apart by what differs: their work and bytes, and then, until nothing changes, by
the classes of those that they meet in moves, in sums and behind a card. What remains alike is alike at every moment.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.simulating.flows import Bools, Ints


def classes_of(ranks: int, features: Iterable[Ints], meetings: Sequence[Bools], groupings: Sequence[Ints]) -> Ints:
    """For every rank the number of its class, counted by first appearance.

    `features`: numbers by rank that tell ranks apart; `meetings`: (ranks, ranks), who gets something from whom, in
    either direction; `groupings`: for every rank the number of the group that it is in, -1 for none.
    """
    colours = np.zeros(ranks, dtype=np.int64)
    for feature in features:
        colours = _finer(colours, feature)
    directions = [side.astype(np.float32) for meeting in meetings for side in (meeting, meeting.T)]
    stacked = np.concatenate(directions) if directions and ranks * ranks * len(directions) <= 1 << 24 else None
    while True:
        count = int(colours.max()) + 1
        if count == ranks:
            return colours
        before, each = colours, np.eye(count, dtype=np.float32)[colours]
        if stacked is not None:
            met = (stacked @ each).reshape(len(directions), ranks, count).transpose(1, 0, 2).reshape(ranks, -1)
            colours = _finer(colours, _numbered(met))
        else:
            for direction in directions:
                colours = _finer(colours, _numbered(direction @ each))
        for grouping in groupings:
            sums = np.zeros((int(grouping.max()) + 2, count), dtype=np.float32)
            np.add.at(sums, grouping, each)
            colours = _finer(colours, _numbered(sums)[grouping])
        if int(colours.max()) + 1 == count:
            return before


def _finer(colours: Ints, feature: Ints) -> Ints:
    """Classes told apart by one more number."""
    _, numbers = np.unique(feature, return_inverse=True)
    _, first, mixed = np.unique(colours * (int(numbers.max()) + 1) + numbers, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    finer: Ints = order[mixed]
    return finer


def _numbered(rows: NDArray[np.float32]) -> Ints:
    """Equal rows have equal numbers."""
    _, numbers = np.unique(np.ascontiguousarray(rows), axis=0, return_inverse=True)
    distinct: Ints = numbers.reshape(-1).astype(np.int64)
    return distinct
