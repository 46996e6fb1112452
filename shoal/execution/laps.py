"""A pass whose linear layers run in laps: each lap forward and at once backward, before the caller asks for gradients.

The front of the network runs forward and is kept. Then, lap by lap, the features of some samples go to all ranks, the
linear layers and the loss run forward and backward on them, and the features' gradients go home. What the caller gets
is the loss; its backward pass is the front's, begun from those gradients.

Promise   where weights step once: one device's loss and gradients, to rounding. Where they step after every lap, each
          lap sees the weights that the lap before has left: its gradient of them is that of the mean loss of its own
          samples; the front's gradient is that of the mean over all samples.
Memory    of the features and of all that the linear layers keep, a rank has what belongs to one lap, and the features
          of the next, which are on their way meanwhile.
Cost      a product per lap in the place of one, and one message more for each lap where all send in each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.execution.autograd_node import Request
from shoal.execution.engine import Begun, Engine
from shoal.execution.factors import Own, add_product
from shoal.execution.precision import value_types
from shoal.execution.tape import RanInLaps, Tape
from shoal.lowering.factors import Factors, factorable
from shoal.lowering.laps import Lap, LappedStep
from shoal.lowering.program import Program, first_uses
from shoal.moves import Layout
from shoal.transport import Transport

AfterLap = Callable[[], object]


@dataclass
class AddedUp:
    """Gradients of several laps, added up as they come: a product of factors straight into the sum."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def ready(self, name: str, grad: Tensor) -> None:
        """Add it."""
        self.sums[name] = self.sums[name].add_(grad) if name in self.sums else grad.contiguous()

    def ready_factors(self, factors: Factors, own: Own | None, shard: Tensor) -> None:
        """Add what this rank's rows give."""
        self.sums[factors.weight] = add_product(self.sums.get(factors.weight), own, shard)

    def finish(self) -> dict[str, Tensor]:
        """The sums, which then begin anew."""
        sums, self.sums = self.sums, {}
        return sums


class LapRunner:
    """Runs passes in laps on one rank. `homes`: where states live."""

    def __init__(self, engine: Engine, transport: Transport, homes: Mapping[str, Layout]) -> None:
        self._engine, self._transport, self._homes = engine, transport, homes
        self._products: dict[int, tuple[Program, Mapping[str, Factors]]] = {}
        """By the id of a lap's program, with the program, so that it stays its own."""

    def run(
        self,
        request: Request,
        lapped: LappedStep,
        states: Mapping[str, Tensor],
        step: str,
        stepping: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> tuple[Tensor | None, Tape]:
        """(the losses of this rank's samples, the tape). A collective.

        `stepping`: where weights step after every lap, steps them with these gradients.
        """
        engine, whole = self._engine, request.ready.program
        types = value_types(whole.graph, next(iter(request.inputs.values()), None))
        tape = engine.tape(whole, states, types, step=step, record=True, input_grads=request.input_grads)
        front = engine.tape(lapped.front, states, types, step=step, record=True, input_grads=request.input_grads)
        inputs = {name: request.inputs[name] for name in lapped.front.graph.inputs}
        tiles = dict(zip(lapped.features, engine.finish(engine.begin(front, inputs, record=True)), strict=True))
        wanted = frozenset(name for name in lapped.features if name in front.route.grads_for)
        grads = {name: torch.empty_like(tile) for name, tile in tiles.items() if name in wanted and tile is not None}
        once = [(request.weights[0], 1.0)] * len(lapped.laps)
        scales = once if stepping is None else self._scales(request, lapped)
        added, losses = AddedUp(), []

        def begin(lap: Lap) -> Begun:
            lap_tape = engine.tape(
                lap.program,
                states,
                types,
                step=step,
                record=True,
                input_grads=wanted,
                factors=self._factors(lap.program),
                samples=lap.samples,
            )
            return engine.begin(lap_tape, self._inputs(request, lapped, lap, tiles), record=True)

        begun = begin(lapped.laps[0])
        for number, (lap, (seed, share)) in enumerate(zip(lapped.laps, scales, strict=True), start=1):
            following = begin(lapped.laps[number]) if number < len(lapped.laps) else None
            (loss,) = engine.finish(begun)
            if loss is not None:
                losses.append(loss)
            returned = self._back(begun.tape, loss, seed, added)
            for name, grad in returned.items():
                mine = self._own_rows(lapped, lap)
                grads[name][mine] = grad if share == 1.0 else grad * share
            if stepping is not None:
                stepping(added.finish())
            if following is not None:
                begun = following
        tape.lapped = RanInLaps(front, grads, added.finish())
        return torch.cat(losses) if losses else None, tape

    def _back(self, tape: Tape, loss: Tensor | None, seed: float, added: AddedUp) -> Mapping[str, Tensor]:
        """Backward through a lap: the gradients of this rank's features in it."""
        program = tape.program
        if program.graph.output not in tape.route.grads_for:
            return {}
        seeds = None if loss is None else torch.full_like(loss, seed)
        return self._engine.backward(
            tape, [seeds], added, first_uses(program), tape.route.trainable, tape.route.grads_for
        )

    def _inputs(
        self, request: Request, lapped: LappedStep, lap: Lap, tiles: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """This rank's rows of what the linear layers read, and of the targets."""
        rows, given = self._own_rows(lapped, lap), {}
        for name, tile in tiles.items():
            if tile is not None and rows.stop > rows.start:
                given[name] = tile[rows]
        for name in lap.program.graph.targets:
            chosen = self._target_rows(request, lap, name)
            if chosen:
                given[name] = request.inputs[name][list(chosen)]
        return given

    def _own_rows(self, lapped: LappedStep, lap: Lap) -> slice:
        """Where the samples that this rank sends in a lap stand among those that it keeps the features of."""
        rank = self._transport.rank
        mine = lap.senders[rank].shifted(-lapped.held[rank].start)
        return slice(mine.start, mine.stop)

    def _target_rows(self, request: Request, lap: Lap, name: str) -> Sequence[int]:
        box = request.ready.program.layouts[name][self._transport.rank]
        return () if box is None else lap.rows_of(box[0].start, len(box[0]))

    def _scales(self, request: Request, lapped: LappedStep) -> list[tuple[float, float]]:
        """For every lap what the gradient of each of its losses begins with, for their mean; and the lap's share.

        A collective.
        """
        tail = request.variant.form.tail
        assert tail is not None
        (target,) = request.ready.program.graph.targets
        rows = [list(self._target_rows(request, lap, target)) for lap in lapped.laps]
        own = [tail.weight(request.inputs[target][of_lap]) if of_lap else 0.0 for of_lap in rows]
        weights = [sum(of_lap) for of_lap in zip(*self._transport.gather_numbers(own), strict=True)]
        everyone = sum(weights)
        return [(1 / weight, weight / everyone) if weight else (0.0, 0.0) for weight in weights]

    def _factors(self, program: Program) -> Mapping[str, Factors]:
        """By weight, the factors of its gradient, of which laps add the products to one sum; found once per program."""
        if id(program) not in self._products:
            self._products[id(program)] = program, factorable(program, self._homes, alone=True)
        return self._products[id(program)][1]


@contextmanager
def stepping_by(
    after_lap: AfterLap, parameters: Mapping[str, Tensor], dense: frozenset[str]
) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
    """Within, what it gives calls `after_lap` while these gradients, and no others, are the parameters' `.grad`.

    Afterwards the others have what they had; the `dense` ones, which have stepped, have none.
    """
    kept = {name: parameter.grad for name, parameter in parameters.items()}

    def show(grads: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = grads.get(name)

    def step(grads: Mapping[str, Tensor]) -> None:
        show(grads)
        with torch._C._EnableTorchFunction(), torch.no_grad():  # as the caller's code has it elsewhere
            after_lap()
        show({})

    show({})
    try:
        yield step
    finally:
        show({name: grad for name, grad in kept.items() if grad is not None and name not in dense})


def agreed_after_lap(after_lap: AfterLap | None, transport: Transport) -> AfterLap:
    """What steps after every lap; refused on all ranks where one has nothing that does. A collective."""
    without = [rank for rank, (has,) in enumerate(transport.gather_numbers([after_lap is not None])) if not has]
    if without or after_lap is None:
        raise RunError(
            f"rank {without[0]} has not said what steps the linear layers' weights after every lap, as its plan asks.",
            "Call model.after_lap(optimizer.step) once the optimizer is made; or take 'owt:b' or 'owt:c', with which "
            "they step once, with all others.",
        )
    return after_lap
