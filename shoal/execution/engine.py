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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shoal.execution.gradients import Collector
from shoal.execution.peers import RankPeers
from shoal.execution.precision import value_types
from shoal.execution.randomness import LayerRandom
from shoal.execution.transfer import Arriving, begin_transfer, inner
from shoal.graph import State
from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program, Settle
from shoal.moves import Move
from shoal.operators.base import Call, Need, Part
from shoal.partition import overlap, slices
from shoal.transport import Transport

Observer = Callable[[str, str, Tensor], None]
"""Told ("value", layer, this rank's box of its output) in forward and ("grad", layer, its gradient) in backward."""


_NOTHING = nullcontext()


class _Saved:
    """A tensor that autograd saved, where it can be replaced by another with the same content."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Enter(torch.autograd.Function):
    """A tile as an input of its layer's graph. A leaf would do, but would hold the tile's memory."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tile: Tensor) -> Tensor:  # noqa: ARG004  (torch's own signature)
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


@dataclass
class _Inputs:
    """The inputs of a graph that want a gradient."""

    tiles: list[tuple[int, GradientEdge]] = field(default_factory=list)
    """With the Fetch that brought them; layers of a chain may read the same one."""
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Record:
    """One layer, or a chain of them, as it was run on this rank."""

    inputs: _Inputs
    output: GradientEdge
    zeros: Callable[[], Tensor]
    """A gradient of nothing, for an output that nobody used."""


@dataclass
class _Live:
    """What forward holds at one point of the list."""

    values: dict[str, Tensor]
    tiles: dict[int, Tensor | Arriving | None] = field(default_factory=dict)
    saved: dict[int, list[_Saved]] = field(default_factory=dict)
    """What autograd saved of a value, by the one Fetch that reads it."""
    chains: dict[str, "_Inputs"] = field(default_factory=dict)
    """Values that still hang on the graph which the next layer goes on with, and that graph's inputs so far."""

    def tile(self, key: int) -> Tensor | None:
        """A tile, waited for."""
        found = self.tiles[key]
        if isinstance(found, Arriving):
            found = self.tiles[key] = found.wait()
        return found

    def wait(self) -> None:
        """Until everything under way has arrived, here and where it was sent."""
        for key in self.tiles:
            self.tile(key)

    def copy(self) -> "_Live":
        """The same tensors, for a second run from here."""
        self.wait()
        return _Live(dict(self.values), dict(self.tiles))


@dataclass
class _Back:
    """What backward holds at one point of the list."""

    wanted: frozenset[str]
    """States whose gradients are asked for."""
    flowing: frozenset[str]
    """Values that have a gradient."""
    values: dict[str, list[Tensor | Arriving]] = field(default_factory=dict)
    tiles: dict[int, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    leaving: list[Arriving] = field(default_factory=list)
    """Messages of this rank to others."""

    def value(self, name: str) -> Tensor | None:
        """The gradient of a value, all contributions added up in the program's order; taken out."""
        total: Tensor | None = None
        for piece in self.values.pop(name, ()):
            grad = piece.wait() if isinstance(piece, Arriving) else piece
            assert grad is not None
            total = grad if total is None else total + grad
        return total


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of one layer, with everything about it that is the same in every step."""

    placed: Placed
    name: str
    part: Part
    letters: frozenset[str]
    peers: RankPeers
    flows: bool
    """Whether a gradient goes through the layer."""
    states: tuple[tuple[str, str, bool, bool], ...]
    """(argument, state, whether the layer updates it, whether it learns)."""
    tiles: tuple[tuple[str, int, bool], ...]
    """(argument, Fetch, whether its value wants a gradient)."""
    link: int | None
    """The Fetch that links the layer to the one before it in its chain."""
    before: str
    """The value that this Fetch passes on."""
    goes_on: bool
    """Whether its chain does not end with it."""
    reader: int | None
    """The one Fetch that moves its output, where what autograd saved of it can be replaced."""
    waits: bool
    """Whether its parameters' gradients are found after its input's have left."""


@dataclass(frozen=True)
class Route:
    """How gradients go through a program; the same for every step that trains the same parameters."""

    program: Program
    trainable: frozenset[str]
    grads_for: frozenset[str]
    segments: Sequence[range]
    linked: frozenset[int]
    """The Fetches of all links."""
    parts: Mapping[int, _Part]
    """This rank's part of every layer that it has one of, by the index of the layer."""


@dataclass
class Tape:
    """What backward needs of one forward pass."""

    route: Route
    types: Mapping[str, torch.dtype]
    step: str
    states: Mapping[str, Tensor]
    """The parameters and buffers that the pass read."""
    precision: Callable[[], AbstractContextManager[object]] = nullcontext
    """The autocast of the forward pass."""
    records: dict[int, _Record] = field(default_factory=dict)
    """By the index of the instruction."""
    kept: list[_Live] = field(default_factory=list)
    """What lived at the start of every segment that was not recorded."""
    used: bool = False

    @property
    def program(self) -> Program:
        """What was run."""
        return self.route.program


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
    ) -> tuple[list[Tensor | None], Tape]:
        """This rank's tiles of the outputs, and the tape (empty unless `record`).

        `step`: what the masks of random layers depend on besides the seed and the layer; `input_grads`: inputs whose
        gradient is wanted, the same on all ranks.
        """
        trainable = frozenset(name for name, state in states.items() if state.requires_grad and record)
        tape = Tape(
            self._route(program, trainable, input_grads if record else frozenset(), record=record),
            value_types(program.graph, next(iter(inputs.values()), None)),
            step,
            dict(states),
            _autocast_now(self.device),
        )
        live = _Live(dict(inputs))
        with self._blaming():
            for segment in tape.route.segments[:-1]:
                tape.kept.append(live.copy())
                self._run(segment, live, states, tape, record=False)
            self._run(tape.route.segments[-1], live, states, tape, record=record)
            return [live.tile(fetch.key) for fetch in program.outputs], tape

    def _route(
        self, program: Program, trainable: frozenset[str], input_grads: frozenset[str], *, record: bool
    ) -> Route:
        key = (id(program), trainable, input_grads, record, self.observe is None)
        if key not in self._routes:  # it keeps the program alive, so that the id stays its own
            every = range(len(program.instructions))
            pieces = program.segments if self.recompute and record else (every,)
            links, goes_on = _links_within(program, pieces if record and self.observe is None else ())
            flowing = program.needing_grad(trainable, input_grads)
            parts = self._parts(program, trainable, flowing, links, goes_on)
            self._routes[key] = Route(program, trainable, flowing, pieces, frozenset(links.values()), parts)
        return self._routes[key]

    def _parts(
        self,
        program: Program,
        trainable: frozenset[str],
        flowing: frozenset[str],
        links: Mapping[int, int],
        goes_on: frozenset[int],
    ) -> dict[int, _Part]:
        rank, found = self.transport.rank, {}
        for index, one in enumerate(program.instructions):
            if not isinstance(one, Compute):
                continue
            one.placed.facts.check(one.placed.op, one.placed.parts, local=self.local_statistics)
            if (part := one.placed.parts[rank]) is None:
                continue
            placed, name, link = one.placed, one.placed.layer.name, links.get(index)
            updates, needs = placed.updates, placed.needs[rank]
            read = [(argument, ref) for argument, ref in placed.layer.tensors if argument in needs]
            states = tuple(
                (argument, ref.name, argument in updates, ref.name in trainable)
                for argument, ref in read
                if isinstance(ref, State)
            )
            tiles = tuple(
                (argument, one.sources[argument], ref.name in flowing and one.sources[argument] != link)
                for argument, ref in read
                if not isinstance(ref, State)
            )
            before = None if link is None else program.instructions[link]
            learns = any(learning for *_, learning in states)
            sends = any(key in program.crossing for _, key, wanted in tiles if wanted)
            found[index] = _Part(
                placed=placed,
                name=name,
                part=part,
                letters=placed.cut_letters,
                peers=RankPeers(placed, self.transport),
                flows=name in flowing,
                states=states,
                tiles=tiles,
                link=link,
                before=before.value if isinstance(before, Fetch) else "",
                goes_on=index in goes_on,
                reader=program.only_moved_to.get(name),
                # not within a chain: its other layers would be walked, and would send, twice
                waits=placed.rule.apart and link is None and learns and sends,
            )
        return found

    def _run(
        self,
        segment: range,
        live: _Live,
        states: Mapping[str, Tensor],
        tape: Tape,
        *,
        record: bool,
        again: bool = False,
    ) -> None:
        """A piece of the list, forward. `again`: for the second time, for backward's sake."""
        program, rank = tape.program, self.transport.rank
        instructions, last_values, last_tiles = program.instructions, program.last_uses.values, program.last_uses.tiles
        for index in segment:
            one = instructions[index]
            self.transport.label = one.label
            match one:
                case Fetch():
                    live.tiles[one.key] = self._fetch(one, live.values, tape)
                case Compute():
                    out = self._compute(index, live, states, tape, record=record, again=again)
                    if out is not None:
                        live.values[one.placed.layer.name] = out
                    if self.observe and not again and out is not None and not one.placed.partial:
                        self.observe("value", one.placed.layer.name, out)
                case Settle():
                    partial = live.values.pop(one.value, None)
                    settled = self._move(
                        one.moves, partial, one.partial[rank], _need(program.layouts[one.value][rank]),
                        tape.types[one.value], tag=2 * one.key, add=True,
                    ).wait()  # fmt: skip
                    if settled is not None:
                        live.values[one.value] = settled
                    if self.observe and not again and settled is not None:
                        self.observe("value", one.value, settled)
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
        back = _Back(wanted, flowing)
        for fetch, grad in zip(tape.program.outputs, grads, strict=True):
            if grad is not None and fetch.value in flowing:
                back.tiles[fetch.key] = grad
        states = tape.states
        finished_by = _by_first_layer(first_use, wanted)
        with self._blaming():
            for number in range(len(tape.route.segments) - 1, -1, -1):
                if number < len(tape.kept):
                    live = tape.kept.pop()
                    with tape.precision():
                        self._run(tape.route.segments[number], live, states, tape, record=True, again=True)
                    live.wait()
                self._run_back(tape.route.segments[number], back, tape, collector, finished_by, states)
            for message in back.leaving:
                message.wait()
            return self._input_grads(tape, back)

    def _run_back(
        self,
        segment: range,
        back: _Back,
        tape: Tape,
        collector: Collector,
        finished_by: Mapping[str, list[str]],
        states: Mapping[str, Tensor],
    ) -> None:
        """A piece of the list, reversed.

        A layer may leave the gradients of its parameters for later: until its tiles' are on their way.
        """
        program, rank = tape.program, self.transport.rank
        later: Callable[[], None] | None = None
        for index in reversed(segment):
            one = program.instructions[index]
            self.transport.label = one.label
            if isinstance(one, Fetch):
                if one.value in back.flowing and one.key not in tape.route.linked:
                    self._fetch_back(one, back, tape)
                continue
            if later is not None:
                later()
                later = None
            if isinstance(one, Compute):
                name = one.placed.layer.name
                finish = self._compute_back(index, one, back, tape)
                later = _then(finish, back, finished_by.get(name, ()), collector, states)
            elif one.value in back.flowing:
                returned = self._move(
                    _reversed(one.moves), back.value(one.value), program.layouts[one.value][rank],
                    _need(one.partial[rank]), tape.types[one.value], tag=2 * one.key + 1, add=False,
                )  # fmt: skip
                self._arrives(one.value, returned, back)
        if later is not None:
            later()

    def _arrives(self, value: str, returned: Arriving, back: _Back) -> None:
        if returned.wanted is None:
            back.leaving.append(returned)
        else:
            back.values.setdefault(value, []).append(returned)

    def _input_grads(self, tape: Tape, back: _Back) -> dict[str, Tensor]:
        """Of every input that this rank passed and that wants a gradient; zeros where no part of its own read it."""
        rank, grads = self.transport.rank, {}
        for name in tape.program.graph.inputs:
            box, found = tape.program.layouts[name][rank], back.value(name)
            if found is not None:
                grads[name] = found
            elif name in back.flowing and box is not None:
                shape = [len(span) for span in box]
                grads[name] = torch.zeros(shape, dtype=tape.types[name], device=self.device)
        return grads

    def _fetch(self, one: Fetch, values: Mapping[str, Tensor], tape: Tape) -> Tensor | Arriving | None:
        local, rank = values.get(one.value), self.transport.rank
        if one.identity:
            return local if one.tiles[rank] is not None else None
        held = tape.program.layouts[one.value][rank]
        return self._move(one.moves, local, held, one.tiles[rank], tape.types[one.value], tag=2 * one.key, add=False)

    def _fetch_back(self, one: Fetch, back: _Back, tape: Tape) -> None:
        rank, program = self.transport.rank, tape.program
        grad = back.tiles.pop(one.key, None)
        tile = one.tiles[rank]
        if grad is None and tile is not None:
            grad = torch.zeros(tile.shape, dtype=tape.types[one.value], device=self.device)
        if one.identity:
            if grad is not None:
                back.values.setdefault(one.value, []).append(grad)
            return
        if grad is not None and tile is not None and tile.padded:
            grad = grad[inner(tile)]
        returned = self._move(
            _reversed(one.moves), grad, None if tile is None else tile.box, _need(program.layouts[one.value][rank]),
            tape.types[one.value], tag=2 * one.key + 1, add=True,
        )  # fmt: skip
        self._arrives(one.value, returned, back)

    def _compute(
        self,
        index: int,
        live: _Live,
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
        inputs = _Inputs() if here.link is None else live.chains.pop(here.before, _Inputs())
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
            random=LayerRandom(self.seed, here.name, tape.step),
            local_statistics=self.local_statistics,
        )
        reader = here.reader if record else None
        saved: list[_Saved] = []
        with torch.set_grad_enabled(record), _saving(saved) if reader is not None else _NOTHING:
            out = here.placed.rule.run(call)
            if out.dtype != tape.types[here.name]:
                out = out.to(tape.types[here.name])
        if record and out.requires_grad:
            if here.goes_on:
                live.chains[here.name] = inputs
                return out
            edge, shape, dtype = get_gradient_edge(out), out.shape, out.dtype
            tape.records[index] = _Record(inputs, edge, lambda: torch.zeros(shape, dtype=dtype, device=self.device))
        out = out.detach()
        if reader is not None:
            live.saved[reader] = [one for one in saved if _same(one.tensor, out)]
        return out

    def _share(self, key: int, live: _Live, tile: Tensor, tape: Tape) -> None:
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

    def _compute_back(self, index: int, one: Compute, back: _Back, tape: Tape) -> Callable[[], None] | None:
        """The gradients of a layer's tiles now; those of its parameters now, or when the result is called."""
        name = one.placed.layer.name
        grad = back.value(name)
        record = tape.records.pop(index, None)
        if grad is not None and self.observe:
            self.observe("grad", name, grad)
        if record is None or name not in back.flowing:
            return None
        if grad is None:
            grad = record.zeros()
        keys, edges = [key for key, _ in record.inputs.tiles], [edge for _, edge in record.inputs.tiles]
        names = [name for name in record.inputs.states if name in back.wanted]
        states = [record.inputs.states[name] for name in names]
        waits = tape.route.parts[index].waits and bool(states)
        inputs: list[Any] = edges if waits else [*edges, *states]
        found = (
            torch.autograd.grad(record.output, inputs, grad, retain_graph=waits, allow_unused=True) if inputs else ()
        )
        for key, value in zip(keys, found, strict=False):
            if value is not None:
                back.tiles[key] = value if key not in back.tiles else back.tiles[key] + value

        def parameters(grads: Sequence[Tensor | None]) -> None:
            for name, value in zip(names, grads, strict=True):
                if value is not None:
                    owned = _own(value, grad)
                    back.states[name] = owned if name not in back.states else back.states[name] + owned

        if not waits:
            parameters(found[len(keys) :])
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
    back: _Back,
    names: Sequence[str],
    collector: Collector,
    states: Mapping[str, Tensor],
) -> Callable[[], None] | None:
    """What is left to do for a layer: its parameters' gradients, and handing over those that are final."""

    def complete() -> None:
        if finish is not None:
            finish()
        for name in names:
            grad = back.states.pop(name, None)
            collector.ready(name, torch.zeros_like(states[name]) if grad is None else grad)

    if finish is None:
        complete()
        return None
    return complete


def _links_within(program: Program, pieces: Sequence[range]) -> tuple[dict[int, int], frozenset[int]]:
    """The program's links whose two layers lie in one piece: (Fetch by reader, producers)."""
    kept = {key: (a, b) for key, (a, b) in program.links.items() if any(a in piece and b in piece for piece in pieces)}
    return {reader: key for key, (_, reader) in kept.items()}, frozenset(producer for producer, _ in kept.values())


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype)


def _saving(found: list[_Saved]) -> saved_tensors_hooks:
    """Within, `found` gets everything that autograd saves."""

    def pack(tensor: Tensor) -> _Saved:
        found.append(_Saved(tensor))
        return found[-1]

    return saved_tensors_hooks(pack, lambda saved: saved.tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


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
    found: dict[str, list[str]] = {}
    for name, layer in first_use.items():
        if name in trainable:
            found.setdefault(layer, []).append(name)
    return found
