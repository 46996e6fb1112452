"""From a network and its cuts to the outline that pictures and pages show. Pure."""

from collections.abc import Mapping, Sequence
from math import prod

from shoal.graph import LayerGraph, State
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.lowering.placement import sharers
from shoal.lowering.program import Compute, Fetch, Program, Settle, first_uses
from shoal.moves import Move
from shoal.outline import Outline, OutlineEdge, OutlineStage
from shoal.partition import Cut, volume
from shoal.planning.costs import flowing_values
from shoal.planning.price import Price
from shoal.planning.stages import Stage, stages_of
from shoal.traffic import ring_bytes


def outline_of(
    graph: LayerGraph,
    cuts: Mapping[str, Cut],
    boundary: Boundary,
    name: str,
    *,
    losses: bool,
    itemsize: int = 4,
    priced: Price | None = None,
) -> Outline:
    """The network stage by stage; `losses`: it ends in one loss per sample; `priced`: what this plan is predicted to
    cost. Layers that do not see the batch are left out.

    Costs a lowering of the network; a cut that does not fit is a `PlanError`.
    """
    program = step_program(graph, cuts, boundary, even_shares(graph.batch, boundary.ranks), losses=losses)
    stages = stages_of(graph, 1)
    home = {op.layer.name: stage.name for stage in stages for op in stage.ops}
    rows: dict[tuple[str, str], int] = {}
    for (source, reader), amount in edge_bytes(program, itemsize).items():
        edge = home.get(source, source), home.get(reader, reader)
        rows[edge] = rows.get(edge, 0) + amount
    return Outline(
        plan=name,
        ranks=boundary.ranks,
        stages=tuple(_stages(graph, stages, cuts, home, _gradient_bytes(program, itemsize), priced)),
        edges=tuple(OutlineEdge(source=source, reader=reader, bytes=sent) for (source, reader), sent in rows.items()),
        step_seconds=None if priced is None else priced.seconds,
    )


def _stages(
    graph: LayerGraph,
    stages: Sequence[Stage],
    cuts: Mapping[str, Cut],
    home: Mapping[str, str],
    gradients: Mapping[str, int],
    priced: Price | None,
) -> list[OutlineStage]:
    """Inputs that somebody reads, then the stages, each after those that it reads."""
    read = {name for stage in stages for _, name in stage.reads}
    outlined = [
        OutlineStage(name=name, operators=(), shape=spec.shape, cut=None, reads=())
        for name, spec in graph.inputs.items()
        if name in read
    ]
    known = {stage.name for stage in outlined}
    prices = {} if priced is None else {row.name: row for row in priced.layers}
    for stage in stages:
        layers = [op.layer for op in stage.ops]
        reads = dict.fromkeys(home.get(name, name) for _, name in stage.reads)
        own = [prices[layer.name] for layer in layers if layer.name in prices]
        learned = {
            ref.name
            for layer in layers
            for _, ref in layer.tensors
            if isinstance(ref, State) and graph.states[ref.name].differentiable
        }
        outlined.append(
            OutlineStage(
                name=stage.name,
                operators=tuple(_word(layer.op) for layer in layers),
                shape=layers[-1].output.shape,
                cut=str(cuts.get(stage.name, Cut())),
                reads=tuple(name for name in reads if name in known),
                parameters=sum(prod(graph.states[name].shape) for name in learned),
                gradient_bytes=sum(gradients.get(layer.name, 0) for layer in layers),
                compute_seconds=sum(row.compute for row in own) if own else None,
                communication_seconds=sum(row.communication for row in own) if own else None,
            )
        )
        known.add(stage.name)
    return outlined


def _word(op: str) -> str:
    return op.split(".")[1].strip("_")


def _gradient_bytes(program: Program, itemsize: int) -> dict[str, int]:
    """What all ranks send to add up gradients, by the layer that finishes them."""
    by_layer: dict[str, int] = {}
    for name, layer in first_uses(program).items():
        if not program.graph.states[name].differentiable or name in program.changed:
            continue
        for box, ranks in sharers(program.states[name]).items():
            sent = sum(ring_bytes(volume(box) * itemsize, len(ranks), index) for index in range(len(ranks)))
            by_layer[layer] = by_layer.get(layer, 0) + sent
    return by_layer


def edge_bytes(program: Program, itemsize: int) -> dict[tuple[str, str], int]:
    """Bytes between ranks over the edges of layers where rows travel, forward and backward.

    An edge that takes the tiles which another one brings has 0.

    Partial sums that are added up after a layer are on the edges to its readers, shared evenly.
    """
    graph = program.graph
    flowing = flowing_values(graph)
    by_edge: dict[tuple[str, str], int] = {}
    moving: set[int] = set()
    readers: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.reads:
            readers.setdefault(name, []).append(layer.name)

    def bytes_of(moves: Sequence[Move], value: str) -> int:
        size = itemsize if graph.specs[value].differentiable else 8
        return sum(move.elements for move in moves) * size * (1 + (value in flowing))

    for instruction in program.instructions:
        match instruction:
            case Fetch(identity=False) as fetch:
                if amount := bytes_of(fetch.moves, fetch.value):
                    edge = fetch.value, fetch.reader
                    by_edge[edge] = by_edge.get(edge, 0) + amount
                    moving.add(fetch.key)
            case Settle(value=value, moves=moves):
                for reader in readers.get(value, ()):
                    share = bytes_of(moves, value) // len(readers[value])
                    by_edge[value, reader] = by_edge.get((value, reader), 0) + share
            case Compute(placed=placed, sources=sources):
                for argument, reference in placed.layer.tensors:
                    if sources.get(argument) in moving:
                        by_edge.setdefault((reference.name, placed.layer.name), 0)
            case Fetch():
                pass
    return by_edge
