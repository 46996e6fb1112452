"""A step as a list of instructions, the same list on every rank. Integers only.

    Fetch    bring a value from its owners to the tiles that readers need   (halo, gather, re-cut: all moves)
    Compute  run one layer's part on its tiles
    Settle   add partial sums up at their owners

Forward runs the list, backward runs it reversed with every move turned round. Because all ranks follow one
list, collectives meet in one order, whichever ranks have a part in them. The cost model prices this list and
the simulator replays it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import TypeVar

from shoal.errors import PlanError
from shoal.graph import LayerGraph, State, Value
from shoal.lowering.placement import Placed, depends_on_input, op_of, place, state_layouts
from shoal.lowering.segments import choose_boundaries
from shoal.moves import Layout, Move, add_moves, copy_moves
from shoal.operators.base import Need
from shoal.operators.registry import learning
from shoal.partition import Box, Cut, volume

K = TypeVar("K")


@dataclass(frozen=True)
class Fetch:
    """Bring a value to tiles."""

    key: int
    """Its index in the program; also the tag of its messages."""
    value: str
    have: Layout
    """For every rank what it owns of the value."""
    tiles: tuple[Need | None, ...]
    boxes: Layout
    """The tiles without their padding."""
    copies: bool
    """Whether ranks that own anything of the value own all of it."""
    reader: str
    """The layer that reads the tiles first, for people."""
    identity: bool
    """Whether every rank's tile is exactly what it owns, so that nothing has to be done."""

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every box that goes to a tile. Listed when first asked for: the planner asks of many ranks and needs none."""
        return (copy_moves if self.copies else add_moves)(self.have, self.boxes)

    @cached_property
    def crosses(self) -> bool:
        """Whether something goes from one rank to another."""
        pairs = zip(self.have, self.boxes, strict=True)
        return any(wanted is not None and volume(wanted) and not _within(wanted, held) for held, wanted in pairs)

    @property
    def label(self) -> str:
        """Whose traffic this is."""
        return self.reader


@dataclass(frozen=True)
class Compute:
    """Run a layer on fetched tiles."""

    placed: Placed
    sources: Mapping[str, int]
    """For every tensor argument that is a value, the key of the Fetch that brings it."""

    @property
    def label(self) -> str:
        """Whose traffic this is."""
        return self.placed.layer.name


@dataclass(frozen=True)
class Settle:
    """Add partial sums up at their owners."""

    key: int
    value: str
    partial: Layout
    owned: Layout
    """Who owns which box of the finished value."""

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every partial sum on its way to an owner."""
        return add_moves(self.partial, self.owned)

    @property
    def label(self) -> str:
        """Whose traffic this is."""
        return self.value


Instruction = Fetch | Compute | Settle


@dataclass(frozen=True)
class Inputs:
    """How the caller's tensors are laid over ranks."""

    layouts: Mapping[str, Layout]
    copies: frozenset[str]
    """Those of which every rank passes the whole."""


@dataclass(frozen=True)
class LastUses:
    """By the index of an instruction, the values and tiles that no later one reads."""

    values: Mapping[int, list[str]]
    tiles: Mapping[int, list[int]]


@dataclass(frozen=True)
class Program:
    """One step of one network under one plan, for one number of samples."""

    graph: LayerGraph
    ranks: int
    instructions: tuple[Instruction, ...]
    layouts: Mapping[str, Layout]
    """For every value the box of it that each rank owns."""
    copies: frozenset[str]
    """Values that every rank holds whole."""
    states: Mapping[str, Layout]
    outputs: tuple[Fetch, ...]
    """Each of the network's results to the layout the caller asked for."""

    @cached_property
    def last_uses(self) -> "LastUses":
        """What may be forgotten after each instruction."""
        values: dict[str, int] = {}
        tiles: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            if isinstance(instruction, Fetch):
                values[instruction.value] = index
            elif isinstance(instruction, Compute):
                tiles.update(dict.fromkeys(instruction.sources.values(), index))
        for fetch in self.outputs:
            tiles.pop(fetch.key, None)
        return LastUses(_by_index(values), _by_index(tiles))

    @cached_property
    def only_moved_to(self) -> Mapping[str, int]:
        """Layers whose output is read as one kind of tile only, made by moves: the key of that Fetch."""
        readers: dict[str, list[Fetch]] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Fetch):
                readers.setdefault(instruction.value, []).append(instruction)
        others = {instruction.value for instruction in self.instructions if isinstance(instruction, Settle)}
        others.update(self.graph.inputs, self.graph.outputs)  # a result is the caller's, who may change it
        return {
            value: fetches[0].key
            for value, fetches in readers.items()
            if len(fetches) == 1 and not fetches[0].identity and value not in others
        }

    @cached_property
    def links(self) -> Mapping[int, tuple[int, int]]:
        """Fetches that only pass a value on within each rank, from the layer that makes it to the only one that reads
        it: for each key the indices of the two layers. Layers so linked can be differentiated as one.

        Convolutions and linear layers begin a chain, so that their parameters' gradients are summed while backward goes
        on; one whose input came from other ranks is a chain of its own.
        """
        made = {
            instruction.placed.layer.name: index
            for index, instruction in enumerate(self.instructions)
            if isinstance(instruction, Compute)
        }
        readers: dict[int, list[int]] = {}
        for index, instruction in enumerate(self.instructions):
            if isinstance(instruction, Compute):
                for key in instruction.sources.values():
                    readers.setdefault(key, []).append(index)
        fetches = [fetch for fetch in self.instructions if isinstance(fetch, Fetch)]
        counts = Counter(fetch.value for fetch in fetches)
        settled = {settle.value for settle in self.instructions if isinstance(settle, Settle)}
        links: dict[int, tuple[int, int]] = {}
        linked: set[int] = set()
        for fetch in fetches:
            if not fetch.identity or counts[fetch.value] > 1 or len(readers.get(fetch.key, ())) != 1:
                continue
            if fetch.value in settled or fetch.value in self.copies or fetch.value not in made:
                continue
            if fetch.value in self.graph.outputs:  # its gradient comes from the caller too
                continue
            producer, reader = self.instructions[made[fetch.value]], readers[fetch.key][0]
            after = self.instructions[reader]
            assert isinstance(producer, Compute)
            assert isinstance(after, Compute)
            if after.placed.rule.apart:
                continue
            if producer.placed.rule.apart and self.crossing & set(producer.sources.values()):
                continue
            if reader not in linked:  # a chain, not a tree
                links[fetch.key] = (made[fetch.value], reader)
                linked.add(reader)
        return links

    def links_within(self, pieces: Iterable[range]) -> tuple[dict[int, int], frozenset[int]]:
        """The links whose two layers lie in one piece of the list: (Fetch by reader, producers)."""
        pieces = tuple(pieces)
        kept = {
            key: (producer, reader)
            for key, (producer, reader) in self.links.items()
            if any(producer in piece and reader in piece for piece in pieces)
        }
        return {reader: key for key, (_, reader) in kept.items()}, frozenset(first for first, _ in kept.values())

    @cached_property
    def crossing(self) -> frozenset[int]:
        """Keys of the Fetches that send something from one rank to another."""
        return frozenset(
            instruction.key
            for instruction in self.instructions
            if isinstance(instruction, Fetch) and not instruction.identity and instruction.crosses
        )

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """The list in segments for recomputing, in order; together they are the whole list."""
        made: list[int] = []
        alive: list[int] = []
        living: dict[str, int] = {}
        for index, instruction in enumerate(self.instructions):
            alive.append(sum(living.values()))
            made.append(0)
            if isinstance(instruction, Compute):
                name = instruction.placed.layer.name
                made[-1] = living[name] = self.graph.specs[name].elements
            for name in self.last_uses.values.get(index, ()):
                living.pop(name, None)
        return tuple(range(a, b) for a, b in pairwise((0, *choose_boundaries(made, alive), len(made))))

    @cached_property
    def learning(self) -> frozenset[str]:
        """Layers from which a gradient of the result can come back."""
        return learning(self.graph)

    @cached_property
    def changed(self) -> tuple[str, ...]:
        """Buffers that a forward pass changes: running statistics, as batch norm keeps them."""
        names = [
            instruction.placed.op[argument].name
            for instruction in self.instructions
            if isinstance(instruction, Compute)
            for argument in instruction.placed.updates
        ]
        return tuple(dict.fromkeys(names))

    @cached_property
    def first_uses(self) -> Mapping[str, str]:
        """As the function has it."""
        first: dict[str, str] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Compute) and instruction.placed.layer.name in self.learning:
                for _, reference in instruction.placed.layer.tensors:
                    if isinstance(reference, State):
                        first.setdefault(reference.name, instruction.placed.layer.name)
        return first

    def behind(self, outputs: Iterable[str]) -> frozenset[str]:
        """The values that these results are made of, themselves included."""
        behind = set(outputs)
        for layer in reversed(self.graph.layers):
            if layer.name in behind:
                behind.update(layer.reads)
        return frozenset(behind)

    def needing_grad(self, trainable: frozenset[str], inputs: frozenset[str]) -> frozenset[str]:
        """Values through which gradients flow, decided from the graph so that all ranks agree.

        `inputs`: those whose gradient is wanted.
        """
        need = {name for name in inputs if self.graph.inputs[name].differentiable}
        for layer in self.graph.layers:
            if layer.name in self.learning and any(
                reference.name in (need if isinstance(reference, Value) else trainable)
                for _, reference in layer.tensors
            ):
                need.add(layer.name)
        return frozenset(need)


def compile_program(
    graph: LayerGraph, cuts: Mapping[str, Cut], ranks: int, inputs: Inputs, outputs: Mapping[str, Layout]
) -> Program:
    """Lay every layer over the ranks and find all moves. `outputs`: the layouts that the caller wants results in.

    Pure: the same on every rank. Raises `PlanError` for a cut that does not fit.
    """
    compiler = _Compiler(graph, ranks, inputs)
    sees_batch = depends_on_input(graph)
    placed = []
    for layer in graph.layers:
        layer_placed = place(op_of(layer, graph), cuts[layer.name], ranks, everywhere=layer.name not in sees_batch)
        compiler.add(layer_placed)
        placed.append(layer_placed)
    last = tuple(compiler.fetch(name, _tiles(outputs[name]), outputs[name], "output") for name in graph.outputs)
    return Program(
        graph=graph,
        ranks=ranks,
        instructions=tuple(compiler.instructions),
        layouts=compiler.layouts,
        copies=frozenset(compiler.copies),
        states=state_layouts(placed, graph, ranks),
        outputs=last,
    )


class _Compiler:
    def __init__(self, graph: LayerGraph, ranks: int, inputs: Inputs) -> None:
        self.graph = graph
        self.ranks = ranks
        self.layouts: dict[str, Layout] = dict(inputs.layouts)
        self.copies: set[str] = set(inputs.copies)
        self.instructions: list[Instruction] = []
        self.known: dict[str, list[Fetch]] = {}

    def add(self, placed: Placed) -> None:
        sources = {}
        for argument, reference in placed.layer.tensors:
            if isinstance(reference, Value):
                tiles = placed.tiles(argument)
                if any(tile is not None for tile in tiles):
                    fetch = self.fetch(reference.name, tiles, placed.reads(argument), placed.layer.name)
                    sources[argument] = fetch.key
        self.instructions.append(Compute(placed, sources))
        name = placed.layer.name
        self.layouts[name] = placed.owns
        if placed.copies:
            self.copies.add(name)
        if placed.partial:
            self.instructions.append(Settle(len(self.instructions), name, placed.writes, placed.owns))

    def fetch(self, value: str, tiles: tuple[Need | None, ...], boxes: Layout, reader: str) -> Fetch:
        """The instruction that brings `value` to `tiles`; one that several readers share is added once.

        `tiles`: with padding only where there is some; `boxes`: without any.
        """
        known = self.known.setdefault(value, [])
        for fetch in known:  # few, which differ early: to hash the tiles of many ranks takes longer
            if fetch.tiles == tiles:
                return fetch
        have = self.layouts[value]
        identity = not any(tile is not None and tile.pad for tile in tiles) and (
            boxes == have
            if value not in self.copies
            else all(box is None or box == held for box, held in zip(boxes, have, strict=True))
        )
        fetch = Fetch(len(self.instructions), value, have, tiles, boxes, value in self.copies, reader, identity)
        known.append(fetch)
        self.instructions.append(fetch)
        return fetch


def _by_index(last: Mapping[K, int]) -> dict[int, list[K]]:
    by_index: dict[int, list[K]] = {}
    for what, index in last.items():
        by_index.setdefault(index, []).append(what)
    return by_index


def _within(inner: Box, outer: Box | None) -> bool:
    return outer is not None and all(b.start <= a.start and a.stop <= b.stop for a, b in zip(inner, outer, strict=True))


def _tiles(layout: Layout) -> tuple[Need | None, ...]:
    return tuple(None if box is None else Need(box) for box in layout)


def first_uses(program: Program) -> dict[str, str]:
    """For every state the first layer that uses it: when its backward is done, so is the state's gradient.

    A state that only layers without a gradient use has none.
    """
    return dict(program.first_uses)


def state_homes(training: Program, evaluation: Program) -> dict[str, Layout]:
    """Where every state lives: as training needs it, or evaluation where training does not use it.

    A state that the two need different parts of is a `PlanError`.
    """
    users: dict[str, str] = {}
    for instruction in training.instructions:
        if isinstance(instruction, Compute):
            for _, reference in instruction.placed.layer.tensors:
                if isinstance(reference, State):
                    users.setdefault(reference.name, instruction.placed.layer.name)
    homes = {**evaluation.states, **{name: training.states[name] for name in users}}
    for instruction in evaluation.instructions:
        if isinstance(instruction, Compute):
            for argument, reference in instruction.placed.layer.tensors:
                if isinstance(reference, State) and not _held(instruction.placed, argument, homes[reference.name]):
                    raise PlanError(
                        f"layers {users[reference.name]!r} in training and {instruction.label!r} in evaluation share "
                        f"{reference.name!r} but are cut so that they need different parts of it.",
                        "Give both layers the same cut.",
                    )
    return homes


def _held(placed: Placed, argument: str, home: Layout) -> bool:
    """Whether every rank holds exactly what its part of a layer needs of a state."""
    return all(
        argument not in needs or needs[argument].box == box for needs, box in zip(placed.needs, home, strict=True)
    )


def layer_groups(program: Program) -> set[tuple[int, ...]]:
    """The groups of ranks that rules may sum over: parts that differ in any choice of a layer's cut axes."""
    groups: set[tuple[int, ...]] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Compute) and instruction.placed.copies:
            if instruction.placed.rule.sums(instruction.placed.op, {}, frozenset(), {}, local=False):
                groups.add(tuple(range(program.ranks)))
        elif isinstance(instruction, Compute):
            letters = sorted(instruction.placed.cut_letters)
            overs = ["".join(chosen) for size in range(1, len(letters) + 1) for chosen in combinations(letters, size)]
            ranks = [rank for rank, part in enumerate(instruction.placed.parts) if part is not None]
            groups.update(instruction.placed.group(rank, over) for over in overs for rank in ranks)
    return groups
