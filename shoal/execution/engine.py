"""Run a program on one rank: forward as the list stands, backward as the list reversed.

Every layer is a small autograd graph of its own, from its tiles to its output. Forward keeps these graphs on a
tape; backward walks the tape from the end, asks each graph for the gradients of its tiles and parameters, and
turns every move round. So the order of all communication is the program's, on every rank, and does not depend
on the order in which autograd happens to visit a branching network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.execution.gradients import Collector
from shoal.execution.peers import RankPeers
from shoal.execution.precision import value_types
from shoal.execution.randomness import LayerRandom
from shoal.execution.transfer import transfer
from shoal.graph import State
from shoal.lowering.program import Compute, Fetch, Program, Settle
from shoal.moves import Move
from shoal.operators.base import Call, Need
from shoal.transport import Transport


@dataclass
class _Record:
    """One layer as it was run on this rank."""

    tiles: dict[int, Tensor]
    """The leaves of its graph, by the Fetch that brought them."""
    states: dict[str, Tensor]
    output: Tensor


@dataclass
class Tape:
    """What backward needs of one forward pass."""

    program: Program
    grads_for: frozenset[str]
    trainable: frozenset[str]
    types: Mapping[str, torch.dtype]
    records: dict[int, _Record] = field(default_factory=dict)
    """By the index of the instruction."""
    used: bool = False


@dataclass(frozen=True)
class Engine:
    """One rank's side of a network."""

    transport: Transport
    device: torch.device
    local_statistics: bool
    seed: int

    def forward(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        *,
        step: int,
        record: bool,
        input_grad: bool = False,
    ) -> tuple[Tensor | None, Tape]:
        """This rank's tile of the output, and the tape (empty unless `record`)."""
        trainable = frozenset(name for name, state in states.items() if state.requires_grad and record)
        tape = Tape(
            program,
            program.needing_grad(trainable, input_grad=input_grad and record),
            trainable,
            value_types(program.graph, next(iter(inputs.values()), None)),
        )
        values: dict[str, Tensor] = dict(inputs)
        tiles: dict[int, Tensor | None] = {}
        uses = _last_uses(program)
        for index, one in enumerate(program.instructions):
            self.transport.label = one.label
            match one:
                case Fetch():
                    tiles[one.key] = self._fetch(one, values, tape)
                case Compute():
                    out = self._compute(index, one, tiles, states, tape, step=step, record=record)
                    if out is not None:
                        values[one.placed.layer.name] = out
                case Settle():
                    values_here = values.pop(one.value, None)
                    settled = self._move(
                        one.moves, values_here, one.partial, _needs(program.layouts[one.value]), tape.types[one.value],
                        tag=2 * one.key, add=True,
                    )  # fmt: skip
                    if settled is not None:
                        values[one.value] = settled
            for name in uses.values.get(index, ()):
                values.pop(name, None)
            for key in uses.tiles.get(index, ()):
                tiles.pop(key, None)
        return tiles[program.output.key], tape

    def backward(
        self,
        tape: Tape,
        grad: Tensor | None,
        collector: Collector,
        first_use: Mapping[str, str],
        states: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Hand every trainable state's gradient to `collector`; returns the gradients of the inputs, where wanted."""
        program = tape.program
        value_grads: dict[str, Tensor] = {}
        tile_grads: dict[int, Tensor] = {}
        state_grads: dict[str, Tensor] = {}
        if grad is not None:
            tile_grads[program.output.key] = grad
        finished_by = _by_first_layer(first_use, tape.trainable)
        for index in range(len(program.instructions) - 1, -1, -1):
            one = program.instructions[index]
            self.transport.label = one.label
            match one:
                case Fetch() if one.value in tape.grads_for:
                    self._fetch_back(one, tile_grads, value_grads, tape)
                case Settle() if one.value in tape.grads_for:
                    returned = self._move(
                        _reversed(one.moves), value_grads.pop(one.value, None), program.layouts[one.value],
                        _needs(one.partial), tape.types[one.value], tag=2 * one.key + 1, add=False,
                    )  # fmt: skip
                    if returned is not None:
                        value_grads[one.value] = returned
                case Compute():
                    self._compute_back(index, one, value_grads, tile_grads, state_grads, tape)
                    for name in finished_by.get(one.placed.layer.name, ()):
                        grad = state_grads.pop(name, None)
                        collector.ready(name, torch.zeros_like(states[name]) if grad is None else grad)
                case _:
                    pass
        return self._input_grads(tape, value_grads)

    def _input_grads(self, tape: Tape, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of every input that this rank passed and that wants a gradient; zeros where no part of its own read it."""
        rank, grads = self.transport.rank, {}
        for name in tape.program.graph.inputs:
            box = tape.program.layouts[name][rank]
            if name in found:
                grads[name] = found[name]
            elif name in tape.grads_for and box is not None:
                shape = [len(span) for span in box]
                grads[name] = torch.zeros(shape, dtype=tape.types[name], device=self.device)
        return grads

    def _fetch(self, one: Fetch, values: Mapping[str, Tensor], tape: Tape) -> Tensor | None:
        local = values.get(one.value)
        if one.identity:
            return local if one.tiles[self.transport.rank] is not None else None
        layout = tape.program.layouts[one.value]
        return self._move(one.moves, local, layout, one.tiles, tape.types[one.value], tag=2 * one.key, add=False)

    def _fetch_back(
        self, one: Fetch, tile_grads: dict[int, Tensor], value_grads: dict[str, Tensor], tape: Tape
    ) -> None:
        rank, program = self.transport.rank, tape.program
        grad = tile_grads.pop(one.key, None)
        tile = one.tiles[rank]
        if grad is None and tile is not None:
            grad = torch.zeros(tile.shape, dtype=tape.types[one.value], device=self.device)
        if one.identity:
            returned = grad
        else:
            if grad is not None and tile is not None and tile.padded:
                grad = grad[
                    tuple(
                        slice(before, before + len(span)) for span, (before, _) in zip(tile.box, tile.pad, strict=True)
                    )
                ]
            boxes = tuple(None if need is None else need.box for need in one.tiles)
            returned = self._move(
                _reversed(one.moves), grad, boxes, _needs(program.layouts[one.value]), tape.types[one.value],
                tag=2 * one.key + 1, add=True,
            )  # fmt: skip
        if returned is not None:
            before = value_grads.get(one.value)
            value_grads[one.value] = returned if before is None else before + returned

    def _compute(
        self,
        index: int,
        one: Compute,
        tiles: Mapping[int, Tensor | None],
        states: Mapping[str, Tensor],
        tape: Tape,
        *,
        step: int,
        record: bool,
    ) -> Tensor | None:
        placed, rank = one.placed, self.transport.rank
        part = placed.parts[rank]
        if part is None:
            return None
        record = record and placed.layer.name in tape.grads_for
        leaves: dict[int, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        used: dict[str, Tensor] = {}
        for argument, reference in placed.layer.tensors():
            if argument not in placed.needs[rank]:
                continue
            if isinstance(reference, State):
                tensors[argument] = states[reference.name]
                if reference.name in tape.trainable:
                    used[reference.name] = states[reference.name]
                continue
            key = one.sources[argument]
            if key not in leaves:
                tile = tiles[key]
                assert tile is not None
                leaves[key] = tile.detach().requires_grad_(record and reference.name in tape.grads_for)
            tensors[argument] = leaves[key]
        call = Call(
            op=placed.op,
            part=part,
            cut=placed.cut_letters,
            tensors=tensors,
            peers=RankPeers(placed, self.transport),
            random=LayerRandom(self.seed, placed.layer.name, step),
            local_statistics=self.local_statistics,
        )
        with torch.enable_grad() if record else torch.no_grad():
            out = placed.rule.run(call)
            if out.dtype != tape.types[placed.layer.name]:
                out = out.to(tape.types[placed.layer.name])
        if record and out.requires_grad:
            tape.records[index] = _Record({k: t for k, t in leaves.items() if t.requires_grad}, used, out)
        return out.detach()

    def _compute_back(
        self,
        index: int,
        one: Compute,
        value_grads: dict[str, Tensor],
        tile_grads: dict[int, Tensor],
        state_grads: dict[str, Tensor],
        tape: Tape,
    ) -> None:
        grad = value_grads.pop(one.placed.layer.name, None)
        record = tape.records.pop(index, None)
        if record is None:
            return
        if grad is None:
            grad = torch.zeros_like(record.output)
        keys, names = list(record.tiles), list(record.states)
        wanted = [*record.tiles.values(), *record.states.values()]
        found = torch.autograd.grad(record.output, wanted, grad, allow_unused=True)
        for key, value in zip(keys, found, strict=False):
            if value is not None:
                tile_grads[key] = value if key not in tile_grads else tile_grads[key] + value
        for name, value in zip(names, found[len(keys) :], strict=True):
            if value is not None:
                state_grads[name] = _own(value, grad) if name not in state_grads else state_grads[name] + value

    def _move(
        self,
        moves: tuple[Move, ...],
        local: Tensor | None,
        held: tuple[object, ...],
        wanted: tuple[Need | None, ...],
        dtype: torch.dtype,
        *,
        tag: int,
        add: bool,
    ) -> Tensor | None:
        rank = self.transport.rank
        like = torch.empty(0, dtype=dtype, device=self.device)
        if local is not None and local.dtype != dtype:
            local = local.to(dtype)
        return transfer(local, held[rank], wanted[rank], moves, self.transport, tag=tag, like=like, add=add)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Uses:
    values: Mapping[int, list[str]]
    tiles: Mapping[int, list[int]]


def _last_uses(program: Program) -> _Uses:
    """What may be forgotten after each instruction."""
    last_value: dict[str, int] = {}
    last_tile: dict[int, int] = {}
    for index, one in enumerate(program.instructions):
        if isinstance(one, Fetch):
            last_value[one.value] = index
        elif isinstance(one, Compute):
            last_tile.update(dict.fromkeys(one.sources.values(), index))
    last_tile.pop(program.output.key, None)
    values: dict[int, list[str]] = {}
    tiles: dict[int, list[int]] = {}
    for name, index in last_value.items():
        values.setdefault(index, []).append(name)
    for key, index in last_tile.items():
        tiles.setdefault(index, []).append(key)
    return _Uses(values, tiles)


def _reversed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
    return tuple(move.reversed() for move in moves)


def _own(value: Tensor, passed: Tensor) -> Tensor:
    """A parameter's gradient in memory of its own; a sum passes one gradient on to all that it adds."""
    shared = value._is_zerotensor() or value.untyped_storage().data_ptr() == passed.untyped_storage().data_ptr()
    return value.clone(memory_format=torch.contiguous_format) if shared else value


def _needs(layout: tuple[object, ...]) -> tuple[Need | None, ...]:
    return tuple(None if box is None else Need(box) for box in layout)  # type: ignore[arg-type]


def _by_first_layer(first_use: Mapping[str, str], trainable: frozenset[str]) -> dict[str, list[str]]:
    """For every layer the states whose gradient is final when its backward is done."""
    found: dict[str, list[str]] = {}
    for name, layer in first_use.items():
        if name in trainable:
            found.setdefault(layer, []).append(name)
    return found
