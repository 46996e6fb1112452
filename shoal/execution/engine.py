"""Run a program on one rank: forward as the list stands, backward as the list reversed.

Every layer is a small autograd graph of its own, from its tiles to its output. Forward keeps these graphs on a
tape; backward walks the tape from the end, asks each graph for the gradients of its tiles and parameters, and
turns every move round. So the order of all communication is the program's, on every rank, and does not depend
on the order in which autograd happens to visit a branching network.

Time      moves travel while the rank computes: a tile is waited for when its layer runs, and in backward a layer
          whose input came from other ranks finds the input's gradient first, sends it, and then the parameters'.
Memory    a graph holds what its operators saved and nothing else: neither its tiles nor its output. What a layer
          saved of its own output is replaced by the tile of the layer that reads it, halo and all.
          With `recompute` the tape keeps the values at the start of each segment of the list and no graphs;
          backward runs each segment again, messages included, before it walks it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shoal.diary import Diary, now
from shoal.execution.gradients import Collector
from shoal.execution.precision import value_types
from shoal.execution.randomness import LayerRandom
from shoal.execution.route import Route, find_route
from shoal.execution.tape import Back, GraphInputs, Live, Record, Saved, Tape, same_memory, saving
from shoal.execution.transfer import Arriving, begin_transfer, inner
from shoal.lowering.factors import Factors
from shoal.lowering.program import Compute, Fetch, Program, Settle
from shoal.moves import Move
from shoal.operators.base import Call, Need
from shoal.partition import overlap, slices
from shoal.transport import Transport

Observer = Callable[[str, str, Tensor], None]
"""Told ("value", layer, this rank's box of its output) in forward and ("grad", layer, its gradient) in backward."""


_NOTHING = nullcontext()


class _Enter(torch.autograd.Function):
    """A tile as an input of its layer's graph. A leaf would do, but would hold the tile's memory."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tile: Tensor) -> Tensor:  # noqa: ARG004  (torch's own signature)
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


@dataclass
class Begun:
    """A forward pass on its way."""

    tape: Tape
    live: Live
    record: bool
    done: int = 0
    """Instructions that were carried out."""


@dataclass
class Engine:
    """One rank's side of a network."""

    transport: Transport
    device: torch.device
    local_statistics: bool
    seed: int
    recompute: bool = False
    observe: Observer | None = None

    def __post_init__(self) -> None:
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._routes: dict[tuple[object, ...], Route] = {}

    def forward(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        *,
        step: str,
        record: bool,
        input_grads: frozenset[str] = frozenset(),
        factors: Mapping[str, Factors] | None = None,
    ) -> tuple[list[Tensor | None], Tape]:
        """This rank's tiles of the outputs, and the tape (empty unless `record`).

        `step`: what the masks of random layers depend on besides the seed and the layer; `input_grads`: inputs whose
        gradient is wanted, the same on all ranks; `factors`: of the weights whose gradients ranks find from
        each other's factors, always the same for one program.
        """
        types = value_types(program.graph, next(iter(inputs.values()), None))
        tape = self.tape(program, states, types, step=step, record=record, input_grads=input_grads, factors=factors)
        return self.finish(Begun(tape, Live(dict(inputs)), record)), tape

    def tape(
        self,
        program: Program,
        states: Mapping[str, Tensor],
        types: Mapping[str, torch.dtype],
        *,
        step: str,
        record: bool,
        input_grads: frozenset[str] = frozenset(),
        factors: Mapping[str, Factors] | None = None,
        samples: Sequence[int] | None = None,
    ) -> Tape:
        """The empty tape of a pass, as `forward` has it. `types`: of every value.

        `samples`: which sample of the batch each row of the program's own is, where it runs a part of one.
        """
        trainable = frozenset(name for name, state in states.items() if state.requires_grad and record)
        return Tape(
            self._route(program, trainable, input_grads if record else frozenset(), factors or {}, record=record),
            types,
            step,
            states if isinstance(states, dict) else dict(states),
            _autocast_now(self.device),
            samples=samples,
        )

    def begin(self, tape: Tape, inputs: Mapping[str, Tensor], *, record: bool) -> "Begun":
        """A forward pass of which this rank has begun to send what its first layer reads; `finish` does the rest.

        Others may be finished in between. With `recompute` what is sent must be kept, and leaves with the rest.
        """
        begun = Begun(tape, Live(dict(inputs)), record)
        if len(tape.route.segments) == 1:
            first = tape.route.segments[0]
            while begun.done < len(first) and isinstance(tape.program.instructions[begun.done], Fetch):
                begun.done += 1
            with self._blaming():
                self._run(range(begun.done), begun.live, tape.states, tape, record=record)
        return begun

    def finish(self, begun: "Begun") -> list[Tensor | None]:
        """Run what is left of a forward pass; this rank's tiles of the outputs."""
        tape, live, states = begun.tape, begun.live, begun.tape.states
        with self._blaming():
            for segment in tape.route.segments[:-1]:
                tape.kept.append(live.copy())
                self._run(segment, live, states, tape, record=False)
            self._run(tape.route.segments[-1][begun.done :], live, states, tape, record=begun.record)
            return [live.tile(fetch.key) for fetch in tape.program.outputs]

    def _route(
        self,
        program: Program,
        trainable: frozenset[str],
        input_grads: frozenset[str],
        factors: Mapping[str, Factors],
        *,
        record: bool,
    ) -> Route:
        key = (id(program), trainable, input_grads, record, self.observe is None)
        if key not in self._routes:  # it keeps the program alive, so that the id stays its own
            self._routes[key] = find_route(
                program,
                trainable,
                input_grads,
                program.segments if self.recompute and record else (range(len(program.instructions)),),
                self.transport,
                factors=factors,
                chains=record and self.observe is None,
                local_statistics=self.local_statistics,
            )
        return self._routes[key]

    def _run(
        self,
        segment: range,
        live: Live,
        states: Mapping[str, Tensor],
        tape: Tape,
        *,
        record: bool,
        again: bool = False,
    ) -> None:
        """A piece of the list, forward. `again`: for the second time, for backward's sake."""
        program, rank, diary = tape.program, self.transport.rank, self.transport.diary
        instructions, last_values, last_tiles = program.instructions, program.last_uses.values, program.last_uses.tiles
        for index in segment:
            instruction = instructions[index]
            self.transport.label = instruction.label
            begun = 0 if diary is None else now()
            match instruction:
                case Fetch() as fetch:
                    live.tiles[fetch.key] = self._fetch(fetch, live.values, tape)
                case Compute() as compute:
                    name = compute.placed.layer.name
                    out = self._compute(index, live, states, tape, record=record, again=again)
                    if out is not None:
                        live.values[name] = out
                    if self.observe and not again and out is not None and not compute.placed.partial:
                        self.observe("value", name, out)
                case Settle() as settle:
                    value = settle.value
                    settled = self._move(
                        settle.moves, live.values.pop(value, None), settle.partial[rank],
                        _need(program.layouts[value][rank]), tape.types[value], tag=2 * settle.key, add=True,
                    ).wait()  # fmt: skip
                    if settled is not None:
                        live.values[value] = settled
                    if self.observe and not again and settled is not None:
                        self.observe("value", value, settled)
            if diary is not None:
                _note_forward(diary, instruction, begun, here=index in tape.route.parts, again=again)
            for name in last_values.get(index, ()):
                live.values.pop(name, None)
            for key in last_tiles.get(index, ()):
                left = live.tiles.pop(key, None)
                if isinstance(left, Arriving):  # nobody here reads it, but others get their part of it from here
                    left.wait()

    def backward(
        self,
        tape: Tape,
        grads: Sequence[Tensor | None],
        collector: Collector,
        first_use: Mapping[str, str],
        wanted: frozenset[str],
        flowing: frozenset[str],
    ) -> Mapping[str, Tensor]:
        """Hand the gradient of every `wanted` state to `collector`; returns those of the inputs that have one.

        `grads`: of this rank's tiles of the outputs; None for nothing. `flowing`: the values that have a gradient, the
        same on all ranks: those behind results that some rank has a gradient of.
        """
        back = Back(wanted, flowing)
        for fetch, grad in zip(tape.program.outputs, grads, strict=True):
            if grad is not None and fetch.value in flowing:
                back.tiles[fetch.key] = grad
        states = tape.states
        finished_by = _by_first_layer(first_use, wanted)
        with self._blaming():
            for number in range(len(tape.route.segments) - 1, -1, -1):
                if number < len(tape.kept):
                    self._run_again(tape.route.segments[number], tape)
                self._run_back(tape.route.segments[number], back, tape, collector, finished_by, states)
            for message in back.leaving:
                message.wait()
            return self._input_grads(tape, back)

    def _run_again(self, segment: range, tape: Tape) -> None:
        """The last segment whose start was kept, recorded now; afterwards only the tape holds anything of it."""
        live = tape.kept.pop()
        with tape.precision():
            self._run(segment, live, tape.states, tape, record=True, again=True)
        live.wait()

    def _run_back(
        self,
        segment: range,
        back: Back,
        tape: Tape,
        collector: Collector,
        finished_by: Mapping[str, list[str]],
        states: Mapping[str, Tensor],
    ) -> None:
        """A piece of the list, reversed.

        A layer may leave the gradients of its parameters for later: until its tiles' are on their way.
        """
        program, rank, diary = tape.program, self.transport.rank, self.transport.diary
        later: Callable[[], None] | None = None
        for index in reversed(segment):
            instruction = program.instructions[index]
            self.transport.label = instruction.label
            begun = 0 if diary is None else now()
            if isinstance(instruction, Fetch):
                if instruction.value in back.flowing and instruction.key not in tape.route.linked:
                    self._fetch_back(instruction, back, tape)
                    if diary is not None and not instruction.identity:
                        diary.note("move", instruction.label, begun)
                continue
            if later is not None:
                later()
                later, begun = None, 0 if diary is None else now()
            if isinstance(instruction, Compute):
                name, recorded = instruction.placed.layer.name, index in tape.records
                finish = self._compute_back(index, instruction, back, tape)
                later = _then(finish, back, finished_by.get(name, ()), collector, states, tape.route.factors)
                if diary is not None and recorded:
                    later = _note_backward(diary, tape.route.parts[index].chain, begun, later)
            elif instruction.value in back.flowing:
                value = instruction.value
                returned = self._move(
                    _reversed(instruction.moves), back.value(value), program.layouts[value][rank],
                    _need(instruction.partial[rank]), tape.types[value], tag=2 * instruction.key + 1, add=False,
                )  # fmt: skip
                self._arrives(value, returned, back)
                if diary is not None:
                    diary.note("move", instruction.label, begun)
        if later is not None:
            later()

    def _arrives(self, value: str, returned: Arriving, back: Back) -> None:
        if returned.wanted is None:
            back.leaving.append(returned)
        else:
            back.values.setdefault(value, []).append(returned)

    def _input_grads(self, tape: Tape, back: Back) -> dict[str, Tensor]:
        """Of every input that this rank passed and that wants a gradient; zeros where no part of its own read it."""
        rank, grads = self.transport.rank, {}
        for name in tape.program.graph.inputs:
            box, grad = tape.program.layouts[name][rank], back.value(name)
            if grad is not None:
                grads[name] = grad
            elif name in back.flowing and box is not None:
                shape = [len(span) for span in box]
                grads[name] = torch.zeros(shape, dtype=tape.types[name], device=self.device)
        return grads

    def _fetch(self, fetch: Fetch, values: Mapping[str, Tensor], tape: Tape) -> Tensor | Arriving | None:
        local, rank = values.get(fetch.value), self.transport.rank
        if fetch.identity:
            return local if fetch.tiles[rank] is not None else None
        held = tape.program.layouts[fetch.value][rank]
        return self._move(
            fetch.moves, local, held, fetch.tiles[rank], tape.types[fetch.value], tag=2 * fetch.key, add=False
        )

    def _fetch_back(self, fetch: Fetch, back: Back, tape: Tape) -> None:
        rank, program = self.transport.rank, tape.program
        grad = back.tiles.pop(fetch.key, None)
        tile = fetch.tiles[rank]
        if grad is None and tile is not None:
            grad = torch.zeros(tile.shape, dtype=tape.types[fetch.value], device=self.device)
        if fetch.identity:
            if grad is not None:
                back.values.setdefault(fetch.value, []).append(grad)
            return
        if grad is not None and tile is not None and tile.padded:
            grad = grad[inner(tile)]
        returned = self._move(
            _reversed(fetch.moves), grad, None if tile is None else tile.box, _need(program.layouts[fetch.value][rank]),
            tape.types[fetch.value], tag=2 * fetch.key + 1, add=True,
        )  # fmt: skip
        self._arrives(fetch.value, returned, back)

    def _compute(
        self,
        index: int,
        live: Live,
        states: Mapping[str, Tensor],
        tape: Tape,
        *,
        record: bool,
        again: bool,
    ) -> Tensor | None:
        here = tape.route.parts.get(index)
        if here is None:
            return None
        record = record and here.flows
        inputs = GraphInputs() if here.link is None else live.chains.pop(here.before, GraphInputs())
        tensors: dict[str, Tensor] = {}
        for argument, name, updates, learns in here.states:
            state = states[name]
            if again and updates:
                state = state.clone()  # it was updated the first time
            tensors[argument] = state
            if learns:
                inputs.states[name] = state
        entered: dict[int, Tensor] = {}
        for argument, key, wanted in here.tiles:
            if key not in entered:
                tile = live.tile(key)
                assert tile is not None
                self._share(key, live, tile, tape)
                if record and wanted:
                    with torch.enable_grad():
                        tile = _Enter.apply(self._anchor, tile)  # type: ignore[no-untyped-call]
                    inputs.tiles.append((key, get_gradient_edge(tile)))
                entered[key] = tile
            tensors[argument] = entered[key]
        call = Call(
            op=here.placed.op,
            part=here.part,
            cut=here.letters,
            tensors=tensors,
            peers=here.peers,
            random=LayerRandom(self.seed, here.name, tape.step, tape.samples),
            local_statistics=self.local_statistics,
            overwrites=record and here.overwrites,
        )
        reader = here.reader if record else None
        saved: list[Saved] = []
        with torch.set_grad_enabled(record), saving(saved) if reader is not None else _NOTHING:
            out = here.placed.rule.run(call)
            if here.factored is not None and out.requires_grad:
                inputs.factors[here.factored] = Saved(tensors["input"].detach()), get_gradient_edge(out)
            if out.dtype != tape.types[here.name]:
                out = out.to(tape.types[here.name])
        if record and out.requires_grad:
            if here.goes_on:
                live.chains[here.name] = inputs
                return out
            edge, shape, dtype = get_gradient_edge(out), out.shape, out.dtype
            tape.records[index] = Record(inputs, edge, lambda: torch.zeros(shape, dtype=dtype, device=self.device))
        out = out.detach()
        if reader is not None:
            live.saved[reader] = [copy for copy in saved if same_memory(copy.tensor, out)]
        return out

    def _share(self, key: int, live: Live, tile: Tensor, tape: Tape) -> None:
        """Let what autograd saved of a value be the part of its reader's tile that has the same content."""
        saved = live.saved.pop(key, None)
        if not saved:
            return
        fetch = tape.program.instructions[key]
        assert isinstance(fetch, Fetch)
        need, box = fetch.tiles[self.transport.rank], tape.program.layouts[fetch.value][self.transport.rank]
        if need is not None and box is not None and overlap(box, need.box) == box:
            for copy in saved:
                copy.tensor = tile[inner(need)][slices(box, need.box)]

    def _compute_back(self, index: int, compute: Compute, back: Back, tape: Tape) -> Callable[[], None] | None:
        """The gradients of a layer's tiles now; those of its parameters now, or when the result is called."""
        name = compute.placed.layer.name
        grad = back.value(name)
        record = tape.records.pop(index, None)
        if grad is not None and self.observe:
            self.observe("grad", name, grad)
        if record is None or name not in back.flowing:
            return None
        if grad is None:
            grad = record.zeros()
        keys, edges = [key for key, _ in record.inputs.tiles], [edge for _, edge in record.inputs.tiles]
        factored = [weight for weight in record.inputs.factors if weight in back.wanted]
        edges += [record.inputs.factors[weight][1] for weight in factored]
        names = [name for name in record.inputs.states if name in back.wanted and name not in factored]
        states = [record.inputs.states[name] for name in names]
        waits = tape.route.parts[index].waits and bool(states)
        inputs: list[Any] = edges if waits else [*edges, *states]
        input_grads = (
            torch.autograd.grad(record.output, inputs, grad, retain_graph=waits, allow_unused=True) if inputs else ()
        )
        for key, value in zip(keys, input_grads, strict=False):
            if value is not None:
                back.tiles[key] = value if key not in back.tiles else back.tiles[key] + value
        for weight, value in zip(factored, input_grads[len(keys) : len(edges)], strict=True):
            if value is not None:
                back.factors[weight] = record.inputs.factors[weight][0].unpack(), value

        def parameters(grads: Sequence[Tensor | None]) -> None:
            for name, value in zip(names, grads, strict=True):
                if value is not None:
                    owned = _own(value, grad)
                    back.states[name] = owned if name not in back.states else back.states[name] + owned

        if not waits:
            parameters(input_grads[len(edges) :])
            return None
        return lambda: parameters(torch.autograd.grad(record.output, states, grad, allow_unused=True))

    def _move(
        self,
        moves: tuple[Move, ...],
        local: Tensor | None,
        held: Any,
        wanted: Need | None,
        dtype: torch.dtype,
        *,
        tag: int,
        add: bool,
    ) -> Arriving:
        like = torch.empty(0, dtype=dtype, device=self.device)
        if local is not None and local.dtype != dtype:
            local = local.to(dtype)
        return begin_transfer(local, held, wanted, moves, self.transport, tag=tag, like=like, add=add)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Whatever fails within says in which layer and on which rank."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in layer {self.transport.label!r} on rank {self.transport.rank}")
            raise


def _then(
    finish: Callable[[], None] | None,
    back: Back,
    names: Sequence[str],
    collector: Collector,
    states: Mapping[str, Tensor],
    factors: Mapping[str, Factors],
) -> Callable[[], None] | None:
    """What is left to do for a layer: its parameters' gradients, and handing over those that are final."""

    def complete() -> None:
        if finish is not None:
            finish()
        for name in names:
            if name in factors:
                collector.ready_factors(factors[name], back.factors.pop(name, None), states[name])
                continue
            grad = back.states.pop(name, None)
            collector.ready(name, torch.zeros_like(states[name]) if grad is None else grad)

    if finish is None:
        complete()
        return None
    return complete


def _note_forward(diary: Diary, done: Fetch | Compute | Settle, begun: int, *, here: bool, again: bool) -> None:
    """An instruction that was carried out on this rank. `here`: whether this rank has a part of the layer."""
    if isinstance(done, Compute):
        if here:
            name = done.placed.layer.name
            diary.note("forward", f"{name} again" if again else name, begun)
    elif isinstance(done, Settle) or not done.identity:
        diary.note("move", done.label, begun)


def _note_backward(diary: Diary, chain: str, begun: int, later: Callable[[], None] | None) -> Callable[[], None] | None:
    """A layer that went back, or a chain of them; what is left of it for `later` then notes itself."""
    if later is None:
        diary.note("backward", chain, begun)
        return None
    diary.note("backward", f"{chain}: input gradient", begun)
    return diary.noting("backward", f"{chain}: weight gradient", later)


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype)


def _reversed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
    return tuple(move.reversed() for move in moves)


def _own(value: Tensor, passed: Tensor) -> Tensor:
    """A parameter's gradient in memory of its own; a sum passes one gradient on to all that it adds."""
    shared = value._is_zerotensor() or value.untyped_storage().data_ptr() == passed.untyped_storage().data_ptr()
    return value.clone(memory_format=torch.contiguous_format) if shared else value


def _need(box: Any) -> Need | None:
    return None if box is None else Need(box)


def _by_first_layer(first_use: Mapping[str, str], trainable: frozenset[str]) -> dict[str, list[str]]:
    """For every layer the states whose gradient is final when its backward is done."""
    by_layer: dict[str, list[str]] = {}
    for name, layer in first_use.items():
        if name in trainable:
            by_layer.setdefault(layer, []).append(name)
    return by_layer
