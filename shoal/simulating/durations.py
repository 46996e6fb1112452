"""What tasks take on given devices and links, each alone: seconds of kernels, bytes of moves, ways of sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.lowering.placement import Placed
from shoal.lowering.step_traffic import GRADIENTS
from shoal.lowering.tasks import Bytes, Gathered, Kernel, Moved, Summed, Task, Tasks
from shoal.operators.base import Op, Part
from shoal.operators.registry import rule_for
from shoal.partition import Span, volume
from shoal.simulating.collectives import Phase, Shape, Sums, gather_phases, is_card, phase_seconds, unit_size
from shoal.simulating.flows import Flows, Ints, elements_between, flows_of
from shoal.simulating.speeds import KernelTime, Speeds, part_key

Floats = NDArray[np.float64]


@dataclass
class Durations:
    """Of the tasks of one step; everything is worked out once and kept."""

    tasks: Tasks
    speeds: Speeds
    kernels: dict[object, KernelTime] = field(default_factory=dict)
    """By layer, part and cut; may be shared between plans of one network."""
    known: Sums | None = None
    """What is known of sums on the cluster; may be shared likewise."""
    _flows: dict[tuple[int, int], Flows] = field(default_factory=dict)
    _largest: dict[int, KernelTime] = field(default_factory=dict)
    _groups: dict[int, list[tuple[int, Shape, tuple[int, ...]]]] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The links."""
        return self.speeds.cluster

    @cached_property
    def adding(self) -> Sums:
        """How ranks add something up."""
        return self.known or Sums(self.cluster)

    @cached_property
    def computed(self) -> Floats:
        """(tasks, ranks): seconds of every task that computes; 0 for ranks without a part, and for other tasks."""
        tasks, seconds = self.tasks.tasks, np.zeros((len(self.tasks.tasks), self.tasks.ranks))
        kernels: list[tuple[int, float, Ints]] = []
        copies: list[tuple[int, int, Ints]] = []
        for place, task in enumerate(tasks):
            match task.work:
                case Kernel(placed=placed, over=over, of=of) if over:
                    seconds[place, list(task.ranks)] = self._product_seconds(placed, over, of)
                case Kernel(placed=placed, of=of):
                    kernels.append((place, self._kernel_seconds(task, placed, of), self.volumes(placed)))
                case Moved() if task.resource == "compute":
                    copies.append((place, task.work.itemsize, self.flows(task.work).arriving))
                case Bytes(by_rank=sizes):
                    seconds[place] = np.array(sizes, dtype=np.float64) * self.speeds.update_per_byte
                case _:
                    pass
        if kernels:
            places, times, volumes = zip(*kernels, strict=True)
            first = [tasks[place].ranks[:1] for place in places]
            largest = [max(own[ranks[0]], 1) if ranks else 1 for own, ranks in zip(volumes, first, strict=True)]
            seconds[list(places)] = np.array(times)[:, None] * np.array(volumes) / np.array(largest)[:, None]
        if copies:
            places, sizes, elements = zip(*copies, strict=True)
            arriving = (np.array(elements) * np.array(sizes)[:, None]).astype(np.float64)
            seconds[list(places)] = arriving * self.speeds.copy_per_byte
        return seconds

    def compute(self, task: Task) -> Floats:
        """By rank, seconds of one of the tasks, which computes."""
        if task.resource != "compute":
            raise TypeError(f"a task of kind {task.kind!r} does not compute")
        seconds: Floats = self.computed[self._places[id(task)]]
        return seconds

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(task): place for place, task in enumerate(self.tasks.tasks)}

    def _kernel_seconds(self, task: Task, placed: Placed, of: int) -> float:
        """Of the largest part; `of`: the tasks into which its pass is divided, 2 of backward into its two gradients."""
        time = self.kernel(placed)
        seconds = time.forward
        if task.kind != "forward":
            apart = time.to_input if task.kind == "input gradient" else time.to_weights
            seconds = time.backward if of == 1 else apart * 2 / of
        return seconds + self.speeds.layer_overhead / 2 / of

    def kernel(self, placed: Placed) -> KernelTime:
        """Of the first part of a layer, which no other exceeds."""
        if id(placed) not in self._largest:
            part = next(part for part in placed.parts if part is not None)
            self._largest[id(placed)] = self._kernel(placed, part, placed.cut_letters)
        return self._largest[id(placed)]

    def _kernel(self, placed: Placed, part: Part, letters: frozenset[str]) -> KernelTime:
        flowing = self.tasks.flowing
        key = part_key(placed.op, part, letters)
        if key not in self.kernels:
            to_input = any(read in flowing for read in placed.layer.reads)
            seconds = self.speeds.kernel(placed.op, placed.rule, part, letters, input_grad=to_input)
            self.kernels[key] = seconds if placed.layer.name in flowing else KernelTime(seconds.forward)
        return self.kernels[key]

    def _product_seconds(self, placed: Placed, over: frozenset[str], of: int) -> float:
        """The weight's gradient of a layer's largest part, were it whole along the letters `over`."""
        part = next(part for part in placed.parts if part is not None)
        time = kernel_of_all_rows(partial(self._kernel, placed), placed.op, part, placed.cut_letters, over)
        return time.to_weights + self.speeds.layer_overhead / 2 / of

    def volumes(self, placed: Placed) -> Ints:
        """By rank, elements that its part writes, at least 1; 0 without a part."""
        if "volumes" not in placed.alike:
            sizes = [0 if box is None else max(volume(box), 1) for box in placed.writes]
            placed.alike["volumes"] = np.array(sizes, dtype=np.int64)
        found: Ints = placed.alike["volumes"]
        return found

    def flows(self, work: Moved) -> Flows:
        """What goes over which links."""
        key = (id(work.have), id(work.need))
        if key not in self._flows:
            self._flows[key] = flows_of(work, [level.size for level in self.cluster.levels])
        return self._flows[key].back if work.back else self._flows[key]

    def pairs(self, work: Moved) -> Ints:
        """(ranks that get, ranks that send): elements, for a few ranks."""
        elements = elements_between(work, slice(None))
        np.fill_diagonal(elements, 0)
        return elements.T if work.back else elements

    def move_seconds(self, work: Moved) -> float:
        """How long the slowest rank waits, alone, until all has arrived."""
        flows, slowest = self.flows(work), 0.0
        for index, level in enumerate(self.cluster.levels):
            for amounts in (flows.received[index], flows.sent[index]):
                busiest = self._busiest(amounts, index)
                if busiest:
                    slowest = max(slowest, level.meeting + busiest * work.itemsize / level.bandwidth)
        return slowest

    def _busiest(self, amounts: Ints, index: int) -> int:
        if is_card(self.cluster, index):
            amounts = np.add.reduceat(amounts, np.arange(0, len(amounts), unit_size(self.cluster, index)))
        return int(amounts.max(initial=0))

    def phases(self, task: Task, number: int) -> tuple[Phase, ...]:
        """How one group of a sum adds up, or sends what each of its ranks has to the others."""
        return self._phases(task, *self._sums(task)[number])

    def sum_seconds(self, task: Task) -> float:
        """How long a sum takes alone, in its slowest group."""
        groups = set(self._sums(task))
        if isinstance(task.work, Gathered):
            return max(phase_seconds(self._phases(task, *group), group[2], self.cluster) for group in groups)
        in_layer = task.label != GRADIENTS
        return max((self.adding.seconds(*group, in_layer=in_layer) for group in groups), default=0.0)

    def _phases(self, task: Task, size: int, shape: Shape, sharing: tuple[int, ...]) -> tuple[Phase, ...]:
        if isinstance(task.work, Gathered):
            return gather_phases(size, shape, self.cluster)
        return self.adding.phases(size, shape, sharing, in_layer=task.label != GRADIENTS)

    def _sums(self, task: Task) -> list[tuple[int, Shape, tuple[int, ...]]]:
        """Of every group its bytes, how it lies in the cluster, and how many like it share a card by level."""
        assert isinstance(task.work, Summed | Gathered)
        if id(task) not in self._groups:
            groups, sharing = task.work.groups, self.adding.sharing(task.work.groups)
            shapes = [self.adding.shape(group) for group in groups]
            self._groups[id(task)] = [
                (size, shape, sharing) for size, shape in zip(task.work.bytes, shapes, strict=True)
            ]
        return self._groups[id(task)]


def kernel_of_all_rows(
    kernel: Callable[[Part, frozenset[str]], KernelTime],
    op: Op,
    part: Part,
    letters: frozenset[str],
    over: frozenset[str],
) -> KernelTime:
    """Of a part with all rows along `over` of its cut's `letters`: as `kernel` knows it, or in proportion."""
    sizes = {axis.letter: axis.size for axis in rule_for(op).axes(op)}
    whole = {letter: Span(0, sizes[letter]) if letter in over else span for letter, span in part.items()}
    try:
        return kernel(whole, letters - over)
    except InputError:  # it was not measured
        own, times = kernel(part, letters), prod(sizes[letter] / len(part[letter]) for letter in over)
        return KernelTime(own.forward * times, own.to_input * times, own.to_weights * times)


def sent_bytes(tasks: Sequence[Task], durations: Durations) -> list[int]:
    """By task, what all ranks together send."""
    sizes = []
    for task in tasks:
        match task.work:
            case Moved() if task.kind == "move":
                sizes.append(int(durations.flows(task.work).sent.sum()) * task.work.itemsize)
            case Summed(groups=groups, bytes=by_group):
                sizes.append(sum(2 * (len(group) - 1) * size for group, size in zip(groups, by_group, strict=True)))
            case Gathered(groups=groups, by_rank=by_rank):
                sizes.append(sum((len(group) - 1) * by_rank[rank] for group in groups for rank in group))
            case _:
                sizes.append(0)
    return sizes
