"""What tasks take on given devices and links, each alone: seconds of kernels, bytes of moves, ways of sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.lowering.placement import Placed
from shoal.lowering.step_traffic import GRADIENTS
from shoal.lowering.tasks import Bytes, Kernel, Moved, Summed, Task, Tasks
from shoal.partition import volume
from shoal.simulating.collectives import (
    Phase,
    Shape,
    is_card,
    layer_sum_phases,
    phase_seconds,
    shape_of,
    sharing_of,
    sum_phases,
    unit_size,
)
from shoal.simulating.flows import Flows, Ints, elements_between, flows_of
from shoal.simulating.speeds import KernelTime, Speeds

Floats = NDArray[np.float64]


@dataclass
class Durations:
    """Of the tasks of one step; everything is worked out once and kept."""

    tasks: Tasks
    speeds: Speeds
    kernels: dict[object, KernelTime] = field(default_factory=dict)
    """By layer, part and cut; may be shared between plans of one network."""
    _flows: dict[tuple[int, int], Flows] = field(default_factory=dict)
    _volumes: dict[int, Ints] = field(default_factory=dict)
    _sharing: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The links."""
        return self.speeds.cluster

    def compute(self, task: Task) -> Floats:
        """By rank, seconds of a task that computes; 0 for ranks without a part."""
        match task.work:
            case Kernel(placed=placed, of=of):
                volumes = self.volumes(placed)
                largest = max(int(volumes[task.ranks[0]]) if task.ranks else 1, 1)
                return self._kernel_seconds(task, placed) / of * volumes / largest
            case Moved():
                return self.arriving(task.work) * self.speeds.copy_per_byte
            case Bytes(by_rank=sizes):
                return np.array(sizes, dtype=np.float64) * self.speeds.update_per_byte
            case _:
                raise TypeError(f"a task of kind {task.kind!r} does not compute")

    def _kernel_seconds(self, task: Task, placed: Placed) -> float:
        """Of the largest part."""
        time = self.kernel(placed)
        half = self.speeds.layer_overhead / 2
        return (time.forward if task.kind == "forward" else time.backward) + half

    def kernel(self, placed: Placed) -> KernelTime:
        """Of the first part of a layer, which no other exceeds."""
        part = next(part for part in placed.parts if part is not None)
        flowing = self.tasks.flowing
        key = (placed.layer.name, tuple(part.items()), placed.cut_letters)
        if key not in self.kernels:
            to_input = any(read in flowing for read in placed.layer.reads)
            seconds = self.speeds.kernel(placed.op, placed.rule, part, placed.cut_letters, input_grad=to_input)
            self.kernels[key] = seconds if placed.layer.name in flowing else KernelTime(seconds.forward, 0.0)
        return self.kernels[key]

    def volumes(self, placed: Placed) -> Ints:
        """By rank, elements that its part writes, at least 1; 0 without a part."""
        if id(placed) not in self._volumes:
            sizes = [0 if box is None else max(volume(box), 1) for box in placed.writes]
            self._volumes[id(placed)] = np.array(sizes, dtype=np.int64)
        return self._volumes[id(placed)]

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

    def arriving(self, work: Moved) -> Floats:
        """By rank, bytes that are put together."""
        elements: Floats = (self.flows(work).arriving * work.itemsize).astype(np.float64)
        return elements

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

    def sharing(self, work: Summed) -> tuple[int, ...]:
        """By level, groups of the same task behind one card."""
        if id(work) not in self._sharing:
            self._sharing[id(work)] = sharing_of(work.groups, self.cluster)
        return self._sharing[id(work)]

    def phases(self, task: Task, number: int) -> tuple[Phase, ...]:
        """How one group of a sum adds up."""
        assert isinstance(task.work, Summed)
        shape = shape_of(task.work.groups[number], self.cluster)
        return self._phases(task, task.work.bytes[number], shape, self.sharing(task.work))

    def _phases(self, task: Task, size: int, shape: Shape, sharing: tuple[int, ...]) -> tuple[Phase, ...]:
        way = sum_phases if task.label == GRADIENTS else layer_sum_phases
        return way(size, shape, sharing, self.cluster)

    def sum_seconds(self, task: Task) -> float:
        """How long a sum takes alone, in its slowest group."""
        assert isinstance(task.work, Summed)
        sharing = self.sharing(task.work)
        shapes: dict[tuple[Shape, int], float] = {}
        for group, size in zip(task.work.groups, task.work.bytes, strict=True):
            shape = shape_of(group, self.cluster)
            if (shape, size) not in shapes:
                phases = self._phases(task, size, shape, sharing)
                shapes[shape, size] = phase_seconds(phases, sharing, self.cluster)
        return max(shapes.values(), default=0.0)


def sent_bytes(tasks: Sequence[Task], durations: Durations) -> list[int]:
    """By task, what all ranks together send."""
    sizes = []
    for task in tasks:
        match task.work:
            case Moved() if task.kind == "move":
                sizes.append(int(durations.flows(task.work).sent.sum()) * task.work.itemsize)
            case Summed(groups=groups, bytes=by_group):
                sizes.append(sum(2 * (len(group) - 1) * size for group, size in zip(groups, by_group, strict=True)))
            case _:
                sizes.append(0)
    return sizes
