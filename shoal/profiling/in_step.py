"""What layers took in real steps, held against what they take alone: a factor for each tile and kind of operator. Pure.

A tile is timed alone. In a step it finds other things in the caches, memory that comes and goes, and a processor that
was busy with something else; how much that matters differs from operator to operator. So

    tiles that ran        take what they took
    others of that kind   take longer than alone by the factor of those that ran
    all others            take what they take alone

A chain of layers is noted as one; its time is divided as the factors so far divide it, which converges.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from shoal.diary import Event
from shoal.lowering.tasks import Kernel
from shoal.profiling.kernels import kernel_key
from shoal.simulating.durations import Durations
from shoal.timings import InStep

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHT = ": input gradient", ": weight gradient"
"""How a diary calls the two gradients of a layer that finds them apart."""
ROUNDS = 100
"""Of dividing chains: more changes nothing that a measurement would notice; 30 left some short layers 5% off."""
BEHIND = 0.1
"""An instruction of which sums of gradients went on behind more than this part says nothing of its kernel alone."""
NANO = 1e-9

Place = tuple[str, str]
"""(forward or backward, the layer's name; backward: those of its chain, in forward's order)."""


@dataclass(frozen=True)
class Piece:
    """One layer's part in what was noted."""

    tile: str
    kind: str
    seconds: float
    """Alone, with what every layer costs besides."""


@dataclass(frozen=True)
class Taken:
    """What a few layers took together, in one pass of real steps."""

    pieces: tuple[Piece, ...]
    seconds: float


@dataclass(frozen=True)
class Noted:
    """What one rank's diary says of some steps."""

    places: Mapping[Place, float]
    """Median seconds, without waiting and without what others send meanwhile."""
    between: float
    """Median seconds of a step up to the end of backward that are in no layer."""
    update: float
    """Median seconds of the optimizer."""


def tile_name(key: str, which: str) -> str:
    """What the factor of a tile's pass is called."""
    return f"{key} {which}"


def noted(events: Sequence[Event], begun: Mapping[int, int]) -> Noted:
    """`begun`: when each step began, by its number, in the events' nanoseconds."""
    places: dict[Place, list[float]] = {}
    between, updates = [], []
    for step, start in begun.items():
        mine = [event for event in events if event[5] == step]
        computing = [event for event in mine if event[4] == "compute"]
        others = _Cover(event for event in computing if event[0] in ("wait", "sum", "move"))
        sums = _Cover(event for event in mine if event[0] == "gradients")
        spans: dict[Place, float] = {}
        last = start
        for kind, label, begin, end, *_ in computing:
            if kind == "update":
                updates.append((end - begin) * NANO)
            if kind not in (FORWARD, BACKWARD):
                continue
            place: Place = kind, label.removesuffix(INPUT).removesuffix(WEIGHT)
            last = max(last, end)
            clear = sums.within(begin, end) <= BEHIND * (end - begin)
            own = end - begin - others.within(begin, end) if clear else nan
            spans[place] = spans.get(place, 0.0) + own * NANO
        for place, seconds in spans.items():
            places.setdefault(place, []).append(seconds)
        layers = _Cover(event for event in computing if event[0] in (FORWARD, BACKWARD))
        between.append((last - start - layers.within(start, last)) * NANO)
    known = {place: median(times) for place, times in places.items() if not any(map(isnan, times))}
    return Noted(known, median(between), median(updates) if updates else 0.0)


class _Cover:
    """The time in which any of some events goes on."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before = [0]
        for begin, end in sorted((event[2], event[3]) for event in events):
            if self._ends and begin <= self._ends[-1]:
                self._before[-1] += max(0, end - self._ends[-1])
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(begin)
                self._ends.append(end)
                self._before.append(self._before[-1] + end - begin)

    def within(self, begin: int, end: int) -> int:
        """How much of a span."""
        return self._until(end) - self._until(begin)

    def _until(self, at: int) -> int:
        number = bisect_right(self._starts, at)
        return self._before[number] - max(0, self._ends[number - 1] - at) if number else 0


def taken(durations: Durations, dtype: str, by_rank: Sequence[Noted]) -> list[Taken]:
    """What ranks with the largest part of every layer took, in the mean, beside what `durations` has for it.

    Ranks that differ in which parts they have of a chain leave it out.
    """
    pieces, largest = _pieces(durations, dtype)
    found = []
    for place in dict.fromkeys(place for one in by_rank for place in one.places):
        which, label = place
        names = [label] if which == FORWARD else label.split(", ")
        if not all((which, name) in pieces for name in names):
            continue
        times = [
            one.places[place]
            for rank, one in enumerate(by_rank)
            if place in one.places and all(largest[name][rank] for name in names)
        ]
        if times:
            found.append(Taken(tuple(pieces[which, name] for name in names), sum(times) / len(times)))
    return found


def _pieces(durations: Durations, dtype: str) -> tuple[dict[Place, Piece], dict[str, list[bool]]]:
    """(each layer's part by pass and name, whether each rank has a largest part of it)."""
    pieces: dict[Place, Piece] = {}
    largest: dict[str, list[bool]] = {}
    flowing = durations.tasks.flowing
    factored = {task.label for task in durations.tasks.tasks if isinstance(task.work, Kernel) and task.work.over}
    for task in durations.tasks.tasks:
        if not isinstance(task.work, Kernel):
            continue
        if task.label in factored and task.kind != FORWARD:
            continue  # what is noted is a product over the rows of all ranks: no tile's
        placed = task.work.placed
        which = FORWARD if task.kind == FORWARD else BACKWARD
        to_input = any(read in flowing for read in placed.layer.reads)
        part = next(part for part in placed.parts if part is not None)
        key = kernel_key(placed.op, placed.rule, part, placed.cut_letters, dtype, input_grad=to_input)
        seconds = float(durations.compute(task).max())
        before = pieces.get((which, task.label))
        if before is not None:  # its two gradients are two tasks
            seconds += before.seconds
        kind = f"{placed.layer.op} {which}"
        pieces[which, task.label] = Piece(tile_name(key, which), kind, seconds)
        volumes = durations.volumes(placed)
        largest[task.label] = (volumes == volumes.max()).tolist()
    return pieces, largest


def factors(found: Iterable[Taken]) -> dict[str, float]:
    """How many times longer than alone: by kind of operator and pass, and by tile and pass.

    Multiplicative updates of a non-negative fit: what was noted of several layers is divided as the factors so far
    divide it. Every factor is above 0.
    """
    observed = [one for one in found if one.seconds > 0 and sum(piece.seconds for piece in one.pieces) > 0]
    kinds = _fitted(observed, {piece.kind: 1.0 for one in observed for piece in one.pieces}, by_tile=False)
    tiles = {piece.tile: kinds[piece.kind] for one in observed for piece in one.pieces}
    return {**kinds, **_fitted(observed, tiles, by_tile=True)}


def _fitted(observed: Sequence[Taken], start: Mapping[str, float], *, by_tile: bool) -> dict[str, float]:
    fitted = dict(start)
    for _ in range(ROUNDS):
        given, alone = dict.fromkeys(fitted, 0.0), dict.fromkeys(fitted, 0.0)
        for one in observed:
            names = [piece.tile if by_tile else piece.kind for piece in one.pieces]
            expected = sum(fitted[name] * piece.seconds for name, piece in zip(names, one.pieces, strict=True))
            for name, piece in zip(names, one.pieces, strict=True):
                given[name] += one.seconds * fitted[name] * piece.seconds / expected
                alone[name] += piece.seconds
        fitted = {name: given[name] / alone[name] if alone[name] else fitted[name] for name in fitted}
    return fitted


def in_step(found: Iterable[Taken], by_rank: Sequence[Noted], updated_bytes: float) -> InStep:
    """Everything that real steps say of one network."""
    count = len(by_rank)
    update = sum(one.update for one in by_rank) / count
    return InStep(
        factors=factors(found),
        between=sum(one.between for one in by_rank) / count,
        update_per_byte=update / updated_bytes if updated_bytes and update else None,
    )
