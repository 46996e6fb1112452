"""How gradients go through a program, and this rank's part of every layer: worked out once, the same in every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.execution.peers import RankPeers
from shoal.graph import State
from shoal.lowering.factors import Factors
from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program
from shoal.operators.base import Part
from shoal.transport import Transport


@dataclass(frozen=True, slots=True)
class RankPart:
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
    """The value that this Fetch passes on; empty without one."""
    chain: str
    """The layers of its chain up to this one, with commas between: backward goes through them at once."""
    goes_on: bool
    """Whether the next layer goes on with its autograd graph."""
    reader: int | None
    """The one Fetch that moves its output, where what autograd saved of it can be replaced."""
    factored: str | None
    """The weight whose gradient ranks find from each other's factors, where there is one."""
    waits: bool
    """Whether backward sends its input's gradient before it computes its parameters'."""
    overwrites: bool
    """Whether it may write over the value that the link passes on, which nobody else reads."""


@dataclass(frozen=True)
class Route:
    """How gradients go through a program; the same for every step that trains the same parameters."""

    program: Program
    trainable: frozenset[str]
    grads_for: frozenset[str]
    segments: Sequence[range]
    linked: frozenset[int]
    """The Fetches of all links."""
    parts: Mapping[int, RankPart]
    """This rank's part of every layer that it has one of, by the index of the layer."""
    factors: Mapping[str, Factors]
    """Of the weights whose gradients are found so, of those that learn."""


def find_route(
    program: Program,
    trainable: frozenset[str],
    input_grads: frozenset[str],
    pieces: Sequence[range],
    transport: Transport,
    *,
    factors: Mapping[str, Factors],
    chains: bool,
    local_statistics: bool,
) -> Route:
    """The route of steps that train these parameters and find the gradients of these inputs.

    `pieces`: the segments of the list that run one after another; `factors`: of weights whose gradients ranks find from
    each other's; `chains`: whether neighbouring layers that pass a
    value on within each rank become one autograd graph. Raises what torch raises where shapes alone forbid a layer.
    """
    links, goes_on = program.links_within(pieces if chains else ())
    flowing = program.needing_grad(trainable, input_grads)
    factors = {weight: own for weight, own in factors.items() if weight in trainable}
    factored = {own.index: weight for weight, own in factors.items()}
    parts = _parts(program, transport, local_statistics, trainable, flowing, links, goes_on, factored)
    return Route(program, trainable, flowing, pieces, frozenset(links.values()), parts, factors)


def _parts(
    program: Program,
    transport: Transport,
    local_statistics: bool,
    trainable: frozenset[str],
    flowing: frozenset[str],
    links: Mapping[int, int],
    goes_on: frozenset[int],
    factored: Mapping[int, str],
) -> dict[int, RankPart]:
    """This rank's part of every layer that it has one of, by the index of the layer's instruction."""
    rank, parts = transport.rank, {}
    chains: dict[str, str] = {}
    for index, compute in enumerate(program.instructions):
        if not isinstance(compute, Compute):
            continue
        compute.placed.facts.check(compute.placed.op, compute.placed.parts, local=local_statistics)
        if (part := compute.placed.parts[rank]) is None:
            continue
        placed, name, link = compute.placed, compute.placed.layer.name, links.get(index)
        updates, needs = placed.updates, placed.needs[rank]
        read = [(argument, ref) for argument, ref in placed.layer.tensors if argument in needs]
        states = tuple(
            (argument, ref.name, argument in updates, ref.name in trainable)
            for argument, ref in read
            if isinstance(ref, State)
        )
        tiles = tuple(
            (argument, compute.sources[argument], ref.name in flowing and compute.sources[argument] != link)
            for argument, ref in read
            if not isinstance(ref, State)
        )
        before = None if link is None else program.instructions[link]
        before_name = before.value if isinstance(before, Fetch) else ""
        chains[name] = f"{chains[before_name]}, {name}" if before_name in chains else name
        learns = any(learning for *_, learning in states)
        sends = any(key in program.crossing for _, key, wanted in tiles if wanted)
        parts[index] = RankPart(
            placed=placed,
            name=name,
            part=part,
            letters=placed.cut_letters,
            peers=RankPeers(placed, transport),
            flows=name in flowing,
            states=states,
            tiles=tiles,
            link=link,
            before=before_name,
            chain=chains[name],
            goes_on=index in goes_on,
            reader=program.only_moved_to.get(name),
            overwrites=link is not None and _may_overwrite(program, compute, link),
            factored=factored.get(index),
            # not within a chain: its other layers would be walked, and would send, twice
            waits=placed.rule.apart and link is None and learns and sends,
        )
    return parts


def _may_overwrite(program: Program, compute: Compute, link: int) -> bool:
    """Whether a layer can write its result over the value of its link, which nobody reads again, nor autograd.

    Not where what autograd saved of the result is replaced (`RankPart.reader`).
    """
    before = program.instructions[program.links[link][0]]
    assert isinstance(before, Compute)
    rule, result = compute.placed.rule, compute.placed.layer.name
    return rule.can_overwrite and before.placed.rule.fresh_output and result not in program.only_moved_to
