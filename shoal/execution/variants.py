"""The captured forms of one network: one for every way in which its code was seen to run.

The network's code may do other things in training and in evaluation, for another image size, for another flag of a
module or of the call, or for another number of samples. Each such way is a variant with a graph of its own. A way that
was not seen before is captured when it first comes, on all ranks at once, and remembered; what was measured and planned
for the first one holds for all.

Promise   no capture is used for a call that it was not made for, or proven for: a new number of samples is traced
          once and compared with what the captured graph says of it.
Cost      0.1 to 2 s for a new variant, half of that for a new number of samples.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from shoal.capturing import capture_call
from shoal.capturing.reader import Reading
from shoal.capturing.signature import Call, Returned, bind, single
from shoal.errors import PlanError
from shoal.execution.loss import Loss, LossTail, join_loss
from shoal.execution.states import shard_of
from shoal.graph import LayerGraph, same_graph
from shoal.lowering.boundary import (
    Boundary,
    follows_batch,
    input_tiles,
    output_tiles,
    own_inputs,
    step_program,
)
from shoal.lowering.laps import LappedStep, lapped_step
from shoal.lowering.program import Compute, Program, first_uses, layer_groups
from shoal.moves import Layout
from shoal.partition import Box, Cut, whole
from shoal.plan import steps_in_laps
from shoal.planning import Resolved

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Form:
    """One capture, with the loss where there is one."""

    graph: LayerGraph
    returned: Returned
    states: Mapping[str, Tensor]
    """Every tensor that the graph names: of the module, of the loss, and constants of the code."""
    tail: LossTail | None = None
    asked: Mapping[str, str] = field(default_factory=dict)
    """What the network asks about its call (capturing/questions.py), and where."""

    @property
    def gives_losses(self) -> bool:
        """Whether it ends in one loss per sample, left where it is computed."""
        return self.tail is not None and self.tail.mean


def capture_form(model: nn.Module, call: Call, loss: Loss | None, target: Any) -> Form:
    """The network as it is now, called so; in training with its loss."""
    reading: Reading = capture_call(model, call)
    if loss is None or not model.training:
        return Form(reading.graph, reading.returned, reading.states, asked=reading.asked)
    tail = join_loss(reading, call, loss, target)
    return Form(tail.graph, single(), {**reading.states, **tail.states}, tail, {**tail.asked, **reading.asked})


@dataclass(frozen=True)
class Ready:
    """A program that can be run."""

    program: Program
    first_uses: Mapping[str, str]
    """For every state the first layer that uses it."""
    constants: Mapping[str, Tensor]
    """This rank's parts of tensors that are not the module's."""
    lapped: LappedStep | None = None
    """The same step with its linear layers in laps, for passes that record gradients."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that may run."""
        if self.lapped is None:
            return (self.program,)
        return self.program, self.lapped.front, *(lap.program for lap in self.lapped.laps)


@dataclass
class Variant:
    """A form of the network under the plan."""

    form: Form
    resolved: Resolved
    graphs: dict[int, LayerGraph] = field(default_factory=dict)
    """For every number of samples that a trace has proven."""
    others: dict[int, "Variant"] = field(default_factory=dict)
    """For numbers of samples for which the network does something else."""
    ready: dict[tuple[int, ...], Ready] = field(default_factory=dict)
    """By the ranks' shares."""

    def __post_init__(self) -> None:
        self.graphs.setdefault(self.form.graph.batch, self.form.graph)

    def cuts(self, graph: LayerGraph) -> dict[str, Cut]:
        """Every layer's cut; by sample it shrinks with a batch that is smaller than the one planned for."""
        if graph.batch >= self.form.graph.batch:
            return dict(self.resolved.cuts)
        return {name: _shrunk(cut, graph, name) for name, cut in self.resolved.cuts.items()}

    def at(self, batch: int) -> LayerGraph:
        """The graph for a number of samples, proven or not: for sizes and tiles."""
        known = self.graphs.get(batch)
        return self.form.graph.at_batch(batch) if known is None else known

    def says(self, traced: Form) -> bool:
        """Whether the captured graph, taken to another number of samples, is the one that was traced with it."""
        if not self.form.graph.holds_for(traced.graph.batch) or not self.form.returned.same_as(traced.returned):
            return False
        if same_graph(self.form.graph.at_batch(traced.graph.batch), traced.graph) is not None:
            return False
        constants = [name for name, tensor in traced.states.items() if not isinstance(tensor, FakeTensor)]
        return all(
            name in self.form.states and _equal(self.form.states[name], traced.states[name]) for name in constants
        )

    def input_boxes(self, batch: int, rank: int, world: int) -> tuple[Box | None, ...]:
        """What a rank passes of every input of such a batch where each passes its own tile; None: nothing."""
        graph = self.at(batch)
        cuts = self.cuts(graph)
        return tuple(
            input_tiles(graph, name, cuts, world)[rank]
            if follows_batch(graph, name)
            else whole(graph.inputs[name].shape)
            for name in own_inputs(graph)
        )

    def output_boxes(self, batch: int, rank: int, world: int) -> list[Box | None]:
        """What a rank gets of every result of such a batch where each gets its own tile; None: nothing."""
        graph, losses = self.at(batch), self.form.gives_losses
        cuts, tiled = self.cuts(graph), Boundary("tile", world)
        tiles = {name: output_tiles(graph, name, cuts, world, losses=losses) for name in graph.outputs}
        return [tiled.output(graph, name, (), layout)[rank] for name, layout in tiles.items()]

    def program(self, shares: tuple[int, ...], boundary: Boundary) -> Program:
        """Of a batch of these shares, for which the variant is proven."""
        graph = self.graphs[sum(shares)]
        return step_program(graph, self.cuts(graph), boundary, shares, losses=self.form.gives_losses)

    def lapped(self, shares: tuple[int, ...], boundary: Boundary) -> LappedStep | None:
        """The same with its linear layers in laps, where the plan asks for that; `PlanError` where it cannot be.

        Alone, and in evaluation, there is nothing to send.
        """
        graph, laps = self.graphs[sum(shares)], self.resolved.laps
        if laps is None or boundary.ranks == 1 or not graph.training:
            return None
        return lapped_step(
            graph,
            self.cuts(graph),
            boundary,
            shares,
            "b" if laps.startswith("b") else "c",
            losses=self.form.gives_losses,
            steps=steps_in_laps(laps),
            learning=[name for name, state in self.form.states.items() if state.requires_grad],
        )

    def prepare(self, shares: tuple[int, ...], boundary: Boundary, rank: int, homes: Mapping[str, Layout]) -> Ready:
        """The program for a batch of these shares; found once, in some ten milliseconds."""
        if shares not in self.ready:
            program = self.program(shares, boundary)
            own = {name: tensor for name, tensor in self.form.states.items() if name not in homes}
            constants = {name: shard_of(tensor.detach(), program.states[name][rank]) for name, tensor in own.items()}
            ready = Ready(program, first_uses(program), constants, self.lapped(shares, boundary))
            for one in ready.programs:
                _check_homes(one, homes)
            self.ready[shares] = ready
        return self.ready[shares]


def groups_of(ready: Ready) -> list[tuple[int, ...]]:
    """The ranks that meet within layers."""
    return sorted(set[tuple[int, ...]]().union(*map(layer_groups, ready.programs)))


def _check_homes(program: Program, homes: Mapping[str, Layout]) -> None:
    """Refuse a variant that needs other parts of the parameters than the ranks hold."""
    for instruction in program.instructions:
        if not isinstance(instruction, Compute):
            continue
        for argument, reference in instruction.placed.layer.tensors:
            home = homes.get(reference.name)
            if home is None or reference.name in program.graph.specs:
                continue
            for needs, box in zip(instruction.placed.needs, home, strict=True):
                if argument in needs and needs[argument].box != box:
                    raise PlanError(
                        f"layer {instruction.label!r} needs another part of {reference.name!r} for this input than the "
                        "ranks hold since the network was laid over them.",
                        "Give the layer a cut in a plan file that fits all inputs, or use plan='data'.",
                    )


def example_call(model: nn.Module, example: Any, device: torch.device, dtype: torch.dtype) -> Call:
    """The call that an example stands for: a tensor or its shape, a tuple of those, or a dict by argument names."""

    def tensor(given: Any) -> Any:
        if isinstance(given, Tensor):
            return given.detach().to(device)
        if _is_shape(given):
            return torch.zeros(tuple(given), dtype=dtype, device=device)
        if isinstance(given, dict):
            return {key: tensor(value) for key, value in given.items()}
        if isinstance(given, tuple) and hasattr(given, "_fields"):
            return type(given)(*map(tensor, given))
        return type(given)(map(tensor, given)) if isinstance(given, list | tuple) else given

    made = tensor(example)
    if isinstance(example, dict):
        return bind(model, (), made)
    if isinstance(example, Tensor) or _is_shape(example):
        return bind(model, (made,), {})
    return bind(model, tuple(made), {})


def _is_shape(given: Any) -> bool:
    return (
        isinstance(given, tuple | list | torch.Size)
        and len(given) > 0
        and all(isinstance(size, int) and not isinstance(size, bool) for size in given)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _shrunk(planned: Cut, graph: LayerGraph, name: str) -> Cut:
    rows = min(graph.batch, *graph.specs[name].shape[:1] or (1,))
    return planned.shrunk("n", rows)
