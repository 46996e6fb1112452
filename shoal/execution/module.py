"""One rank's part of a network, as an nn.Module for an ordinary training loop."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.building import Draft
from shoal.capturing.signature import Call, bind
from shoal.errors import RunError
from shoal.execution.calling import Caller, Laying, own_inputs
from shoal.execution.engine import Engine, Tape
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.gradients import Collector, GradientSums, Kept
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.precision import value_types
from shoal.execution.states import Shard, ShardedStates, take_rank0s
from shoal.execution.step import Asked, Request, Step, results_of, seeds_of
from shoal.execution.transfer import begin_transfer
from shoal.execution.tree import Tree
from shoal.execution.variants import Form, Ready, Variant
from shoal.graph import LayerGraph, State
from shoal.lowering.boundary import Boundary, even_shares, input_tiles, output_tiles
from shoal.lowering.placement import sharers
from shoal.lowering.program import Program, state_homes
from shoal.lowering.traffic import INPUT, step_traffic
from shoal.moves import Layout, Move
from shoal.operators.base import Need
from shoal.partition import Box, whole
from shoal.plan import Plan
from shoal.planning import Resolved
from shoal.traffic import Sent


@dataclass
class _Now:
    """What changes from pass to pass."""

    training_passes: int = 0
    evaluation_passes: int = 0
    flag: bool = False
    ended: bool = False
    """Whether the module is another parallel network's by now."""
    recorded: int = 0
    """Passes that autograd has a node of."""
    syncing: bool = True
    bucket_bytes: int = 0
    sums: dict[object, GradientSums] = field(default_factory=dict)


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
        draft: Draft | None = None,
    ) -> None:
        super().__init__()
        transport = engine.transport
        self._engine, self._boundary, self._transport = engine, boundary, transport
        self._plan = resolved[True].plan(transport.world, also=resolved[False].cuts)
        self._now = _Now()
        first = {mode: Variant(form, resolved[mode]) for mode, form in forms.items()}
        shares = even_shares(forms[True].graph.batch, transport.world)
        homes = state_homes(*(first[mode].program(shares, boundary) for mode in (True, False)))
        if draft is not None:
            shapes = {name: tuple(tensor.shape) for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
            cut = [name for name, shape in shapes.items() if any(box != whole(shape) for box in homes[name])]
            draft.fill({name: homes[name][transport.rank] for name in cut})
            self._states = ShardedStates(root, homes, transport.rank, in_place=True, whole_shapes=shapes)
        else:
            if in_place:
                take_rank0s(root, homes, transport)
            self._states = ShardedStates(root, homes, transport.rank, in_place=in_place)
        example = call or bind(root, [torch.empty(0) for _ in own_inputs(forms[False].graph)], {})
        tree = Tree(root)
        self._caller = Caller(tree, self._states, transport, boundary, laying, engine.device, first, example)
        transport.make_groups(
            [(GRADIENT, ranks) for layout in self._states.layouts.values() for ranks in sharers(layout).values()]
        )
        for variant in first.values():
            self._caller.prepare(variant, shares)
        self._now.bucket_bytes = bucket_bytes or transport.good_bucket_bytes()
        self._cut = self._states.cut_leaves()
        undo = _when_alive(self, ParallelModule._make_whole)
        self._handles = [
            *(handle for path, own in self._cut.items() for handle in _whole_states(self, root, path, own)),
            *tree.guard({path: next(iter(own.values())) for path, own in self._cut.items()}, undo),
        ]
        self._tree = tree
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = root.__dict__[kind]  # from here on our tree is the user's own

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
        return self._caller.flagged

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
        request = self._caller.agree(args, kwargs, flag=self._now.flag, sync=self._now.syncing)
        learning = {name: self._states[name] for name in request.ready.first_uses if name in self._states}
        learning = {name: state for name, state in learning.items() if state.requires_grad}
        if torch.is_grad_enabled() and (request.input_grads or learning):
            results = Step.apply(  # type: ignore[no-untyped-call]
                self, request, tuple(learning), *request.inputs.values(), *learning.values()
            )
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
        if assign:
            raise RunError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are laid over the "
                "ranks.",
                "Load without assign, or load into the module before shoal.parallelize.",
            )
        return self._tree.root.load_state_dict(state_dict, strict)

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every parameter and buffer, by name, and where it lies in the whole one."""
        return self._states.shards()

    def input_tile(self, batch: int) -> Box | None:
        """With io="tile": the box that this rank passes of a batch of so many samples, in the present mode."""
        graph = self._caller.mode.at(batch)
        return input_tiles(graph, next(iter(graph.inputs)), self._caller.mode.cuts(graph), self._transport.world)[
            self._transport.rank
        ]

    def output_tile(self, batch: int) -> Box | None:
        """With io="tile": this rank's box of the result of such a batch, and of the target where there is a loss."""
        variant = self._caller.mode
        graph = variant.at(batch)
        return output_tiles(
            graph, graph.output, variant.cuts(graph), self._transport.world, losses=variant.form.gives_losses
        )[self._transport.rank]

    @property
    def input_box(self) -> Box | None:
        """`input_tile` of the batch that the network was captured with."""
        return self.input_tile(self._caller.mode.form.graph.batch)

    @property
    def output_box(self) -> Box | None:
        """`output_tile` of the batch that the network was captured with."""
        return self.output_tile(self._caller.mode.form.graph.batch)

    def value_layout(self, layer: str) -> Layout:
        """Which box of a layer's output each rank holds, in the present mode, for the captured batch."""
        return self._captured(training=self.training).program.layouts[layer]

    @property
    def counted(self) -> Mapping[str, Sent]:
        """Payload that this rank has sent so far, by layer."""
        return dict(self._transport.counted)

    def predicted(self, *, input_grad: bool = False) -> Mapping[str, Sent]:
        """Payload that this rank sends in one training step of the captured batch, by layer, from the moves alone."""
        ready = self._captured(training=True)
        program, states = ready.program, {**self._states.tensors(), **ready.constants}
        types = value_types(program.graph, None)
        inputs = own_inputs(program.graph)
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

    # One step

    def _captured(self, *, training: bool) -> Ready:
        """What runs the batch that the network was captured with."""
        variant = self._caller.first[training]
        return self._caller.prepare(variant, even_shares(variant.form.graph.batch, self._transport.world))

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

    def _next_number(self) -> int:
        """Of a pass that can be gone back through; the same on all ranks."""
        self._now.recorded += 1
        return self._now.recorded

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
        flowing = tape.route.grads_for
        if asked.results is not None:
            flowing = flowing & tape.program.behind(asked.results)
        learning = self._learning(request.ready, asked.names, flowing)
        names = self._backward_order(request.ready, learning)
        before = {
            name: grad
            for name in names
            if request.sync and name in asked.accumulated and (grad := self._states[name].grad) is not None
        }
        apart = [name for name in names if request.sync and name in asked.hooked]
        collector: Collector
        if request.sync:
            collector = self._begin_sums(names, {name: grad for name, grad in before.items() if name not in apart})
        else:
            collector = Kept({name: len(self._states.ranks_of(name, rank)) for name in names})
        seeds = seeds_of(request, tape, grads, rank)
        inputs = self._engine.backward(tape, seeds, collector, request.ready.first_uses, learning, flowing)
        found = collector.finish()
        for name in apart:  # a hook changes the new gradient alone
            self._average(name, before.get(name))
        for name, grad in before.items():
            if name not in apart:
                grad.zero_()  # its mean is in the sum, which autograd now adds to it
        return self._input_grads(inputs, request), found

    def _average(self, name: str, grad: Tensor | None) -> None:
        """What a parameter's gradient had accumulated before, averaged over its ranks; each may have none."""
        ranks = self._states.ranks_of(name, self._transport.rank)
        if len(ranks) > 1:
            before = torch.zeros_like(self._states[name]) if grad is None else grad
            total = before.detach().div(len(ranks)).contiguous()
            work = self._transport.sum_later(total, ranks, GRADIENT, label="gradients")
            assert work is not None
            work.wait()
            if grad is not None:
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

    def _learning(self, ready: Ready, wanted: frozenset[str], flowing: frozenset[str]) -> frozenset[str]:
        """Of the wanted parameters those that a gradient reaches; a head whose result nobody used has none."""
        if flowing >= {layer.name for layer in ready.program.graph.layers if layer.name in ready.program.learning}:
            return wanted
        layers = [layer for layer in ready.program.graph.layers if layer.name in flowing]
        return wanted & {ref.name for layer in layers for _, ref in layer.tensors if isinstance(ref, State)}

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


def _leaf(state: Tensor, *, record: bool) -> Tensor:
    """A state as the engine's own graphs see it: the user's graph ends at `Step`."""
    return state.detach().requires_grad_(record and state.requires_grad)


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


def _whole_states(
    model: ParallelModule, root: nn.Module, path: str, leaves: Mapping[str, str]
) -> list[RemovableHandle]:
    """Let a module with cut tensors give whole ones to a state dict, and take whole ones from it.

    `leaves`: the tensors' names there and in the graph. Handles to end that.
    """
    states, transport, owner = model._states, model._transport, root.get_submodule(path)

    def give(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
        transport.header("state_dict")
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
