"""Play a list of tasks in time: every class of ranks walks the list, links are shared, sums go on behind.

    compute   one task at a time on each rank, in the list's order
    links     each rank has its own on every level, or the ranks of a host share a card; each direction by itself.
              Whatever is under way on a link at the same time gets an equal part of it
    moves     what a rank sends and what it gets are under way when all that take part have come to them; a rank has its
              tile when both are through, and all that it gets something from have sent theirs
    sums      begin when the last rank of a group has come, and go through the phases of the quickest algorithm
    contention  a sum behind computing slows it, by the link's `contention`
    skew        who computed longer since it last met others waits longer for them, by the link's `skew`

What this leaves out: a flow that is slow elsewhere still takes its equal part of a link.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan

import numpy as np

from shoal.cluster import Level
from shoal.lowering.step_traffic import GRADIENTS
from shoal.lowering.tasks import Gathered, Kernel, Moved, Summed, Task
from shoal.simulating.classes import classes_of
from shoal.simulating.collectives import Phase, is_card, unit_size
from shoal.simulating.durations import Durations, Floats
from shoal.simulating.flows import Bools, Ints
from shoal.simulating.links import Agenda, Link, Links


@dataclass(frozen=True)
class Noise:
    """How ranks differ from each other and from step to step. Without any, every rank is as its data sheet says."""

    speeds: Mapping[int, float] = field(default_factory=dict)
    """By rank: how fast it computes beside the others; 1 for those that are not named."""
    jitter: float = 0.0
    """Standard deviation of the time of a task that computes, as a part of it; log-normal, the mean stays."""
    delay: float = 0.0
    """Mean seconds, exponentially distributed, that each rank loses at the start of each step."""
    seed: int = 0

    @property
    def random(self) -> bool:
        """Whether anything is drawn."""
        return self.jitter > 0 or self.delay > 0


@dataclass(frozen=True)
class Played:
    """When every class of ranks did what."""

    durations: Durations
    steps: int
    classes: Ints
    """By rank, the class."""
    starts: Floats
    """(steps x tasks, classes): seconds since the start; NaN for tasks that a class has no part in."""
    ends: Floats

    @property
    def first_ranks(self) -> Ints:
        """The first rank of every class."""
        _, first = np.unique(self.classes, return_index=True)
        ranks: Ints = first.astype(np.int64)
        return ranks

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return float(np.nanmax(self.ends, initial=0.0))


def play(durations: Durations, *, steps: int = 1, noise: Noise | None = None) -> Played:
    """Play `steps` steps, one after the other. The same noise and seed give the same times."""
    noise = noise or Noise()
    classes = _classes(durations, noise)
    player = _Player(durations, classes, steps, noise)
    player.play()
    return Played(durations, steps, classes, np.array(player.starts), np.array(player.ends))


def _classes(durations: Durations, noise: Noise) -> Ints:
    ranks = durations.tasks.ranks
    if noise.random:
        return np.arange(ranks)
    features: dict[object, Ints] = {-1: np.array([round(noise.speeds.get(rank, 1.0) * 1e9) for rank in range(ranks)])}
    meetings: dict[bytes, Bools] = {}
    """By who gets something from whom: many moves join the same ranks."""
    groupings: dict[object, Ints] = {}
    cards = [index for index in range(len(durations.cluster.levels)) if is_card(durations.cluster, index)]
    for index in cards:
        groupings[index] = np.arange(ranks) // unit_size(durations.cluster, index)
    for task in durations.tasks.tasks:
        match task.work:
            case Kernel(placed=placed, over=over):
                volumes = durations.volumes(placed)
                features[id(volumes)] = volumes  # those that are alike have one array
                if over:  # ranks without rows of their own work on those of the others too
                    features[id(task)] = np.isin(np.arange(ranks), task.ranks).astype(np.int64)
            case Moved():
                flows = durations.flows(task.work)
                features[id(flows.arriving)] = flows.arriving
                for number, amounts in enumerate((*flows.received, *flows.sent)):
                    features[hash((id(flows), number))] = amounts
                if task.kind == "move" and not task.work.back:
                    meetings[flows.packed.tobytes()] = flows.sources
            case Summed(groups=groups, bytes=sizes) | Gathered(groups=groups, bytes=sizes):
                if groups not in groupings:
                    grouping = np.full(ranks, -1, dtype=np.int64)
                    for number, group in enumerate(groups):
                        grouping[list(group)] = number
                    groupings[groups] = grouping
                    for index in cards:
                        features[hash((id(task), index))] = _groups_behind(
                            grouping, unit_size(durations.cluster, index)
                        )
                features[groups, sizes] = np.array([*sizes, 0])[groupings[groups]]
            case _:
                features[id(task)] = np.array(task.work.by_rank)
    return classes_of(ranks, features.values(), list(meetings.values()), list(groupings.values()))


def _groups_behind(grouping: Ints, unit: int) -> Ints:
    """By rank, how many groups have members behind its card."""
    first = range(0, len(grouping), unit)
    counts = [len(set(grouping[start : start + unit].tolist()) - {-1}) for start in first]
    behind: Ints = np.repeat(counts, unit)[: len(grouping)]
    return behind


@dataclass
class _Rank:
    """One class of ranks on its way through the list."""

    place: int = 0
    """The next task."""
    begun: int = -1
    """Where the last step that it has begun stands in the list."""
    missing: int = 0
    """Tasks of the network that it waits for."""
    computing: int | None = None
    left: float = 0.0
    """Seconds of the current task, alone."""
    since: float = 0.0
    behind: int = 0
    """Sums that go on behind it."""
    apart: float = 0.0
    """Seconds that it computed since it last met others."""
    version: int = 0


class _Player:
    def __init__(self, durations: Durations, classes: Ints, steps: int, noise: Noise) -> None:
        self.durations, self.classes, self.steps, self.noise = durations, classes, steps, noise
        self.cluster = durations.cluster
        self.tasks = durations.tasks.tasks
        self.count = int(classes.max()) + 1
        _, self.first = np.unique(classes, return_index=True)
        total = steps * len(self.tasks)
        self.length = total
        self.starts = [[nan] * self.count for _ in range(total)]
        self.ends = [[nan] * self.count for _ in range(total)]
        self.ranks = [_Rank() for _ in range(self.count)]
        self.random = np.random.default_rng(noise.seed)
        self.agenda = Agenda()
        self.links = Links(self.agenda)
        self.contention = max((level.contention for level in self.cluster.levels), default=0.0)
        self.skew = max((level.skew for level in self.cluster.levels), default=0.0)
        self.steady = not self.contention and not noise.random
        self.units = [self._unit_classes(index) for index in range(len(self.cluster.levels))]
        some = {ranks: _some(classes, ranks, self.count) for ranks in {task.ranks for task in self.tasks}}
        self.members = [some[task.ranks] for task in self.tasks]
        self.computes = [task.resource == "compute" for task in self.tasks]
        self.seconds = self._seconds()
        self.moves = [self._parties(task) if task.kind == "move" else None for task in self.tasks]
        self.known_groups: dict[object, list[_Group | None]] = {}
        self.groups = [self._groups(task) if task.kind == "sum" else None for task in self.tasks]
        self.waiting: dict[tuple[int, int], list[int]] = {}
        """(task, class) -> classes that wait for it: the class itself."""
        self.posted: dict[int, int] = {}
        """By task, the classes that have come to it; sets of classes are bits here, which compare at once."""
        self.begun: dict[tuple[int, str], int] = {}
        """(move, direction) -> classes of which it is under way."""
        self.through: dict[tuple[int, str], int] = {}
        """(move, direction) -> classes of which it is through."""
        self.apart: dict[tuple[int, int], float] = {}
        """(task, class) -> seconds that it had computed by itself when it came to it."""

    # What is known before

    def _seconds(self) -> list[list[float]]:
        """By task and class, what computing takes."""
        speeds = [self.noise.speeds.get(rank, 1.0) for rank in self.first.tolist()]
        seconds: list[list[float]] = (self.durations.computed[:, self.first] / np.array(speeds)).tolist()
        return seconds

    def _unit_classes(self, index: int) -> list[tuple[int, Mapping[int, int]]]:
        """By class: the number of its kind of host, and how many ranks of each class are there."""
        if not is_card(self.cluster, index):
            return []
        unit = unit_size(self.cluster, index)
        kinds: dict[tuple[tuple[int, int], ...], int] = {}
        units: list[tuple[int, Mapping[int, int]]] = []
        for rank in self.first.tolist():
            first = rank // unit * unit
            there = Counter(self.classes[first : first + unit].tolist())
            kind = kinds.setdefault(tuple(sorted(there.items())), len(kinds))
            units.append((kind, there))
        return units

    def _parties(self, task: Task) -> "_Parties":
        assert isinstance(task.work, Moved)
        flows = self.durations.flows(task.work)
        sources = flows.sources
        gets, gives = (
            [
                self._flights(direction, number, levels, task.work.itemsize)
                for number, levels in enumerate(amounts[:, self.first].T.tolist())
            ]
            for direction, amounts in (("in", flows.received), ("out", flows.sent))
        )
        return _Parties(
            [sorted(set(self.classes[sources[rank]].tolist())) for rank in self.first],
            [sorted(set(self.classes[sources[:, rank]].tolist())) for rank in self.first],
            gets,
            gives,
        )

    def _flights(
        self, direction: str, number: int, amounts: Sequence[int], itemsize: int
    ) -> list[tuple[Link, float, int, Level]]:
        """What a class puts on links of which level: seconds of each flow, alone, and how many there are."""
        flights = []
        for index, (level, amount) in enumerate(zip(self.cluster.levels, amounts, strict=True)):
            if amount:
                name: tuple[object, ...] = (direction, index, number)
                alike = 1
                if is_card(self.cluster, index):
                    kind, there = self.units[index][number]
                    name, alike = (direction, index, "card", kind), there[number]
                flights.append((self.links.link(name), amount * itemsize / level.bandwidth, alike, level))
        return flights

    def _groups(self, task: Task) -> list["_Group | None"]:
        """By class: its group, one for all classes that are in it; worked out once for sums that are alike."""
        assert isinstance(task.work, Summed | Gathered)
        key = (type(task.work), task.work.groups, task.work.bytes, task.label == GRADIENTS)
        if key not in self.known_groups:
            self.known_groups[key] = self._find_groups(task, task.work)
        return self.known_groups[key]

    def _find_groups(self, task: Task, work: Summed | Gathered) -> list["_Group | None"]:
        number_of = np.full(len(self.classes), -1, dtype=np.int64)
        kinds: list[tuple[int, ...]] = []
        for number, group in enumerate(work.groups):
            number_of[list(group)] = number
            kinds.append(tuple(sorted(self.classes[list(group)].tolist())))
        groups: dict[tuple[int, ...], _Group] = {}
        by_class: list[_Group | None] = []
        for rank in self.first.tolist():
            number = int(number_of[rank])
            if number < 0:
                by_class.append(None)
                continue
            kind = kinds[number]
            if kind not in groups:
                phases = self.durations.phases(task, number)
                links = [self._links_of(work.groups[number], number_of, kinds, phase) for phase in phases]
                classes = tuple(dict.fromkeys(kind))
                groups[kind] = _Group(classes, _bits(classes), phases, links)
            by_class.append(groups[kind])
        return by_class

    def _links_of(
        self, group: Sequence[int], number_of: Ints, kinds: Sequence[tuple[int, ...]], phase: Phase
    ) -> list[tuple[Link, float, int]]:
        """(link, seconds alone, flows) of one phase, both directions of each kind of link once."""
        links: dict[tuple[object, ...], tuple[float, int]] = {}
        own = kinds[int(number_of[group[0]])]
        for load in phase.loads:
            for rank in group:
                kind = int(self.classes[rank])
                if not is_card(self.cluster, load.level):
                    links[load.level, kind] = load.own, 1
                    continue
                unit = unit_size(self.cluster, load.level)
                name = (load.level, "card", self.units[load.level][kind][0])
                if name not in links:
                    first = rank // unit * unit
                    numbers = set(number_of[first : first + unit].tolist()) - {-1}
                    links[name] = load.card, sum(kinds[number] == own for number in numbers)
        return [
            (self.links.link((direction, *name)), seconds, flows)
            for name, (seconds, flows) in links.items()
            if seconds > 0
            for direction in ("out", "in")
        ]

    # Walking

    def play(self) -> None:
        for number in range(self.count):
            self.agenda.note(0.0, self._walker(number))
        self.agenda.run()
        stuck = [number for number, rank in enumerate(self.ranks) if rank.place < self.length]
        assert not stuck, f"classes {stuck} wait for what never comes"

    def _walker(self, number: int) -> Callable[[float], None]:
        return lambda now: self._walk(number, now)

    def _walk(self, number: int, now: float) -> None:
        """Go on through the list until something has to be waited for.

        Where nothing can change how long a task takes, the rank goes ahead of the agenda until others are concerned.
        """
        rank, length, ahead = self.ranks[number], len(self.tasks), False
        tasks, members, starts, ends = self.tasks, self.members, self.starts, self.ends
        while (at := rank.place) < self.length:
            index = at % length
            if not index and rank.begun < at:
                rank.begun = at
                self.agenda.note(now + self._overhead(), self._walker(number))
                return
            if number not in members[index]:
                rank.place += 1
                continue
            task, computes = tasks[index], self.computes[index]
            awaited = task.after and [
                at - index + other for other in task.after if not self._has(number, at - index + other)
            ]
            if ahead and (awaited or not computes):
                self.agenda.note(now, self._walker(number))
                return
            if computes:
                rank.missing = self._wait_for(number, awaited) if awaited else 0
                if rank.missing:
                    return
                if self.steady:
                    seconds = self.seconds[index][number]
                    starts[at][number] = now
                    now += seconds
                    rank.apart += seconds
                    ends[at][number] = now
                    rank.place += 1
                    ahead = True
                elif self._compute(number, at, now):
                    return
            else:
                self._post(number, at, now)
                rank.place += 1
                if task.waits:
                    rank.missing = self._wait_for(number, [] if self._has(number, at) else [at])
                    if rank.missing:
                        return

    def _has(self, number: int, at: int) -> bool:
        """Whether a task of the network is through for a class, or none of its business."""
        return not isnan(self.ends[at][number]) or number not in self.members[at % len(self.tasks)]

    def _wait_for(self, number: int, places: Sequence[int]) -> int:
        for at in places:
            self.waiting.setdefault((at, number), []).append(number)
        return len(places)

    def _done(self, at: int, number: int, now: float) -> None:
        """A task of the network is through for one class."""
        self.ends[at][number] = now
        for waiting in self.waiting.pop((at, number), ()):
            self.ranks[waiting].missing -= 1
            if not self.ranks[waiting].missing:
                self.agenda.note(now, self._walker(waiting))

    def _overhead(self) -> float:
        """Seconds that a step takes before its first task."""
        overhead = self.durations.speeds.step_overhead
        return overhead + float(self.random.exponential(self.noise.delay)) if self.noise.delay else overhead

    # Computing

    def _compute(self, number: int, at: int, now: float) -> bool:
        """Begin a task; whether it takes any time."""
        rank, index = self.ranks[number], at % len(self.tasks)
        seconds = self.seconds[index][number]
        if self.noise.jitter and seconds:
            spread = np.log1p(self.noise.jitter**2)
            seconds *= float(self.random.lognormal(-spread / 2, spread**0.5))
        self.starts[at][number] = now
        rank.place += 1
        if not seconds:
            self.ends[at][number] = now
            return False
        rank.computing, rank.left, rank.since = at, seconds, now
        rank.apart += seconds
        self._expect(number, now)
        return True

    def _expect(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        rank.version += 1
        version = rank.version
        self.agenda.note(now + rank.left * self._slower(rank), lambda then: self._computed(number, version, then))

    def _slower(self, rank: _Rank) -> float:
        return 1 + self.contention if rank.behind else 1.0

    def _computed(self, number: int, version: int, now: float) -> None:
        rank = self.ranks[number]
        if version != rank.version or rank.computing is None:
            return
        self.ends[rank.computing][number] = now
        rank.computing = None
        self._walk(number, now)

    def _behind(self, number: int, change: int, now: float) -> None:
        """Sums that go on behind a rank begin or end."""
        rank = self.ranks[number]
        if rank.computing is not None and self.contention:
            rank.left = max(rank.left - (now - rank.since) / self._slower(rank), 0.0)
            rank.since = now
        rank.behind += change
        if rank.computing is not None and self.contention:
            self._expect(number, now)

    # The network

    def _post(self, number: int, at: int, now: float) -> None:
        index = at % len(self.tasks)
        self.starts[at][number] = now
        if self.tasks[index].label != GRADIENTS:  # nobody waits for those yet
            self.apart[at, number], self.ranks[number].apart = self.ranks[number].apart, 0.0
        posted = self.posted[at] = self.posted.get(at, 0) | 1 << number
        if self.moves[index] is not None:
            self._post_move(number, at, index, posted, now)
            return
        group = self.groups[index]
        assert group is not None
        mine = group[number]
        assert mine is not None
        if mine.bits & posted == mine.bits:
            if self.tasks[index].label == GRADIENTS:
                for other in mine.classes:
                    self._behind(other, 1, now)
            self._phase(mine, 0, at, now)

    def _phase(self, group: "_Group", phase: int, at: int, now: float) -> None:
        """Begin one phase of a sum, or end the sum."""
        if phase == len(group.phases):
            for number in group.classes:
                if self.tasks[at % len(self.tasks)].label == GRADIENTS:
                    self._behind(number, -1, now)
                self._done(at, number, now)
            return
        links = group.links[phase]
        after = group.phases[phase].latency
        if not phase:
            after += self.skew * max(self.apart.get((at, number), 0.0) for number in group.classes)
        left = len(links)

        def through(then: float) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self.agenda.note(then + after, lambda end: self._phase(group, phase + 1, at, end))

        if not links:
            through(now)
        for link, seconds, flows in links:
            link.carry(seconds, flows, through)

    def _post_move(self, number: int, at: int, index: int, posted: int, now: float) -> None:
        parties = self.moves[index]
        assert parties is not None
        waiting = posted & ~(self.begun.get((at, "in"), 0) & self.begun.get((at, "out"), 0))
        for other in parties.met[number]:
            if waiting >> other & 1:
                for direction, needed in (("in", parties.source_bits[other]), ("out", parties.sink_bits[other])):
                    if needed & posted == needed and not self.begun.get((at, direction), 0) >> other & 1:
                        self._carry(other, at, index, direction, now)

    def _carry(self, number: int, at: int, index: int, direction: str, now: float) -> None:
        """What one class gets, or what it sends, of a move."""
        self.begun[at, direction] = self.begun.get((at, direction), 0) | 1 << number
        parties = self.moves[index]
        assert parties is not None
        flights = parties.gets[number] if direction == "in" else parties.gives[number]
        left = len(flights)

        def through(then: float) -> None:
            nonlocal left
            left -= 1
            if left > 0:
                return
            self.through[at, direction] = self.through.get((at, direction), 0) | 1 << number
            self._end_moves(at, parties, parties.told[number] if direction == "out" else (number,), then)

        if not flights:
            through(now)
        apart = self.apart[at, number]
        for link, seconds, alike, level in flights:

            def landed(then: float, latency: float = level.meeting + level.skew * apart) -> None:
                self.agenda.note(then + latency, through)

            link.carry(seconds, alike, landed)

    def _end_moves(self, at: int, parties: "_Parties", classes: Sequence[int], now: float) -> None:
        """A move is done for those that have sent and got theirs, from classes that have all sent."""
        sent = self.through.get((at, "out"), 0)
        both = sent & self.through.get((at, "in"), 0)
        for number in classes:
            sources = parties.source_bits[number]
            if both >> number & 1 and sources & sent == sources:
                self._done(at, number, now)


@dataclass(frozen=True)
class _Parties:
    """Who takes part in a move, by class."""

    sources: list[list[int]]
    """The classes that it gets something from."""
    sinks: list[list[int]]
    """Those that it sends something to."""
    gets: list[list[tuple[Link, float, int, Level]]]
    """(link, seconds alone, flows, level) of all that comes over links."""
    gives: list[list[tuple[Link, float, int, Level]]]
    """The same of what it sends."""

    @cached_property
    def source_bits(self) -> list[int]:
        """As bits."""
        return list(map(_bits, self.sources))

    @cached_property
    def sink_bits(self) -> list[int]:
        """As bits."""
        return list(map(_bits, self.sinks))

    @cached_property
    def met(self) -> list[list[int]]:
        """Itself, then all that it gets from or sends to."""
        pairs = enumerate(zip(self.sources, self.sinks, strict=True))
        return [list(dict.fromkeys((number, *sources, *sinks))) for number, (sources, sinks) in pairs]

    @cached_property
    def told(self) -> list[list[int]]:
        """For whom the move may be done when it has sent: itself first, unless it is among those that it sends to."""
        return [sinks if number in sinks else [number, *sinks] for number, sinks in enumerate(self.sinks)]


@dataclass(frozen=True)
class _Group:
    """Classes that add something up, and what each phase puts on which links."""

    classes: tuple[int, ...]
    """In order."""
    bits: int
    """The same."""
    phases: tuple[Phase, ...]
    links: list[list[tuple[Link, float, int]]]


def _bits(classes: Iterable[int]) -> int:
    bits = 0
    for number in classes:
        bits |= 1 << number
    return bits


def _some(classes: Ints, ranks: Sequence[int], count: int) -> frozenset[int]:
    if len(ranks) == len(classes):
        return frozenset(range(count))
    return frozenset(classes[list(ranks)].tolist())
