"""One rank's part of a network, as an nn.Module for an ordinary training loop."""

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.capturing.signature import Call, bind
from shoal.errors import PeerError, RunError
from shoal.execution.engine import Engine, Tape
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.gradients import Collector, GradientSums, Kept
from shoal.execution.loss import Loss
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.precision import value_types
from shoal.execution.states import Shard, ShardedStates, take_rank0s
from shoal.execution.step import Asked, Request, Step, results_of, seeds_of
from shoal.execution.transfer import begin_transfer
from shoal.execution.tree import Tree
from shoal.execution.variants import Form, Ready, Variant, capture_form, first_difference, groups_of
from shoal.graph import LayerGraph
from shoal.lowering.boundary import Boundary, even_shares, follows_batch, input_tiles, output_tiles, step_program
from shoal.lowering.placement import sharers
from shoal.lowering.program import Program, state_homes
from shoal.lowering.traffic import INPUT, step_traffic
from shoal.moves import Layout, Move
from shoal.operators.base import Need
from shoal.partition import Box
from shoal.plan import Plan
from shoal.planning import Resolved, resolve
from shoal.traffic import Sent
from shoal.transport import Transport
from shoal.transport.agreement import agree

log = logging.getLogger("shoal")

_MANY_VARIANTS = 32
"""Captures after which a network is told to change too often."""


@dataclass
class _Now:
    """What changes from pass to pass."""

    training_passes: int = 0
    evaluation_passes: int = 0
    flag: bool = False
    flagged: bool = False
    ended: bool = False
    """Whether the module is another parallel network's by now."""
    syncing: bool = True
    bucket_bytes: int = 0
    sums: dict[object, GradientSums] = field(default_factory=dict)
    variants: dict[tuple[object, ...], Variant] = field(default_factory=dict)


@dataclass(frozen=True)
class Laying:
    """What a new variant is made of."""

    plan: str | Plan
    names: tuple[str, ...]
    """Every layer that a plan's line may name."""
    loss: Loss | None
    target: Any


class ParallelModule(nn.Module):
    """One rank's part of a network; made by `shoal.parallelize`.

    It shows the tree of the module that it was made of: `model.module`, the same children, the same parameters and
    buffers under the same names, each this rank's shard. After `backward()` each parameter holds the gradient of the
    mean of the ranks' losses, weighted by their samples. `state_dict()` and `load_state_dict()` are whole.
    """

    def __init__(
        self,
        root: nn.Module,
        forms: Mapping[bool, Form],
        resolved: Mapping[bool, Resolved],
        call: Call | None,
        laying: Laying,
        *,
        engine: Engine,
        boundary: Boundary,
        bucket_bytes: int | None,
        in_place: bool,
    ) -> None:
        super().__init__()
        transport = engine.transport
        self._engine, self._boundary, self._transport, self._laying = engine, boundary, transport, laying
        self._plan = resolved[True].plan(transport.world, also=resolved[False].cuts)
        self._now = _Now()
        variants = {mode: Variant(form, resolved[mode]) for mode, form in forms.items()}
        self._first = variants
        shares = even_shares(forms[True].graph.batch, transport.world)
        programs = {
            mode: step_program(one.form.graph, one.cuts(one.form.graph), boundary, shares, losses=one.form.gives_losses)
            for mode, one in variants.items()
        }
        homes = state_homes(programs[True], programs[False])
        if in_place:
            take_rank0s(root, homes, transport)
        self._states = ShardedStates(root, homes, transport.rank, in_place=in_place)
        self._call = call or bind(root, [torch.empty(0) for name in _own_inputs(forms[False].graph)], {})
        groups = [(GRADIENT, ranks) for layout in self._states.layouts.values() for ranks in sharers(layout).values()]
        transport.make_groups(groups)
        for one in variants.values():
            self._prepare(one, shares)
        self._now.bucket_bytes = bucket_bytes or transport.good_bucket_bytes()
        self._tree = tree = Tree(root)
        self._remember_both(root, variants)
        self._cut = self._states.cut_leaves()
        handles = [handle for path, own in self._cut.items() for handle in _whole_states(self, path, own)]
        undo = _when_alive(self, ParallelModule._make_whole)
        handles += tree.guard({path: next(iter(own.values())) for path, own in self._cut.items()}, undo)
        self._handles = handles
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = root.__dict__[kind]  # from here on our tree is the user's own

    def _remember_both(self, root: nn.Module, variants: Mapping[bool, Variant]) -> None:
        flags = {name: module.training for name, module in root.named_modules()}
        for mode, variant in variants.items():
            if root.training != mode:
                root.train(mode)
            graph = variant.form.graph
            shapes = [graph.inputs[name].shape for name in _own_inputs(graph)]
            follows = [follows_batch(graph, name) for name in _own_inputs(graph)]
            floats = [graph.inputs[name].differentiable for name in _own_inputs(graph)]
            key = (self._tree.key(), self._call.form, _sizes(shapes, floats, follows), mode)
            self._now.variants[key] = variant
            for name, module in root.named_modules():
                module.training = flags[name]
        self._follows = {self._call.form: tuple(follows)}

    # What people use

    @property
    def module(self) -> nn.Module:
        """The network that was laid over the ranks; its parameters are this rank's shards."""
        return self._tree.root

    @property
    def cuts_parameters(self) -> bool:
        """Whether some rank holds less than all of some parameter or buffer."""
        return bool(self._cut)

    @property
    def plan(self) -> Plan:
        """The plan as it was laid, one line per layer; `plan.save(path)` keeps it."""
        return self._plan

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that are summed at a time: given, or measured on the link."""
        return self._now.bucket_bytes

    @property
    def training(self) -> bool:
        """Whether the module itself is in training."""
        tree = self.__dict__.get("_tree")
        return True if tree is None else bool(tree.root.training)

    @training.setter
    def training(self, mode: bool) -> None:
        tree = self.__dict__.get("_tree")
        if tree is not None:
            tree.root.training = mode

    @property
    def flag(self) -> bool:
        """Set on any rank before a forward pass, `flagged` is True on all ranks after it, at no extra cost."""
        return self._now.flag

    @flag.setter
    def flag(self, value: bool) -> None:
        self._now.flag = value

    @property
    def flagged(self) -> bool:
        """Whether some rank had set its flag before the last forward pass."""
        return self._now.flagged

    @property
    def steps(self) -> int:
        """Forward passes in training so far; dropout's masks depend on it. Set it to go on with a stopped run."""
        return self._now.training_passes

    @steps.setter
    def steps(self, value: int) -> None:
        self._now.training_passes = value

    def train(self, mode: bool = True) -> "ParallelModule":
        """As of the module itself: of all modules in it."""
        self._tree.root.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns for this rank's part of the batch; in training with a loss, the loss of its share.

        A collective: all ranks call it, each with its own samples (or the whole, or its tile, as io says).
        """
        if self._now.ended:
            raise RunError(
                "this network was laid over the ranks anew by a later shoal.parallelize of the same module.",
                "Use what that call returned.",
            )
        request, names, tensors = self._agree(args, kwargs)
        if torch.is_grad_enabled() and (request.input_grads or names):
            results = Step.apply(self, request, names, *tensors)  # type: ignore[no-untyped-call]
        else:
            results = self._run(request, record=False)[0]
        return request.variant.form.returned.build(results)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of passes begun inside stay this rank's own; the next one outside averages what accumulated."""
        before, self._now.syncing = self._now.syncing, False
        try:
            yield
        finally:
            self._now.syncing = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own: its keys and whole tensors. Where the plan cuts any, a collective that all ranks call."""
        return self._tree.root.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the module, of whole tensors; each rank takes its shards."""
        return self._tree.root.load_state_dict(state_dict, strict, assign)

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every parameter and buffer, by name, and where it lies in the whole one."""
        return self._states.shards()

    def input_tile(self, batch: int) -> Box | None:
        """With io="tile": the box that this rank passes of a batch of so many samples, in the present mode."""
        graph = self._mode.at(batch)
        return input_tiles(graph, next(iter(graph.inputs)), self._mode.cuts(graph), self._transport.world)[
            self._transport.rank
        ]

    def output_tile(self, batch: int) -> Box | None:
        """With io="tile": this rank's box of the result of such a batch, and of the target where there is a loss."""
        variant = self._mode
        graph = variant.at(batch)
        return output_tiles(
            graph, graph.output, variant.cuts(graph), self._transport.world, losses=variant.form.gives_losses
        )[self._transport.rank]

    @property
    def input_box(self) -> Box | None:
        """`input_tile` of the batch that the network was captured with."""
        return self.input_tile(self._mode.form.graph.batch)

    @property
    def output_box(self) -> Box | None:
        """`output_tile` of the batch that the network was captured with."""
        return self.output_tile(self._mode.form.graph.batch)

    def value_layout(self, layer: str) -> Layout:
        """Which box of a layer's output each rank holds, in the present mode, for the captured batch."""
        return self._captured_program(training=self.training).layouts[layer]

    @property
    def counted(self) -> Mapping[str, Sent]:
        """Payload that this rank has sent so far, by layer."""
        return dict(self._transport.counted)

    def predicted(self, *, input_grad: bool = False) -> Mapping[str, Sent]:
        """Payload that this rank sends in one training step of the captured batch, by layer, from the moves alone."""
        ready = self._prepare(self._first[True], even_shares(self._first[True].form.graph.batch, self._transport.world))
        program, states = ready.program, {**self._states.tensors(), **ready.constants}
        types = value_types(program.graph, None)
        inputs = _own_inputs(program.graph)
        return step_traffic(
            program,
            self._transport.rank,
            trainable=self._backward_order(ready, frozenset(n for n, s in states.items() if s.requires_grad)),
            homes=self._states.layouts,
            itemsize={
                **{name: dtype.itemsize for name, dtype in types.items()},
                **{name: state.dtype.itemsize for name, state in states.items()},
            },
            dtypes={name: str(state.dtype) for name, state in states.items()},
            bucket_bytes=self.bucket_bytes,
            inputs=frozenset(inputs if input_grad else ()),
            local_statistics=self._engine.local_statistics,
            again=range(program.segments[-1].start if self._engine.recompute else 0),
        )

    def extra_repr(self) -> str:
        """What `print(model)` says besides the module's own tree."""
        return f"plan={self._plan.name!r}, rank {self._transport.rank} of {self._transport.world}"

    # The tree is the user's: its names come first, and what is set goes where the network's code reads it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = self.__dict__.get("_tree")
            if root is None or name.startswith("__"):
                raise
            return getattr(root.root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        tree = self.__dict__.get("_tree")
        if tree is not None and isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif tree is not None and not name.startswith("_") and name not in self.__dict__ and hasattr(tree.root, name):
            setattr(tree.root, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RunError(
            "a network that is laid over ranks cannot be copied or pickled: it has connections to the others.",
            "Keep model.state_dict(), which is whole and loads into the plain module; or copy the module before "
            "shoal.parallelize.",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__deepcopy__(None)

    def _make_whole(self) -> None:
        """Give the module its whole tensors back; this network ends. A collective."""
        for handle in self._handles:
            handle.remove()
        for own in self._cut.values():
            for name in own.values():
                tensor = self._states[name]
                grad, tensor.grad = tensor.grad, None
                tensor.data = self._gathered(name, tensor.detach())
                if any(self._transport.gather_objects(grad is not None)):
                    missing = torch.zeros(self._states[name].shape) if grad is None else grad
                    tensor.grad = self._gathered(name, missing)
        self._now.ended = True

    def _gathered(self, name: str, shard: Tensor) -> Tensor:
        full = self._states.gather_one(name, self._transport, shard, rank0_only=False)
        assert full is not None
        return full

    # What the ranks agree on before a pass

    @property
    def _mode(self) -> Variant:
        """The variant that the network was first captured as in the present mode."""
        return self._first[self.training]

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Request, tuple[str, ...], list[Tensor]]:
        """(what to run, the parameters that learn, the tensors that autograd sees); the same for all ranks.

        A rank whose arguments do not fit fails on all ranks, so that none waits for it.
        """
        problem: Exception | None = None
        call, own, known = self._call, 0.0, None
        targets: tuple[Tensor, ...] = ()
        follows: tuple[bool, ...] = ()
        key: tuple[object, ...] = ()
        try:
            call, targets = self._bind(args, kwargs)
            follows = self._follows.get(call.form) or _guessed(call.tensors)
            key = self._key(call, follows)
            known = self._now.variants.get(key)
            self._refuse_misfits(call, targets, known)
            if targets and known is not None and known.form.tail is not None:
                own = known.form.tail.weight(targets[0])
        except RunError as error:
            problem = error
        mask = sum(1 << place for place, one in enumerate(call.tensors) if one.requires_grad)
        wishes = torch.is_grad_enabled()
        samples = float(call.tensors[0].shape[0]) if call.tensors and call.tensors[0].ndim else 1.0
        row = [samples, own, problem is not None, self._now.flag, wishes, mask if wishes else 0, _digest(key)]
        table = self._transport.gather_numbers([0.0, *map(float, row)])
        self._now.flagged = any(other[4] for other in table)
        self._refuse_different(table, problem, key, call)
        sizes = [int(other[1]) for other in table]
        variant = self._variant(key, call, follows, targets, sizes)
        if targets and variant.form.tail is not None and known is None:
            own = variant.form.tail.weight(targets[0])
            table = [[*other[:2], weight[0], *other[3:]] for other, weight in
                     zip(table, self._transport.gather_numbers([own]), strict=True)]  # fmt: skip
        shares = self._boundary.batch(sizes, lambda batch: self._tiles_at(variant, batch), variant.form.graph.batch)
        variant = self._proven(variant, sum(shares), call, targets)
        ready = self._prepare(variant, shares)
        graph = ready.program.graph
        wanted = 0
        for other in table:
            wanted |= int(other[6])
        inputs = dict(zip(graph.inputs, (*call.tensors, *targets), strict=True))
        places = list(_own_inputs(graph))
        grads = frozenset(
            name for place, name in enumerate(places) if wanted >> place & 1 and graph.inputs[name].differentiable
        )
        losses = variant.form.gives_losses
        everyone = sum(other[2] for other in table)
        weights = self._boundary.weights(ready.program, self._transport.rank)
        request = Request(
            variant, ready, inputs, grads,
            targets=own if losses else None,
            weights=((1 / everyone if everyone else 0.0),) if losses else weights,
            sync=self._now.syncing,
        )  # fmt: skip
        names = tuple(name for name in ready.first_uses if name in self._states and self._states[name].requires_grad)
        return request, names, [*inputs.values(), *(self._states[name] for name in names)]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[Tensor, ...]]:
        """The call of the network itself, and the targets of the loss."""
        loss = self._laying.loss is not None and self.training
        targets: tuple[Any, ...] = ()
        if loss:
            kwargs = dict(kwargs)
            given = kwargs.pop("target") if "target" in kwargs else args[-1] if args else None
            args = args if "target" not in kwargs and given is not (args[-1] if args else None) else args[:-1]
            targets = tuple(leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        try:
            return bind(self._tree.root, args, kwargs), targets
        except TypeError as error:
            if loss:
                problem = f"the loss needs a target: {error}."
            elif self._laying.loss is not None or len(args) > len(self._call.tensors):
                problem = f"a target was given that nobody asked for: {error}."
            else:
                problem = f"the network cannot be called so: {error}."
            raise RunError(
                problem,
                "With parallelize(..., loss=...) call model(x, y) in training and model(x) in evaluation; "
                "without a loss call model(x).",
            ) from None

    def _key(self, call: Call, follows: Sequence[bool]) -> tuple[object, ...]:
        shapes = [tuple(tensor.shape) for tensor in call.tensors]
        floats = [tensor.is_floating_point() for tensor in call.tensors]
        if self._boundary.io == "tile":  # the whole sizes are those it was captured with
            graph = self._mode.form.graph
            shapes = [graph.inputs[name].shape for name in _own_inputs(graph)]
        return (self._tree.key(), call.form, _sizes(shapes, floats, follows), self.training)

    def _refuse_misfits(self, call: Call, targets: Sequence[Tensor], known: Variant | None) -> None:
        """What is wrong with this rank's tensors; the number of samples is the caller's choice."""
        rank, graph = self._transport.rank, self._mode.form.graph
        if self._laying.loss is not None and self.training and len(targets) != len(graph.targets):
            raise RunError(
                f"rank {rank} passed {len(targets)} targets; the loss needs {len(graph.targets)}.",
                "Call model(x, y) in training, with y of the form of the example `target`.",
            )
        boxes = (self.input_box, self.output_box) if self._boundary.io == "tile" else (None, None)
        given = zip([*_own_inputs(graph), *graph.targets], [*call.tensors, *targets], strict=False)
        for name, tensor in given:
            box = boxes[name in graph.targets]
            if self._boundary.io == "tile" and box is None:
                continue
            if box is None and name not in graph.targets:
                continue  # of another size: another variant
            if box is None and (known is None or known is not self._mode):
                continue
            wanted = graph.inputs[name].shape if box is None else tuple(map(len, box))
            if tensor.ndim != len(wanted) or tuple(tensor.shape[1:]) != tuple(wanted[1:]):
                raise RunError(
                    f"rank {rank} passed {tuple(tensor.shape)} for {name!r}; "
                    f"io={self._boundary.io!r} and the captured batch need {wanted}.",
                    "Pass this rank's samples, the whole batch, or the box `model.input_box`, as io says.",
                )

    def _refuse_different(
        self, table: Sequence[Sequence[float]], problem: Exception | None, key: tuple[object, ...], call: Call
    ) -> None:
        wrong = [rank for rank, row in enumerate(table) if row[3]]
        if problem is not None:
            raise problem
        if wrong:
            raise PeerError(
                f"rank {wrong[0]} cannot run the network as it was called; see its message.",
                "Mend what that rank says.",
            )
        if len({row[5] for row in table}) > 1:
            modes = [f"rank {rank} {'does' if row[5] else 'does not'}" for rank, row in enumerate(table)]
            raise RunError(
                f"some ranks record gradients and some do not: {', '.join(modes)}.",
                "Use torch.no_grad() on all ranks or on none.",
            )
        if len({row[7] for row in table}) > 1:
            keys = self._transport.gather_objects((key, [tuple(tensor.shape) for tensor in call.tensors]))
            rank, difference = next((r, d) for r, one in enumerate(keys) if (d := _difference(keys[0][0], one[0])))
            shapes = f"inputs of {keys[0][1]} against {keys[rank][1]}"
            same_settings = keys[0][0][0] == keys[rank][0][0]
            raise RunError(
                f"rank 0 and rank {rank} called the network differently: {shapes if same_settings else difference}.",
                "All ranks must call it in the same mode, with inputs of the same form and sizes; the number of "
                "samples alone may differ.",
            )

    def _tiles_at(self, variant: Variant, batch: int) -> Layout:
        graph = variant.at(batch)
        return input_tiles(graph, next(iter(graph.inputs)), variant.cuts(graph), self._transport.world)

    # Variants

    def _variant(
        self, key: tuple[object, ...], call: Call, follows: Sequence[bool], targets: Sequence[Tensor], sizes: list[int]
    ) -> Variant:
        """The variant that a key stands for; captured when it first comes."""
        if key not in self._now.variants:
            batch = sizes[0] if self._boundary.io == "whole" else sum(sizes)
            self._now.variants[key] = self._captured(call, follows, targets, batch)
            self._follows.setdefault(call.form, tuple(follows))
            known = len(self._now.variants)
            if self._transport.rank == 0:
                shapes = ", ".join(str(tuple(one.shape)) for one in call.tensors)
                log.info("captured the network anew for its present settings and inputs of %s (%d)", shapes, known)
                if known % _MANY_VARIANTS == 0:
                    log.warning(
                        "the network was captured %d times: settings of modules or sizes of inputs change often. Make "
                        "a number that changes in every step a buffer or an input, and sizes few.",
                        known,
                    )
        return self._now.variants[key]

    def _captured(self, call: Call, follows: Sequence[bool], targets: Sequence[Tensor], batch: int) -> Variant:
        form = agree(self._transport, lambda: self._trace(call, follows, targets, batch))
        return self._planned(form)

    def _planned(self, form: Form) -> Variant:
        compare_graphs(form.graph, self._transport)
        layers = [layer.name for layer in form.graph.layers]
        resolved = agree(
            self._transport,
            lambda: resolve(self._laying.plan, form.graph, self._transport.world, [*self._laying.names, *layers]),
        )
        return Variant(form, resolved)

    def _trace(self, call: Call, follows: Sequence[bool], targets: Sequence[Tensor], batch: int) -> Form:
        """The network as it is now, called so with a batch of so many samples; on shapes alone."""
        device = self._engine.device
        with self._tree.whole(self._whole_shapes()) as fakes, _plain_torch(device):

            def fake(tensor: Tensor, follow: bool) -> Tensor:
                shape = (batch, *tensor.shape[1:]) if follow else tuple(tensor.shape)
                with fakes:
                    return torch.empty(shape, dtype=tensor.dtype, device=device)

            given = replace(call, tensors=tuple(fake(*pair) for pair in zip(call.tensors, follows, strict=True)))
            example = torch.empty((batch, *targets[0].shape[1:]), dtype=targets[0].dtype) if targets else None
            return capture_form(self._tree.root, given, self._laying.loss, example)

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._states.shapes[own] for name, own in self._states.names_of.items()}

    def _proven(self, variant: Variant, batch: int, call: Call, targets: Sequence[Tensor]) -> Variant:
        """The variant itself if it says of a batch what a trace says; else one of that batch alone."""
        if batch in variant.others:
            return variant.others[batch]
        if batch not in variant.graphs:
            if batch < 1:
                raise RunError("the batch has no sample.", "Pass at least one sample on one rank.")
            follows = self._follows[call.form]
            form = agree(self._transport, lambda: self._trace(call, follows, targets, batch))
            if variant.says(form):
                variant.graphs[batch] = variant.form.graph.at_batch(batch)
            else:
                variant.others[batch] = self._planned(form)
                return variant.others[batch]
        return variant

    def _prepare(self, variant: Variant, shares: tuple[int, ...]) -> Ready:
        known = shares in variant.ready
        ready = variant.prepare(shares, self._boundary, self._transport.rank, self._states.layouts)
        if not known:
            self._transport.make_groups([(LAYER, ranks) for ranks in groups_of(ready)])
        return ready

    def _captured_program(self, *, training: bool) -> Program:
        variant = self._first[training]
        return self._prepare(variant, even_shares(variant.form.graph.batch, self._transport.world)).program

    # One step

    def _run(self, request: Request, *, record: bool) -> tuple[list[Tensor], Tape]:
        program, now = request.ready.program, self._now
        training = self.training
        if training:
            now.training_passes += 1
        else:
            now.evaluation_passes += 1
        states = {
            **{name: _leaf(state, record=record) for name, state in self._states.tensors().items()},
            **request.ready.constants,
        }
        tiles, tape = self._engine.forward(
            program,
            request.inputs,
            states,
            step=str(now.training_passes) if training else f"evaluation {now.evaluation_passes}",
            record=record,
            input_grads=request.input_grads,
        )
        if training:
            self._count_up(program.graph)
            self._spread_buffers(program)
        return results_of(request, tape, tiles, self._engine.device), tape

    def _count_up(self, graph: LayerGraph) -> None:
        with torch.no_grad():
            for name, by in graph.counters.items():
                self._states[name].add_(by)

    def _spread_buffers(self, program: Program) -> None:
        """Give new running statistics to ranks that hold them but had no part in a smaller batch."""
        for name in program.changed:
            home, used = self._states.layouts[name], program.states[name]
            if used == home:
                continue
            sources = {box: ranks[0] for box, ranks in sharers(used).items()}
            idle = [rank for rank, box in enumerate(home) if box is not None and used[rank] is None]
            moves = [Move(sources[box], rank, box) for rank in idle if (box := home[rank]) is not None]
            shard, mine = self._states[name], home[self._transport.rank]
            wanted = Need(mine) if self._transport.rank in idle and mine is not None else None
            self._transport.label = "buffers"
            new = begin_transfer(shard, mine, wanted, moves, self._transport, tag=1, like=shard, add=False).wait()
            if new is not None:
                shard.copy_(new)

    def _backward(
        self, tape: Tape, request: Request, grads: Sequence[Tensor | None], asked: Asked
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """(gradients of inputs, of the parameters that are asked for)."""
        rank = self._transport.rank
        names = self._backward_order(request.ready, asked.names)
        before = {
            name: grad
            for name in names
            if request.sync and name in asked.accumulated and (grad := self._states[name].grad) is not None
        }
        apart = {name: grad for name, grad in before.items() if self._states[name]._backward_hooks}
        collector: Collector
        if request.sync:
            collector = self._begin_sums(names, {name: grad for name, grad in before.items() if name not in apart})
        else:
            collector = Kept({name: len(self._states.ranks_of(name, rank)) for name in names})
        seeds = seeds_of(request, tape, grads, rank)
        inputs = self._engine.backward(tape, seeds, collector, request.ready.first_uses, asked.names)
        found = collector.finish()
        for name, grad in before.items():
            if name in apart:  # a hook changes the new gradient alone
                self._average(grad, self._states.ranks_of(name, rank))
            else:
                grad.zero_()  # its mean is in the sum, which autograd now adds to it
        return self._input_grads(inputs, request), found

    def _average(self, grad: Tensor, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            total = grad.detach().div(len(ranks)).contiguous()
            work = self._transport.sum_later(total, ranks, GRADIENT, label="gradients")
            assert work is not None
            work.wait()
            grad.copy_(total)

    def _input_grads(self, grads: Mapping[str, Tensor], request: Request) -> dict[str, Tensor]:
        """Of this rank's loss. Of an input that all ranks passed, each has found what its own parts contribute."""
        program, found = request.ready.program, {}
        everyone = tuple(range(self._transport.world))
        for name in program.graph.inputs:
            if name not in grads:
                continue
            grad = grads[name]
            if name in program.copies and self._transport.world > 1:
                grad, self._transport.label = grad.clone(memory_format=torch.contiguous_format), INPUT
                self._transport.make_groups([(LAYER, everyone)])
                self._transport.sum(grad, everyone, LAYER)
            weight = self._boundary.input_weight(program, name, self._transport.rank)
            found[name] = grad if weight == 1.0 else grad / weight
        return found

    # Gradients

    def _backward_order(self, ready: Ready, trainable: frozenset[str]) -> tuple[str, ...]:
        return tuple(name for name in reversed(list(ready.first_uses)) if name in trainable)

    def _begin_sums(self, names: tuple[str, ...], before: Mapping[str, Tensor]) -> GradientSums:
        states = {name: self._states[name].detach() for name in names}
        kinds = tuple((name, state.dtype, state.device, state.shape) for name, state in states.items())
        if kinds not in self._now.sums:
            rank = self._transport.rank
            shards = {name: (self._states.ranks_of(name, rank), state) for name, state in states.items()}
            self._now.sums[kinds] = GradientSums(shards, self._transport, self.bucket_bytes)
        self._now.sums[kinds].begin(before)
        return self._now.sums[kinds]


def compare_graphs(graph: LayerGraph, transport: Transport) -> None:
    """Refuse on all ranks where they have captured different networks. A collective."""
    graphs = transport.gather_objects(_graph_digest(graph))
    if len(set(graphs)) == 1:
        return
    everything = transport.gather_objects(graph)
    rank, difference = next(
        (rank, first_difference(everything[0], other) or "their arguments")
        for rank, other in enumerate(everything)
        if graphs[rank] != graphs[0]
    )
    raise RunError(
        f"rank 0 and rank {rank} have different networks: {difference}.",
        "Build the same network on all ranks. Python's random numbers, the rank's own number or the time must not "
        "decide what its code does.",
    )


def _graph_digest(graph: LayerGraph) -> str:
    layers = [(one.name, one.op, one.result, repr(dict(one.arguments)), repr(one.output)) for one in graph.layers]
    everything = (layers, repr(dict(graph.inputs)), repr(dict(graph.states)), graph.outputs)
    return hashlib.blake2b(repr(everything).encode(), digest_size=16).hexdigest()


def _own_inputs(graph: LayerGraph) -> tuple[str, ...]:
    """The network's own inputs, without the loss's targets."""
    return tuple(name for name in graph.inputs if name not in graph.targets)


def _sizes(
    shapes: Sequence[tuple[int, ...]], floats: Sequence[bool], follows: Sequence[bool]
) -> tuple[tuple[object, ...], ...]:
    """Sizes of inputs, the number of samples left out."""
    return tuple(
        (tuple(shape[1:]) if follow else tuple(shape), kind, follow)
        for shape, kind, follow in zip(shapes, floats, follows, strict=True)
    )


def _guessed(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which inputs have samples in dim 0: those that are as long there as the first."""
    return tuple(one.ndim > 0 and one.shape[0] == tensors[0].shape[0] for one in tensors)


def _digest(key: tuple[object, ...]) -> float:
    """A number that is the same for equal keys, exact in a float."""
    return float(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big"))


def _difference(one: Any, other: Any) -> str | None:
    """The first place where two keys differ."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if (found := _difference(mine, theirs)) is not None:
                return found
        return None
    return None if one == other else f"{one} against {other}"


def _leaf(state: Tensor, *, record: bool) -> Tensor:
    """A state as the engine's own graphs see it: the user's graph ends at `Step`."""
    return state.detach().requires_grad_(record and state.requires_grad)


@contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Whatever modes the caller is in, the capture is not."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


def _when_alive(model: ParallelModule, method: Callable[[ParallelModule], None]) -> Callable[[], None]:
    """A call of a network's method that does not keep the network alive."""
    known = weakref.ref(model)

    def call() -> None:
        alive = known()
        if alive is None:
            raise RunError(
                "the module holds the shards of a parallel network that is gone, so that nobody can put them together.",
                "Keep the parallel network until its module is laid over ranks anew, or make a new module.",
            )
        method(alive)

    return call


def _whole_states(model: ParallelModule, path: str, leaves: Mapping[str, str]) -> list[RemovableHandle]:
    """Let a module with cut tensors give whole ones to a state dict, and take whole ones from it.

    `leaves`: the tensors' names there and in the graph. Handles to end that.
    """
    states, transport, owner = model._states, model._transport, model._tree.root.get_submodule(path)

    def give(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
        for leaf, name in leaves.items():
            if prefix + leaf in state_dict:
                shard = states[name].detach()
                state_dict[prefix + leaf] = states.gather_one(name, transport, shard, rank0_only=False)

    def take(
        _module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        _metadata: object,
        _strict: object,
        _missing: object,
        _unexpected: object,
        errors: list[str],
    ) -> None:
        for leaf, name in leaves.items():
            full = state_dict.get(prefix + leaf)
            if not isinstance(full, Tensor):
                continue
            if tuple(full.shape) != states.shapes[name]:
                errors.append(
                    f"size mismatch for {prefix + leaf}: the state has {tuple(full.shape)}, the network, whole, "
                    f"{states.shapes[name]}."
                )
                del state_dict[prefix + leaf]
            else:
                state_dict[prefix + leaf] = states.shard_of(name, full.detach(), transport.rank)

    return [
        owner._register_state_dict_hook(give),  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(take),  # type: ignore[no-untyped-call]
    ]
