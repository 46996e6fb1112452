"""A step whose dense layers run in laps: over some samples at a time, forward and backward. Integers only.

The front of the network (all that reads no result of a linear layer) runs once over the batch. What it gives, the
features, the linear layers and all behind them read lap by lap. Schemes of Krizhevsky's "one weird trick", for K ranks:

    b    a lap has the samples of one rank, which sends their features to all: K laps, one sender in each
    c    a lap has 1/K of the samples of every rank: K laps, all send in each

Whether the linear layers read all features at once (its scheme (a)) or in laps, every feature is sent to the same ranks
once, and its gradient comes back once. In laps a rank holds those of the lap at hand, and of the next, on their way.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from shoal.errors import PlanError
from shoal.graph import Layer, LayerGraph, State
from shoal.lowering.boundary import Boundary, even_shares, samples
from shoal.lowering.placement import depends_on_input, op_of, sharers
from shoal.lowering.program import Inputs, Program, compile_program
from shoal.moves import Layout
from shoal.operators.base import Rule
from shoal.operators.registry import WHOLE, facts_of, rule_for
from shoal.partition import Cut, Span, whole

Scheme = Literal["b", "c"]


@dataclass(frozen=True)
class Lap:
    """The dense layers over some samples of the batch."""

    program: Program
    senders: tuple[Span, ...]
    """For every rank which of the batch's samples it sends the features of, maybe none; ascending."""

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """For every row of the lap which sample of the batch it is."""
        return tuple(sample for span in self.senders for sample in range(span.start, span.stop))

    def rows_of(self, first: int, count: int) -> tuple[int, ...]:
        """Which of the samples that somebody holds from `first` on are in the lap, counted from there."""
        return tuple(sample - first for sample in self.samples if first <= sample < first + count)


@dataclass(frozen=True)
class LappedStep:
    """A training step with the dense layers in laps."""

    front: Program
    """From the caller's inputs to the features, of which every rank keeps those of its samples."""
    laps: tuple[Lap, ...]
    features: tuple[str, ...]
    """What the front gives and the dense layers read."""
    states: frozenset[str]
    """Parameters and buffers that the dense layers read."""
    held: tuple[Span, ...]
    """For every rank the samples that it keeps the features of."""
    steps: bool
    """Whether the dense layers' weights step after every lap, else once with all others."""


def lapped_step(
    graph: LayerGraph,
    cuts: Mapping[str, Cut],
    boundary: Boundary,
    shares: Sequence[int],
    scheme: Scheme,
    *,
    losses: bool,
    steps: bool,
    learning: Collection[str],
) -> LappedStep:
    """The programs of a step in laps. `losses`: the graph ends with a loss per sample; `steps`: as `LappedStep` has it;
    `learning`: states that learn.

    Pure: the same on every rank. A `PlanError`, with the layer's name, where laps would not give one device's result:
    without a loss that is a mean over samples, or with a dense layer in which samples meet.
    """
    _check_end(boundary, losses=losses)
    dense = _dense(graph)
    _check_layers(graph, dense)
    features = _features(graph, dense)
    alone = {layer.name for layer in graph.layers} - depends_on_input(graph)
    rear = _with_what_they_read([layer for layer in graph.layers if layer.name in dense], graph, alone)
    front = _with_what_they_read(
        [layer for layer in graph.layers if layer.name not in dense | alone], graph, alone
    )  # layers that see parameters alone stand where their results are read, maybe in both
    held = _spans(even_shares(graph.batch, boundary.ranks))
    step = LappedStep(
        front=_front_program(graph, front, features, cuts, boundary, shares),
        laps=tuple(
            Lap(_lap_program(graph, rear, features, cuts, boundary, shares, senders), senders)
            for senders in lap_samples(held, scheme)
        ),
        features=features,
        states=_states(rear),
        held=held,
        steps=steps,
    )
    _check_states(step, _states(front), learning)
    return step


def lap_samples(held: Sequence[Span], scheme: Scheme) -> list[tuple[Span, ...]]:
    """For every lap what each rank sends of the samples that it has; laps are as even as whole samples allow.

    >>> [[(span.start, span.stop) for span in lap] for lap in lap_samples([Span(0, 3), Span(3, 5)], "b")]
    [[(0, 3), (3, 3)], [(3, 3), (3, 5)]]
    >>> [[(span.start, span.stop) for span in lap] for lap in lap_samples([Span(0, 3), Span(3, 5)], "c")]
    [[(0, 2), (3, 4)], [(2, 3), (4, 5)]]
    """
    ranks = len(held)
    sizes = [[0] * ranks for _ in range(ranks)]  # of each rank, by lap
    longer = 0
    for rank, span in enumerate(held):
        if scheme == "b":
            sizes[rank][rank] = len(span)
            continue
        least, more = divmod(len(span), ranks)
        sizes[rank] = [least + ((lap - longer) % ranks < more) for lap in range(ranks)]
        longer += more
    starts = [list(accumulate(of_rank, initial=span.start)) for of_rank, span in zip(sizes, held, strict=True)]
    laps = [tuple(Span(own[lap], own[lap + 1]) for own in starts) for lap in range(ranks)]
    return [lap for lap in laps if any(map(len, lap))]


def _dense(graph: LayerGraph) -> frozenset[str]:
    """Linear layers and all that lies behind them, as plan `owt` has it."""
    behind: set[str] = set()
    for layer in graph.layers:
        if facts_of(layer.op).dense or behind & set(layer.reads):
            behind.add(layer.name)
    if graph.output not in behind:
        raise PlanError("the network has no linear layer to run in laps.", "Use plan='data', or 'owt' without laps.")
    return frozenset(behind)


def _features(graph: LayerGraph, dense: frozenset[str]) -> tuple[str, ...]:
    """Values, but for targets, that dense layers read and that are not theirs."""
    sees_batch = depends_on_input(graph)
    read = dict.fromkeys(name for layer in graph.layers if layer.name in dense for name in layer.reads)
    features = tuple(name for name in read if name in sees_batch and name not in {*dense, *graph.targets})
    for name in features:
        if not _by_row(graph, name):
            raise PlanError(
                f"{name!r}, {graph.specs[name].shape}, which layers behind a linear one read, has no row for each of "
                f"the {graph.batch} samples, so that they cannot run in laps.",
                "Use the plan without laps, as 'owt'.",
            )
    return features


def _with_what_they_read(layers: Sequence[Layer], graph: LayerGraph, alone: set[str]) -> tuple[Layer, ...]:
    """These layers, and before them those of which they read what was computed with parameters `alone`."""
    wanted = {layer.name for layer in layers}
    for layer in reversed(graph.layers):
        if layer.name in wanted:
            wanted.update(name for name in layer.reads if name in alone)
    return tuple(layer for layer in graph.layers if layer.name in wanted)


def _states(layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(ref.name for layer in layers for _, ref in layer.tensors if isinstance(ref, State))


def _part(graph: LayerGraph, layers: tuple[Layer, ...], inputs: Sequence[str], outputs: tuple[str, ...]) -> LayerGraph:
    """A piece of the network as a graph."""
    states = _states(layers)
    return replace(
        graph,
        layers=layers,
        inputs={name: graph.specs[name] for name in inputs},
        states={name: spec for name, spec in graph.states.items() if name in states},
        outputs=outputs,
        targets=tuple(name for name in graph.targets if name in inputs),
        shared=tuple(name for name in graph.shared if name in inputs),
    )


def _front_program(
    graph: LayerGraph,
    layers: tuple[Layer, ...],
    features: tuple[str, ...],
    cuts: Mapping[str, Cut],
    boundary: Boundary,
    shares: Sequence[int],
) -> Program:
    part = _part(graph, layers, [name for name in graph.inputs if name not in graph.targets], features)
    even = even_shares(graph.batch, boundary.ranks)
    outputs = {name: samples(part.specs[name].shape, even) for name in features}
    return compile_program(part, cuts, boundary.ranks, boundary.inputs(part, shares, cuts, ()), outputs)


def _lap_program(
    graph: LayerGraph,
    layers: tuple[Layer, ...],
    features: tuple[str, ...],
    cuts: Mapping[str, Cut],
    boundary: Boundary,
    shares: Sequence[int],
    senders: tuple[Span, ...],
) -> Program:
    rows = sum(map(len, senders))
    part = _part(graph, layers, [*features, *graph.targets], graph.outputs).at_batch(rows)
    own = {layer.name: cuts[layer.name].shrunk("n", rows) for layer in layers}
    sent = _spans([len(span) for span in senders])
    lap = [sample for span in senders for sample in range(span.start, span.stop)]
    callers = _spans([sum(1 for sample in lap if sample in range(*span)) for span in map(_ends, _spans(shares))])

    def laid(name: str, spans: Sequence[Span]) -> Layout:
        shape = part.specs[name].shape
        return tuple((span, *whole(shape[1:])) if len(span) else None for span in spans)

    layouts = {name: laid(name, sent) for name in features}
    if boundary.io == "whole":
        layouts |= {name: (whole(part.specs[name].shape),) * boundary.ranks for name in graph.targets}
        result: Layout = (whole(part.specs[graph.output].shape),) * boundary.ranks
    else:
        layouts |= {name: laid(name, callers) for name in graph.targets}
        result = laid(graph.output, callers)
    copies = frozenset(graph.targets if boundary.io == "whole" else ())
    return compile_program(part, own, boundary.ranks, Inputs(layouts, copies), {graph.output: result})


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop


def _spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Spans of these lengths, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    return tuple(map(Span, ends, ends[1:]))


def _check_end(boundary: Boundary, *, losses: bool) -> None:
    if boundary.io == "tile":
        raise PlanError("laps need whole samples, and with io='tile' ranks pass boxes.", "Pass io='share' or 'whole'.")
    if not losses:
        raise PlanError(
            "laps run backward before the next one runs forward, so that the loss must be a part of the network, as a "
            "mean over samples.",
            "Pass loss=F.cross_entropy, or another loss with a mean that comes last, to shoal.parallelize; or use the "
            "plan without laps, as 'owt'.",
        )


def _check_layers(graph: LayerGraph, dense: frozenset[str]) -> None:
    """Refuse dense layers that are not the same for each sample by itself."""
    sees_batch = depends_on_input(graph)
    for layer in graph.layers:
        if layer.name in dense and layer.name in sees_batch and (why := _mixing(layer, graph)) is not None:
            raise PlanError(
                f"layer {layer.name!r} ({layer.op}) lies behind a linear layer and cannot run in laps: {why}.",
                "Use the plan without laps, as 'owt', or move the layer before the first linear one.",
            )
    if not graph.any_batch:
        raise PlanError(
            "the network does something else for another number of samples, as far as its capture tells, so that its "
            "linear layers cannot run in laps.",
            "Use the plan without laps, as 'owt'.",
        )


def _mixing(layer: Layer, graph: LayerGraph) -> str | None:
    """What keeps a layer from being computed for some samples alone; None where nothing does.

    Its rule is asked: what one row of the output reads, at both ends of the batch.
    """
    op, facts, batch = op_of(layer, graph), facts_of(layer.op), graph.batch
    rule = rule_for(op)
    if facts.mixes_samples:
        return "a sample's result depends on the others"
    if facts.updates(layer):
        return "it changes a buffer once a step"
    if rule is WHOLE:
        return "nothing is known of what it does to each sample"
    if not _by_row(graph, layer.name):
        return f"the rows of its result, {layer.output.shape}, are not one for each of the {batch} samples"
    if layer.per_sample and not facts.view:
        return "what it computes depends on the number of samples"
    for sample in {0, batch - 1}:
        if (told := _row_mixes(layer, graph, rule, Span(sample, sample + 1))) is not None:
            return told
    return None


def _row_mixes(layer: Layer, graph: LayerGraph, rule: Rule, row: Span) -> str | None:
    op, batch = op_of(layer, graph), graph.batch
    axes = rule.axes(op)
    if not any(axis.letter == "n" and axis.size == batch and not axis.summed for axis in axes):
        return "it cannot be cut by sample"
    part = {axis.letter: row if axis.letter == "n" else Span(0, axis.size) for axis in axes}
    cut_n = frozenset("n") if batch > 1 else frozenset()
    if rule.writes(op, part)[:1] != (row,) or rule.sums(op, part, cut_n, {"n": batch}, local=False):
        return "samples meet in it"
    needs = rule.needs(op, part)
    for argument, reference in layer.tensors:
        if isinstance(reference, State) or argument not in needs:
            continue
        name, box = reference.name, needs[argument].box
        if any(graph.specs[name].per_sample) and (not _by_row(graph, name) or box[:1] != (row,)):
            return "a row of its result reads other samples"
    return None


def _by_row(graph: LayerGraph, name: str) -> bool:
    """Whether a value has one row for each sample, in dim 0."""
    try:
        return graph.batch_dim(name) == 0
    except ValueError:
        return False


def _check_states(step: LappedStep, of_front: frozenset[str], learning: Collection[str]) -> None:
    """Refuse parameters that laps and front share, and, where weights step in laps, those that ranks share."""
    both = sorted(step.states & of_front)
    if both:
        raise PlanError(
            f"{both[0]!r} is read before the first linear layer and behind it, so that it cannot run in laps.",
            "Use the plan without laps, as 'owt'.",
        )
    layouts = {name: layout for lap in step.laps for name, layout in lap.program.states.items()}
    for name, layout in layouts.items():
        shared = any(len(ranks) > 1 for ranks in sharers(layout).values())
        if step.steps and shared and name in learning:
            raise PlanError(
                f"several ranks hold the same part of {name!r}, whose gradient is summed over them once a step, not "
                "after every lap.",
                "Use the scheme in which weights step once: 'owt:b' or 'owt:c'.",
            )
