"""From a call of the network, as this rank makes it, to what all ranks run: one form of it, one batch, one program.

Every call begins with a small gather in which each rank tells what it was given. Whatever is wrong on one rank, or
different between them, is refused on all before anything else is sent, and the ranks can go on. What the network's code
would do (which variant) is decided from values that are equal on all ranks.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.capturing.attributes import short
from shoal.capturing.batch import mark_samples
from shoal.capturing.questions import AUTOCAST, INFERENCE, LAYOUT, REQUIRES_GRAD, answer, laid, order_of
from shoal.capturing.sight import differing
from shoal.capturing.signature import Call, bind
from shoal.errors import RunError
from shoal.execution.alike import Buffers, mark_of
from shoal.execution.autograd_node import Request
from shoal.execution.given_call import GivenCall, Key, Told, difference_between, numbers_of, sizes_without_samples
from shoal.execution.loss import Loss
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.states import ShardedStates
from shoal.execution.tree import Tree
from shoal.execution.variants import Form, Ready, Variant, capture_form, groups_of
from shoal.graph import LayerGraph, fingerprint, same_graph
from shoal.lowering.boundary import Boundary, even_shares, follows_batch, input_tiles, own_inputs
from shoal.moves import Layout
from shoal.plan import Plan
from shoal.planning import resolve
from shoal.transport import Transport
from shoal.transport.agreement import agree

log = logging.getLogger("shoal")

_MANY_VARIANTS = 32
"""After so many captures, and each time as many more, a warning says that the network changes too often."""


@dataclass(frozen=True)
class Laying:
    """What a new variant is made of."""

    plan: str | Plan
    names: tuple[str, ...]
    """Every layer that a plan's line may name."""
    loss: Loss | None
    target: Any


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
    local_statistics: bool = False
    """Whether every rank has its own batch norm."""
    variants: dict[Key, Variant] = field(default_factory=dict)
    flagged: int = 0
    """Bits that some rank had set in its flag at the last call."""
    loss_share: float | None = None
    """What this rank's loss weighed in the mean at the last call; None where that was no mean over samples."""

    def __post_init__(self) -> None:
        self._follows: dict[tuple[object, ...], tuple[bool, ...]] = {}
        self._buffers = Buffers(self.states, local=self.local_statistics)
        self._asked = {question: at for one in self.first.values() for question, at in one.form.asked.items()}
        self._settings: list[tuple[str, str]] = []
        """Of the last pass."""
        self._sizes: set[object] = set()
        """Of inputs, without samples, that it was captured for."""
        root = self.tree.root
        flags = {name: module.training for name, module in root.named_modules()}
        for mode, variant in self.first.items():
            if root.training != mode:
                root.train(mode)
            graph = variant.form.graph
            specs = [(name, graph.inputs[name]) for name in own_inputs(graph)]
            follows = tuple(follows_batch(graph, name) for name, _ in specs)
            sizes = sizes_without_samples(
                [spec.shape for _, spec in specs], [spec.differentiable for _, spec in specs], follows
            )
            with torch.enable_grad():  # as it was captured
                targets = [f"torch.{graph.inputs[name].dtype}" for name in graph.targets]
                key = (self.tree.key(), self.example.form, sizes, mode, self._answers(self.example, targets))
            self.variants[key] = variant
            self._sizes.add(sizes)
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

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, flag: int, sync: bool) -> Request:
        """What to run, the same on all ranks. A collective.

        Whatever keeps one rank from running it, or is different between them, is raised on all.
        """
        own = self._read(args, kwargs, sync=sync)
        table = self._tell(own, flag=flag)
        known = own.key in self.variants
        variant = self._variant(own, [int(other.samples) for other in table])
        weights = [other.weight for other in table]
        if not known and own.targets and variant.form.tail is not None:  # what a target weighs was not known before
            own.weight = variant.form.tail.weight(own.targets[0])
            weights = [row[0] for row in self.transport.gather_numbers([own.weight])]
        everyone = sum(weights) if variant.form.gives_losses else 0.0
        self.loss_share = own.weight / everyone if everyone else None
        shares = self._shares(variant, table)
        variant = self._proven(variant, sum(shares), own)
        ready = self.prepare(variant, shares)
        return self._request(variant, ready, own, table, sum(weights), sync=sync)

    def refuse(self, problem: RunError, *, flag: int) -> NoReturn:
        """Raise on all ranks what keeps this one from calling the network. A collective."""
        self._tell(GivenCall(self.example, problem=problem), flag=flag)
        raise problem

    def _tell(self, own: GivenCall, *, flag: int) -> list[Told]:
        """What every rank was given, unless that is refused. A collective."""
        records = torch.is_grad_enabled()
        wishes = (
            sum(1 << place for place, tensor in enumerate(own.call.tensors) if tensor.requires_grad) if records else 0
        )
        row = Told(own.call.samples, own.weight, own.problem is not None, flag, records, wishes, own.digest())
        table = [Told(*row) for row in self.transport.header("forward", numbers_of(row))]
        self.flagged = reduce(or_, (int(other.flag) for other in table))
        self._refuse(table, own)
        return table

    def _request(
        self, variant: Variant, ready: Ready, own: GivenCall, table: Sequence[Told], everyone: float, *, sync: bool
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

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync: bool) -> GivenCall:
        own = GivenCall(self.example)
        try:
            own.call, own.targets = self._bind(args, kwargs)
            own.follows = self._follows.get(own.call.form) or own.call.following
            own.key = self._key(own)
            own.besides = self._besides(own, sync=sync)
            self._refuse_misfits(own)
            self._refuse_modes()
            self._refuse_written()
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

    def _key(self, own: GivenCall) -> Key:
        floats = [tensor.is_floating_point() for tensor in own.call.tensors]
        shapes, _ = self._whole_sizes(own)
        sizes = sizes_without_samples(shapes, floats, own.follows)
        targets = [str(target.dtype) for target in own.targets]
        return self.tree.key(), own.call.form, sizes, self.training, self._answers(own.call, targets)

    def _answers(self, call: Call, targets: Sequence[str]) -> tuple[tuple[str, object], ...]:
        """To all that the network and its loss were heard to ask about a call, and the types of its targets."""
        tensors = [*call.tensors, *self.tree.root.parameters()] if REQUIRES_GRAD in self._asked else call.tensors
        return (
            ("the type of the target", tuple(targets)),
            *(
                (question, answer(question, tensors if question == REQUIRES_GRAD else call.tensors))
                for question in sorted(self._asked)
            ),
        )

    def _whole_sizes(self, own: GivenCall) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The shapes of inputs and targets, whole but for the samples: tiles are of the sizes that were captured."""
        if self.boundary.io == "tile":
            graph = self.mode.form.graph
            return [graph.inputs[n].shape for n in own_inputs(graph)], [graph.inputs[n].shape for n in graph.targets]
        return [tuple(tensor.shape) for tensor in own.call.tensors], [tuple(tensor.shape) for tensor in own.targets]

    def _besides(self, own: GivenCall, *, sync: bool) -> tuple[tuple[str, object], ...]:
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (
            ("inputs of", [str(tensor.dtype) for tensor in own.call.tensors]),
            ("autocast to", str(autocast)),
            ("no_sync", not sync),
            ("parameters that do not learn:", self.states.frozen()),
            ("changed the buffers", self._buffers.changed()),
            *(
                (f"passed {name}, of which all must have the same,", mark_of(shared))
                for name, shared in self._shared(own)
            ),
        )

    def _shared(self, own: GivenCall) -> Iterator[tuple[str, Tensor]]:
        """What every rank passes whole, with words for it."""
        graph, everything = self.mode.form.graph, self.boundary.io == "whole"
        names = own_inputs(graph)
        for number, (tensor, follows) in enumerate(zip(own.call.tensors, own.follows, strict=True)):
            if everything or not follows:
                yield f"input {names[number]!r}" if number < len(names) else f"input {number}", tensor
        for name, tensor in zip(graph.targets, own.targets, strict=False):  # too few or many are refused later
            if everything or not follows_batch(graph, name):
                yield f"target {name!r}", tensor

    def settle(self, changed: Collection[str]) -> None:
        """Called after a pass; `changed`: the states that the network itself changed in it."""
        self._buffers.settle(changed)
        self._settings = self.tree.settings()

    def _refuse_misfits(self, own: GivenCall) -> None:
        """Raise what is wrong with the shapes of this rank's tensors: tiles and targets have a size of their own."""
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

    def _refuse_modes(self) -> None:
        on = {AUTOCAST: torch.is_autocast_enabled(self.device.type), INFERENCE: torch.is_inference_mode_enabled()}
        for question, is_on in on.items():
            if is_on and question in self._asked:
                raise RunError(
                    f"the network asks{self._asked[question]} {question}, and was captured without it.",
                    "Call it without that mode, or do not ask.",
                )

    def _refuse_written(self) -> None:
        if (written := self.states.given.written()) is not None:
            owner, name = written
            state, own = "a state_dict()", "model.named_parameters()"
            if owner == "optimizer":
                state, own = "optimizer.state_dict()", "optimizer.state"
            raise RunError(
                f"rank {self.transport.rank} changed {name!r} of {state} in place, which is a copy here: the plan cuts "
                f"the tensor, and the {owner} still has the old one.",
                f"Change {own} in place, each rank its shard, or call {owner}.load_state_dict(state).",
            )

    def _captured_shares(self) -> tuple[int, ...]:
        return even_shares(self.mode.form.graph.batch, self.transport.world)

    # What all ranks were given

    def _refuse(self, table: Sequence[Told], own: GivenCall) -> None:
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

    def _refuse_different(self, own: GivenCall) -> None:
        self._buffers.doubt()
        shapes = [tuple(tensor.shape) for tensor in own.call.tensors]
        told = self.transport.gather_objects((own.key, own.besides, shapes, self.tree.settings()))
        rank = next(rank for rank, theirs in enumerate(told) if theirs[:2] != told[0][:2])
        raise RunError(
            f"rank 0 and rank {rank} called the network differently: {difference_between(told[0], told[rank])}.",
            "All ranks must call it in the same mode, with inputs of the same form and sizes; the number of "
            "samples alone may differ.",
        )

    def _shares(self, variant: Variant, table: Sequence[Told]) -> tuple[int, ...]:
        def tiles_at(batch: int) -> Layout:
            graph = variant.at(batch)
            return input_tiles(graph, next(iter(graph.inputs)), variant.cuts(graph), self.transport.world)

        return self.boundary.batch([int(other.samples) for other in table], tiles_at, variant.form.graph.batch)

    # Variants

    def _variant(self, own: GivenCall, sizes: Sequence[int]) -> Variant:
        """The variant that a key stands for; captured when it first comes."""
        if own.key not in self.variants:
            self._follows.setdefault(own.call.form, own.follows)
            batch = sizes[0] if self.boundary.io == "whole" else sum(sizes)
            variant = self._planned(self._traced(own, batch))
            own.key = self._key(own)  # it may have asked something new
            self.variants[own.key] = variant
            self._announce(own.call, own.key[2])
        return self.variants[own.key]

    def _announce(self, call: Call, sizes: object) -> None:
        known, new = len(self.variants), sizes not in self._sizes
        self._sizes.add(sizes)
        if self.transport.rank == 0:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
            change = differing(self._settings, self.tree.settings()) if self._settings else None
            why = "" if change is None else f"; {change[0]} is {short(change[2])} and was {short(change[1])}"
            log.info("captured the network anew for its present settings and inputs of %s (%d)%s", shapes, known, why)
            if new:
                log.warning(
                    "inputs of %s are of a new size: captured the network for it, which is remembered (%d sizes now)",
                    shapes,
                    len(self._sizes),
                )
            if known % _MANY_VARIANTS == 0:
                log.warning(
                    "the network was captured %d times: settings of modules or sizes of inputs change often. Make a "
                    "number that changes in every step a buffer or an input, and sizes few%s.",
                    known,
                    why,
                )

    def _proven(self, variant: Variant, batch: int, own: GivenCall) -> Variant:
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

    def _traced(self, own: GivenCall, batch: int) -> Form:
        """The network as it is now, called so with a batch of so many samples; on shapes alone."""
        form = agree(self.transport, lambda: self._trace(own, batch), "forward")
        if form.asked.keys() <= self._asked.keys():
            return form
        self._asked.update(form.asked)
        return self._traced(own, batch)  # which answers

    def _trace(self, own: GivenCall, batch: int) -> Form:
        whole = {name: self.states.shapes[first] for name, first in self.states.names_of.items()}
        records = torch.is_grad_enabled()
        with _plain_torch(self.device), self.tree.whole(whole) as fakes:

            def fake(tensor: Tensor, shape: tuple[int, ...], follows: bool) -> Tensor:
                with fakes:
                    size = (batch, *shape[1:]) if follows else shape
                    order = order_of(tensor) if LAYOUT in self._asked else range(len(size))
                    made = laid(size, order, tensor.dtype, self.device)
                    return made.requires_grad_(REQUIRES_GRAD in self._asked and tensor.requires_grad)

            shapes, target_shapes = self._whole_sizes(own)
            tensors = tuple(map(fake, own.call.tensors, shapes, own.follows))
            call = replace(own.call, tensors=tensors, follows=own.follows, records=records)
            targets = [
                torch.empty((batch, *shape[1:]), dtype=target.dtype, device=self.device)
                for target, shape in zip(own.targets, target_shapes, strict=True)
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
        ready = variant.prepare(shares, self.boundary, self.transport.rank, self.states.uses)
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


@contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Within, none of the caller's torch modes (inference, no_grad, autocast, a default device) is in force."""
    place = device if torch.get_default_device().type != device.type else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), place:
        yield
