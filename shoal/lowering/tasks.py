"""One training step as a list of tasks: what the engine does, in its order, and what each waits for. Integers only.

Every rank walks the list and skips what it has no part in. Tasks that compute run one after the other; tasks of the
network begin when the rank comes to them and go on behind what it does next. So on each rank

    a task that computes   starts when the one before it is done, and everything in its `after` has arrived
    a task of the network  starts when the ranks that it joins have come to it; `waits`: they do nothing else meanwhile

    forward of a layer     its tiles are put together (copy), its kernel runs (forward), its parts add up (sum)
    backward of a layer    what came back is put together (copy), the input's gradient is found and set out (move) while
                           the parameters' gradient is found; where nothing has to travel both are found at once
    gradients              are summed in buckets as soon as a bucket is full, behind backward; where factors travel in
                           the place of a sum, the weight gradient is found from those of all ranks behind backward
    cut optimizer state    new rows of weights set out when the step begins and are there when a layer reads them; a
                           gradient sets out to the owners of its rows when it is found (moves)
    the optimizer          steps when every sum is done (update)

Work is a kernel or bytes, never seconds: the simulator plays the list on any devices and links. `push`, `fetch`,
`apply` and `average` are names for what replicas do between steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from shoal.graph import State
from shoal.lowering.factors import Factors, factorable
from shoal.lowering.owners import FROM_OWNERS, TO_OWNERS, OptimizerState, cut_homes
from shoal.lowering.placement import Placed, sharers
from shoal.lowering.program import Compute, Fetch, Program, Settle, first_uses
from shoal.lowering.step_traffic import GRADIENTS, SUMMED_BYTES, Bucket, fill_buckets
from shoal.moves import Layout
from shoal.partition import volume

Kind = Literal[
    "forward", "input gradient", "weight gradient", "move", "sum", "copy", "update", "push", "fetch", "apply", "average"
]
Resource = Literal["compute", "network"]
COMPUTES: tuple[Kind, ...] = ("forward", "input gradient", "weight gradient", "copy", "update", "apply")
"""Kinds that keep the rank's processor busy; the others keep its links busy."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of one part of a layer."""

    placed: Placed
    of: int = 1
    """Into how many tasks of about the same work the layer's pass is divided."""
    over: frozenset[str] = frozenset()
    """Letters of the layer's cut along which a part is whole all the same: it works on the rows of all its group."""


@dataclass(frozen=True)
class Moved:
    """Boxes between ranks: every overlap of what they have with what they need."""

    have: Layout
    need: Layout
    copies: bool
    """Whether ranks that have anything have all of it, and those without get it from one of them."""
    itemsize: int
    back: bool = False
    """Whether the same boxes travel the other way, where those that meet are added up."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have or need something."""
        pairs = enumerate(zip(self.have, self.need, strict=True))
        return tuple(rank for rank, (held, wanted) in pairs if held is not None or wanted is not None)


@dataclass(frozen=True)
class Summed:
    """Sums within groups of ranks, all groups at the same time."""

    groups: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    """By group."""


@dataclass(frozen=True)
class Gathered:
    """What ranks of a group send each other, each what it has to all others; all groups at the same time."""

    groups: tuple[tuple[int, ...], ...]
    by_rank: tuple[int, ...]
    """Bytes that a rank sends to each of the others."""

    @property
    def bytes(self) -> tuple[int, ...]:
        """By group, the most that one of its ranks sends to each of the others."""
        return tuple(max(self.by_rank[rank] for rank in group) for group in self.groups)


@dataclass(frozen=True)
class Bytes:
    """Bytes of parameters that each rank steps over."""

    by_rank: tuple[int, ...]


Work = Kernel | Moved | Summed | Gathered | Bytes


@dataclass(frozen=True)
class Task:
    """One thing that some ranks do at the same place of the list."""

    kind: Kind
    label: str
    """The layer, or `gradients`."""
    ranks: tuple[int, ...]
    work: Work
    """Of a copy: the moves whose boxes each rank puts together."""
    after: tuple[int, ...] = ()
    """Tasks of the network that must be done first, by their index; besides, all that the rank computed before."""
    waits: bool = False
    """Of a task of the network: whether its ranks do nothing else until it is done."""
    states: tuple[str, ...] = ()
    """Of a sum of gradients, of what is sent in its place, or a move of rows: the parameters."""

    @property
    def resource(self) -> Resource:
        """What it keeps busy."""
        return "compute" if self.kind in COMPUTES else "network"


@dataclass(frozen=True)
class StepOptions:
    """What a step depends on besides its program."""

    itemsize: Mapping[str, int]
    """Bytes of one element of every value and state."""
    bucket_bytes: int
    local_statistics: bool = False
    recompute: bool = False
    factors: frozenset[str] = frozenset()
    """Weights whose gradients are found from factors."""
    optimizer_state: OptimizerState = "whole"


@dataclass(frozen=True)
class Tasks:
    """The list of one step."""

    program: Program
    options: StepOptions
    tasks: tuple[Task, ...]
    trainable: tuple[str, ...]
    """The states that learn, in the order in which backward finishes them."""
    flowing: frozenset[str]
    """Values that have a gradient."""
    homes: Mapping[str, Layout] = field(default_factory=dict)
    """Where the states live, which the optimizer steps over."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.program.ranks

    @cached_property
    def users(self) -> Mapping[str, str]:
        """For every state that learns the layer whose backward finishes its gradient."""
        return first_uses(self.program)


def step_tasks(program: Program, options: StepOptions) -> Tasks:
    """The tasks of one forward and backward pass, all parameters learning, and the optimizer's step. Pure."""
    graph = program.graph
    trainable = tuple(
        name
        for name in reversed(first_uses(program))
        if graph.states[name].differentiable and name not in program.changed
    )
    return _Lister(program, options, trainable).list()


@dataclass
class _Lister:
    program: Program
    options: StepOptions
    trainable: tuple[str, ...]
    tasks: list[Task] = field(default_factory=list)
    fetched: dict[int, tuple[Moved, int | None]] = field(default_factory=dict)
    """Of every Fetch whose tiles are not put together yet, the boxes and the task that moves them."""
    returned: dict[str, list[tuple[str, Moved, int | None]]] = field(default_factory=dict)
    """The same of gradients on their way back to where a value was made, with whose traffic they are."""
    later: list[Task] = field(default_factory=list)
    """What backward of a layer leaves until its input's gradient is on its way."""
    arriving: dict[str, int] = field(default_factory=dict)
    """Of every state whose rows come from their owners, the task that moves them."""

    def list(self) -> Tasks:
        program, options = self.program, self.options
        cut = options.optimizer_state == "cut"
        self.homes = cut_homes(program.states, self.trainable) if cut else program.states
        pieces = program.segments if self.options.recompute else (range(len(program.instructions)),)
        self.flowing = program.needing_grad(frozenset(self.trainable), frozenset())
        self.links, self.goes_on = program.links_within(pieces)
        wanted = self.options.factors & frozenset(self.trainable)
        self.factors = (
            {weight: own for weight, own in factorable(program, self.homes).items() if weight in wanted}
            if wanted
            else {}
        )
        self.sums = _GradientSums(self)
        for name in program.states:
            if (work := _owned(program, self.homes, name, options)) is not None:
                self.arriving[name] = self._move(FROM_OWNERS, work, states=(name,))
        for piece in pieces:
            self._forward(piece)
        for piece in reversed(pieces):
            if piece is not pieces[-1]:
                self._forward(piece)
            for key in list(self.fetched):
                self._assemble(key)
            self._backward(piece)
        self._products()
        self._update()
        return Tasks(program, self.options, tuple(self.tasks), self.trainable, self.flowing, self.homes)

    # Forward

    def _forward(self, piece: range) -> None:
        for index in piece:
            match self.program.instructions[index]:
                case Fetch() as fetch if not fetch.identity:
                    work = self._moved(fetch)
                    self.fetched[fetch.key] = work, self._move(fetch.label, work) if fetch.crosses else None
                case Compute(placed=placed, sources=sources):
                    for key in dict.fromkeys(sources.values()):
                        self._assemble(key)
                    states = [ref.name for _, ref in placed.layer.tensors if isinstance(ref, State)]
                    after = tuple(self.arriving[name] for name in states if name in self.arriving)
                    self._compute("forward", placed, after=after)
                    self._layer_sums(placed, back=False)
                case Settle() as settle:
                    work = self._moved(settle)
                    self._copy(settle.label, work, self._move(settle.label, work, waits=True))
                case _:
                    pass

    def _moved(self, instruction: Fetch | Settle, *, back: bool = False) -> Moved:
        size = self.options.itemsize[instruction.value]
        if isinstance(instruction, Settle):
            return Moved(instruction.partial, instruction.owned, False, size, back)
        return Moved(instruction.have, instruction.boxes, instruction.copies, size, back)

    def _assemble(self, key: int) -> None:
        """Put the tiles of a Fetch together, as the first layer does that reads them."""
        if key in self.fetched:
            work, move = self.fetched.pop(key)
            self._copy(self.program.instructions[key].label, work, move)

    # Backward

    def _backward(self, piece: range) -> None:
        for index in reversed(piece):
            instruction = self.program.instructions[index]
            if isinstance(instruction, Fetch):
                linked = instruction.key in self.links.values()
                if instruction.value in self.flowing and not linked and not instruction.identity:
                    self._send_back(instruction, crosses=instruction.crosses)
                continue
            self._leave_nothing()
            if isinstance(instruction, Compute):
                self._compute_back(index)
            elif instruction.value in self.flowing:
                self._gather(instruction.value)
                self._send_back(instruction, crosses=True)
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        self.tasks += self.later
        self.later = []

    def _send_back(self, instruction: Fetch | Settle, *, crosses: bool) -> None:
        work = self._moved(instruction, back=True)
        move = self._move(instruction.label, work) if crosses else None
        self.returned.setdefault(instruction.value, []).append((instruction.label, work, move))

    def _gather(self, value: str) -> None:
        """Add up what came back of a value's gradient."""
        for label, work, move in self.returned.pop(value, ()):
            self._copy(label, work, move)

    def _compute_back(self, index: int) -> None:
        """The layer, or the whole chain that ends in it; then the sums whose last gradient that was."""
        chain = [] if index in self.goes_on else list(self._chain(index))
        for compute in chain:
            self._layer_back(compute, alone=len(chain) == 1)
        for task in self.sums.begun_by(self.program.instructions[index].label):
            (self.later if self.later else self.tasks).append(task)

    def _chain(self, index: int) -> Iterator[Compute]:
        """The layers that are differentiated at once, last first."""
        compute = self.program.instructions[index]
        assert isinstance(compute, Compute)
        yield compute
        if index in self.links:
            yield from self._chain(self.program.links[self.links[index]][0])

    def _layer_back(self, compute: Compute, *, alone: bool) -> None:
        placed, layer = compute.placed, compute.placed.layer
        self._gather(layer.name)
        if layer.name not in self.flowing:
            return
        to_input = any(read in self.flowing for read in layer.reads)
        learning = [ref.name for _, ref in layer.tensors if isinstance(ref, State) and ref.name in self.sums.states]
        learns, later = bool(learning), alone and self._sends(compute)
        if any(name in self.factors for name in learning):
            if to_input:
                self._compute("input gradient", placed, of=2)
            if len(learning) > 1:  # of the bias: one addition where the others multiply and add for every input
                self._compute("weight gradient", placed, of=4 * placed.op.shapes["weight"][1], later=later)
        elif not to_input:
            self._compute("weight gradient", placed)
        elif not (learns and placed.rule.apart):
            self._compute("input gradient", placed)
        else:
            self._compute("input gradient", placed, of=2)
            self._compute("weight gradient", placed, of=2, later=later)
        self._layer_sums(placed, back=True)

    def _sends(self, compute: Compute) -> bool:
        """Whether the gradient of what a layer reads goes to other ranks."""
        fetches = [self.program.instructions[key] for key in compute.sources.values()]
        return any(
            isinstance(fetch, Fetch) and fetch.value in self.flowing and fetch.key in self.program.crossing
            for fetch in fetches
        )

    def _products(self) -> None:
        """The gradients of weights from the factors of all ranks, in the order in which these were sent."""
        for index, task in enumerate(tuple(self.tasks)):
            if isinstance(task.work, Gathered):
                own = self.factors[task.states[0]]
                of = 2 if any(read in self.flowing for read in own.placed.layer.reads) else 1
                work = Kernel(own.placed, of, own.over)
                self.tasks.append(Task("weight gradient", own.layer, task.ranks, work, after=(index,)))

    def _update(self) -> None:
        sizes = [0] * self.program.ranks
        for name in self.trainable:
            for rank, box in enumerate(self.homes[name]):
                sizes[rank] += 0 if box is None else volume(box) * self.options.itemsize[name]
        for index, task in enumerate(list(self.tasks)):
            if task.label == TO_OWNERS:
                assert isinstance(task.work, Moved)
                self._copy(TO_OWNERS, task.work, index)
        sums = tuple(index for index, task in enumerate(self.tasks) if task.label == GRADIENTS)
        ranks = tuple(range(self.program.ranks))
        self.tasks.append(Task("update", "", ranks, Bytes(tuple(sizes)), after=sums))

    # Single tasks

    def _compute(
        self, kind: Kind, placed: Placed, *, of: int = 1, later: bool = False, after: tuple[int, ...] = ()
    ) -> None:
        task = Task(kind, placed.layer.name, placed.ranks, Kernel(placed, of), after)
        (self.later if later else self.tasks).append(task)

    def _move(self, label: str, work: Moved, *, waits: bool = False, states: tuple[str, ...] = ()) -> int:
        self.tasks.append(Task("move", label, work.ranks, work, waits=waits, states=states))
        return len(self.tasks) - 1

    def _copy(self, label: str, work: Moved, move: int | None) -> None:
        self.tasks.append(Task("copy", label, work.ranks, work, after=() if move is None else (move,)))

    def _layer_sums(self, placed: Placed, *, back: bool) -> None:
        """What crosses between the parts of one layer while it runs."""
        name = placed.layer.name
        if back and not (
            name in self.flowing if placed.copies else any(read in self.flowing for read in placed.layer.reads)
        ):
            return
        size = max(self.options.itemsize[name], SUMMED_BYTES)
        for backward, forward, ranks, work in _sums_within(placed, size, local=self.options.local_statistics):
            if backward if back else forward:
                self.tasks.append(Task("sum", name, ranks, work, waits=True))


def _sums_within(placed: Placed, size: int, *, local: bool) -> list[tuple[bool, bool, tuple[int, ...], Summed]]:
    """(in backward, in forward, ranks, groups and bytes) of every sum within a layer; once for layers that are alike.

    `size`: bytes of an element.
    """
    known: dict[object, list[tuple[bool, bool, tuple[int, ...], Summed]]] = placed.alike.setdefault("sums", {})
    if (size, local) in known:
        return known[size, local]
    parts, found = dict(placed.cut.degrees), known.setdefault((size, local), [])
    first = next((part for part in placed.parts if part is not None), None)
    sums = () if first is None else placed.rule.sums(placed.op, first, placed.cut_letters, parts, local=local)
    for number, summed in enumerate(sums):
        sizes: dict[tuple[int, ...], int] = {}
        for group in dict.fromkeys(placed.groups(summed.over)):
            if group is not None and len(group) > 1:
                part = placed.parts[group[0]]
                assert part is not None
                of_part = placed.rule.sums(placed.op, part, placed.cut_letters, parts, local=local)
                sizes[group] = of_part[number].elements * size
        if sizes:
            task = _sum_task("", sizes, waits=True)
            assert isinstance(task.work, Summed)
            found.append((summed.backward, summed.forward, task.ranks, task.work))
    return found


def _sum_task(label: str, sizes: Mapping[tuple[int, ...], int], *, waits: bool, states: Sequence[str] = ()) -> Task:
    ranks = tuple(sorted(rank for group in sizes for rank in group))
    work = Summed(tuple(sizes), tuple(sizes.values()))
    return Task("sum", label, ranks, work, waits=waits, states=tuple(states))


def _gather_task(factors: Factors, itemsize: int) -> Task:
    groups = tuple(dict.fromkeys(group for group in factors.groups if group))
    sizes = tuple(factors.elements(rank) * itemsize for rank in range(len(factors.groups)))
    ranks = tuple(sorted(rank for group in groups for rank in group))
    return Task("sum", GRADIENTS, ranks, Gathered(groups, sizes), states=(factors.weight,))


def _owned(
    program: Program, homes: Mapping[str, Layout], name: str, options: StepOptions, *, back: bool = False
) -> Moved | None:
    """A state's rows from their owners to all that read them, or its gradient's `back`; None where nothing is."""
    if homes[name] is program.states[name]:
        return None
    pairs = list(zip(homes[name], program.states[name], strict=True))
    if all(home == use for home, use in pairs):
        return None
    have = tuple(None if home == use else home for home, use in pairs)
    need = tuple(None if home == use else use for home, use in pairs)
    return Moved(have, need, False, options.itemsize[name], back)


class _GradientSums:
    """The buckets of all ranks, and moves to owners: which of them begin when backward of a layer is done."""

    def __init__(self, lister: _Lister) -> None:
        program, options = lister.program, lister.options
        self.states = frozenset(lister.trainable)
        self._program, self._homes, self._options = program, lister.homes, options
        self._finished_by: dict[str, list[str]] = {}
        for state, layer in first_uses(program).items():
            if state in self.states:
                self._finished_by.setdefault(layer, []).append(state)
        self._sizes: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        summed = [name for name in lister.trainable if name not in lister.factors]
        for bucket in _buckets_of_all(program, options, summed, lister.homes):
            self._sizes.setdefault(tuple(bucket.names), {})[bucket.ranks] = bucket.bytes
        self._factors, self._itemsize = lister.factors, options.itemsize
        self._missing = {names: set(names) for names in self._sizes}
        self._holding: dict[str, list[tuple[str, ...]]] = {}
        for names in self._sizes:
            for name in names:
                self._holding.setdefault(name, []).append(names)

    def begun_by(self, layer: str) -> Iterator[Task]:
        """The sums whose last gradient is one of this layer's."""
        for state in self._finished_by.get(layer, ()):
            if (work := _owned(self._program, self._homes, state, self._options, back=True)) is not None:
                yield Task("move", TO_OWNERS, work.ranks, work, states=(state,))
            if state in self._factors:
                yield _gather_task(self._factors[state], self._itemsize[state])
            for names in self._holding.get(state, ()):
                self._missing[names].remove(state)
                if not self._missing[names]:
                    yield _sum_task(GRADIENTS, self._sizes[names], waits=False, states=names)


def _buckets_of_all(
    program: Program, options: StepOptions, trainable: Sequence[str], homes: Mapping[str, Layout]
) -> Iterator[Bucket]:
    """The buckets that ranks fill, each once; ranks that hold the same shards as one before fill the same."""
    held: list[list[tuple[str, tuple[int, ...], str, int]]] = [[] for _ in range(program.ranks)]
    for name in trainable:
        for box, group in sharers(homes[name]).items():
            size = volume(box) * options.itemsize[name]
            for rank in group:
                held[rank].append((name, group, program.graph.states[name].dtype, size))
    seen = set()
    for shards in held:
        alike = tuple((name, group[0], len(group)) for name, group, _, _ in shards)
        if alike not in seen:
            seen.add(alike)
            yield from fill_buckets(shards, options.bucket_bytes)
