"""Plans for people: tables of layers, totals and rivals, on 80 to 120 columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

from rich.console import Console
from rich.table import Table

from shoal.finding.race import Finish
from shoal.graph import LayerGraph
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.planning.find import SearchResult
from shoal.planning.price import LayerPrice, Price
from shoal.planning.stages import stages_of
from shoal.planning.strategies import followed
from shoal.planning.why import Alternative
from shoal.units import show_bytes, show_seconds

WIDEST = 120
NAMES_FROM, NAMES_TO = 12, 40
"""Columns that layers' names may take."""


@dataclass(frozen=True)
class Row:
    """A stage: a layer and those that follow it under the same cut."""

    name: str
    followers: tuple[str, ...]
    cut: Cut
    compute: float
    communication: float
    bytes: int
    memory: int

    @property
    def seconds(self) -> float:
        """All of it, as if nothing ran at the same time."""
        return self.compute + self.communication


def rows_of(price: Price, graph: LayerGraph) -> list[Row]:
    """One row per stage; a follower that is cut otherwise than its stage has a row of its own."""
    home = {op.layer.name: stage.name for stage in stages_of(graph, 1) for op in stage.ops}
    groups: list[list[LayerPrice]] = []
    place: dict[str, int] = {}
    for layer in price.layers:
        head = home.get(layer.name)
        index = None if head is None else place.get(head)
        if (
            head is not None
            and index is not None
            and layer.cut in (groups[index][0].cut, followed(groups[index][0].cut))
        ):
            groups[index].append(layer)
        else:
            place.setdefault(head or layer.name, len(groups))
            groups.append([layer])
    return [
        Row(
            group[0].name,
            tuple(_word(member.op) for member in group[1:]),
            group[0].cut,
            sum(member.compute for member in group),
            sum(member.communication for member in group),
            sum(member.bytes for member in group),
            sum(member.memory for member in group),
        )
        for group in groups
    ]


def _word(op: str) -> str:
    """An operator as people call it.

    >>> _word("aten.batch_norm.default"), _word("aten.relu.default")
    ('norm', 'relu')
    """
    word = op.split(".")[1].strip("_")
    return "norm" if word.endswith("norm") else word


def show_layers(console: Console, price: Price, graph: LayerGraph, why: Mapping[str, Alternative | None]) -> None:
    """The table of stages."""
    rows = rows_of(price, graph)
    cells = [
        [
            str(row.cut),
            str(row.cut.parts),
            _time(row.compute),
            _time(row.communication),
            _size(row.bytes),
            _size(row.memory),
            _why(why.get(row.name)),
        ]
        for row in rows
    ]
    headings = ["cut", "ranks", "compute", "commun.", "sent", "memory", "next best"]
    _print_table(console, "layer", [_label(row) for row in rows], headings, cells, left={"cut", "next best"})


def _label(row: Row) -> tuple[str, str]:
    return row.name, f" + {', '.join(row.followers)}" if row.followers else ""


def _print_table(
    console: Console,
    first: str,
    names: Sequence[tuple[str, str]],
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    left: Iterable[str] = (),
) -> None:
    """A table whose first column takes the room that the others leave: (name, what may be left out) per row."""
    widths = [max(map(len, (heading, *(row[i] for row in cells)))) for i, heading in enumerate(headings)]
    longest = max((len(name) for name, _ in names), default=0)
    free = min(console.width, WIDEST) - sum(widths)
    gap = 2 if free - 2 * len(widths) >= min(longest, NAMES_TO) else 1
    room = free - gap * (len(widths) + 1)  # the last column is padded too
    room = max(NAMES_FROM, min(room, NAMES_TO, max((len(a + b) for a, b in names), default=0)))
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for (name, rest), row in zip(names, cells, strict=True):
        text = name + rest if len(name + rest) <= room else shortened(name, room)
        table.add_row(_plain(text), *map(_plain, row))
    console.print(table)


def shortened(name: str, room: int) -> str:
    """A name with its middle left out where it is too long.

    >>> shortened("features.denseblock1.conv", 12)
    'featur….conv'
    """
    if len(name) <= room:
        return name
    head = room // 2
    return f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"


def _plain(text: str) -> str:
    return text.replace("[", chr(92) + "[")


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    return show_seconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _size(count: int) -> str:
    return show_bytes(count) if count else "-"


def _why(alternative: Alternative | None) -> str:
    if alternative is None or not isfinite(alternative.extra):
        return "-"
    return f"{alternative.cut} {_signed_time(alternative.extra)}"


def _signed_time(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{_time(abs(seconds)) if abs(seconds) > 5e-7 else '0 us'}"


def _signed_size(count: int) -> str:
    return f"{'+' if count >= 0 else '-'}{show_bytes(abs(count))}"


def show_totals(console: Console, price: Price, search: SearchResult | None = None) -> None:
    """What the step takes, and what the search knows about it."""
    table = Table(show_header=False, box=None, pad_edge=False)
    parts = f"compute {_time(price.compute)}, sums not hidden {_time(price.exposed)}, update {_time(price.update)}"
    table.add_row("predicted step", f"[bold]{_time(price.seconds)}[/bold] ({parts})")
    if search is not None and search.bound:
        table.add_row("lower bound", f"{_time(search.bound)}: no plan over these cuts is faster, by this cost model")
    table.add_row("sent per step", f"{show_bytes(price.bytes)}, by {price.ranks} ranks together")
    if price.factors:
        table.add_row("factors, not sums", ", ".join(_some(price.factors)))
    if price.recompute:
        table.add_row("recomputes", _recomputing(price, search))
    table.add_row("peak per rank", ", ".join(_some([show_bytes(memory.total) for memory in price.memory])))
    if search is not None and search.offered is not None:
        rest = "; more make no step shorter" if price.ranks < search.offered else ""
        table.add_row("ranks", f"{price.ranks} of {search.offered} devices{rest}")
    if search is not None:
        seconds = f"{search.search_seconds:.2g} s, after {search.table_seconds:.2g} s for the tables"
        table.add_row("search", f"{seconds}; {search.stages} stages, {search.choices} cuts")
    console.print(table)


def _recomputing(price: Price, search: SearchResult | None) -> str:
    """What it means that a plan recomputes; where that was the search's choice, what it costs and saves."""
    what = "activations are computed a second time in backward"
    if search is None or search.without is None or not search.price.recompute:
        return what
    without = search.without
    longer, saved = price.seconds - without.seconds, without.peak - price.peak
    beside = f"{_signed_time(longer)} and {_signed_size(-saved)} beside"
    if without.cuts == price.cuts and longer >= 0:
        return f"{what}: {beside} the same cuts without, which do not fit; nor does any other plan that was found"
    return f"{what}: {beside} the best plan without that fits"


def _some(texts: Sequence[str], most: int = 4) -> list[str]:
    """The distinct ones, the first few of many."""
    distinct = list(dict.fromkeys(texts))
    return distinct if len(distinct) <= most else [*distinct[: most - 1], "...", distinct[-1]]


def show_rivals(
    console: Console,
    chosen: Price,
    chosen_name: str,
    entrants: Mapping[str, Price],
    fixed: Sequence[Price],
    race: Sequence[Finish],
) -> None:
    """The fixed strategies and other entrants of the race beside the plan, best prediction first."""
    finishes = {rival.name: rival.seconds for rival in race}
    everyone = {chosen_name: chosen, **{rival.name: rival for rival in fixed}, **entrants}
    ordered: list[tuple[list[str], Price]] = []
    for name, rival in sorted(everyone.items(), key=lambda item: (item[0] != chosen_name, item[1].seconds)):
        way = rival.cuts, rival.recompute
        alike = next((names for names, other in ordered if (other.cuts, other.recompute) == way), None)
        if alike is None:
            ordered.append(([name], rival))
        else:  # a strategy that the search found too
            alike.append(name)
    headings = ["predicted", "ratio", "sent", "peak"] + (["measured", "error"] if race else [])
    cells, names = [], []
    for alike, rival in ordered:
        ratio = f"{rival.seconds / chosen.seconds:.2f}"
        row = [_time(rival.seconds), ratio, _size(rival.bytes), show_bytes(rival.peak)]
        if race:
            took = next((finishes[name] for name in alike if name in finishes), None)
            row += ["-", "-"] if took is None else [_time(took), f"{(rival.seconds - took) / took:+.0%}"]
        cells.append(row)
        names.append((" = ".join(alike) + (" (chosen)" if chosen_name in alike else ""), ""))
    _print_table(console, "plan", names, headings, cells)


def show_lines(console: Console, plan: Plan) -> None:
    """A plan file by itself: runs of lines with the same cut, each one row, and whether it recomputes."""
    names, cells = [], []
    for cut, run in groupby(plan.layers, key=lambda line: line[1]):
        patterns = [pattern for pattern, _ in run]
        label = patterns[0] if len(patterns) == 1 else f"{patterns[0]} … {patterns[-1]}"
        names.append((label, ""))
        cells.append([str(len(patterns)), str(cut), str(cut.parts)])
    _print_table(console, "layers", names, ["lines", "cut", "ranks"], cells, left={"cut"})
    if plan.laps is not None:
        console.print(f"Linear layers and all behind them run in laps: scheme {plan.laps}.")
    if plan.recompute:
        console.print("Activations are computed a second time in backward.")


def show_differing_lines(console: Console, a: Plan, b: Plan) -> None:
    """Lines that two plan files do not share."""
    first, second = dict(a.layers), dict(b.layers)
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    if a.laps != b.laps:
        console.print(f"Linear layers in laps: {a.laps or 'no'} and {b.laps or 'no'}.")
    _say_which_recomputes(console, (a, b))
    if not names:
        console.print("Both plans cut every layer alike.")
        return
    cells = [[str(first.get(name, "-")), str(second.get(name, "-"))] for name in names]
    headings = _headings(a, b)
    _print_table(console, "layer", [(name, "") for name in names], headings, cells, left=headings)
    console.print(f"{len(names)} of {len({*first, *second})} lines differ.")


def _say_which_recomputes(console: Console, plans: tuple[Plan, Plan]) -> None:
    """Where two plans differ in that."""
    if plans[0].recompute != plans[1].recompute:
        one = "first" if plans[0].recompute else "second"
        console.print(f"The {one} plan computes activations a second time in backward, the other keeps them.")


def _headings(a: Plan, b: Plan) -> list[str]:
    return [shortened(a.name, 12), shortened(b.name, 12)] if a.name != b.name else ["first", "second"]


def show_difference(console: Console, plans: tuple[Plan, Plan], prices: tuple[Price, Price], graph: LayerGraph) -> None:
    """Stage by stage where cuts, seconds or bytes differ, and in total; the second minus the first."""
    _say_which_recomputes(console, plans)
    layers, other_layers = ({layer.name: layer for layer in price.layers} for price in prices)
    first, second = (rows_of(price, graph) for price in prices)
    heads = [row.name for row in first if row.name in {other.name for other in second}]
    home = _homes(graph, heads)
    names, cells = [], []
    for head in heads:
        members = [name for name, owner in home.items() if owner == head]
        seconds = [sum(of[m].compute + of[m].communication for m in members) for of in (layers, other_layers)]
        sent = [sum(of[m].bytes for m in members) for of in (layers, other_layers)]
        cuts = [str(of[head].cut) for of in (layers, other_layers)]
        if cuts[0] != cuts[1] or sent[0] != sent[1] or abs(seconds[1] - seconds[0]) > 5e-7:
            names.append((head, ""))
            cells.append([*cuts, _time(seconds[0]), _signed_time(seconds[1] - seconds[0]), _size(sent[0]),
                          _signed_size(sent[1] - sent[0])])  # fmt: skip
    if not names:
        console.print("Both plans cut every layer alike.")
    else:
        left = _headings(*plans)
        headings = [*left, "time", "change", "sent", "change "]
        _print_table(console, "layer", names, headings, cells, left=left)
        console.print(f"{len(names)} of {len(heads)} stages differ; changes are from the first plan to the second.\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", *_headings(*plans), "change"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    a, b = prices
    table.add_row("predicted step", _time(a.seconds), _time(b.seconds), _signed_time(b.seconds - a.seconds))
    table.add_row("sent per step", _size(a.bytes), _size(b.bytes), _signed_size(b.bytes - a.bytes))
    table.add_row("peak per rank", _size(a.peak), _size(b.peak), _signed_size(b.peak - a.peak))
    console.print(table)


def _homes(graph: LayerGraph, heads: Sequence[str]) -> dict[str, str]:
    """For every layer the row it is counted in: the last head at or before it in its stage."""
    stage_of = {op.layer.name: stage for stage in stages_of(graph, 1) for op in stage.ops}
    homes: dict[str, str] = {}
    for layer in graph.layers:
        stage = stage_of.get(layer.name)
        if layer.name in heads or stage is None:
            homes[layer.name] = layer.name
        else:
            members = [op.layer.name for op in stage.ops]
            homes[layer.name] = next(
                name for name in reversed(members[: members.index(layer.name) + 1]) if name in heads
            )
    return homes
