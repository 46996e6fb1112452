"""What a training step holds in memory on one rank, read off the program.

    parameters   this rank's shards, their gradients, and what the optimizer keeps of each
    kept         values and tiles that operators save for backward, each once however many save it
    working      what one layer of backward handles at a time, in the largest such layer: its gradients, and the copies
                 that kernels make of its tensors in a layout of their own
    libraries    compiled kernels and the like, a constant

It does not see the allocator's rests. `benchmarks/memory` holds it against measured peaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.graph import Layer, LayerGraph
from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program
from shoal.operators.registry import facts_of
from shoal.partition import volume

LIBRARIES = 32 << 20
CHANNELS_TOGETHER = 16
"""Convolutions pad their input's channels to a multiple of this, in a copy."""


def stands_for_input(layer: Layer, graph: LayerGraph) -> bool:
    """Whether to keep a layer's output is to keep its input: a view of all its rows.

    A view that leaves rows out has a tile of its own, with the rows that it reads.
    """
    rows = layer.output.elements
    return facts_of(layer.op).view and all(rows >= graph.specs[read].elements for read in layer.reads[:1])


def kept_values(graph: LayerGraph) -> frozenset[str]:
    """Values that live until backward because an operator saved them; a view stands for what it looks at."""
    root: dict[str, str] = {}
    kept: set[str] = set()
    for layer in graph.layers:
        facts = facts_of(layer.op)
        if layer.reads and stands_for_input(layer, graph):
            root[layer.name] = root.get(layer.reads[0], layer.reads[0])
        if facts.saves_output:
            kept.add(layer.name)
        if facts.saves_input:
            kept.update(root.get(read, read) for read in layer.reads)
    return frozenset(kept)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    kept: int
    working: int
    libraries: int = LIBRARIES

    @property
    def total(self) -> int:
        """The predicted peak above what the process holds before the network is laid."""
        return self.parameters + self.kept + self.working + self.libraries


def step_memory(program: Program, rank: int, itemsize: Mapping[str, int], *, optimizer_slots: int = 1) -> Memory:
    """What one rank holds at the peak of a training step under a program."""
    graph = program.graph
    parameters = 0
    for name, layout in program.states.items():
        box = layout[rank]
        if box is not None:
            copies = 2 + optimizer_slots if graph.states[name].differentiable and name not in program.changed else 1
            parameters += volume(box) * itemsize[name] * copies
    wanted = kept_values(graph)
    kept = 0
    working = 0
    readers = {
        key: instruction.placed.facts
        for instruction in program.instructions
        if isinstance(instruction, Compute)
        for key in instruction.sources.values()
    }
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            placed = instruction.placed
            name, box = placed.layer.name, placed.writes[rank]
            if box is None:
                continue
            size = volume(box) * itemsize[name]
            if name in wanted and name not in program.only_moved_to and not stands_for_input(placed.layer, graph):
                kept += size
            kept += volume(box) * placed.facts.index_bytes
            needs = placed.needs[rank]
            read = sum(
                volume(needs[argument].box) * itemsize[reference.name]
                for argument, reference in placed.layer.tensors
                if argument in needs and reference.name in graph.specs
            )
            working = max(working, _working(placed, rank, size, read, itemsize[name]))
        elif isinstance(instruction, Fetch) and not instruction.identity:
            tile = instruction.tiles[rank]
            reader = readers.get(instruction.key)
            if tile is not None and reader is not None and (reader.saves_input or instruction.value in wanted):
                size = itemsize[instruction.value]
                for rows in tile.shape:
                    size *= rows
                kept += size
    return Memory(parameters, kept, working)


def _working(placed: Placed, rank: int, written: int, read: int, itemsize: int) -> int:
    """Bytes that backward of one layer handles beyond what was kept: gradients of both sides, and kernels' copies."""
    if not placed.facts.own_layout:
        return written + read
    needs = placed.needs[rank]
    channels = max(1, len(needs["input"].box[1]))
    padded = read * -(-channels // CHANNELS_TOGETHER) * CHANNELS_TOGETHER // channels
    weights = volume(needs["weight"].box) * itemsize
    return 2 * written + read + padded + max(read, padded) // 2 + 2 * weights
