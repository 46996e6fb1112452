"""Plan: how each layer of one network is cut over the ranks of a replica. Saves to versioned JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from shoal.errors import PlanError
from shoal.files import write_text_atomically
from shoal.partition import Cut

SCHEMA = "shoal.plan/1"
SHOWN_CUTS = 4
"""Kinds of cuts that are named where a plan is told in words."""
FactorsOption = Literal["auto", "always", "never"] | tuple[str, ...]
"""Linear layers for whose gradients ranks send each other factors: all that take less time so, all, none, or these."""
Laps = Literal["b", "c", "b1", "c1"]
"""How a network's dense layers run over a batch in laps, by the letters of Krizhevsky's schemes: in (b) a lap has the
samples of one rank, in (c) some of every rank. With a 1 their weights step after every lap, else once a step."""
_DIMS_IN_WORDS = {"n": "sample", "c": "channel", "k": "input channel", "d": "depth", "h": "height", "w": "width"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cut for every layer, by its name; patterns may use `*`, and a later line wins.

    A pattern that stands twice is the same as its last line alone, and is kept as that.
    """

    name: str
    """What people call it: data, owt, ... or a file's name."""
    ranks: int
    """Ranks of one replica."""
    layers: tuple[tuple[str, Cut], ...]
    """(pattern of layers' names, cut)."""
    factors: tuple[str, ...] | None = None
    """Linear layers for whose weights' gradients ranks send each other factors; None: found where it is laid."""
    laps: Laps | None = None
    """How the linear layers and all behind them run over a training batch in laps; None: over all of it at once."""
    recompute: bool = False
    """Whether activations are computed a second time in backward, and not kept."""

    def __post_init__(self) -> None:
        """Refuse a layer that is cut into more parts than there are ranks."""
        if self.ranks < 1:
            raise PlanError(f"plan {self.name!r} is for {self.ranks} ranks.", "A plan needs at least 1.")
        last = {pattern: index for index, (pattern, _) in enumerate(self.layers)}
        object.__setattr__(self, "layers", tuple(self.layers[index] for index in sorted(last.values())))
        for pattern, cut in self.layers:
            if cut.parts > self.ranks:
                raise PlanError(
                    f"layer {pattern!r} is cut {cut}, needing {cut.parts} ranks; the plan has {self.ranks}.",
                    f"Cut it into at most {self.ranks} parts, or give the plan more ranks.",
                )

    def in_words(self) -> str:
        """How many layers are cut in which way, most first, and whether activations are computed again.

        >>> by_sample, by_channel = Cut.parse("n2"), Cut.parse("c2")
        >>> Plan(name="mine", ranks=2, layers=(("a", by_sample), ("b", by_channel), ("c", by_sample))).in_words()
        '2 layers by sample (n2), 1 by channel (c2)'
        >>> data_parallel(4).in_words()
        'every layer by sample (n4)'
        >>> Plan(name="mine", ranks=2, layers=(("*", by_sample),), recompute=True).in_words()
        'every layer by sample (n2); activations are recomputed'
        """
        return self._cuts_in_words() + ("; activations are recomputed" if self.recompute else "")

    def _cuts_in_words(self) -> str:
        counts = Counter(cut for _, cut in self.layers).most_common()
        if len(counts) == 1:
            return f"every layer {_in_words(counts[0][0])}"
        words = [f"{count} {_in_words(cut)}" for cut, count in counts[:SHOWN_CUTS]]
        first, _, rest = words[0].partition(" ")
        words[0] = f"{first} layer{'' if first == '1' else 's'} {rest}"
        others = sum(count for _, count in counts[SHOWN_CUTS:])
        return ", ".join([*words, *([f"{others} otherwise"] if others else [])])

    def to_json(self) -> str:
        """The text of a plan file."""
        layers = {pattern: str(cut) for pattern, cut in self.layers}
        content: dict[str, Any] = {"schema": SCHEMA, "name": self.name, "ranks": self.ranks, "layers": layers}
        if self.factors is not None:
            content["factors"] = list(self.factors)
        if self.laps is not None:
            content["laps"] = self.laps
        if self.recompute:
            content["recompute"] = True
        return json.dumps(content, indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_text_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; a file that is missing, not JSON or of another schema is a `PlanError`."""
        remedy = 'A plan is JSON: {"schema": "shoal.plan/1", "name": "mine", "ranks": 4, "layers": {"*": "n4"}}.'
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
        except (OSError, ValueError) as error:
            raise PlanError(f"plan {str(path)!r} cannot be read: {error}.", remedy) from None
        match content:
            case {
                "schema": "shoal.plan/1",
                "name": str(name),
                "ranks": int(ranks),
                "layers": dict(layers),
                **rest,
            } if not isinstance(ranks, bool) and _are_further_fields(rest):
                cuts = tuple((pattern, Cut.parse(str(cut))) for pattern, cut in layers.items())
                named: Any = rest.get("factors")
                recompute: Any = rest.get("recompute", False)
                factors = None if named is None else tuple(named)
                laps: Any = rest.get("laps")
                return cls(name=name, ranks=ranks, layers=cuts, factors=factors, laps=laps, recompute=recompute)
            case {"schema": other} if other != SCHEMA:
                raise PlanError(f"plan {str(path)!r} has schema {other!r}; this version reads {SCHEMA!r}.", remedy)
            case _:
                raise PlanError(f"plan {str(path)!r} does not have the fields of a plan.", remedy)


def _are_further_fields(rest: Mapping[Any, Any]) -> bool:
    """Those that a plan may leave out, each with what may stand in it."""
    known = rest.keys() <= {"factors", "laps", "recompute"} and rest.get("laps", "b") in get_args(Laps)
    return known and _are_names(rest.get("factors", [])) and isinstance(rest.get("recompute", False), bool)


def _are_names(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)


def _in_words(cut: Cut) -> str:
    """How a layer is cut.

    >>> _in_words(Cut.parse("n2h2")), _in_words(Cut())
    ('by sample and height (n2h2)', 'whole')
    """
    dims = " and ".join(_DIMS_IN_WORDS[dim] for dim, _ in cut.degrees)
    return f"by {dims} ({cut})" if dims else "whole"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice and forgets where the first stood, but which line is later matters here."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key!r} stands in it twice")
    return dict(pairs)


def factors_option(given: str | Sequence[str]) -> FactorsOption:
    """What people write, as names with commas or a list, as an option.

    >>> factors_option("never"), factors_option("fc1,fc2"), factors_option(["fc1"])
    ('never', ('fc1', 'fc2'), ('fc1',))
    """
    match given:
        case "auto" | "always" | "never":
            return given
        case str():
            return tuple(name.strip() for name in given.split(",") if name.strip())
        case _:
            return tuple(given)


def planned_factors(plan: str | Plan, wanted: FactorsOption = "auto") -> FactorsOption:
    """What a plan says of factors, unless the caller says otherwise."""
    return plan.factors if wanted == "auto" and isinstance(plan, Plan) and plan.factors is not None else wanted


def steps_in_laps(laps: Laps | None) -> bool:
    """Whether the dense layers' weights step after every lap: no longer one device's step."""
    return laps is not None and laps.endswith("1")


def planned_recompute(plan: str | Plan, wanted: bool | None = None) -> bool:
    """Whether a plan recomputes, unless the caller says whether to."""
    return wanted if wanted is not None else isinstance(plan, Plan) and plan.recompute


def data_parallel(ranks: int) -> Plan:
    """Every layer cut by sample over all ranks: what DDP does. On one rank, every layer whole."""
    return Plan(name="data", ranks=ranks, layers=(("*", Cut.parse(f"n{ranks}")),))
