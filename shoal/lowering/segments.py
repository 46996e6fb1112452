"""Where to cut a program for recomputing: segments whose inputs are kept and whose insides are found again.

Keeping the values alive at every boundary costs their bytes; running a segment again costs the bytes of what its
layers save. The cut chosen has the smallest sum of all that is kept and the largest segment, among cuts into up to
2 sqrt(n) segments of about equal bytes whose boundaries lie where little is alive. Integers only.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isqrt


def choose_boundaries(made: Sequence[int], alive: Sequence[int]) -> tuple[int, ...]:
    """Boundaries (a segment starts at each) from the bytes that each instruction makes, and that live before it."""
    count = len(made)
    upto = [0, *accumulate(made)]
    best: tuple[int, tuple[int, ...]] = (upto[-1], ())
    for pieces in range(2, 2 * isqrt(count) + 1):
        boundaries: list[int] = []
        for piece in range(1, pieces):
            wanted = upto[-1] * piece // pieces
            room = upto[-1] // (4 * pieces)
            first = max(1, bisect_left(upto, wanted - room))
            if near := range(first, min(count, bisect_right(upto, wanted + room))):
                boundaries.append(min(near, key=lambda i: (alive[i], abs(upto[i] - wanted))))
        chosen = tuple(sorted(set(boundaries)))
        largest = max(upto[stop] - upto[start] for start, stop in pairwise((0, *chosen, count)))
        best = min(best, (sum(alive[i] for i in chosen) + largest, chosen))
    return best[1]
