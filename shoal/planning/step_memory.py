"""What a training step holds in memory on one rank, read off the program.

    parameters   this rank's shards, their gradients, and what the optimizer keeps of each; where its state is cut, what
                 layers read, gradients and state of the own rows, and the largest gradient on its way to its owners
    kept         values and tiles that operators save for backward, each once however many save it
    working      what one layer of backward handles at a time, in the largest such layer: its gradients, and the copies
                 that kernels make of its tensors in a layout of their own
    libraries    compiled kernels and the like, a constant

A step that recomputes keeps other things at other moments: `recomputed_memory.py`, whose fullest moment then is what is
kept and at work. It does not see the allocator's rests. `benchmarks/memory` holds it against measured peaks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shoal.graph import Layer, LayerGraph
from shoal.lowering.laps import LappedStep
from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program
from shoal.moves import Layout
from shoal.operators.registry import facts_of
from shoal.partition import volume
from shoal.planning.recomputed_memory import fullest_moment

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
    if "kept" not in graph.worked_out:
        graph.worked_out["kept"] = _find_kept_values(graph)
    kept: frozenset[str] = graph.worked_out["kept"]
    return kept


def _find_kept_values(graph: LayerGraph) -> frozenset[str]:
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


def step_memories(
    program: Program,
    ranks: Iterable[int],
    itemsize: Mapping[str, int],
    *,
    optimizer_slots: int = 1,
    homes: Mapping[str, Layout] | None = None,
    recompute: bool = False,
) -> list[Memory]:
    """What each of these ranks holds at the peak of a step under a program. `homes`: what they keep of states."""
    ranks = tuple(ranks)
    parameters = _of_states(program, ranks, itemsize, optimizer_slots, homes or program.states)
    kept, working = (_recomputed if recompute else _kept)(program, ranks, itemsize)
    return [Memory(*sizes) for sizes in zip(parameters, kept, working, strict=True)]


def lapped_memories(
    program: Program,
    lapped: LappedStep,
    ranks: Iterable[int],
    itemsize: Mapping[str, int],
    *,
    optimizer_slots: int = 1,
    homes: Mapping[str, Layout] | None = None,
) -> list[Memory]:
    """The same where linear layers run in laps; `program`: the step without laps.

    What the front keeps is there all the time, and of its features and their gradients this rank's own rows. What a
    lap keeps comes and goes, with the features of the next, which are on their way.
    """
    ranks = tuple(ranks)
    parameters = _of_states(program, ranks, itemsize, optimizer_slots, homes or program.states)
    front = _of_pass(lapped.front, ranks, itemsize)
    laps = [_of_pass(lap.program, ranks, itemsize) for lap in lapped.laps]
    coming = [[_of_features(lap.program, lapped.features, rank, itemsize) for rank in ranks] for lap in lapped.laps]
    found = []
    for index, rank in enumerate(ranks):
        own = _held_features(lapped, rank, itemsize)
        at_once = [
            sum(lap[index]) + (coming[number][index] if number < len(laps) else 0)
            for number, lap in enumerate(laps, start=1)
        ]
        kept, working = front[index]
        found.append(Memory(parameters[index], kept + own, max(working, max(at_once) + own)))
    return found


def _held_features(lapped: LappedStep, rank: int, itemsize: Mapping[str, int]) -> int:
    """Bytes of a rank's own rows of what the front gives; as many as of their gradients."""
    boxes = {fetch.value: fetch.boxes[rank] for fetch in lapped.front.outputs}
    return sum(volume(box) * itemsize[name] for name, box in boxes.items() if box is not None)


def _of_features(program: Program, features: Sequence[str], rank: int, itemsize: Mapping[str, int]) -> int:
    """Bytes of what one lap reads of them."""
    fetches = [one for one in program.instructions if isinstance(one, Fetch) and one.value in features]
    boxes = [(fetch.value, fetch.boxes[rank]) for fetch in fetches]
    return sum(volume(box) * itemsize[name] for name, box in boxes if box is not None)


def _of_pass(program: Program, ranks: Sequence[int], itemsize: Mapping[str, int]) -> list[tuple[int, int]]:
    """Of each rank (what is kept for backward, the largest layer's working memory)."""
    return list(zip(*_kept(program, ranks, itemsize), strict=True))


def _recomputed(
    program: Program, ranks: Sequence[int], itemsize: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Of each rank what it holds and handles at the fullest moment of a step that recomputes."""
    graph = program.graph
    fullest = fullest_moment(
        program,
        ranks,
        itemsize,
        handled=lambda placed: _handled(placed, ranks, graph, itemsize),
        is_view=lambda placed: stands_for_input(placed.layer, graph),
    )
    return fullest.kept.tolist(), fullest.working.tolist()


def _kept(program: Program, ranks: Sequence[int], itemsize: Mapping[str, int]) -> tuple[Sequence[int], Sequence[int]]:
    """Of each rank what it keeps from forward to backward, and what the largest layer handles."""
    graph = program.graph
    computes = [instruction for instruction in program.instructions if isinstance(instruction, Compute)]
    wanted = kept_values(graph)
    own = {
        compute.placed.layer.name
        for compute in computes
        if compute.placed.layer.name in wanted
        and compute.placed.layer.name not in program.only_moved_to
        and not stands_for_input(compute.placed.layer, graph)
    }
    readers = {key: compute.placed.facts for compute in computes for key in compute.sources.values()}
    tiles = [
        instruction
        for instruction in program.instructions
        if isinstance(instruction, Fetch)
        and not instruction.identity
        and instruction.key in readers
        and (readers[instruction.key].saves_input or instruction.value in wanted)
    ]
    kept, working = [0] * len(ranks), [0] * len(ranks)
    for compute in computes:
        placed = compute.placed
        name, index_bytes = placed.layer.name, placed.facts.index_bytes
        each = (itemsize[name] if name in own else 0) + index_bytes
        for index, handled in enumerate(_handled(placed, ranks, graph, itemsize)):
            if handled is not None:
                kept[index] += handled[0] * each
                working[index] = max(working[index], handled[1])
    for fetch in tiles:
        for index, rank in enumerate(ranks):
            tile = fetch.tiles[rank]
            kept[index] += 0 if tile is None else prod(tile.shape) * itemsize[fetch.value]
    return kept, working


def _of_states(
    program: Program,
    ranks: Sequence[int],
    itemsize: Mapping[str, int],
    optimizer_slots: int,
    homes: Mapping[str, Layout],
) -> list[int]:
    """Of each rank the bytes of what layers read, of gradients and optimizer state, and of the largest gradient on its
    way to owners.
    """
    held, leaving = [0] * len(ranks), [0] * len(ranks)
    for name, layout in program.states.items():
        home, learns = homes[name], program.graph.states[name].differentiable and name not in program.changed
        for index, rank in enumerate(ranks):
            box, kept = layout[rank], home[rank]
            if box is None:
                continue
            size = volume(box) * itemsize[name]
            held[index] += size
            if learns:
                own = size if kept is box else 0 if kept is None else volume(kept) * itemsize[name]
                held[index] += own * (1 + optimizer_slots)
                if own != size:  # what arrives first becomes the gradient
                    leaving[index] = max(leaving[index], size + own * (layout.count(box) - 2))
    return [sum(both) for both in zip(held, leaving, strict=True)]


def _handled(
    placed: Placed, ranks: Sequence[int], graph: LayerGraph, itemsize: Mapping[str, int]
) -> list[tuple[int, int] | None]:
    """Of each rank the elements that its part of a layer writes, and bytes that its backward handles; None without one.

    Worked out once for layers that are alike.
    """
    own = itemsize[placed.layer.name]
    sizes = {arg: itemsize[ref.name] for arg, ref in placed.layer.tensors if ref.name in graph.specs}
    by_sizes: dict[object, dict[int, tuple[int, int] | None]] = placed.alike.setdefault("handled", {})
    known = by_sizes.setdefault((own, *sizes.items()), {})
    for rank in ranks:
        if rank not in known:
            known[rank] = None
            if (box := placed.writes[rank]) is not None:
                needs, written = placed.needs[rank], volume(box)
                read = sum(volume(needs[arg].box) * size for arg, size in sizes.items() if arg in needs)
                known[rank] = written, _working(placed, rank, written * own, read, own)
    return [known[rank] for rank in ranks]


def _working(placed: Placed, rank: int, written: int, read: int, itemsize: int) -> int:
    """Bytes that backward of one layer handles beyond what was kept: gradients of both sides, and kernels' copies."""
    if not placed.facts.own_layout:
        return written + read
    needs = placed.needs[rank]
    channels = max(1, len(needs["input"].box[1]))
    padded = read * -(-channels // CHANNELS_TOGETHER) * CHANNELS_TOGETHER // channels
    weights = volume(needs["weight"].box) * itemsize
    return 2 * written + read + padded + max(read, padded) // 2 + 2 * weights
