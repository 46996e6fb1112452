"""The fixed strategies: one cut for every kind of layer, the same idea throughout the network.

    data     every layer by sample                                       what DDP does
    model    every layer by channel                                      Yadan 2013, OptCNN's "model"
    RxG      R parts by sample, each of G parts by channel               Yadan's hybrid, 2x2
    owt      by sample, linear layers and all behind them by channel     one weird trick, Krizhevsky 2014
    owt:b owt:c owt:b1 owt:c1     the same, its linear part in laps      its schemes (b) and (c); owt is (a)
    spatial  by height and width; by sample where there is none          images too large for one device

A layer too small for its cut takes the largest that fits.
"""

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import cast, get_args

from shoal.errors import PlanError, suggestion
from shoal.graph import LayerGraph
from shoal.lowering.placement import most_parts
from shoal.operators.base import Axis
from shoal.operators.registry import facts_of
from shoal.partition import Cut
from shoal.plan import Laps

NAMES = ("data", "model", "owt", "spatial")
AUTO = "auto"
"""No strategy but a wish: the plan that a search finds and a race confirms."""
SCHEMES = tuple(f"owt:{scheme}" for scheme in ("a", *get_args(Laps)))
"""Ways to send what the linear layers read: `owt` itself is the first."""
_HYBRID = re.compile(r"(\d+)x(\d+)")


def check_name(name: str, ranks: int) -> None:
    """Refuse what is no strategy's name, and a hybrid for another number of ranks, with a `PlanError`."""
    hybrid = _HYBRID.fullmatch(name)
    known = (*NAMES, AUTO, *SCHEMES)
    if name not in known and hybrid is None:
        raise PlanError(
            f"there is no plan {name!r}.",
            f"{suggestion(name, known)} RxG is a hybrid, such as 2x2; a path names a plan file.",
        )
    if hybrid is not None and int(hybrid[1]) * int(hybrid[2]) != ranks:
        raise PlanError(
            f"plan {name!r} needs {int(hybrid[1]) * int(hybrid[2])} ranks; there are {ranks}.",
            f"Choose R and G with R x G = {ranks}.",
        )


def laps_of(name: str) -> Laps | None:
    """How the linear layers of a named plan run over the batch: in laps, or all at once.

    >>> laps_of("owt:c"), laps_of("owt:b1"), laps_of("owt:a"), laps_of("data")
    ('c', 'b1', None, None)
    """
    scheme = name.removeprefix("owt:")
    return cast(Laps, scheme) if name in SCHEMES and scheme != "a" else None


def wanted_cuts(name: str, graph: LayerGraph, ranks: int) -> Mapping[str, Cut]:
    """What the strategy asks of each layer, in order, before looking at sizes. Unknown names are a `PlanError`."""
    check_name(name, ranks)
    if name == AUTO and ranks > 1:
        raise PlanError("the plan 'auto' has to be found first.", "Use shoal.parallelize, or a plan of `shoal plan`.")
    names = [layer.name for layer in graph.layers]
    if name in ("data", AUTO):
        return dict.fromkeys(names, Cut.of(n=ranks))
    if name == "model":
        return dict.fromkeys(names, Cut.of(c=ranks))
    if name == "spatial":
        return {name: _spatial(len(graph.specs[name].shape), graph.batch, ranks) for name in names}
    if name == "owt" or name in SCHEMES:
        behind: set[str] = set()  # not by their place in the list: a head in the middle has layers beside it
        for layer in graph.layers:
            if facts_of(layer.op).dense or behind & set(layer.reads):
                behind.add(layer.name)
        return {name: Cut.of(c=ranks) if name in behind else Cut.of(n=ranks) for name in names}
    replicas, group = map(int, name.split("x"))
    return dict.fromkeys(names, Cut.of(n=replicas, c=group))


def _spatial(ndim: int, batch: int, ranks: int) -> Cut:
    """As square a grid as the ranks allow, more rows than columns; samples or channels without space."""
    if ndim < 3:
        return Cut.of(n=ranks) if batch >= ranks else Cut.of(c=ranks)
    if ndim == 3:
        return Cut.of(w=ranks)
    columns = max(d for d in range(1, isqrt(ranks) + 1) if ranks % d == 0)
    return Cut.of(h=ranks // columns, w=columns)


def fit(wanted: Cut, axes: tuple[Axis, ...]) -> Cut:
    """The largest cut of the wanted dims that a layer's axes allow."""
    return fit_all([wanted], axes)[0]


def fit_all(wanted: Sequence[Cut], axes: tuple[Axis, ...]) -> list[Cut]:
    """The same of many cuts; one that fits as it is, is given back itself."""
    limits = {axis.letter: most_parts(axis) for axis in axes}
    return [
        cut
        if all(1 < degree <= limits.get(letter, 1) for letter, degree in cut.degrees)
        else cut.at_most({letter: limits.get(letter, 1) for letter, _ in cut.degrees})
        for cut in wanted
    ]


def followed(cut: Cut) -> Cut:
    """The cut for a layer that follows: sums over cut input channels end up with every rank, so by channel."""
    degrees: dict[str, int] = {}
    for letter, degree in cut.degrees:
        place = "c" if letter == "k" else letter
        degrees[place] = degrees.get(place, 1) * degree
    return Cut(tuple(degrees.items()))
