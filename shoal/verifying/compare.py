"""A plan beside one device, on one rank: the same steps, every number compared with its box of one device's.

A difference is the largest one over a tensor, relative to the largest element of the whole tensor. Some tensors are
nothing but rounding (the gradient of a bias before batch norm is zero), so no tensor counts for less than a
thousandth of the largest of its kind in the network.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Self

import torch
from torch import Tensor

from shoal.execution import ParallelModule, full_state_dict
from shoal.execution.loss import LossTail
from shoal.lowering.boundary import IO, even_shares
from shoal.lowering.program import Compute, Program
from shoal.moves import Layout
from shoal.partition import Box, slices, whole
from shoal.traffic import Sent
from shoal.transport import Transport
from shoal.verifying.differences import Differences, Kind
from shoal.verifying.one_device import OneDevice, optimizer_of

PURPOSE = "verify"
"""Of the group in which copies' gradients are summed."""
FLOOR = 1e-3
"""The least size of a tensor, relative to the largest of its kind."""

Observe = Callable[[str, str, Tensor], None]


def apart(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """Largest difference over `scale`; infinite where the shapes differ or something is no number."""
    if ours.shape != theirs.shape:
        return inf
    if not ours.numel():
        return 0.0
    difference = (_wide(ours) - _wide(theirs)).abs().max().item()
    if isnan(difference):
        return inf
    return difference / scale if scale else difference


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def size(tensor: Tensor) -> float:
    """The largest element."""
    return _wide(tensor).abs().max().item() if tensor.numel() else 0.0


@dataclass
class Seen:
    """Every layer's output, and gradient of it, of a network laid on one rank; for finding the layer at fault."""

    values: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] = field(default_factory=dict)


class Comparison:
    """One rank's numbers beside one device's."""

    def __init__(
        self, reference: OneDevice, model: ParallelModule, transport: Transport, tail: LossTail | None = None
    ) -> None:
        self.reference, self.model, self.transport, self.tail = reference, model, transport, tail
        self.differences: dict[tuple[Kind, str], float] = {}

    def note(self, kind: Kind, name: str, ours: Tensor, theirs: Tensor, scale: float) -> None:
        """Compare; of several comparisons under one name the largest difference stays."""
        self.differences[kind, name] = max(self.differences.get((kind, name), 0.0), apart(ours, theirs, scale))

    def note_shards(self, kind: Kind, ours: Mapping[str, tuple[Tensor, Box]], theirs: Mapping[str, Tensor]) -> None:
        """Compare this rank's shards, and the box that each is, with one device's whole tensors of the same names."""
        scales = scales_of(theirs)
        for name, (shard, box) in ours.items():
            if name in theirs:
                self.note(kind, name, shard, part(theirs[name], box), scales[name])


def part(tensor: Tensor, box: Box | None) -> Tensor:
    """A box of a whole tensor; None: all of it."""
    return tensor if box is None else tensor[slices(box, whole(tensor.shape))]


@dataclass(frozen=True)
class Rows:
    """Which part of the batch this rank passes, and which part of the result it gets."""

    given: tuple[slice, ...]
    result: tuple[slice, ...]

    @property
    def target(self) -> tuple[slice, ...]:
        """The target's rows: the result's, without channels."""
        return self.result[:1] + self.result[2:]


def rows_of(model: ParallelModule, io: IO, transport: Transport, batch: int, shares: tuple[int, ...] | None) -> Rows:
    """Of a global batch, or of unequal `shares` of it."""
    if io == "tile":
        return Rows(_slices(model.input_box), _slices(model.output_box))
    sizes = shares or even_shares(batch, transport.world)
    start = sum(sizes[: transport.rank])
    rows = (slice(None) if io == "whole" else slice(start, start + sizes[transport.rank]),)
    return Rows(rows, rows)


def _slices(box: Box | None) -> tuple[slice, ...]:
    return (slice(0, 0),) if box is None else tuple(slice(span.start, span.stop) for span in box)


def compare(
    reference: OneDevice,
    model: ParallelModule,
    transport: Transport,
    *,
    tail: LossTail | None = None,
    io: IO = "share",
    shares: tuple[int, ...] | None = None,
    steps: int | None = None,
    record: Seen | None = None,
    against: Seen | None = None,
) -> tuple[Differences, Mapping[str, Sent]]:
    """Train `model` on one device's batch and compare: this rank's differences, and what its first step sent.

    tail       the loss, where it is part of the network
    record     keep the value of every layer here (of a network laid on one rank)
    against    compare the value of every layer with what was so kept
    steps      optimizer steps, as many as one device took unless given; 0 compares the first pass alone
    """
    at = Comparison(reference, model, transport, tail)
    rows = rows_of(model, io, transport, len(reference.x), shares)
    x = reference.x[rows.given].clone().requires_grad_(reference.x_grad is not None)
    y = reference.y[rows.target] if reference.y.ndim < reference.output.ndim else reference.y[rows.result]
    watch = _Watch(at, record, against)

    before = model.counted
    with watch.training():
        output, loss = _forward(at, x, y)
        torch.autograd.backward(loss)
    sent = _more(model.counted, before)
    watch.settle()
    _first_pass(at, rows, x, y, output, loss)
    with watch.evaluation():
        if record or against:
            _evaluate(model, x)
    steps = reference.steps if steps is None else steps
    if steps:
        _further_steps(at, rows, x.detach(), y)
    return at.differences, sent


def _forward(at: Comparison, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
    """(this rank's output unless the loss is part of the network, its loss)."""
    if at.tail is not None:
        return None, at.model(x, y)
    output = at.model(x)
    return output, at.reference.loss(output, y) if y.numel() else output.sum()


def _first_pass(at: Comparison, rows: Rows, x: Tensor, y: Tensor, output: Tensor | None, loss: Tensor) -> None:
    reference, states, rank = at.reference, at.model._states, at.transport.rank
    if output is not None:
        at.note("output", "", output, reference.output[rows.result], size(reference.output))
    if y.numel():
        whole_loss = at.tail is not None and not at.tail.mean  # then every rank gets one number for all
        expected = (
            torch.tensor(reference.loss_value) if whole_loss else reference.loss(reference.output[rows.result], y)
        )
        at.note("loss", "", loss, expected.to(loss), abs(reference.loss_value))
    if reference.x_grad is not None:
        part = x[:, :1].numel() / reference.x[:, :1].numel() if x.numel() else 1.0  # a rank has that of its own loss
        at.note("input gradient", "", _grad(x) * part, reference.x_grad[rows.given], size(reference.x_grad))
    boxes = {name: box for name, layout in states.layouts.items() if (box := layout[rank]) is not None}
    at.note_shards("gradient", {name: (_grad(states[name]), box) for name, box in boxes.items()}, reference.grads)
    at.note_shards("buffer", {name: (states[name], box) for name, box in boxes.items()}, reference.buffers)


def _further_steps(at: Comparison, rows: Rows, x: Tensor, y: Tensor) -> None:
    """The optimizer's steps, then the whole state and an evaluation."""
    reference, model = at.reference, at.model
    optimizer = optimizer_of(model.parameters(), reference.rate)
    for step in range(reference.steps):
        if step:
            optimizer.zero_grad()
            torch.autograd.backward(_forward(at, x, y)[1])
        optimizer.step()
    full, scales = full_state_dict(model), scales_of(reference.after)
    assert list(full) == list(reference.after), "full_state_dict has other keys than the module"
    for key, name in model._states.keys.items():  # tied tensors have several keys
        at.note("later state", name, full[key], reference.after[key], scales[key])
    if reference.evaluated is not None:
        at.note(
            "later evaluation", "", _evaluate(model, x), reference.evaluated[rows.result], size(reference.evaluated)
        )


def scales_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """What differences of each tensor are divided by."""
    sizes = {name: size(tensor) for name, tensor in tensors.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    return {name: max(scale, floor) for name, scale in sizes.items()}


def over_ranks(mine: Differences, transport: Transport, reference: OneDevice, seen: Seen) -> Differences:
    """The largest difference on any rank; infinite where no rank had anything to compare. A collective."""
    wanted: dict[Kind, Iterable[str]] = {
        "loss": [""],
        "input gradient": [] if reference.x_grad is None else [""],
        "gradient": reference.grads,
        "buffer": reference.buffers,
        "value": seen.values,
        "value gradient": seen.grads,
        "evaluated value": seen.evaluated,
    }
    compared = largest(*transport.gather_objects(mine))
    return {**{(kind, name): inf for kind, names in wanted.items() for name in names}, **compared}


def largest(*parts: Differences) -> Differences:
    """Of everything that was compared anywhere the largest difference."""
    result: dict[tuple[Kind, str], float] = {}
    for differences in parts:
        for key, difference in differences.items():
            result[key] = max(result.get(key, 0.0), difference)
    return result


def first_noise(reference: OneDevice, shaken: OneDevice) -> float:
    """The same of the first pass: its output and gradients."""
    scales = scales_of(reference.grads)
    distances = [apart(shaken.grads[name], grad, scales[name]) for name, grad in reference.grads.items()]
    return max(apart(shaken.output, reference.output, size(reference.output)), *distances)


def noise(reference: OneDevice, shaken: OneDevice) -> float:
    """How far one device is from itself after the steps, where its weights were `shaken` by their last bit."""
    scales = scales_of(reference.after)
    distances = [apart(shaken.after[name], tensor, scales[name]) for name, tensor in reference.after.items()]
    if reference.evaluated is not None and shaken.evaluated is not None:
        distances.append(apart(shaken.evaluated, reference.evaluated, size(reference.evaluated)))
    return max(distances, default=0.0)


def _evaluate(model: ParallelModule, x: Tensor) -> Tensor:
    """The output in evaluation; the network is left in training."""
    model.eval()
    try:
        with torch.no_grad():
            result: Tensor = model(x.detach())
            return result
    finally:
        model.train()


def _grad(shard: Tensor) -> Tensor:
    return torch.zeros_like(shard) if shard.grad is None else shard.grad


def _more(after: Mapping[str, Sent], before: Mapping[str, Sent]) -> dict[str, Sent]:
    return {
        label: Sent(sent.bytes - before.get(label, Sent()).bytes, sent.messages - before.get(label, Sent()).messages)
        for label, sent in after.items()
        if sent != before.get(label)
    }


class _Watch:
    """Sees every layer's output and its gradient: keeps them, or compares them with what was kept."""

    def __init__(self, at: Comparison, record: Seen | None, against: Seen | None) -> None:
        self.at, self.record, self.against = at, record, against
        self._scales: dict[str, Mapping[str, float]] = {}
        self._copied: dict[str, Tensor] = {}
        self._placed: dict[bool, _Places] = {}

    def training(self) -> AbstractContextManager[None]:
        """Watch a training pass and its backward pass."""
        return self._watching({"value": "value", "grad": "value gradient"})

    def evaluation(self) -> AbstractContextManager[None]:
        """Watch an evaluation."""
        return self._watching({"value": "evaluated value"})

    def _watching(self, kinds: Mapping[str, Kind]) -> AbstractContextManager[None]:
        if self.record is None and self.against is None:
            return nullcontext()
        return _observed(self.at.model, lambda event, layer, tensor: self._saw(kinds[event], layer, tensor))

    def _saw(self, kind: Kind, layer: str, tensor: Tensor) -> None:
        if self.record is not None:
            self._kept(self.record, kind)[layer] = tensor.detach().clone()
            return
        assert self.against is not None
        places = self._places()
        if kind == "value gradient" and layer in places.copies:
            self._copied[layer] = tensor.detach().clone()
            return
        theirs = self._kept(self.against, kind).get(layer)
        if theirs is not None:
            layout = (places.computed if kind == "value gradient" else places.owned)[layer]
            self._note(kind, layer, tensor, theirs, layout[self.at.transport.rank])

    def _places(self) -> "_Places":
        training = self.at.model.training
        if training not in self._placed:
            self._placed[training] = _Places.of(self.at.model._passes.captured(training=training).program)
        return self._placed[training]

    def settle(self) -> None:
        """Where every rank has a copy of a value, each found what its own readers send back: compare the sum."""
        if self.against is None:
            return
        transport = self.at.transport
        everyone = tuple(range(transport.world))
        transport.make_groups([(PURPOSE, everyone)])
        for layer, theirs in self.against.grads.items():
            if layer in self._places().copies:
                mine = self._copied.pop(layer, None)
                summed = torch.zeros_like(theirs) if mine is None else mine.contiguous()
                transport.sum(summed, everyone, PURPOSE)
                self._note("value gradient", layer, summed, theirs, None)

    def _note(self, kind: Kind, layer: str, ours: Tensor, theirs: Tensor, box: Box | None) -> None:
        assert self.against is not None
        if kind not in self._scales:
            self._scales[kind] = scales_of(self._kept(self.against, kind))
        self.at.note(kind, layer, ours, part(theirs, box), self._scales[kind][layer])

    def _kept(self, seen: Seen, kind: Kind) -> dict[str, Tensor]:
        return {"value": seen.values, "value gradient": seen.grads, "evaluated value": seen.evaluated}[kind]


@contextmanager
def _observed(model: ParallelModule, observe: Observe) -> Iterator[None]:
    model._engine.observe = observe
    try:
        yield
    finally:
        model._engine.observe = None


@dataclass(frozen=True)
class _Places:
    """Where the values of one program are."""

    owned: Mapping[str, Layout]
    """The finished output of every layer."""
    computed: Mapping[str, Layout]
    """What parts compute, maybe partial sums of it; gradients come back to this."""
    copies: frozenset[str]

    @classmethod
    def of(cls, program: Program) -> Self:
        steps = [compute for compute in program.instructions if isinstance(compute, Compute)]
        return cls(program.layouts, {compute.label: compute.placed.writes for compute in steps}, program.copies)
