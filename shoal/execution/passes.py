"""The passes of one network on this rank: an agreed request goes through the engine, forward and backward.

`module.py` is what people hold, `calling.py` finds what to run, `autograd_node.py` shows a pass to autograd as one
node. Here the pass is run: forward, the program on this rank's shards, then counters and running statistics; backward,
the gradients that are asked for, summed over the ranks with what had accumulated before.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.execution.autograd_node import Asking, Request, results_of, seeds_of
from shoal.execution.calling import Caller
from shoal.execution.copies import Copies
from shoal.execution.engine import Engine
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.gradients import Collector, GradientSums, Kept
from shoal.execution.laps import AfterLap, LapRunner, agreed_after_lap, stepping_by
from shoal.execution.peers import PURPOSE as LAYER
from shoal.execution.precision import value_types
from shoal.execution.tape import RanInLaps, Tape
from shoal.execution.transfer import begin_transfer
from shoal.execution.untouched import Untouched
from shoal.execution.variants import Ready
from shoal.graph import LayerGraph, State
from shoal.lowering.boundary import even_shares, own_inputs
from shoal.lowering.factors import Factors, factorable
from shoal.lowering.laps import LappedStep
from shoal.lowering.placement import sharers
from shoal.lowering.program import Program, first_uses
from shoal.lowering.step_traffic import INPUT, step_traffic
from shoal.moves import Move
from shoal.operators.base import Need
from shoal.traffic import Sent


class Passes:
    """Forward and backward passes of one network, and what is counted from pass to pass.

    `bucket_bytes`: of gradients that are summed at a time; None: what is good on the link. `factored`: layers whose
    weights' gradients ranks find from each other's factors, wherever a pass allows it.
    """

    def __init__(
        self, caller: Caller, engine: Engine, bucket_bytes: int | None, factored: Collection[str] = ()
    ) -> None:
        self._caller, self._engine, self._boundary = caller, engine, caller.boundary
        self.states, self.transport = caller.states, caller.transport
        self.copies = Copies(self.states, self.transport)
        """What layers read of parameters of which this rank keeps some rows."""
        self.bucket_bytes = bucket_bytes or self.transport.good_bucket_bytes()
        self.factored = frozenset(factored)
        self._factors: dict[int, tuple[Program, Mapping[str, Factors]]] = {}
        """By the program's id, with the program, so that it stays its own."""
        self.training_passes = 0
        """Forward passes in training so far."""
        self.ended = False
        """Whether the network's module belongs to another parallel network by now."""
        self._evaluation_passes = 0
        self._recorded = 0
        """Passes that autograd has a node of."""
        self.after_lap: AfterLap | None = None
        """What steps the linear layers' weights where they step after every lap."""
        self._laps = LapRunner(engine, self.transport, self.states.layouts)
        self._sums: dict[object, GradientSums] = {}
        """By the names, types and shapes of the parameters that learn."""

    def captured(self, *, training: bool) -> Ready:
        """What runs the batch that the network was captured with."""
        variant = self._caller.first[training]
        return self._caller.prepare(variant, even_shares(variant.form.graph.batch, self.transport.world))

    def factors(self, program: Program) -> Mapping[str, Factors]:
        """By weight, what ranks send each other in the place of a sum; found once per program."""
        if not self.factored:
            return {}
        if id(program) not in self._factors:
            found = factorable(program, self.states.layouts)
            kept = {weight: own for weight, own in found.items() if own.layer in self.factored}
            self._factors[id(program)] = program, kept
        return self._factors[id(program)][1]

    def predicted(self, *, input_grad: bool = False, accumulated: bool = False) -> Mapping[str, Sent]:
        """Payload that this rank sends in one training step of the captured batch, by layer, from the moves alone.

        `accumulated`: on top of gradients of passes before, with which all gradients are summed.
        """
        ready = self.captured(training=True)
        program, states = ready.program, {**self.states.tensors(), **ready.constants}
        types = value_types(program.graph, None)
        inputs = own_inputs(program.graph)
        lapped = ready.lapped
        program = program if lapped is None else lapped.front
        learning = frozenset(name for name, state in states.items() if state.requires_grad)
        return step_traffic(
            program,
            self.transport.rank,
            trainable=self._backward_order(ready, learning),
            laps=() if lapped is None else [(lap.program, self._run_again(lap.program)) for lap in lapped.laps],
            learning=learning,
            homes=self.states.layouts,
            uses=self.states.uses,
            itemsize={
                **{name: dtype.itemsize for name, dtype in types.items()},
                **{name: state.dtype.itemsize for name, state in states.items()},
            },
            dtypes={name: str(state.dtype) for name, state in states.items()},
            bucket_bytes=self.bucket_bytes,
            inputs=frozenset(inputs if input_grad else ()),
            local_statistics=self._engine.local_statistics,
            again=self._run_again(program),
            factors=self.factors(program),
            accumulated=accumulated,
        )

    def _run_again(self, program: Program) -> range:
        """The instructions that backward runs a second time."""
        return range(program.segments[-1].start if self._engine.recompute else 0)

    def forward(self, request: Request, *, record: bool) -> tuple[list[Tensor], Tape]:
        """This rank's results, and the tape for backward (empty unless `record`). A collective."""
        program, training = request.ready.program, self._caller.training
        if training:
            self.training_passes += 1
        else:
            self._evaluation_passes += 1
        own = {name: _leaf(state, record=record) for name, state in self.states.tensors().items()}
        states = self.copies.gather({**own, **request.ready.constants})
        step = str(self.training_passes) if training else f"evaluation {self._evaluation_passes}"
        tiles: list[Tensor | None]
        if record and request.ready.lapped is not None:
            losses, tape = self._in_laps(request, request.ready.lapped, states, step)
            tiles = [losses]
        else:
            tiles, tape = self._engine.forward(
                program,
                request.inputs,
                states,
                step=step,
                record=record,
                input_grads=request.input_grads,
                factors=self.factors(program),
            )
        states.wait()  # also for what no layer here has read
        self._count_up(program.graph)  # in evaluation too: a batch norm in it may train, a network's own counter count
        self._update_idle_ranks(program)
        self._caller.settle(program.changed)
        return results_of(request, tape, tiles, self._engine.device), tape

    def _in_laps(
        self, request: Request, lapped: LappedStep, states: Mapping[str, Tensor], step: str
    ) -> tuple[Tensor | None, Tape]:
        """(the losses of this rank's samples, the tape): the linear layers have been through forward and backward."""
        if not lapped.steps:
            return self._laps.run(request, lapped, states, step)
        if not request.sync:
            raise RunError(
                "inside no_sync gradients are kept, and this plan's linear layers step after every lap.",
                "Use 'owt:b' or 'owt:c', whose weights step once, to accumulate gradients.",
            )
        after_lap = agreed_after_lap(self.after_lap, self.transport)
        with stepping_by(after_lap, self.states.tensors(), lapped.states) as stepping:
            return self._laps.run(request, lapped, states, step, stepping)

    def next_number(self) -> int:
        """The number of a new pass that backward can go through; the same on all ranks."""
        self._recorded += 1
        return self._recorded

    def untouched(self, request: Request, tape: Tape, results: Sequence[Tensor]) -> Untouched:
        """What the pass read and returned, as it is now. What the network itself updates is not for backward."""
        own = {*tape.program.changed, *tape.program.graph.counters}
        read = {name: tape.states[name] for name in request.ready.first_uses if name in tape.states and name not in own}
        shown = [] if request.targets is not None else [fetch.value for fetch in tape.program.outputs]
        return Untouched({**read, **request.inputs}, zip(shown, results, strict=False), again=self._engine.recompute)

    def _count_up(self, graph: LayerGraph) -> None:
        """Add to the counters of the network, such as a batch norm's number of batches."""
        with torch.no_grad():
            for name, by in graph.counters.items():
                self.states[name].add_(by)

    def _update_idle_ranks(self, program: Program) -> None:
        """Send new running statistics to ranks that hold them but had no samples of a smaller batch."""
        for name in program.changed:
            home, used = self.states.layouts[name], program.states[name]
            if used == home:
                continue
            sources = {box: ranks[0] for box, ranks in sharers(used).items()}
            idle = [rank for rank, box in enumerate(home) if box is not None and used[rank] is None]
            moves = [Move(sources[box], rank, box) for rank in idle if (box := home[rank]) is not None]
            shard, mine = self.states[name], home[self.transport.rank]
            wanted = Need(mine) if self.transport.rank in idle and mine is not None else None
            self.transport.label = "buffers"
            new = begin_transfer(shard, mine, wanted, moves, self.transport, tag=1, like=shard, add=False).wait()
            if new is not None:
                shard.copy_(new)

    def backward(
        self, tape: Tape, request: Request, grads: Sequence[Tensor | None], asking: Asking
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """(gradients of the inputs, gradients of the parameters that are asked for). A collective.

        A plain pass begins on this rank before all ranks have agreed on it, and sends nothing before they have.
        """
        rank = self.transport.rank
        before = {
            name: grad
            for name in asking.asked.names
            if request.sync
            and name in asking.asked.accumulated
            and name not in self.copies  # whose rows are on one rank: nothing to average
            and (grad := self.states[name].grad) is not None
        }
        asked = asking.asked if asking.plain and not before and tape.lapped is None else asking.agreed()
        scale = 1.0 if tape.lapped is None else self._agreed_scale(grads)
        tape.used = True
        flowing = tape.route.grads_for
        if asked.results is not None:
            flowing = flowing & tape.program.behind(asked.results)
        learning = self._parameters_reached(request.ready, asked.names, flowing)
        names = self._backward_order(request.ready, learning)
        before = {name: before[name] for name in names if name in before}
        rest: Collector
        if request.sync:
            rest = self._begin_sums(
                tuple(name for name in names if name not in self.copies),
                {name: grad for name, grad in before.items() if name not in asked.hooked},
                tape.route.factors.keys() & names,
                lambda: asking.agreed().accumulating,
            )
        else:
            rest = Kept({name: len(self.states.ranks_of(name, rank)) for name in names})
        collector = self.copies.sums(rest)
        inputs: Mapping[str, Tensor]
        if tape.lapped is not None:
            inputs = self._back_through_front(tape.lapped, scale, names, collector, learning)
        else:
            seeds = seeds_of(request, tape, grads, rank)
            inputs = self._engine.backward(tape, seeds, collector, request.ready.first_uses, learning, flowing)
        parameters = collector.finish()
        apart = [name for name in names if request.sync and name in asking.agreed().hooked]
        for name in apart:  # a hook changes the new gradient alone
            self._average(name, before.get(name))
        for name, grad in before.items():
            if name not in apart:
                grad.zero_()  # its mean is in the sum, which autograd now adds to it
        return self._input_grads(inputs, request), parameters

    def _back_through_front(
        self, lapped: RanInLaps, scale: float, names: Sequence[str], collector: Collector, learning: frozenset[str]
    ) -> Mapping[str, Tensor]:
        """What is left of a pass in laps, whose gradients count `scale` times."""
        for name in names:
            if name in lapped.parameters:
                grad = lapped.parameters.pop(name)  # autograd copies what somebody else holds too
                collector.ready(name, grad if scale == 1.0 else grad.mul_(scale))
                del grad
        front = lapped.front
        features = [lapped.features.get(fetch.value) for fetch in front.program.outputs]
        seeds = [grad if grad is None or scale == 1.0 else grad * scale for grad in features]
        uses = first_uses(front.program)
        return self._engine.backward(front, seeds, collector, uses, learning & uses.keys(), front.route.grads_for)

    def _agreed_scale(self, grads: Sequence[Tensor | None]) -> float:
        """By how much all ranks multiply their losses; in laps gradients were added up before anybody could say.

        A collective; refused on all where they differ.
        """
        (grad,) = grads
        scales = [scale for (scale,) in self.transport.gather_numbers([0.0 if grad is None else float(grad)])]
        if len(set(scales)) > 1:
            rank = next(rank for rank, scale in enumerate(scales) if scale != scales[0])
            raise RunError(
                f"rank 0 multiplies its loss by {scales[0]:g} before backward, and rank {rank} by {scales[rank]:g}; "
                "linear layers that run in laps have summed their gradients over the ranks already.",
                "Multiply the loss by the same number on all ranks, or use the plan without laps, as 'owt'.",
            )
        return scales[0]

    def _average(self, name: str, grad: Tensor | None) -> None:
        """Average over its ranks what a parameter's gradient had accumulated before; having none counts as zeros."""
        ranks = self.states.ranks_of(name, self.transport.rank)
        if len(ranks) > 1:
            before = torch.zeros_like(self.states[name]) if grad is None else grad
            total = before.detach().div(len(ranks)).contiguous()
            work = self.transport.sum_later(total, ranks, GRADIENT, label="gradients", kind="gradients", content=name)
            assert work is not None
            work.wait()
            if grad is not None:
                grad.copy_(total)

    def _input_grads(self, grads: Mapping[str, Tensor], request: Request) -> dict[str, Tensor]:
        """Gradients of this rank's loss. An input that all ranks passed gets the sum of what their parts contribute."""
        program, own_grads = request.ready.program, {}
        everyone = tuple(range(self.transport.world))
        for name in program.graph.inputs:
            if name not in grads:
                continue
            grad = grads[name]
            if name in program.copies and self.transport.world > 1:
                grad, self.transport.label = grad.clone(memory_format=torch.contiguous_format), INPUT
                self.transport.make_groups([(LAYER, everyone)])
                self.transport.sum(grad, everyone, LAYER)
            weight = self._boundary.input_weight(program, name, self.transport.rank)
            own_grads[name] = grad if weight == 1.0 else grad / weight
        return own_grads

    def _parameters_reached(self, ready: Ready, wanted: frozenset[str], flowing: frozenset[str]) -> frozenset[str]:
        """The wanted parameters that a gradient reaches: not those of a head whose result nobody used."""
        if flowing >= {layer.name for layer in ready.program.graph.layers if layer.name in ready.program.learning}:
            return wanted
        layers = [layer for layer in ready.program.graph.layers if layer.name in flowing]
        return wanted & {ref.name for layer in layers for _, ref in layer.tensors if isinstance(ref, State)}

    def _backward_order(self, ready: Ready, trainable: frozenset[str]) -> tuple[str, ...]:
        """Parameters in the order in which backward finishes their gradients; without those that step in laps."""
        order, lapped = list(ready.first_uses), ready.lapped
        if lapped is not None:
            in_laps = [] if lapped.steps else [name for name in order if name in lapped.states]
            order = [*(name for name in order if name not in lapped.states), *in_laps]
        return tuple(name for name in reversed(order) if name in trainable)

    def _begin_sums(
        self,
        names: tuple[str, ...],
        before: Mapping[str, Tensor],
        factored: Set[str],
        accumulating: Callable[[], bool],
    ) -> GradientSums:
        """The sums of these parameters' gradients over the ranks, ready for a new backward pass."""
        states = {name: self.states[name].detach() for name in names}
        kinds = tuple(
            (name, state.dtype, state.device, state.shape, name in factored) for name, state in states.items()
        )
        if kinds not in self._sums:
            rank = self.transport.rank
            shards = {name: (self.states.ranks_of(name, rank), state) for name, state in states.items()}
            self._sums[kinds] = GradientSums(shards, self.transport, self.bucket_bytes, factored)
        self._sums[kinds].begin(before, accumulating)
        return self._sums[kinds]


def _leaf(state: Tensor, *, record: bool) -> Tensor:
    """A state as the engine's own graphs see it: the user's graph ends at `Step`."""
    return state.detach().requires_grad_(record and state.requires_grad)
