"""From a call of the network, as this rank makes it, to what all ranks run: one form of it, one batch, one program.

Every call begins with a small gather in which each rank tells what it was given. Whatever is wrong on one rank, or
different between them, is refused on all before anything else is sent, and the ranks can go on. What the network's code
would do (which variant) is decided from values that are equal on all ranks.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.capturing.batch import mark_samples
from shoal.capturing.signature import Call, bind
from shoal.errors import RunError
from shoal.execution.loss import Loss
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.states import ShardedStates
from shoal.execution.step import Request
from shoal.execution.tree import Tree
from shoal.execution.variants import Form, Ready, Variant, capture_form, groups_of
from shoal.graph import LayerGraph, fingerprint, same_graph
from shoal.lowering.boundary import Boundary, even_shares, follows_batch, input_tiles
from shoal.moves import Layout
from shoal.plan import Plan
from shoal.planning import resolve
from shoal.transport import Transport
from shoal.transport.agreement import agree

log = logging.getLogger("shoal")

_MANY_VARIANTS = 32
"""Captures after which a network is told to change too often."""

Key = tuple[Any, ...]
"""(mark of the modules' settings, form of the call, sizes of its tensors, training): what decides what code runs."""


@dataclass(frozen=True)
class Laying:
    """What a new variant is made of."""

    plan: str | Plan
    names: tuple[str, ...]
    """Every layer that a plan's line may name."""
    loss: Loss | None
    target: Any


@dataclass(frozen=True)
class Told:
    """What every rank tells the others at the start of a call."""

    samples: float
    weight: float
    """Of its targets."""
    wrong: float
    """Whether it cannot go on."""
    flag: float
    records: float
    """Whether gradients are recorded."""
    input_grads: float
    """A bit for each tensor that wants a gradient."""
    key: float


@dataclass
class _Own:
    """What this rank was given."""

    call: Call
    targets: tuple[Tensor, ...] = ()
    follows: tuple[bool, ...] = ()
    """Which tensors of the call have samples in dim 0."""
    key: Key = ()
    besides: tuple[tuple[str, object], ...] = ()
    """What no capture depends on, and ranks must have in common all the same, with words for it."""
    weight: float = 0.0
    problem: Exception | None = None

    def digest(self) -> float:
        """A number that is the same for equal calls, exact in a float."""
        text = repr((self.key, self.besides))
        return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))

    def check(self) -> None:
        """Raise what is wrong with it."""
        if self.problem is not None:
            raise self.problem


@dataclass
class Caller:
    """The calls of one network, and the variants that they have needed so far."""

    tree: Tree
    states: ShardedStates
    transport: Transport
    boundary: Boundary
    laying: Laying
    device: torch.device
    first: Mapping[bool, Variant]
    """The variants that the network was laid as, by whether it trains."""
    example: Call
    variants: dict[Key, Variant] = field(default_factory=dict)
    flagged: bool = False
    """Whether some rank had raised its flag at the last call."""

    def __post_init__(self) -> None:
        self._follows: dict[tuple[object, ...], tuple[bool, ...]] = {}
        root = self.tree.root
        flags = {name: module.training for name, module in root.named_modules()}
        for mode, variant in self.first.items():
            if root.training != mode:
                root.train(mode)
            graph = variant.form.graph
            specs = [(name, graph.inputs[name]) for name in own_inputs(graph)]
            follows = tuple(follows_batch(graph, name) for name, _ in specs)
            sizes = _sizes([spec.shape for _, spec in specs], [spec.differentiable for _, spec in specs], follows)
            self.variants[self.tree.key(), self.example.form, sizes, mode] = variant
            self._follows[self.example.form] = follows
            for name, module in root.named_modules():
                module.training = flags[name]

    @property
    def training(self) -> bool:
        """Whether the network is in training."""
        return self.tree.root.training

    @property
    def mode(self) -> Variant:
        """The variant that the network was laid as in the present mode."""
        return self.first[self.training]

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, flag: bool, sync: bool) -> Request:
        """What to run, the same on all ranks. A collective.

        Whatever keeps one rank from running it, or is different between them, is raised on all.
        """
        own = self._read(args, kwargs, sync=sync)
        records = torch.is_grad_enabled()
        wishes = sum(1 << place for place, one in enumerate(own.call.tensors) if one.requires_grad) if records else 0
        row = Told(own.call.samples, own.weight, own.problem is not None, flag, records, wishes, own.digest())
        table = [Told(*row) for row in self.transport.header("forward", _numbers(row))]
        self.flagged = any(other.flag for other in table)
        self._refuse(table, own)
        known = own.key in self.variants
        variant = self._variant(own, [int(other.samples) for other in table])
        weights = [other.weight for other in table]
        if not known and own.targets and variant.form.tail is not None:  # what a target weighs was not known before
            own.weight = variant.form.tail.weight(own.targets[0])
            weights = [row[0] for row in self.transport.gather_numbers([own.weight])]
        shares = self._shares(variant, table)
        variant = self._proven(variant, sum(shares), own)
        ready = self.prepare(variant, shares)
        return self._request(variant, ready, own, table, sum(weights), sync=sync)

    def _request(
        self, variant: Variant, ready: Ready, own: _Own, table: Sequence[Told], everyone: float, *, sync: bool
    ) -> Request:
        graph = ready.program.graph
        wished = [int(other.input_grads) for other in table]
        grads = [name for place, name in enumerate(own_inputs(graph)) if any(bits >> place & 1 for bits in wished)]
        losses = variant.form.gives_losses
        weights = self.boundary.weights(ready.program, self.transport.rank)
        return Request(
            variant=variant,
            ready=ready,
            inputs=dict(zip(graph.inputs, (*own.call.tensors, *own.targets), strict=True)),
            input_grads=frozenset(name for name in grads if graph.inputs[name].differentiable),
            targets=own.weight if losses else None,
            weights=(1 / everyone if everyone else 0.0,) if losses else weights,
            sync=sync,
        )

    # What this rank was given

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync: bool) -> _Own:
        own = _Own(self.example)
        try:
            own.call, own.targets = self._bind(args, kwargs)
            own.follows = self._follows.get(own.call.form) or own.call.following
            own.key = self._key(own)
            own.besides = self._besides(own, sync=sync)
            self._refuse_misfits(own)
            known = self.variants.get(own.key)
            if own.targets and known is not None and known.form.tail is not None:
                own.weight = known.form.tail.weight(own.targets[0])
        except Exception as error:
            own.problem = error  # told to the others first
        return own

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[Tensor, ...]]:
        """The call of the network itself, and the targets of the loss: the last argument, or `target=`."""
        loss = self.laying.loss is not None and self.training
        given = None
        if loss and "target" in kwargs:
            given = kwargs["target"]
            kwargs = {name: value for name, value in kwargs.items() if name != "target"}
        elif loss and args:
            *rest, given = args
            args = tuple(rest)
        try:
            call = bind(self.tree.root, args, kwargs)
        except TypeError as error:
            if loss:
                problem = f"the loss needs a target: {error}."
            elif self.laying.loss is not None or len(args) > len(self.example.tensors):
                problem = f"a target was given that nobody asked for: {error}."
            else:
                problem = f"the network cannot be called so: {error}."
            raise RunError(
                problem,
                "With parallelize(..., loss=...) call model(x, y) in training and model(x) in evaluation; "
                "without a loss call model(x).",
            ) from None
        return call, tuple(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))

    def _key(self, own: _Own) -> Key:
        floats = [tensor.is_floating_point() for tensor in own.call.tensors]
        shapes, _ = self._whole_sizes(own)
        return self.tree.key(), own.call.form, _sizes(shapes, floats, own.follows), self.training

    def _whole_sizes(self, own: _Own) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The shapes of inputs and targets, whole but for the samples: tiles are of the sizes that were captured."""
        if self.boundary.io == "tile":
            graph = self.mode.form.graph
            return [graph.inputs[n].shape for n in own_inputs(graph)], [graph.inputs[n].shape for n in graph.targets]
        return [tuple(one.shape) for one in own.call.tensors], [tuple(one.shape) for one in own.targets]

    def _besides(self, own: _Own, *, sync: bool) -> tuple[tuple[str, object], ...]:
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        states = self.states.tensors().items()
        frozen = [name for name, state in states if isinstance(state, nn.Parameter) and not state.requires_grad]
        return (
            ("inputs of", [str(tensor.dtype) for tensor in own.call.tensors]),
            ("autocast to", str(autocast)),
            ("no_sync", not sync),
            ("parameters that do not learn:", frozen),
        )

    def _refuse_misfits(self, own: _Own) -> None:
        """What is wrong with this rank's tensors; sizes are the caller's choice, but not those of tiles and targets."""
        rank, graph, io = self.transport.rank, self.mode.form.graph, self.boundary.io
        if len(own.targets) != len(graph.targets):
            raise RunError(
                f"rank {rank} passed {len(own.targets)} targets; the loss needs {len(graph.targets)}.",
                "Call model(x, y) in training, with y of the form of the example `target`.",
            )
        wanted = {name: graph.inputs[name].shape for name in graph.targets if self.variants.get(own.key) is self.mode}
        if io == "tile":
            layouts = self.prepare(self.mode, self._captured_shares()).program.layouts
            boxes = {name: layouts[name][rank] for name in graph.inputs}
            wanted = {name: tuple(map(len, box)) for name, box in boxes.items() if box is not None}
        tensors = dict(zip(graph.inputs, [*own.call.tensors, *own.targets], strict=False))
        for name, shape in wanted.items():
            tensor = tensors[name]
            if tensor.ndim != len(shape) or tuple(tensor.shape[1:]) != tuple(shape[1:]):
                raise RunError(
                    f"rank {rank} passed {tuple(tensor.shape)} for {name!r}; "
                    f"io={io!r} and the captured batch need {tuple(shape)}.",
                    "Pass this rank's samples, the whole batch, or the box `model.input_box`, as io says.",
                )

    def _captured_shares(self) -> tuple[int, ...]:
        return even_shares(self.mode.form.graph.batch, self.transport.world)

    # What all ranks were given

    def _refuse(self, table: Sequence[Told], own: _Own) -> None:
        if any(other.wrong for other in table):
            agree(self.transport, own.check, "forward")
        if len({other.records for other in table}) > 1:
            modes = [f"rank {rank} {'does' if other.records else 'does not'}" for rank, other in enumerate(table)]
            raise RunError(
                f"some ranks record gradients and some do not: {', '.join(modes)}.",
                "Use torch.no_grad() on all ranks or on none.",
            )
        if len({other.key for other in table}) > 1:
            self._refuse_different(own)

    def _refuse_different(self, own: _Own) -> None:
        shapes = [tuple(tensor.shape) for tensor in own.call.tensors]
        told = self.transport.gather_objects((own.key, own.besides, shapes, self.tree.settings()))
        rank = next(rank for rank, one in enumerate(told) if one[:2] != told[0][:2])
        raise RunError(
            f"rank 0 and rank {rank} called the network differently: {_difference(told[0], told[rank])}.",
            "All ranks must call it in the same mode, with inputs of the same form and sizes; the number of "
            "samples alone may differ.",
        )

    def _shares(self, variant: Variant, table: Sequence[Told]) -> tuple[int, ...]:
        def tiles_at(batch: int) -> Layout:
            graph = variant.at(batch)
            return input_tiles(graph, next(iter(graph.inputs)), variant.cuts(graph), self.transport.world)

        return self.boundary.batch([int(other.samples) for other in table], tiles_at, variant.form.graph.batch)

    # Variants

    def _variant(self, own: _Own, sizes: Sequence[int]) -> Variant:
        """The variant that a key stands for; captured when it first comes."""
        if own.key not in self.variants:
            self._follows.setdefault(own.call.form, own.follows)
            batch = sizes[0] if self.boundary.io == "whole" else sum(sizes)
            self.variants[own.key] = self._planned(self._traced(own, batch))
            self._announce(own.call)
        return self.variants[own.key]

    def _announce(self, call: Call) -> None:
        known = len(self.variants)
        if self.transport.rank == 0:
            shapes = ", ".join(str(tuple(one.shape)) for one in call.tensors)
            log.info("captured the network anew for its present settings and inputs of %s (%d)", shapes, known)
            if known % _MANY_VARIANTS == 0:
                log.warning(
                    "the network was captured %d times: settings of modules or sizes of inputs change often. Make a "
                    "number that changes in every step a buffer or an input, and sizes few.",
                    known,
                )

    def _proven(self, variant: Variant, batch: int, own: _Own) -> Variant:
        """The variant itself if it says of a batch what a trace says; else one of that batch alone."""
        if batch < 1:
            raise RunError("the batch has no sample.", "Pass at least one sample on one rank.")
        if batch not in variant.graphs and batch not in variant.others:
            form = self._traced(own, batch)
            if variant.says(form):
                variant.graphs[batch] = variant.form.graph.at_batch(batch)
            else:
                marked = mark_samples(form.graph, variant.form.graph)
                variant.others[batch] = self._planned(replace(form, graph=marked))
        return variant.others.get(batch, variant)

    def _planned(self, form: Form) -> Variant:
        compare_graphs(form.graph, self.transport)
        names = [*self.laying.names, *(layer.name for layer in form.graph.layers)]
        world = self.transport.world
        return Variant(form, agree(self.transport, lambda: resolve(self.laying.plan, form.graph, world, names)))

    def _traced(self, own: _Own, batch: int) -> Form:
        """The network as it is now, called so with a batch of so many samples; on shapes alone."""
        return agree(self.transport, lambda: self._trace(own, batch), "forward")

    def _trace(self, own: _Own, batch: int) -> Form:
        whole = {name: self.states.shapes[first] for name, first in self.states.names_of.items()}
        with _plain_torch(self.device), self.tree.whole(whole) as fakes:

            def fake(tensor: Tensor, shape: tuple[int, ...], follows: bool) -> Tensor:
                with fakes:
                    size = (batch, *shape[1:]) if follows else shape
                    return torch.empty(size, dtype=tensor.dtype, device=self.device)

            shapes, target_shapes = self._whole_sizes(own)
            tensors = tuple(map(fake, own.call.tensors, shapes, own.follows))
            call = replace(own.call, tensors=tensors, follows=own.follows)
            targets = [
                torch.empty((batch, *shape[1:]), dtype=one.dtype, device=self.device)
                for one, shape in zip(own.targets, target_shapes, strict=True)
            ]
            return capture_form(self.tree.root, call, self.laying.loss, self._target_like(targets))

    def _target_like(self, targets: Sequence[Tensor]) -> Any:
        """Targets in the structure of the example."""
        if self.laying.target is None:
            return targets[0] if targets else None
        leaves, spec = pytree.tree_flatten(self.laying.target)
        given = iter(targets)
        return pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def prepare(self, variant: Variant, shares: tuple[int, ...]) -> Ready:
        """A variant's program for these shares, with the groups that it needs. Collective when it is new."""
        known = shares in variant.ready
        ready = variant.prepare(shares, self.boundary, self.transport.rank, self.states.layouts)
        if not known:
            self.transport.make_groups([(LAYER, ranks) for ranks in groups_of(ready)])
        return ready


def compare_graphs(graph: LayerGraph, transport: Transport) -> None:
    """Refuse on all ranks where they have captured different networks. A collective."""
    digests = transport.gather_objects(fingerprint(graph))
    if len(set(digests)) == 1:
        return
    graphs = transport.gather_objects(graph)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    difference = same_graph(graphs[0], graphs[rank]) or "their arguments"
    raise RunError(
        f"rank 0 and rank {rank} have different networks: {difference}.",
        "Build the same network on all ranks. Python's random numbers, the rank's own number or the time must not "
        "decide what its code does.",
    )


def own_inputs(graph: LayerGraph) -> tuple[str, ...]:
    """The network's own inputs, without the loss's targets."""
    return tuple(name for name in graph.inputs if name not in graph.targets)


def _numbers(row: Told) -> list[float]:
    return [
        float(value) for value in (row.samples, row.weight, row.wrong, row.flag, row.records, row.input_grads, row.key)
    ]


def _sizes(
    shapes: Sequence[tuple[int, ...]], floats: Sequence[bool], follows: Sequence[bool]
) -> tuple[tuple[object, ...], ...]:
    """Sizes of inputs, the number of samples left out."""
    return tuple(
        (tuple(shape[1:]) if follow else tuple(shape), kind, follow)
        for shape, kind, follow in zip(shapes, floats, follows, strict=True)
    )


def _difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """What two ranks do not have in common, of (key, besides, shapes, settings), for people."""
    (key, besides, shapes, settings), (key2, besides2, shapes2, settings2) = one, other
    if key[0] != key2[0]:
        pairs = zip(settings, settings2, strict=False)
        return next((f"{a[0]}={a[1]} against {b[0]}={b[1]}" for a, b in pairs if a != b), "other attributes")
    if shapes != shapes2 and key != key2:
        return f"inputs of {shapes} against {shapes2}"
    if key != key2:
        return f"arguments {key[1][-1]} against {key2[1][-1]}"
    return next(f"{a[0]} {a[1]} against {b[1]}" for a, b in zip(besides, besides2, strict=True) if a != b)


@contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Whatever modes the caller is in, the capture is not."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield
