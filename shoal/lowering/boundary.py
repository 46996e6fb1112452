"""Where the caller's tensors meet the program: how inputs and results are laid over ranks, and what they weigh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import PlanError, RunError
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

    def inputs(self, graph: LayerGraph, shares: Sequence[int], cuts: Mapping[str, Cut], result: Layout) -> Inputs:
        """What every rank passes: of inputs that have samples its own, or its tile; of others the whole.

        As tiles, an input is cut as the layer that reads it first; a target as the `result` that is compared with it.
        """
        layouts: dict[str, Layout] = {}
        copies = set()
        for name, spec in graph.inputs.items():
            if self.io == "whole" or not follows_batch(graph, name):
                layouts[name] = (whole(spec.shape),) * self.ranks
                copies.add(name)
            elif self.io == "share":
                layouts[name] = samples(spec.shape, shares)
            elif name in graph.targets:
                layouts[name] = result
            else:
                layouts[name] = input_tiles(graph, name, cuts, self.ranks)
        return Inputs(layouts, frozenset(copies))

    def output(self, graph: LayerGraph, name: str, shares: Sequence[int], tiled: Layout) -> Layout:
        """What every rank gets of a result. `tiled`: its tiles, as the last layer cuts it.

        A result of which nobody can say which rows belong to which sample is a `PlanError`.
        """
        shape = graph.specs[name].shape
        everything = (whole(shape),) * self.ranks
        if self.io == "whole":
            return everything
        try:
            dim = graph.batch_dim(name)
        except ValueError as error:
            raise PlanError(
                f"the network's result cannot be shared out by sample: {error}.",
                "Return it with one dim that counts the samples (such as N, T, C instead of N*T, C), or pass "
                "io='whole', with which every rank gets all of it.",
            ) from None
        if dim is None:
            return everything
        return samples(shape, shares, dim) if self.io == "share" else tiled

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

    def weights(self, program: Program, rank: int) -> tuple[float, ...]:
        """What a rank's part of each result counts for in the mean over all ranks: its part of samples and pixels."""
        weights = []
        for fetch in program.outputs:
            everything, own = whole(program.graph.specs[fetch.value].shape), fetch.tiles[rank]
            if all(need is not None and need.box == everything for need in fetch.tiles):
                weights.append(1 / self.ranks)
            else:
                weights.append(0.0 if own is None else volume(own.box) / volume(everything))
        return tuple(weights)

    def input_weight(self, program: Program, name: str, rank: int) -> float:
        """This rank's part of the samples and pixels of an input; 1 where every rank passed all of it."""
        box = program.layouts[name][rank]
        if name in program.copies or box is None:
            return 1.0
        return _places(box) / _places(whole(program.graph.inputs[name].shape))


def step_program(
    graph: LayerGraph, cuts: Mapping[str, Cut], boundary: Boundary, shares: Sequence[int], *, losses: bool
) -> Program:
    """The program of one step under these cuts, from what the caller passes to what it gets.

    `shares`: samples that each rank passes; `losses`: the result is losses, which stay where they are computed.
    """
    tiled = {name: output_tiles(graph, name, cuts, boundary.ranks, losses=losses) for name in graph.outputs}
    inputs = boundary.inputs(graph, shares, cuts, tiled[graph.output])
    outputs = {name: boundary.output(graph, name, shares, own) for name, own in tiled.items()}
    return compile_program(graph, cuts, boundary.ranks, inputs, outputs)


def own_inputs(graph: LayerGraph) -> tuple[str, ...]:
    """The network's own inputs, without the loss's targets."""
    return tuple(name for name in graph.inputs if name not in graph.targets)


def follows_batch(graph: LayerGraph, name: str) -> bool:
    """Whether an input has samples in dim 0, or is the same on all ranks."""
    return name not in graph.shared and graph.inputs[name].shape[:1] == (graph.batch,)


def first_cut(graph: LayerGraph, cuts: Mapping[str, Cut], value: str) -> Cut:
    """How the layer is cut that reads a value first; whole where nothing does."""
    return next((cuts[layer.name] for layer in graph.layers if value in layer.reads), Cut())


def input_tiles(graph: LayerGraph, name: str, cuts: Mapping[str, Cut], ranks: int) -> Layout:
    """Tiles of an input, as the layer cuts them that reads it first."""
    return tiles(graph.inputs[name].shape, first_cut(graph, cuts, name), ranks, channels="k")


def output_tiles(graph: LayerGraph, name: str, cuts: Mapping[str, Cut], ranks: int, *, losses: bool) -> Layout:
    """Tiles of a result: losses where they are computed; scores by sample and in space, all their channels."""
    if losses:
        last = next(layer for layer in graph.layers if layer.name == name)
        return place(op_of(last, graph), cuts[name], ranks, everywhere=False).owns
    return tiles(graph.specs[name].shape, cuts[name], ranks)


def _places(box: Box) -> int:
    """Samples and pixels of an input, its channels left out."""
    return volume(box[:1] + box[2:])


def samples(shape: Sequence[int], shares: Sequence[int], dim: int = 0) -> Layout:
    """Each rank's own samples, one after the other in `dim`; None for a rank without any."""
    boxes: list[Box | None] = []
    start = 0
    for share in shares:
        own = (*whole(shape[:dim]), Span(start, start + share), *whole(shape[dim + 1 :]))
        boxes.append(own if share else None)
        start += share
    return tuple(boxes)


def tiles(shape: Sequence[int], wanted: Cut, ranks: int, *, channels: str = "-") -> Layout:
    """A tensor cut as a layer is: by sample and in space, without halos; by channel as the letter `channels` is."""
    names = tile_letters(shape, channels)
    fitted = tile_cut(shape, names, wanted)
    spans = [cut(size, fitted.degree(name)) for name, size in zip(names, shape, strict=True)]
    return tuple(
        None if seat is None else tuple(own[seat.get(name, 0)] for name, own in zip(names, spans, strict=True))
        for seat in fitted.seats(ranks)
    )


def tile_letters(shape: Sequence[int], channels: str) -> list[str]:
    """For every dim of a tensor the letter of a layer's cut that cuts it; `-` for one that is not cut."""
    return [channels if letter == "c" else letter for letter in letters(len(shape))]


def tile_cut(shape: Sequence[int], names: Sequence[str], wanted: Cut) -> Cut:
    """What is left of a layer's cut for a tensor with these letters."""
    sizes = dict(zip(names, shape, strict=True))
    return wanted.at_most({letter: sizes.get(letter, 1) for letter, _ in wanted.degrees})


def even_shares(batch: int, ranks: int) -> tuple[int, ...]:
    """The batch as evenly as possible; ranks beyond the last sample get none.

    >>> even_shares(5, 2), even_shares(1, 3)
    ((3, 2), (1, 0, 0))
    """
    spans = cut(batch, min(batch, ranks))
    return (*map(len, spans), *(0,) * (ranks - len(spans)))
