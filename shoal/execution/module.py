"""One rank's part of a network, as an nn.Module for an ordinary training loop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import PeerError, RunError
from shoal.execution.engine import Engine, Tape
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.gradients import Collector, GradientSums, Kept
from shoal.execution.loss import LossTail
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.precision import value_types
from shoal.execution.states import ShardedStates
from shoal.execution.transfer import begin_transfer
from shoal.graph import LayerGraph
from shoal.lowering.boundary import Boundary, even_shares, input_tiles, output_tiles, step_program
from shoal.lowering.placement import sharers
from shoal.lowering.program import Program, first_uses, layer_groups, state_homes
from shoal.lowering.traffic import INPUT, step_traffic
from shoal.moves import Layout, Move
from shoal.operators.base import Need
from shoal.partition import Box, Cut
from shoal.planning import Resolved
from shoal.traffic import Sent


class ParallelModule(nn.Module):
    """One rank's part of a network; made by `shoal.parallelize`.

    Parameters are this rank's shards under the original module's names. After `backward()` each holds the gradient
    of the mean of the ranks' losses, weighted by their samples.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Mapping[bool, LayerGraph],
        resolved: Mapping[bool, Resolved],
        states: Mapping[str, Tensor],
        *,
        engine: Engine,
        boundary: Boundary,
        tail: LossTail | None,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__()
        self._graphs, self._resolved, self._tail = graphs, resolved, tail
        self._engine, self._boundary = engine, boundary
        self._transport = transport = engine.transport
        self._programs: dict[tuple[bool, tuple[int, ...]], Program] = {}
        self._forwards = 0
        self.flag = False
        """Set on any rank before a forward pass, `flagged` is True on all ranks after it, at no extra cost."""
        self.flagged = False
        self._syncing = True
        self._before_no_sync: dict[str, Tensor | None] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._sums: tuple[object, GradientSums] | None = None
        self.plan = resolved[True].plan(transport.world, also=resolved[False].cuts)
        """The plan as it was laid, one line per layer; `plan.save(path)` keeps it."""

        shares = even_shares(graphs[True].batch, transport.world)
        programs = {mode: self._program(training=mode, shares=shares) for mode in (True, False)}
        self._first_uses = {mode: first_uses(program) for mode, program in programs.items()}
        homes = state_homes(programs[True], programs[False])
        self._states = ShardedStates(self, model, states, homes, transport.rank)
        groups = [(GRADIENT, ranks) for layout in homes.values() for ranks in sharers(layout).values()]
        transport.make_groups(groups)
        self.bucket_bytes = bucket_bytes or transport.good_bucket_bytes()
        """Bytes of gradients that are summed at a time: given, or measured on the link."""
        self.training = model.training

    # What people use

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """This rank's result for its part of the batch; in training with a loss, the loss of this rank's share."""
        if (y is not None) != (self._tail is not None and self.training):
            raise RunError(
                "a target was given that nobody asked for." if y is not None else "the loss needs a target.",
                "With parallelize(..., loss=...) call model(x, y) in training and model(x) in evaluation; "
                "without a loss call model(x).",
            )
        if torch.is_grad_enabled() and (x.requires_grad or self._states.any_trainable()):
            result: Tensor = _Step.apply(self._anchor, x, y, self)  # type: ignore[no-untyped-call]
            return result
        return self._run(x, y, record=False)[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside stay this rank's own; the next one outside sums them all."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def steps(self) -> int:
        """Forward passes in training so far; dropout's masks depend on it. Set it to go on with a stopped run."""
        return self._forwards

    @steps.setter
    def steps(self, value: int) -> None:
        self._forwards = value

    def input_tile(self, batch: int) -> Box | None:
        """With io="tile": the box that this rank passes of a batch of so many samples, in the present mode."""
        return self._input_layout(self._graphs[self.training].at_batch(batch))[self._transport.rank]

    def output_tile(self, batch: int) -> Box | None:
        """With io="tile": this rank's box of the result of such a batch, and of the target where there is a loss."""
        return self._output_layout(self._graphs[self.training].at_batch(batch))[self._transport.rank]

    @property
    def input_box(self) -> Box | None:
        """`input_tile` of the batch that the network was captured with."""
        return self.input_tile(self._graphs[self.training].batch)

    @property
    def output_box(self) -> Box | None:
        """`output_tile` of the batch that the network was captured with."""
        return self.output_tile(self._graphs[self.training].batch)

    def value_layout(self, layer: str) -> Layout:
        """Which box of a layer's output each rank holds, in the present mode, for the captured batch."""
        shares = even_shares(self._graphs[self.training].batch, self._transport.world)
        return self._program(training=self.training, shares=shares).layouts[layer]

    @property
    def counted(self) -> Mapping[str, Sent]:
        """Payload that this rank has sent so far, by layer."""
        return dict(self._transport.counted)

    def predicted(self, *, input_grad: bool = False) -> Mapping[str, Sent]:
        """Payload that this rank sends in one training step of the captured batch, by layer, from the moves alone."""
        program = self._program(training=True, shares=even_shares(self._graphs[True].batch, self._transport.world))
        states = self._states.tensors()
        types = value_types(program.graph, None)
        return step_traffic(
            program,
            self._transport.rank,
            trainable=self._backward_order(frozenset(n for n, s in states.items() if s.requires_grad), training=True),
            homes=self._states.layouts,
            itemsize={
                **{name: dtype.itemsize for name, dtype in types.items()},
                **{name: state.dtype.itemsize for name, state in states.items()},
            },
            dtypes={name: str(state.dtype) for name, state in states.items()},
            bucket_bytes=self.bucket_bytes,
            input_grad=input_grad,
            local_statistics=self._engine.local_statistics,
            again=range(program.segments[-1].start if self._engine.recompute else 0),
        )

    # Programs

    def _program(self, *, training: bool, shares: tuple[int, ...]) -> Program:
        """The program for a batch of these shares; found once, in some ten milliseconds."""
        key = (training, shares)
        if key not in self._programs:
            self._programs[key] = self._compile(self._graphs[training], shares)
        return self._programs[key]

    def _compile(self, captured: LayerGraph, shares: tuple[int, ...]) -> Program:
        batch = sum(shares)
        if not captured.holds_for(batch):
            least = f"needs at least {captured.smallest_batch} samples" if captured.any_batch else "fixes it"
            raise RunError(
                f"the network was captured for a batch of {captured.batch} and {least}; now it got {batch}.",
                "Pass batches of that size, or remove the fixed size from the network's code.",
            )
        graph = captured.at_batch(batch)
        program = step_program(graph, self._cuts(graph), self._boundary, shares, losses=self._gives_losses(graph))
        self._transport.make_groups([(LAYER, ranks) for ranks in layer_groups(program)])
        return program

    def _cuts(self, graph: LayerGraph) -> dict[str, Cut]:
        """Every layer's cut; by sample it shrinks with a batch that is smaller than the one planned for."""
        planned = self._resolved[graph.training].cuts
        if graph.batch >= self._graphs[graph.training].batch:
            return dict(planned)
        return {name: _shrunk(cut, graph, name) for name, cut in planned.items()}

    def _gives_losses(self, graph: LayerGraph) -> bool:
        return self._tail is not None and self._tail.mean and graph.training

    def _input_layout(self, graph: LayerGraph) -> Layout:
        return input_tiles(graph, self._cuts(graph), self._transport.world)

    def _output_layout(self, graph: LayerGraph) -> Layout:
        return output_tiles(graph, self._cuts(graph), self._transport.world, losses=self._gives_losses(graph))

    # One step

    def _run(self, x: Tensor, y: Tensor | None, *, record: bool) -> tuple[Tensor, Tape, "_Weight"]:
        shares, own, everyone = self._agree(x, y)
        program = self._program(training=self.training, shares=shares)
        inputs = dict(zip(program.graph.inputs, (x,) if y is None else (x, y), strict=True))
        self._forwards += self.training
        tile, tape = self._engine.forward(
            program,
            inputs,
            self._states.tensors(),
            step=self._forwards,
            record=record,
            input_grad=x.requires_grad,
        )
        if self.training:
            self._count_up(program.graph)
            self._spread_buffers(program)
        weight = self._weight(program, own, everyone)
        return self._result(tile, tape, weight), tape, weight

    def _agree(self, x: Tensor, y: Tensor | None) -> tuple[tuple[int, ...], float, float]:
        """(samples per rank, weight of this rank's targets, of all): known to all ranks before anything is sent.

        A rank whose tensors do not fit fails on all ranks, so that none waits for it.
        """
        problem = self._misfit(x, y)
        own = 0.0 if y is None or self._tail is None or problem else self._tail.weight(y)
        table = self._transport.gather_numbers([float(x.shape[0]), own, float(problem is not None), float(self.flag)])
        self.flagged = any(row[3] for row in table)
        wrong = [rank for rank, row in enumerate(table) if row[2]]
        if wrong:
            error = PeerError if problem is None else RunError  # the rank in question tells it better
            raise error(
                problem or f"rank {wrong[0]} passed a tensor that does not fit; see its message.",
                "Pass this rank's samples, the whole batch, or the box `model.input_box`, as io says.",
            )
        graph = self._graphs[self.training]
        sizes = [int(row[0]) for row in table]
        shares = self._boundary.batch(sizes, lambda batch: self._input_layout(graph.at_batch(batch)), graph.batch)
        return shares, own, sum(row[1] for row in table)

    def _misfit(self, x: Tensor, y: Tensor | None) -> str | None:
        """What is wrong with this rank's tensors; the number of samples is the caller's choice."""
        graph, io = self._graphs[self.training], self._boundary.io
        boxes = (self.input_box, self.output_box) if io == "tile" else (None, None)
        for name, tensor, box in zip(graph.inputs, (x, y), boxes, strict=False):
            if tensor is None or (io == "tile" and box is None):
                continue
            wanted = graph.inputs[name].shape if box is None else tuple(map(len, box))
            if tensor.ndim != len(wanted) or tensor.shape[1:] != wanted[1:]:
                return (
                    f"rank {self._transport.rank} passed {tuple(tensor.shape)} for {name!r}; "
                    f"io={io!r} and the captured batch need {wanted}."
                )
        return None

    def _count_up(self, graph: LayerGraph) -> None:
        with torch.no_grad():
            for name, by in graph.counters.items():
                self._states[name].add_(by)

    def _spread_buffers(self, program: Program) -> None:
        """Give batch norm's new statistics to ranks that hold them but had no part in a smaller batch."""
        for name in program.graph.changed:
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

    def _weight(self, program: Program, own: float, everyone: float) -> "_Weight":
        if self._tail is not None and self._tail.mean and self.training:
            return _Weight(1 / everyone if everyone else 0.0, own)
        return _Weight(self._boundary.weight(program, self._transport.rank), None)

    def _result(self, tile: Tensor | None, tape: Tape, weight: "_Weight") -> Tensor:
        name = tape.program.graph.output
        if tile is None:
            shape = tape.program.graph.specs[name].shape
            tile = torch.empty([0, *shape[1:]], dtype=tape.types[name], device=self._engine.device)
        if weight.targets is None:
            return tile
        return tile.sum() / weight.targets if weight.targets else tile.sum()

    def _backward(self, tape: Tape, grad: Tensor, weight: "_Weight") -> Tensor | None:
        if tape.used:
            raise RunError("backward ran twice through one forward pass.", "Call the model again before each backward.")
        tape.used = True
        tile = tape.program.output.tiles[self._transport.rank]
        seed = None
        if tile is not None:
            seed = (grad * weight.factor).to(tape.types[tape.program.graph.output]).expand(tile.shape)
        states = self._states.tensors()
        training = tape.program.graph.training
        names = self._backward_order(tape.route.trainable, training=training)
        collector: Collector = self._begin_sums(states, names) if self._syncing else Kept()
        inputs = self._engine.backward(tape, seed, collector, self._first_uses[training], states)
        self._store(collector.finish(), states)
        return self._input_grad(inputs.get(next(iter(tape.program.graph.inputs))))

    def _input_grad(self, grad: Tensor | None) -> Tensor | None:
        """Where every rank passed the whole batch, each has found only what its own parts contribute."""
        if grad is not None and self._boundary.io == "whole":
            everyone = tuple(range(self._transport.world))
            grad, self._transport.label = grad.clone(memory_format=torch.contiguous_format), INPUT
            self._transport.make_groups([(LAYER, everyone)])
            self._transport.sum(grad, everyone, LAYER)
        return grad

    # Gradients

    def _backward_order(self, trainable: frozenset[str], *, training: bool) -> tuple[str, ...]:
        return tuple(name for name in reversed(self._first_uses[training]) if name in trainable)

    def _begin_sums(self, states: Mapping[str, Tensor], names: tuple[str, ...]) -> GradientSums:
        kinds = tuple((name, states[name].dtype, states[name].device) for name in names)
        if self._sums is None or self._sums[0] != kinds:
            rank = self._transport.rank
            shards = {name: (self._states.ranks_of(name, rank), states[name].detach()) for name in names}
            self._sums = (kinds, GradientSums(shards, self._transport, self.bucket_bytes))
        left_over = self._take_left_over(states)
        self._sums[1].begin(left_over, reuse=all(states[name].grad is None for name in names))
        return self._sums[1]

    def _take_left_over(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `no_sync` left in the gradients, taken out of them again."""
        left_over = {}
        for name, before in self._before_no_sync.items():
            grad = states[name].grad
            if grad is not None:
                left_over[name] = grad if before is None else grad - before
                states[name].grad = before
        self._before_no_sync = {}
        return left_over

    def _store(self, grads: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            state = states[name]
            if not self._syncing and name not in self._before_no_sync:
                self._before_no_sync[name] = None if state.grad is None else state.grad.clone()
            state.grad = grad if state.grad is None else state.grad + grad


def _shrunk(planned: Cut, graph: LayerGraph, name: str) -> Cut:
    rows = min(graph.batch, *graph.specs[name].shape[:1] or (1,))
    return planned.shrunk("n", rows)


@dataclass(frozen=True)
class _Weight:
    factor: float
    """What the caller's gradient is multiplied by: this rank's weight in the mean over ranks."""
    targets: float | None
    """With a loss: what the sum of this rank's losses is divided by."""


class _Step(torch.autograd.Function):
    """One forward pass as autograd sees it. The anchor makes its result need a gradient, whatever x does."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: Tensor, y: Tensor | None, module: ParallelModule) -> Tensor:
        result, ctx.tape, ctx.weight = module._run(x, y, record=True)
        ctx.module, ctx.shape = module, x.shape
        return result.clone() if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad = ctx.module._backward(ctx.tape, grad, ctx.weight)
        if x_grad is None and ctx.needs_input_grad[1]:  # this rank passed nothing that anybody reads
            x_grad = grad.new_zeros(ctx.shape)
        return None, x_grad, None, None


def full_state_dict(model: ParallelModule, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The original module's state dict: its keys and whole tensors. A collective.

    On every rank, or on rank 0 and empty elsewhere, which is what writing a file needs.
    """
    return model._states.gather(model._transport, rank0_only=rank0_only)


def full_optimizer_state(model: ParallelModule, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What an optimizer of `model.parameters()` remembers, by parameter and whole. A collective.

    On rank 0; empty elsewhere. Tensors of a parameter's shape come together from its shards; numbers, such as
    counts of steps, are the first holder's.
    """
    own = _remembered(model, optimizer)
    kinds = {name: {key: _scalar(value) for key, value in state.items()} for name, state in own.items()}
    table = model._transport.gather_objects(kinds)
    full: dict[str, dict[str, Any]] = {}
    for name in model._states.names():
        holder: dict[str, Any] = next((found[name] for found in table if name in found), {})
        for key, number in holder.items():
            shard = own.get(name, {}).get(key) if number is None else None
            value = (
                model._states.gather_one(name, model._transport, shard, rank0_only=True) if number is None else number
            )
            if model._transport.rank == 0:
                full.setdefault(name, {})[key] = value
    return full


def load_full_optimizer_state(
    model: ParallelModule, optimizer: Optimizer, full: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give an optimizer what `full_optimizer_state` gave; each rank takes its shards. Also under another plan."""
    parameters = dict(model.named_parameters())
    for name, state in full.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: model._states.shard_of(name, value, model._transport.rank).to(parameter.device)
            if isinstance(value, Tensor) and tuple(value.shape) == model._states.shapes[name]
            else value
            for key, value in state.items()
        }


def _remembered(model: ParallelModule, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """An optimizer's state of the parameters that this rank holds a part of."""
    rank = model._transport.rank
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state and model._states.layouts[name][rank] is not None
    }


def _scalar(value: Any) -> Any:
    """A number, or a tensor of one; None for a tensor that is cut as its parameter is."""
    return value if not isinstance(value, Tensor) or value.ndim == 0 else None


def load_full_state_dict(model: ParallelModule, full: Mapping[str, Tensor]) -> None:
    """Load what `full_state_dict`, or the original module's `state_dict()`, gave; each rank takes its shards."""
    model._states.load(full, model._transport.rank)


def holders(model: ParallelModule) -> dict[str, tuple[int, ...]]:
    """For every parameter, the ranks that hold the same shard of it as this rank does."""
    rank = model._transport.rank
    return {name: model._states.ranks_of(name, rank) for name, _ in model.named_parameters()}


def tell_holders(model: ParallelModule, tensors: Mapping[str, Tensor]) -> None:
    """Tensors of parameters' shapes, as the first holder of each shard has them, on all its holders. Collective."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name, ranks in holders(model).items():
        if len(ranks) > 1 and name in tensors:
            groups.setdefault((ranks, tensors[name].dtype), []).append(tensors[name])
    with torch.no_grad():
        for (ranks, _), members in sorted(groups.items(), key=lambda one: (one[0][0], str(one[0][1]))):
            whole = torch.cat([member.reshape(-1) for member in members])  # one message for many small tensors
            model._transport.tell(whole, ranks, GRADIENT)
            for member, part in zip(members, torch.split(whole, [member.numel() for member in members]), strict=True):
                member.copy_(part.view(member.shape))


def clip_grad_norm_(model: ParallelModule, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients down so that their norm over the whole network is at most `max_norm`; returns the norm.

    A collective: each shard is counted once, wherever its copies are.
    """
    rank, transport = model._transport.rank, model._transport
    owned, grads = [], []
    for name, state in model._states.tensors().items():
        if state.grad is not None:
            grads.append(state.grad)
            if model._states.ranks_of(name, rank)[0] == rank:
                owned.append(state.grad)
    infinite = norm_type == float("inf")
    norms = [torch.linalg.vector_norm(grad, norm_type).double() for grad in owned if grad.numel()]
    if infinite:
        mine = max((float(norm) for norm in norms), default=0.0)
        norm = max(row[0] for row in transport.gather_numbers([mine]))
    else:
        mine = sum(float(norm) ** norm_type for norm in norms)
        norm = sum(row[0] for row in transport.gather_numbers([mine])) ** (1 / norm_type)
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return torch.tensor(norm)
