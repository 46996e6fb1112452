"""Stages: what the search chooses a cut for, and the cuts it may choose from.

A stage is a layer with the layers that follow it: activations, norms and dropout that alone read its output share
its cut, so one choice serves all. Everything else (pools, sums, concatenations, views, losses) is a stage of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from shoal.graph import LayerGraph, Value
from shoal.lowering.placement import depends_on_input, most_parts, op_of, signature
from shoal.operators.base import Axis, Op, Rule
from shoal.operators.registry import WHOLE, axes_of, rule_for
from shoal.partition import DIMS, Cut
from shoal.planning.strategies import fit_all, followed

FEW_RANKS = 8
"""Up to so many ranks every number of parts is a choice; beyond, divisors of the number of ranks."""


@dataclass(frozen=True)
class Stage:
    """Layers that share one choice of cut."""

    ops: tuple[Op, ...]
    """The layer that is cut first, then its followers, in the graph's order."""
    choices: tuple[tuple[Cut, ...], ...]
    """What can be chosen: for every choice the cut of each op."""

    @property
    def name(self) -> str:
        """Its first layer's."""
        return self.ops[0].layer.name

    @property
    def output(self) -> str:
        """The value that other stages read."""
        return self.ops[-1].layer.name

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each op."""
        return tuple(rule_for(op) for op in self.ops)

    @property
    def reads(self) -> tuple[tuple[str, str], ...]:
        """(argument, value) for every value that the first layer reads; followers read only what stands before."""
        return tuple((arg, ref.name) for arg, ref in self.ops[0].layer.tensors if isinstance(ref, Value))

    @cached_property
    def signatures(self) -> tuple[str, ...]:
        """For each op a text that is the same for layers whose parts are the same under the same choices."""
        return tuple(_signature(op, [choice[i] for choice in self.choices]) for i, op in enumerate(self.ops))

    def cuts(self, choice: int) -> dict[str, Cut]:
        """The cut of each of its layers under one choice."""
        return {op.layer.name: cut for op, cut in zip(self.ops, self.choices[choice], strict=True)}


def stages_of(
    graph: LayerGraph,
    ranks: int,
    pins: Mapping[str, Cut] | None = None,
    letters: str = DIMS,
    per_host: int | None = None,
) -> tuple[Stage, ...]:
    """The stages of a network in its order. Layers that do not see the batch have no choice and are left out.

    `pins`: the cut of some layers, by name, as the user wants them; their stages have that choice alone;
    `letters`: the dims along which the others may be cut; `per_host`: ranks of a host, where there are several hosts.
    """
    pins = pins or {}
    sees_batch = depends_on_input(graph)
    groups: list[list[Op]] = []
    home: dict[str, int] = {}
    readers: dict[str, int] = {}
    for layer in graph.layers:
        for read in layer.reads:
            readers[read] = readers.get(read, 0) + 1
    for layer in graph.layers:
        if layer.name not in sees_batch:
            continue
        op = op_of(layer, graph)
        before = layer.reads[0] if layer.reads else ""
        joins = before in home and readers[before] == 1 and groups[home[before]][-1].layer.name == before
        inside = not {before, layer.name} & set(graph.outputs)
        if joins and inside and _follows(op) and layer.output.shape == graph.specs[before].shape:
            home[layer.name] = home[before]
            groups[home[before]].append(op)
        else:
            home[layer.name] = len(groups)
            groups.append([op])
    return tuple(_with_choices(tuple(group), ranks, pins, letters, per_host) for group in groups)


def _follows(op: Op) -> bool:
    return rule_for(op).follows and len(op.layer.reads) == 1


def _with_choices(
    ops: tuple[Op, ...], ranks: int, pins: Mapping[str, Cut], letters: str, per_host: int | None
) -> Stage:
    pinned = {op.layer.name: pins[op.layer.name] for op in ops if op.layer.name in pins}
    head = ops[0]
    cuts = [pinned[head.layer.name]] if head.layer.name in pinned else list(cuts_of(head, ranks, letters, per_host))
    after = [followed(cut) for cut in cuts]
    columns = [cuts]
    for op in ops[1:]:
        pin = pinned.get(op.layer.name)
        columns.append([pin or cut for cut in fit_all(after, axes_of(op))])
    return Stage(ops, tuple(zip(*columns, strict=True)))


def cuts_of(op: Op, ranks: int, letters: str = DIMS, per_host: int | None = None) -> Iterator[Cut]:
    """Every cut of a layer along these dims over at most so many ranks, uneven ones too, the whole layer first.

    With more than a few ranks the numbers of parts are divisors of theirs, or of a rounder number just below, so that a
    13th device makes no plan worse; and partial sums (`k`) combine with samples only: the others would be most of the
    list. Cuts that reach over hosts of `per_host` ranks come in two
    orders, with samples on different hosts and with samples on neighbours.
    """
    rule = rule_for(op)
    axes: Sequence[Axis] = () if rule is WHOLE else [axis for axis in axes_of(op) if axis.letter in letters]
    few = ranks <= FEW_RANKS
    degrees = [d for d in range(1, ranks + 1) if few or ranks % d == 0 or round_number(ranks) % d == 0]

    def extend(rest: Sequence[Axis], left: int) -> Iterable[dict[str, int]]:
        if not rest:
            yield {}
            return
        axis, *others = rest
        for degree in degrees:
            if degree > min(left, most_parts(axis)):
                break
            for more in extend(others, left // degree):
                yield {axis.letter: degree, **more} if degree > 1 else more

    summed = {axis.letter for axis in axes if axis.summed}
    for chosen in extend(axes, ranks):
        if few or not summed & chosen.keys() or chosen.keys() <= summed | {"n"}:
            usual = Cut.of(**chosen)
            yield usual
            if per_host is not None and usual.parts > per_host and "n" in chosen and len(chosen) > 1:
                yield Cut((*usual.degrees[1:], usual.degrees[0]))


@cache
def round_number(ranks: int) -> int:
    """The largest number up to this one that has no other prime factors than 2, 3 and 5: it divides in many ways.

    >>> round_number(64), round_number(13), round_number(14)
    (64, 12, 12)
    """
    for number in range(ranks, 1, -1):
        rest = number
        for prime in (2, 3, 5):
            while not rest % prime:
                rest //= prime
        if rest == 1:
            return number
    return 1


def _signature(op: Op, cuts: Sequence[Cut]) -> str:
    return f"{signature(op)} {[str(cut) for cut in cuts]}"
