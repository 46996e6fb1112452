"""Where the caller's tensors meet the program: how inputs and results are laid over ranks, and what they weigh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import RunError
from shoal.graph import LayerGraph
from shoal.lowering.placement import op_of, place
from shoal.lowering.program import Inputs, Program, compile_program
from shoal.moves import Layout
from shoal.operators.base import letters
from shoal.partition import Box, Cut, Span, cut, volume, whole

IO = Literal["share", "whole", "tile"]


@dataclass(frozen=True)
class Boundary:
    """The caller's side of a network on `ranks` ranks."""

    io: IO
    ranks: int

    def inputs(self, graph: LayerGraph, shares: Sequence[int], first_cuts: Mapping[str, Cut], result: Layout) -> Inputs:
        """What every rank passes.

        As tiles, the first input is cut as the layer that reads it first; a target as the `result` that is compared
        with it.
        """
        if self.io == "whole":
            return Inputs({name: (whole(spec.shape),) * self.ranks for name, spec in graph.inputs.items()}, copies=True)
        if self.io == "share":
            return Inputs({name: samples(spec.shape, shares) for name, spec in graph.inputs.items()}, copies=False)
        first, *target = graph.inputs
        layouts = {first: tiles(graph.inputs[first].shape, first_cuts[first], self.ranks, channels="k")}
        return Inputs({**layouts, **dict.fromkeys(target, result)}, copies=False)

    def output(self, graph: LayerGraph, shares: Sequence[int], result: Layout) -> Layout:
        """What every rank gets."""
        spec = graph.specs[graph.output]
        if self.io == "whole" or spec.shape[:1] != (graph.batch,):
            return (whole(spec.shape),) * self.ranks
        return samples(spec.shape, shares) if self.io == "share" else result

    def batch(self, sizes: Sequence[int], tiles_at: Callable[[int], Layout], captured: int) -> tuple[int, ...]:
        """Samples per rank of the batch at hand, from the number that each rank passed.

        `tiles_at`: the tiles of the input for a number of samples.
        """
        if self.io == "share":
            return tuple(sizes)
        if self.io == "whole":
            if len(set(sizes)) > 1:
                raise RunError(
                    f"with io='whole' every rank passes the same batch, but they passed {list(sizes)} samples.",
                    "Pass the whole batch on every rank, or use io='share'.",
                )
            return even_shares(sizes[0], self.ranks)
        rows = {box[0]: size for box, size in zip(tiles_at(captured), sizes, strict=True) if box is not None}
        batch = sum(rows.values())
        wanted = [None if box is None else len(box[0]) for box in tiles_at(batch)] if batch else [captured]
        if any(rows is not None and rows != size for rows, size in zip(wanted, sizes, strict=False)):
            raise RunError(
                f"the ranks passed tiles of {list(sizes)} samples, which are no cut of one batch.",
                "Pass the box `model.input_tile(samples of the whole batch)` on every rank.",
            )
        return even_shares(batch, self.ranks)

    def weight(self, program: Program, rank: int) -> float:
        """What a rank's result counts for in the mean over all ranks: its part of the samples and pixels."""
        tile = program.output.tiles[rank]
        everything = whole(program.graph.specs[program.graph.output].shape)
        if all(other is not None and other.box == everything for other in program.output.tiles):
            return 1 / self.ranks
        return 0.0 if tile is None else _places(tile.box) / _places(everything)


def step_program(
    graph: LayerGraph, cuts: Mapping[str, Cut], boundary: Boundary, shares: Sequence[int], *, losses: bool
) -> Program:
    """The program of one step under these cuts, from what the caller passes to what it gets.

    `shares`: samples that each rank passes; `losses`: the result is losses, which stay where they are computed.
    """
    result = output_tiles(graph, cuts, boundary.ranks, losses=losses)
    inputs = boundary.inputs(graph, shares, {name: first_cut(graph, cuts, name) for name in graph.inputs}, result)
    return compile_program(graph, cuts, boundary.ranks, inputs, boundary.output(graph, shares, result))


def first_cut(graph: LayerGraph, cuts: Mapping[str, Cut], value: str) -> Cut:
    """How the layer is cut that reads a value first."""
    return cuts[next(layer.name for layer in graph.layers if value in layer.reads)]


def input_tiles(graph: LayerGraph, cuts: Mapping[str, Cut], ranks: int) -> Layout:
    """Tiles of the first input, as the layer cuts them that reads it first."""
    name = next(iter(graph.inputs))
    return tiles(graph.inputs[name].shape, first_cut(graph, cuts, name), ranks, channels="k")


def output_tiles(graph: LayerGraph, cuts: Mapping[str, Cut], ranks: int, *, losses: bool) -> Layout:
    """Tiles of the result: losses where they are computed; scores by sample and in space, all their channels."""
    if losses:
        last = next(layer for layer in graph.layers if layer.name == graph.output)
        return place(op_of(last, graph), cuts[graph.output], ranks, everywhere=False).owns
    return tiles(graph.specs[graph.output].shape, cuts[graph.output], ranks)


def _places(box: Box) -> int:
    """Samples and pixels of a result, its channels left out."""
    return volume(box[:1] + box[2:])


def samples(shape: Sequence[int], shares: Sequence[int]) -> Layout:
    """Each rank's own samples, one after the other; None for a rank without any."""
    boxes: list[Box | None] = []
    start = 0
    for share in shares:
        boxes.append((Span(start, start + share), *whole(shape[1:])) if share else None)
        start += share
    return tuple(boxes)


def tiles(shape: Sequence[int], wanted: Cut, ranks: int, *, channels: str = "-") -> Layout:
    """A tensor cut as a layer is: by sample and in space, without halos; by channel as the letter `channels` is."""
    names = [channels if letter == "c" else letter for letter in letters(len(shape))]
    sizes = dict(zip(names, shape, strict=True))
    fitted = wanted.at_most({letter: sizes.get(letter, 1) for letter, _ in wanted.degrees})
    spans = [cut(size, fitted.degree(name)) for name, size in zip(names, shape, strict=True)]
    return tuple(
        None if seat is None else tuple(own[seat.get(name, 0)] for name, own in zip(names, spans, strict=True))
        for seat in fitted.seats(ranks)
    )


def even_shares(batch: int, ranks: int) -> tuple[int, ...]:
    """The batch as evenly as possible; ranks beyond the last sample get none.

    >>> even_shares(5, 2), even_shares(1, 3)
    ((3, 2), (1, 0, 0))
    """
    spans = cut(batch, min(batch, ranks))
    return (*map(len, spans), *(0,) * (ranks - len(spans)))
