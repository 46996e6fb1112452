"""What a step that recomputes holds on a rank at its fullest moment: the engine's walk, with sizes for tensors. Pure.

Forward keeps what lives at the start of every segment but the last; backward runs a segment again, which then holds
what its layers save, and walks it. So a moment holds

    borders      the values and tiles at the starts of earlier segments, each once however many borders it crosses
    live         values and tiles of the segment that some layer still reads
    saved        what the layers of the segment keep for backward, as in a step without recomputing
    gradients    those on their way from layers that backward has passed to layers that made what these read
    working      what one layer handles at a time

Only the last changes faster than from instruction to instruction, so the fullest moment is one of these. Costs some
microseconds an instruction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program, Settle
from shoal.lowering.tasks import Moved
from shoal.moves import Layout
from shoal.partition import volume
from shoal.simulating.flows import elements_between

Sizes = NDArray[np.int64]
"""Bytes by rank."""
Item = tuple[str, str | int]
"""One tensor: its kind, and the name of a layer or the key of a Fetch."""
Handled = Callable[[Placed], Sequence[tuple[int, int] | None]]
"""Of each rank the elements that its part of a layer writes, and the bytes that its backward handles."""


@dataclass(frozen=True)
class Fullest:
    """The fullest moment of each rank: bytes that are held, and that the layer at work handles."""

    kept: Sizes
    working: Sizes


def fullest_moment(
    program: Program,
    ranks: Sequence[int],
    itemsize: Mapping[str, int],
    *,
    handled: Handled,
    is_view: Callable[[Placed], bool],
) -> Fullest:
    """Of a recomputing step on each of these ranks, but for parameters and what belongs to them.

    What the caller passes is the caller's. `is_view`: whether what a layer gives is what it reads, in the same memory.
    """
    walk = _Walk(program, ranks, itemsize, handled, is_view)
    for segment in program.segments[:-1]:
        walk.keep()
        walk.forward(segment, record=False)
    walk.forward(program.segments[-1], record=True)
    walk.backward(program.segments[-1])
    for segment in reversed(program.segments[:-1]):
        walk.go_back()
        walk.forward(segment, record=True)
        walk.backward(segment)
    return Fullest(walk.kept, walk.working)


@dataclass
class _Live:
    """What lives at one place of the list, by name and by key."""

    values: dict[str, Item | None] = field(default_factory=dict)
    tiles: dict[int, Item | None] = field(default_factory=dict)

    def items(self) -> Iterable[Item | None]:
        return (*self.values.values(), *self.tiles.values())


class _Walk:
    def __init__(
        self,
        program: Program,
        ranks: Sequence[int],
        itemsize: Mapping[str, int],
        handled: Handled,
        is_view: Callable[[Placed], bool],
    ) -> None:
        self._program, self._ranks, self._itemsize = program, ranks, itemsize
        self._handled, self._is_view = handled, is_view
        trainable = {name for name, state in program.graph.states.items() if state.differentiable}
        self._flowing = program.needing_grad(frozenset(trainable) - frozenset(program.changed), frozenset())
        self._nothing: Sizes = np.zeros(len(ranks), dtype=np.int64)
        self.kept, self.working = self._nothing, self._nothing
        self._held = self._nothing.copy()
        self._counts: dict[Item, int] = {}
        self._sizes: dict[Item, Sizes] = {}
        self._borders: list[_Live] = []
        self._live = _Live(dict.fromkeys(program.graph.inputs))
        self._saved: dict[int, list[Item]] = {}
        self._replaced: dict[int, tuple[int, Item]] = {}
        """By the only Fetch that reads a value: the layer that saved it, and as what. The reader's tile replaces it."""
        self._gradients: dict[str, list[Item]] = {}
        self._later: tuple[list[Item], Sizes] = ([], self._nothing)
        """What the layer before keeps, and handles, until its parameters' gradients are found."""
        self._travels: dict[int, tuple[Sizes, Sizes]] = {}

    # What is held

    def _add(self, item: Item | None) -> None:
        if item is not None:
            count = self._counts.get(item, 0)
            self._counts[item] = count + 1
            if not count:
                self._held += self._sizes[item]

    def _drop(self, item: Item | None) -> None:
        if item is not None:
            self._counts[item] -= 1
            if not self._counts[item]:
                self._held -= self._sizes[item]

    def _new(self, item: Item, size: Callable[[], Sizes]) -> Item:
        if item not in self._sizes:
            self._sizes[item] = size()
        return item

    def _moment(self, working: Sizes) -> None:
        """Now, with so much at work besides."""
        fuller = self._held + working > self.kept + self.working
        self.kept, self.working = np.where(fuller, self._held, self.kept), np.where(fuller, working, self.working)

    # Through the list

    def keep(self) -> None:
        """The start of a segment that will be run again."""
        border = _Live(dict(self._live.values), dict(self._live.tiles))
        self._borders.append(border)
        for item in border.items():
            self._add(item)

    def go_back(self) -> None:
        """To the last start that was kept, which from here on lives as long as somebody reads it."""
        for item in self._live.items():
            self._drop(item)
        self._live = self._borders.pop()

    def forward(self, segment: range, *, record: bool) -> None:
        """A piece of the list. `record`: layers save what their backward reads."""
        program, last = self._program, self._program.last_uses
        for index in segment:
            instruction = program.instructions[index]
            if isinstance(instruction, Fetch):
                self._fetch(instruction)
            elif isinstance(instruction, Compute):
                self._compute(index, instruction, record=record)
            else:
                self._settle(instruction)
            for name in last.values.get(index, ()):
                self._drop(self._live.values.pop(name, None))
            for key in last.tiles.get(index, ()):
                self._drop(self._live.tiles.pop(key, None))
        if record:
            for item in self._live.items():
                self._drop(item)
            self._live = _Live()
            self._replaced.clear()

    def _fetch(self, fetch: Fetch) -> None:
        if fetch.identity:
            item = self._live.values[fetch.value]
        else:
            item = self._of_tiles("tile", fetch)
            if fetch.crosses:  # copies of what leaves, what arrived, and the tile that it is put together to
                self._moment(self._sizes[item] + self._travelling(fetch)[0] + self._travelling(fetch)[1])
        self._add(item)
        self._live.tiles[fetch.key] = item

    def _compute(self, index: int, compute: Compute, *, record: bool) -> None:
        placed, name = compute.placed, compute.placed.layer.name
        sources = [self._live.tiles[key] for key in dict.fromkeys(compute.sources.values())]
        if sources and self._is_view(placed):
            item = sources[0]
        else:
            item = self._new(("value", name), lambda: self._of_layout(placed.writes, self._itemsize[name]))
        self._add(item)
        self._live.values[name] = item
        if placed.facts.own_layout:
            self._moment(self._copies(placed))
        if record and name in self._flowing:
            self._save(index, compute, item, sources)
        self._moment(self._nothing)

    def _save(self, index: int, compute: Compute, item: Item | None, sources: Sequence[Item | None]) -> None:
        """What a layer keeps for backward; a reader's own tile takes the place of what the layer before saved."""
        placed, name = compute.placed, compute.placed.layer.name
        for key in compute.sources.values():
            if (replaced := self._replaced.pop(key, None)) is not None and (tile := self._live.tiles[key]) is not None:
                maker, before = replaced
                self._saved[maker] = [tile if one == before else one for one in self._saved[maker]]
                self._add(tile)
                self._drop(before)
        saved = [source for source in sources if source is not None] if placed.facts.saves_input else []
        if placed.facts.saves_output and item is not None:
            saved.append(item)
            if name in self._program.only_moved_to:
                self._replaced[self._program.only_moved_to[name]] = index, item
        if placed.facts.index_bytes:
            saved.append(self._new(("index", name), lambda: self._of_layout(placed.writes, placed.facts.index_bytes)))
        self._saved[index] = saved
        for one in saved:
            self._add(one)

    def _settle(self, settle: Settle) -> None:
        item = self._new(("settled", settle.value), lambda: self._of_layout(settle.owned, self._itemsize[settle.value]))
        self._add(item)
        self._moment(self._travelling(settle)[0] + self._travelling(settle)[1])
        self._drop(self._live.values[settle.value])
        self._live.values[settle.value] = item

    def backward(self, segment: range) -> None:
        """The same piece from its end, after it was recorded."""
        for index in reversed(segment):
            instruction = self._program.instructions[index]
            if isinstance(instruction, Fetch):
                if instruction.value in self._flowing:
                    self._send_back(instruction)
                continue
            self._finish()
            if isinstance(instruction, Compute):
                self._compute_back(index, instruction)
            elif instruction.value in self._flowing:
                whole = ("value", instruction.value)
                self._gather(instruction.value)
                self._leave(instruction, instruction.partial)
                self._add(whole)
                self._gradients[instruction.value] = [whole]
        self._finish()

    def _compute_back(self, index: int, compute: Compute) -> None:
        placed = compute.placed
        self._gather(placed.layer.name)
        if index not in self._saved:
            return
        working = np.array([0 if of is None else of[1] for of in self._handled(placed)], dtype=np.int64)
        self._moment(working)
        self._later = self._saved.pop(index), self._nothing
        for key in dict.fromkeys(compute.sources.values()):
            fetch = self._program.instructions[key]
            assert isinstance(fetch, Fetch)
            if fetch.value in self._flowing:
                item = self._of_tiles("to tile", fetch)
                if not self._counts.get(item):
                    self._add(item)
                if placed.rule.apart and key in self._program.crossing:
                    self._later = self._later[0], working - self._sizes[item]
        if self._later[1] is self._nothing:
            self._finish()

    def _finish(self) -> None:
        """The gradients of parameters that a layer left until its input's was on its way; what it saved can go."""
        saved, working = self._later
        self._moment(working)
        for item in saved:
            self._drop(item)
        self._later = [], self._nothing

    def _send_back(self, fetch: Fetch) -> None:
        """The gradient of a tile goes to where the value was made, and waits there: what arrives, and its own part."""
        own = self._of_tiles("to tile", fetch)
        if not self._counts.get(own):
            self._add(own)  # zeros, of a tile that no gradient came to
        waiting = self._gradients.setdefault(fetch.value, [])
        waiting.append(own)
        if not fetch.identity and fetch.crosses:
            waiting.append(self._new(("back", fetch.key), lambda: sum(self._travelling(fetch), self._nothing)))
            self._add(waiting[-1])
            self._leave(fetch, self._program.layouts[fetch.value])

    def _leave(self, instruction: Fetch | Settle, wanted: Layout) -> None:
        """What a rank sends that gets nothing back is under way until backward is through."""
        nobody = np.array([wanted[rank] is None for rank in self._ranks])
        self._held += np.where(nobody, self._travelling(instruction)[0], 0)

    def _gather(self, value: str) -> None:
        """All that came back of a value's gradient is put together and added up, for the layer that made it."""
        waiting = self._gradients.pop(value, ())
        if any(kind == "back" for kind, _ in waiting):
            layout = self._program.layouts[value]
            self._moment(self._of_layout(layout, self._itemsize[value]))
        for item in waiting:
            self._drop(item)

    # Sizes

    def _of_layout(self, layout: Layout, itemsize: int) -> Sizes:
        boxes = (layout[rank] for rank in self._ranks)
        return np.array([0 if box is None else volume(box) * itemsize for box in boxes], dtype=np.int64)

    def _of_tiles(self, kind: str, fetch: Fetch) -> Item:
        def size() -> Sizes:
            tiles, itemsize = (fetch.tiles[rank] for rank in self._ranks), self._itemsize[fetch.value]
            return np.array([0 if tile is None else prod(tile.shape) * itemsize for tile in tiles], dtype=np.int64)

        return self._new((kind, fetch.key), size)

    def _travelling(self, instruction: Fetch | Settle) -> tuple[Sizes, Sizes]:
        """(bytes that arrive, bytes that leave) in forward; in backward the other way."""
        if instruction.key not in self._travels:
            size, copies = self._itemsize[instruction.value], False
            if isinstance(instruction, Settle):
                have, need = instruction.partial, instruction.owned
            else:
                have, need, copies = instruction.have, instruction.boxes, instruction.copies
            elements = elements_between(Moved(have, need, copies, size), slice(None))
            np.fill_diagonal(elements, 0)
            ranks = list(self._ranks)
            self._travels[instruction.key] = elements.sum(axis=1)[ranks] * size, elements.sum(axis=0)[ranks] * size
        return self._travels[instruction.key]

    def _copies(self, placed: Placed) -> Sizes:
        """Of a kernel with a layout of its own, in forward: its input, its weights and its result once more."""
        sizes: Sizes = self._nothing.copy()
        for index, rank in enumerate(self._ranks):
            box, needs = placed.writes[rank], placed.needs[rank]
            if box is not None:
                size = self._itemsize[placed.layer.name]
                read = sum(
                    volume(needs[arg].box) for arg, ref in placed.layer.tensors if arg in needs and arg != "bias"
                )
                sizes[index] = (volume(box) + read) * size
        return sizes
