"""Random per-layer plans, the same on every rank."""

import random
from functools import partial

from shoal.execution.laying import Captured
from shoal.lowering.placement import depends_on_input, most_parts, op_of
from shoal.operators.registry import WHOLE, rule_for
from shoal.partition import Cut
from shoal.plan import Plan


def random_plan(seed: int, captured: Captured, ranks: int) -> Plan:
    """A cut for every layer, drawn from what its rule allows: any axes, fewer ranks than there are, uneven parts."""
    draw = random.Random(seed)
    graph = captured.graphs[True]
    sees_batch = depends_on_input(graph)
    lines = []
    for layer in graph.layers:
        op = op_of(layer, graph)
        if layer.name not in sees_batch or rule_for(op) is WHOLE:
            continue
        lines.append((layer.name, _random_cut(draw, op, ranks)))
    return Plan(name=f"random-{seed}", ranks=ranks, layers=tuple(lines))


def _random_cut(draw: random.Random, op: object, ranks: int) -> Cut:
    axes = list(rule_for(op).axes(op))  # type: ignore[arg-type]
    draw.shuffle(axes)
    left, degrees = ranks, {}
    for axis in axes:
        degree = draw.randint(1, max(1, min(left, most_parts(axis))))
        if draw.random() < 0.5 and degree > 1:
            degrees[axis.letter] = degree
            left //= degree
    return Cut(tuple(degrees.items()))  # any order: parts on any ranks


def randomly(seed: int) -> partial[Plan]:
    """`random_plan` with its seed, to be called by each rank."""
    return partial(random_plan, seed)
