"""One layer on its ranks: from a cut to parts, boxes and owners. Integers only.

Part `i` of a cut, counted row-major in the order of the cut's letters, is on rank `i`; ranks beyond the last part
hold nothing of the layer. After every layer each element of its output has one owner: where parts hold partial
sums, their box is divided among them. An operator that runs whole is copied to every rank instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from shoal.errors import PlanError
from shoal.graph import Layer, LayerGraph, State, Value
from shoal.moves import Layout
from shoal.operators.base import Axis, Facts, Need, Op, Part, Rule
from shoal.operators.registry import WHOLE, axes_of, facts_of, rule_for
from shoal.partition import Box, Cut, Span, cut, whole

PLACES_KEPT = 4
"""Ways in which a layer was laid that it remembers."""


@dataclass(frozen=True)
class Placed:
    """A layer, its rule, and for every rank the part it has."""

    op: Op
    rule: Rule
    cut: Cut
    parts: tuple[Part | None, ...]
    """For every rank its rows of every axis; None where it has no part."""
    copies: bool
    """Whether every rank computes all of the output for itself."""
    alike: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was worked out for all layers of one kind that are cut so on so many ranks."""

    @property
    def layer(self) -> Layer:
        """The layer itself."""
        return self.op.layer

    @cached_property
    def facts(self) -> Facts:
        """What holds of the layer's operator, whether or not it runs whole."""
        return facts_of(self.op.layer.op)

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Arguments that are states and that the layer changes."""
        return self.facts.updates(self.op.layer)

    @property
    def needs(self) -> tuple[Mapping[str, Need], ...]:
        """For every rank what it reads of each tensor argument."""
        if "needs" not in self.alike:
            needs = ({} if part is None else self.rule.needs(self.op, part) for part in self.parts)
            self.alike["needs"] = tuple(needs)
        found: tuple[Mapping[str, Need], ...] = self.alike["needs"]
        return found

    @property
    def writes(self) -> Layout:
        """For every rank the box that it computes, maybe a partial sum."""
        if "writes" not in self.alike:
            boxes = (None if part is None else self.rule.writes(self.op, part) for part in self.parts)
            self.alike["writes"] = tuple(boxes)
        found: Layout = self.alike["writes"]
        return found

    def tiles(self, argument: str) -> tuple[Need | None, ...]:
        """For every rank what it reads of one tensor argument; what is not padded says nothing of padding."""
        known: dict[str, tuple[Need | None, ...]] = self.alike.setdefault("tiles", {})
        if argument not in known:
            needs = [needs.get(argument) for needs in self.needs]
            known[argument] = tuple(Need(need.box) if need is not None and not need.padded else need for need in needs)
        return known[argument]

    def reads(self, argument: str) -> Layout:
        """For every rank its box of one tensor argument, a parameter's above all."""
        known: dict[str, Layout] = self.alike.setdefault("reads", {})
        if argument not in known:
            needs = (needs.get(argument) for needs in self.needs)
            known[argument] = tuple(None if need is None else need.box for need in needs)
        return known[argument]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a part."""
        if "ranks" not in self.alike:
            self.alike["ranks"] = tuple(rank for rank, part in enumerate(self.parts) if part is not None)
        found: tuple[int, ...] = self.alike["ranks"]
        return found

    @cached_property
    def partial(self) -> bool:
        """Whether parts hold partial sums."""
        summed = {axis.letter for axis in self.rule.axes(self.op) if axis.summed}
        return any(letter in summed for letter, _ in self.cut.degrees)

    @property
    def owns(self) -> Layout:
        """For every rank the box of the finished output that it holds."""
        if "owns" not in self.alike:
            self.alike["owns"] = _divided(self.writes) if self.partial else self.writes
        found: Layout = self.alike["owns"]
        return found

    @cached_property
    def cut_letters(self) -> frozenset[str]:
        """Axes with more than one part."""
        return frozenset(letter for letter, _ in self.cut.degrees)

    def group(self, rank: int, over: str) -> tuple[int, ...]:
        """The ranks whose parts differ from this rank's in the axes `over` only, itself included."""
        group = self.groups(over)[rank]
        assert group is not None
        return group

    def groups(self, over: str) -> tuple[tuple[int, ...] | None, ...]:
        """For every rank the same; None where it has no part. Found once for all ranks."""
        known: dict[str, tuple[tuple[int, ...] | None, ...]] = self.alike.setdefault("groups", {})
        if over not in known:
            alike: dict[tuple[Span, ...], list[int]] = {}
            seats = [
                None if part is None else tuple(span for letter, span in part.items() if letter not in over)
                for part in self.parts
            ]
            for rank, seat in enumerate(seats):
                if seat is not None:
                    alike.setdefault(seat, []).append(rank)
            groups = {seat: tuple(ranks) for seat, ranks in alike.items()}
            known[over] = tuple(None if seat is None else groups[seat] for seat in seats)
        return known[over]


def op_of(layer: Layer, graph: LayerGraph) -> Op:
    """A layer with the global shapes of its tensors; the same `Op` for whoever asks about a layer of a graph."""
    ops: dict[str, Op] = graph.worked_out.setdefault("ops", {})
    op = ops.get(layer.name)
    if op is None or op.layer is not layer:
        op = ops[layer.name] = Op(layer, {name: graph.spec(reference).shape for name, reference in layer.tensors})
    return op


def depends_on_input(graph: LayerGraph) -> set[str]:
    """Layers that see the batch; the others are functions of the parameters alone."""
    seen = set(graph.inputs)
    for layer in graph.layers:
        if any(name in seen for name in layer.reads) or not any(True for _ in layer.tensors):
            seen.add(layer.name)
    return seen


def place(op: Op, wanted: Cut, ranks: int, *, everywhere: bool) -> Placed:
    """Lay a layer over ranks. `everywhere`: it does not see the batch, so every rank computes it.

    A cut that the layer cannot take is a `PlanError` that names the layer and the cuts that fit. Plans of one network
    that are compared differ in few layers, so that a layer remembers the last few ways in which it was laid.
    """
    known: dict[object, Placed] = op.worked_out.setdefault("placed", {})
    key = (wanted, ranks, everywhere)
    found = known.pop(key, None) or _place(op, wanted, ranks, everywhere=everywhere)
    known[key] = found
    for oldest in list(known)[:-PLACES_KEPT]:  # ranks may be threads, which share the layer
        known.pop(oldest, None)
    return found


def _place(op: Op, wanted: Cut, ranks: int, *, everywhere: bool) -> Placed:
    rule = rule_for(op)
    if everywhere or rule is WHOLE:
        return Placed(op, WHOLE, Cut(), ({},) * ranks, copies=True)
    axes = axes_of(op)
    check_fits(op, wanted, axes, ranks)
    parts, alike = _parts_of_kind(signature(op), axes, wanted, ranks)
    return Placed(op, rule, wanted, parts, copies=False, alike=alike)


@lru_cache(maxsize=512)
def _parts_of_kind(
    kind: str,  # noqa: ARG001  (layers of another kind read other boxes of the same parts)
    axes: tuple[Axis, ...],
    wanted: Cut,
    ranks: int,
) -> tuple[tuple[Part | None, ...], dict[str, Any]]:
    """The parts of all layers of one kind under one cut, and a place for what is worked out about them."""
    spans = {axis.letter: cut(axis.size, wanted.degree(axis.letter), grain=axis.grain) for axis in axes}
    parts = tuple(
        None if seat is None else {letter: own[seat.get(letter, 0)] for letter, own in spans.items()}
        for seat in wanted.seats(ranks)
    )
    return parts, {}


def signature(op: Op) -> str:
    """The same text for layers whose parts are the same under the same cuts."""
    if "signature" not in op.worked_out:
        plain = [(name, value) for name, value in op.layer.arguments.items() if not _has_tensor(value)]
        op.worked_out["signature"] = repr((op.layer.op, op.layer.result, op.out, sorted(op.shapes.items()), plain))
    text: str = op.worked_out["signature"]
    return text


def _has_tensor(value: object) -> bool:
    return isinstance(value, Value | State) or (isinstance(value, tuple) and any(map(_has_tensor, value)))


def most_parts(axis: Axis) -> int:
    """Into how many parts an axis can be cut at most."""
    return axis.size // axis.grain


def check_fits(op: Op, wanted: Cut, axes: Sequence[Axis], ranks: int) -> None:
    """Refuse a cut of dims that the layer does not have, of more parts than rows, or of more parts than ranks."""
    limits = {axis.letter: most_parts(axis) for axis in axes}
    fits = ", ".join(f"{letter} up to {limit}" for letter, limit in limits.items() if limit > 1) or "1 only"
    for letter, degree in wanted.degrees:
        if degree > limits.get(letter, 1):
            raise PlanError(
                f"layer {op.layer.name!r} ({op.layer.op}, output {op.out}) cannot be cut {wanted}.",
                f"Cuts that fit it: {fits}.",
            )
    if wanted.parts > ranks:
        raise PlanError(
            f"layer {op.layer.name!r} is cut {wanted}, needing {wanted.parts} ranks; there are {ranks}.",
            f"Cut it into at most {ranks} parts, or use more ranks.",
        )


def _divided(partial: Layout) -> Layout:
    """Share each box among the ranks that hold partial sums of it, along its longest dim."""
    owned: list[Box | None] = [None] * len(partial)
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(partial):
        if box is not None:
            holders.setdefault(box, []).append(rank)
    for box, ranks in holders.items():
        longest = max(range(len(box)), key=lambda dim: len(box[dim]), default=None)
        if longest is None:
            owned[ranks[0]] = box
            continue
        spans = cut(len(box[longest]), min(len(ranks), len(box[longest])))
        for rank, span in zip(ranks, spans, strict=False):
            owned[rank] = (*box[:longest], span.shifted(box[longest].start), *box[longest + 1 :])
    return tuple(owned)


def state_layouts(layers: Sequence[Placed], graph: LayerGraph, ranks: int) -> dict[str, Layout]:
    """For every parameter and buffer the box that each rank holds.

    Layers that share a tensor must need the same box of it on each rank, and where one of them updates it, on the
    same ranks, so that all copies follow; else a `PlanError` names them.
    """
    users: dict[str, list[tuple[Placed, str]]] = {}
    for placed in layers:
        for argument, reference in placed.layer.tensors:
            if isinstance(reference, State):
                users.setdefault(reference.name, []).append((placed, argument))
    layouts = {name: _shared_layout(name, found) for name, found in users.items()}
    for placed in layers:
        for argument in placed.updates:
            name = placed.op[argument].name
            own = placed.reads(argument)
            if own is not layouts[name] and [box is None for box in layouts[name]] != [box is None for box in own]:
                raise PlanError(
                    f"layer {placed.layer.name!r} updates {name!r}, which it and other layers share, on some of their "
                    "ranks only.",
                    "Give the layers that share it the same cut.",
                )
    # What no layer uses, every rank keeps.
    return {
        name: layouts[name] if name in layouts else (whole(spec.shape),) * ranks for name, spec in graph.states.items()
    }


def _shared_layout(state: str, users: Sequence[tuple[Placed, str]]) -> Layout:
    """The box of a state that each rank holds for the layers that use it."""
    (first, argument), *others = users
    layout = first.reads(argument)
    for placed, argument in others:
        boxes = placed.reads(argument)
        if any(None not in (held, own) and held != own for held, own in zip(layout, boxes, strict=True)):
            raise PlanError(
                f"layers {first.layer.name!r} and {placed.layer.name!r} share {state!r} but are cut so that "
                "they need different parts of it.",
                "Give both layers the same cut. Where one of them runs whole, cut the other by n, d, h or w.",
            )
        layout = tuple(own if held is None else held for held, own in zip(layout, boxes, strict=True))
    return layout


def sharers(layout: Layout) -> dict[Box, tuple[int, ...]]:
    """For every box of a layout the ranks that hold it."""
    groups: dict[Box, list[int]] = {}
    for rank, box in enumerate(layout):
        if box is not None:
            groups.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in groups.items()}
