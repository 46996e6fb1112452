"""Weights whose gradient ranks can find from each other's factors, in place of a sum. Integers only.

Each rank's gradient of a linear layer's weight is a product over its own rows of the batch, and the sum of all is the
product over the rows of all ranks that hold the same shard:

    sum over ranks of  G'X  =  [G of all ranks]' [X of all ranks]      X: what a rank's part read; G: the gradient of
                                                                       what it gave, one row per sample and place

So ranks may send each other X and G instead of adding up G'X: rows (K + M) numbers and not 2 K M. Exact to rounding.
(Poseidon: sufficient factor broadcasting.) Whether that pays is decided elsewhere.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.graph import State
from shoal.lowering.placement import Placed, sharers
from shoal.lowering.program import Compute, Program
from shoal.moves import Layout
from shoal.operators.base import Op, letters
from shoal.partition import Cut, volume


@dataclass(frozen=True)
class Factors:
    """What ranks would send each other for the gradient of one layer's weight."""

    index: int
    """Of the layer's instruction."""
    placed: Placed
    weight: str
    groups: tuple[tuple[int, ...], ...]
    """By rank, those that hold the same shard, itself included; empty for a rank that holds none."""
    rows: tuple[int, ...]
    """By rank, the rows of its part; 0 without one."""
    widths: tuple[tuple[int, int], ...]
    """By rank (input, output): the length of its shard's rows, and how many there are."""

    @property
    def layer(self) -> str:
        """Its name."""
        return self.placed.layer.name

    @property
    def over(self) -> frozenset[str]:
        """The letters of its cut in which ranks of a group differ."""
        return over_rows(self.placed.op, self.placed.cut)

    def elements(self, rank: int) -> int:
        """What a rank sends to each of the others."""
        return self.rows[rank] * sum(self.widths[rank])

    def peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks of its group."""
        return tuple(other for other in self.groups[rank] if other != rank)

    def all_rows(self, rank: int) -> int:
        """The rows of its whole group."""
        return sum(self.rows[other] for other in self.groups[rank])


def over_rows(op: Op, chosen: Cut) -> frozenset[str]:
    """The letters of a linear layer's cut that divide its rows, and not its weight."""
    return frozenset(letter for letter, _ in chosen.degrees) - {letters(len(op.out))[-1], "k"}


def factorable(program: Program, homes: Mapping[str, Layout], *, alone: bool = False) -> dict[str, Factors]:
    """By weight, all that could be found so. `homes`: where the states live that a gradient is summed for.

    `alone`: also of weights of which every rank has a part of its own, and nothing to send to anybody.
    Not of a weight with another use in the network, whose gradients only add up as a whole.
    """
    layers = [instruction for instruction in program.instructions if isinstance(instruction, Compute)]
    uses = Counter(ref.name for layer in layers for _, ref in layer.placed.layer.tensors if isinstance(ref, State))
    found: dict[str, Factors] = {}
    for index, compute in enumerate(program.instructions):
        if not isinstance(compute, Compute) or not compute.placed.rule.outer_product:
            continue
        placed = compute.placed
        weight = placed.op["weight"]
        if not isinstance(weight, State) or uses[weight.name] > 1 or weight.name not in homes:
            continue
        home = homes[weight.name]
        shared = sharers(home)
        if not program.graph.states[weight.name].differentiable:
            continue
        if not alone and all(len(ranks) < 2 for ranks in shared.values()):
            continue
        found[weight.name] = Factors(
            index=index,
            placed=placed,
            weight=weight.name,
            groups=tuple(() if box is None else shared[box] for box in home),
            rows=tuple(volume(needs["input"].box[:-1]) if "input" in needs else 0 for needs in placed.needs),
            widths=tuple((0, 0) if box is None else (len(box[1]), len(box[0])) for box in home),
        )
    return found
