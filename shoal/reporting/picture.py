"""A network under a plan as an SVG picture: stages top to bottom, branches side by side, re-cuts on the edges.

Each stage is a box with its name, followers, output shape and cut, and its numbers where one points at it. The colour
is the kind of cut, the small drawing the output tensor with the lines along which it is cut. An edge over which rows
travel between ranks is thick and bears their bytes in one step, forward and backward together. Elements have classes,
by which a page gives them other colours. Pure: an outline in, text out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from shoal.outline import Outline, OutlineStage
from shoal.partition import Cut
from shoal.units import show_bytes, show_seconds

COLOURS = {
    "n": ("#dbeafe", "#2563eb", "by sample (n)"),
    "c": ("#ffedd5", "#c2570c", "by channel (c)"),
    "h/w": ("#dcfce7", "#15803d", "in space (d, h, w)"),
    "k": ("#f3e8ff", "#7e22ce", "partial sums (k)"),
    "mixed": ("#fce7f3", "#be185d", "several dims"),
    "whole": ("#f1f5f9", "#475569", "whole, on one rank"),
}
"""Fill, line and words of every kind of cut."""
TRAVEL = "#b91c1c"
"""Of whatever goes from rank to rank."""
INK, SOFT, FAINT, EDGE = "#0f172a", "#334155", COLOURS["whole"][1], "#94a3b8"
_CLASSES = {
    **{line: f"cut-{'space' if kind == 'h/w' else kind}" for kind, (_, line, _) in COLOURS.items()},
    TRAVEL: "travel",
    INK: "ink",
    SOFT: "soft",
    EDGE: "line",
}
"""By which a page that is dark finds what to give other colours."""
BOX_WIDTH, BOX_HEIGHT = 272, 62
GAP_X, GAP_Y = 28, 40
LANE = 16
"""What an edge that passes a row of boxes takes of its width."""
MARGIN, HEAD = 28, 96
PASSES = 60
"""Over all rows, until columns have settled."""
MOST_LINES = 8
"""A drawing shows at most so many parts along one dim."""


def kind_of(cut: Cut) -> str:
    """The kind of a cut, by which it is coloured.

    >>> [kind_of(Cut.parse(text)) for text in ("n4", "h2w2", "n2c2", "1")]
    ['n', 'h/w', 'mixed', 'whole']
    """
    kinds = {"h/w" if letter in "dhw" else letter for letter, _ in cut.degrees}
    return "whole" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"


@dataclass
class _Place:
    """A box, or a lane through which an edge passes a row."""

    box: OutlineStage | None
    row: int
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        return BOX_WIDTH if self.box is not None else LANE

    @property
    def light(self) -> bool:
        """Whether it stands aside: an input that joins the network further down."""
        return self.box is not None and self.box.is_input and self.row > 0

    @property
    def weight(self) -> float:
        """What it counts for where places compete for room."""
        return 0.02 if self.box is None or self.light else 1.0


def picture(outline: Outline, *, title: str = "") -> str:
    """The SVG text."""
    rows, chains = _layers(outline.stages)
    kinds = {kind_of(stage.parsed_cut()) for stage in outline.stages if not stage.is_input}
    _order(rows)
    width = _place(rows)
    by_edge = {(edge.source, edge.reader): edge.bytes for edge in outline.edges}
    subtitle = (
        f"{show_bytes(outline.row_bytes)} of rows travel between ranks in one step, beside sums of gradients and "
        "statistics"
    )
    tops = [HEAD + index * (BOX_HEIGHT + GAP_Y) for index in range(len(rows))]
    width = max(width + 2 * MARGIN, _legend_width(kinds) + 2 * MARGIN, 9 * len(title) + 2 * MARGIN, 6 * len(subtitle))
    height = HEAD + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + MARGIN
    shift = (width - _extent(rows)) / 2
    for row in rows:
        for place in row:
            place.x += shift
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(MARGIN, 30, title, 18, INK, weight="bold"),
        _text(MARGIN, 50, subtitle, 12, FAINT),
        *_legend(kinds),
    ]
    labels: list[str] = []
    for (source, reader), chain in chains.items():
        parts.append(_edge(chain, tops, by_edge.get((source, reader)), labels))
    for place in (place for row in rows for place in row if place.box is not None):
        assert place.box is not None
        parts.append(_draw_box(place, tops[place.row], outline))
        within = by_edge.get((place.box.name, place.box.name), 0)
        if within:  # partial sums that are added up before a follower of the same stage
            labels.append(
                _pill(place.x + BOX_WIDTH - 52, tops[place.row] + BOX_HEIGHT + 3, f"sums {show_bytes(within)}")
            )
    return "\n".join([*parts, *labels, "</svg>"]) + "\n"


def numbers_of(stage: OutlineStage, outline: Outline) -> list[str]:
    """What is shown where one points at a stage, a line each."""
    lines = [stage.name, f"output {_shape(stage)}"]
    if stage.is_input:
        return lines
    cut = stage.parsed_cut()
    lines.append(f"cut {cut}: {cut.parts} of {outline.ranks} ranks")
    if stage.parameters:
        lines.append(f"{stage.parameters:,} parameters")
    if rows := outline.rows_into(stage.name):
        lines.append(f"rows to it: {show_bytes(rows)} per step")
    if stage.gradient_bytes:
        lines.append(f"sums of gradients: {show_bytes(stage.gradient_bytes)} per step")
    if stage.compute_seconds is not None:
        lines.append(f"predicted: {show_seconds(stage.compute_seconds)} computing")
    if stage.communication_seconds:
        lines.append(f"predicted: {show_seconds(stage.communication_seconds)} communicating")
    return lines


def _shape(stage: OutlineStage) -> str:
    return " x ".join(map(str, stage.shape))


# Where it is drawn


def _layers(boxes: Sequence[OutlineStage]) -> tuple[list[list[_Place]], dict[tuple[str, str], list[_Place]]]:
    """Rows by the longest way from an input, and for every edge its places from source to reader."""
    depth: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for box in boxes:
        depth[box.name] = 1 + max((depth[name] for name in box.reads), default=-1)
        for name in box.reads:
            readers.setdefault(name, []).append(box.name)
    for box in reversed(boxes):  # what only waits, such as labels for the loss, waits near its reader
        if box.name in readers and not box.reads:
            depth[box.name] = min(depth[name] for name in readers[box.name]) - 1
    rows: list[list[_Place]] = [[] for _ in range(1 + max(depth.values(), default=0))]
    places: dict[str, _Place] = {}
    chains: dict[tuple[str, str], list[_Place]] = {}
    for box in boxes:
        places[box.name] = place = _Place(box, depth[box.name])
        rows[place.row].append(place)
    for box in boxes:
        for name in box.reads:
            chain = [places[name]]
            for row in range(depth[name] + 1, depth[box.name]):
                lane = _Place(None, row)
                rows[row].append(lane)
                chain.append(lane)
            chain.append(places[box.name])
            chains[name, box.name] = chain
            for upper, lower in pairwise(chain):
                upper.below.append(lower)
                lower.above.append(upper)
    return rows, chains


def _order(rows: list[list[_Place]]) -> None:
    """Each row by the mean position of its neighbours, down and up in turns, until edges cross little."""
    for turn in range(8):
        down = turn % 2 == 0
        for row in rows if down else reversed(rows):
            position = {id(p): i / max(len(r) - 1, 1) for r in rows for i, p in enumerate(r)}

            def middle(place: _Place, position: dict[int, float] = position, down: bool = down) -> float:
                near = place.above if down else place.below
                return sum(position[id(p)] for p in near) / len(near) if near else position[id(place)]

            row.sort(key=middle)


def _place(rows: list[list[_Place]]) -> float:
    """Columns: every place as near to its neighbours' mean as the order and the widths allow. The width needed."""
    for row in rows:
        x = -(sum(place.width for place in row) + GAP_X * (len(row) - 1)) / 2
        for place in row:
            place.x = x
            x += place.width + GAP_X
    for turn in range(PASSES):
        for row in rows if turn % 2 == 0 else reversed(rows):
            spine = [place for place in row if not place.light]
            wanted = []
            for place in row:
                if len(spine) == 1 and place is spine[0]:  # all goes through it: such boxes stand in one column
                    wanted.append(-place.width / 2)
                    continue
                near = [(p.x + p.width / 2, _pull(place, p)) for p in place.above + place.below]
                weight = sum(pull for _, pull in near)
                middle = sum(x * pull for x, pull in near) / weight if weight else place.x + place.width / 2
                wanted.append(middle - place.width / 2)
            _spread(row, wanted)
    left = min(place.x for row in rows for place in row)
    for row in rows:
        for place in row:
            place.x -= left
    return _extent(rows)


def _pull(place: _Place, other: _Place) -> float:
    """How much an edge wants to be straight: between boxes more than where it passes boxes by."""
    if place.box is None:
        return 3.0 if other.box is None else 1.0
    return 0.1 if other.box is None or other.light else 1.0


def _extent(rows: Sequence[Sequence[_Place]]) -> float:
    return max(place.x + place.width for row in rows for place in row)


def _spread(row: Sequence[_Place], wanted: Sequence[float]) -> None:
    """The positions nearest to those wanted that keep order and distance: means over blocks that would overlap."""
    blocks: list[tuple[float, list[_Place]]] = []
    offsets: dict[int, float] = {}
    for place, want in zip(row, wanted, strict=True):
        offsets[id(place)] = 0.0
        blocks.append((want, [place]))
        while len(blocks) > 1:
            (before, members), (after, others) = blocks[-2], blocks[-1]
            last = members[-1]
            reach = offsets[id(last)] + last.width + GAP_X
            if before + reach <= after:
                break
            for other in others:
                offsets[id(other)] += reach
            here, there = sum(p.weight for p in members), sum(p.weight for p in others)
            joined = (before * here + (after - reach) * there) / (here + there)
            blocks[-2:] = [(joined, members + others)]
    for start, members in blocks:
        for place in members:
            place.x = start + offsets[id(place)]


# How it is drawn


def _text(x: float, y: float, text: str, size: int, fill: str, *, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text{_class_of(fill)} x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _class_of(colour: str) -> str:
    """By which a page finds what has this colour."""
    return f' class="{_CLASSES[colour]}"' if colour in _CLASSES else ""


def _draw_box(place: _Place, top: float, outline: Outline) -> str:
    stage = place.box
    assert stage is not None
    told = escape("\n".join(numbers_of(stage, outline)))
    shapes = _input_shapes(place, stage, top) if stage.is_input else _stage_shapes(place, stage, top, outline.ranks)
    return "\n".join([f'<g class="stage"><title>{told}</title>', *shapes, "</g>"])


def _input_shapes(place: _Place, stage: OutlineStage, top: float) -> list[str]:
    middle = place.x + BOX_WIDTH / 2
    return [
        f'<rect class="paper line" x="{place.x + 40:.1f}" y="{top + 12:.1f}" width="{BOX_WIDTH - 80}" '
        f'height="{BOX_HEIGHT - 12}" rx="19" fill="white" stroke="{EDGE}"/>',
        _text(middle, top + 34, _shortened(stage.name, 22), 12, INK, weight="bold", anchor="middle"),
        _text(middle, top + 51, _shape(stage), 11, FAINT, anchor="middle"),
    ]


def _stage_shapes(place: _Place, stage: OutlineStage, top: float, ranks: int) -> list[str]:
    cut = stage.parsed_cut()
    fill, line, _ = COLOURS[kind_of(cut)]
    parts = f"{cut.parts} of {ranks} ranks" if cut.parts < ranks else ""
    left = place.x + 62
    room = int((BOX_WIDTH - 76 - 9 * len(str(cut))) / 7.7)
    words = " + ".join(stage.operators)
    return [
        f'<rect class="box {_CLASSES[line]}" x="{place.x:.1f}" y="{top:.1f}" width="{BOX_WIDTH}" '
        f'height="{BOX_HEIGHT}" rx="7" fill="{fill}" stroke="{line}" stroke-width="1.3"/>',
        _glyph(place.x + 8, top + 9, 46, 44, stage.shape, cut, line),
        _text(left, top + 18, _shortened(stage.name, room), 12, INK, weight="bold"),
        _text(left, top + 34, _shortened(words, 33), 11, SOFT),
        _text(left, top + 51, _shape(stage), 11, SOFT),
        _text(place.x + BOX_WIDTH - 8, top + 18, str(cut), 13, line, weight="bold", anchor="end"),
        _text(place.x + BOX_WIDTH - 8, top + 51, parts, 10, line, anchor="end"),
    ]


def _glyph(x: float, y: float, width: float, height: float, shape: tuple[int, ...], cut: Cut, line: str) -> str:
    """The output tensor: a block with height and width in front and channels in depth; samples are several blocks.

    A tensor without height is a bar of channels. Partial sums are hatched.
    """
    samples = min(cut.degree("n"), 4)
    columns = 1 if samples == 1 else 2
    lines = -(-samples // columns)
    cell_w, cell_h = width / columns, height / lines
    size = min(cell_w, cell_h)
    shapes = []
    for number in range(samples):
        left = x + (number % columns) * cell_w + (cell_w - size) / 2
        top = y + (number // columns) * cell_h + (cell_h - size) / 2
        draw = _block if len(shape) > 3 else _bar
        shapes.append(draw(left + 1, top + 1, size - 3, cut, line))
    if cut.degree("n") > samples:
        shapes.append(_text(x + width / 2, y + height / 2 + 4, "...", 14, line, weight="bold", anchor="middle"))
    return "\n".join(shapes)


def _lines(segments: Sequence[tuple[float, float, float, float]], colour: str, *, dashed: bool = False) -> str:
    path = " ".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for a, b, c, d in segments)
    dash = ' stroke-dasharray="2 1.5"' if dashed else ""
    return f'<path{_class_of(colour)} d="{path}" stroke="{colour}" stroke-width="1" fill="none"{dash}/>' if path else ""


def _block(x: float, y: float, size: float, cut: Cut, line: str) -> str:
    slant = size * 0.34
    front = size - slant
    top = y + slant
    faces = (
        f'<path class="face {_CLASSES[line]}" d="M{x:.1f} {top:.1f}l{slant:.1f} {-slant:.1f}h{front:.1f}v{front:.1f}'
        f'l{-slant:.1f} {slant:.1f}h{-front:.1f}z" fill="white" stroke="{line}" stroke-width="0.9"/>'
    )
    edges = [(x, top, x + front, top), (x + front, top, x + front, top + front),
             (x + front, top, x + size, y)]  # fmt: skip
    cuts: list[tuple[float, float, float, float]] = []
    rows, columns = _shown(cut, "h"), _shown(cut, "w")
    for i in range(1, rows):
        at = top + front * i / rows
        cuts += [(x, at, x + front, at), (x + front, at, x + size, at - slant)]
    for i in range(1, columns):
        at = x + front * i / columns
        cuts += [(at, top, at, top + front), (at, top, at + slant, top - slant)]
    sheets = max(_shown(cut, "c"), _shown(cut, "d"))
    for i in range(1, sheets):
        by = slant * i / sheets
        cuts += [(x + by, top - by, x + front + by, top - by), (x + front + by, top - by, x + front + by,
                 top + front - by)]  # fmt: skip
    hatch = [(x, top + front * i / 4, x + front * (4 - i) / 4, top + front) for i in range(4)]
    hatch += [(x + front * i / 4, top, x + front, top + front * (4 - i) / 4) for i in range(1, 4)]
    summed = _lines(hatch, line, dashed=True) if cut.degree("k") > 1 else ""
    return faces + _lines(edges, line) + _lines(cuts, line) + summed


def _bar(x: float, y: float, size: float, cut: Cut, line: str) -> str:
    tall = max(size * 0.3, 5.0)
    top = y + (size - tall) / 2
    parts = max(_shown(cut, "c"), _shown(cut, "w"), _shown(cut, "h"))
    cuts = [(x + size * i / parts, top, x + size * i / parts, top + tall) for i in range(1, parts)]
    hatch = [(x + size * i / 5, top, x + size * (i + 1) / 5, top + tall) for i in range(5)]
    summed = _lines(hatch, line, dashed=True) if cut.degree("k") > 1 else ""
    outline = (
        f'<rect class="face {_CLASSES[line]}" x="{x:.1f}" y="{top:.1f}" width="{size:.1f}" height="{tall:.1f}" '
        f'fill="white" stroke="{line}" '
        'stroke-width="0.9"/>'
    )
    return outline + _lines(cuts, line) + summed


def _shown(cut: Cut, letter: str) -> int:
    return min(cut.degree(letter), MOST_LINES)


def _edge(chain: Sequence[_Place], tops: Sequence[float], sent: int | None, labels: list[str]) -> str:
    """A smooth line from box to box; where rows travel it is thick and a label with their bytes joins `labels`."""
    colour, thick = (TRAVEL, 2.2) if sent is not None else (EDGE, 1.2)
    points = []
    for place in chain:
        x = place.x + place.width / 2
        if place is not chain[0]:
            points.append((x, tops[place.row] + (12 if place.box is not None and place.box.is_input else 0)))
        if place is not chain[-1]:
            points.append((x, tops[place.row] + BOX_HEIGHT))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        curve = f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} "
        path += f"{'L' if x0 == x1 else curve}{x1:.1f} {y1:.1f}"
    end_x, end_y = points[-1]
    tip = f'<path class="tip {_CLASSES[colour]}" d="M{end_x:.1f} {end_y:.1f}l-4 -7h8z" fill="{colour}"/>'
    if sent:
        (x0, y0), (x1, y1) = points[-2], points[-1]
        labels.append(_pill((x0 + x1) / 2, (y0 + y1) / 2, show_bytes(sent)))
    return f'<path class="{_CLASSES[colour]}" d="{path}" stroke="{colour}" stroke-width="{thick}" fill="none"/>{tip}'


def _pill(x: float, y: float, text: str) -> str:
    wide = 6.2 * len(text) + 10
    return (
        f'<rect class="paper travel" x="{x - wide / 2:.1f}" y="{y - 9:.1f}" width="{wide:.1f}" height="16" rx="8" '
        f'fill="white" stroke="{TRAVEL}"/>' + _text(x, y + 3, text, 10, TRAVEL, anchor="middle")
    )


def _legend_width(kinds: Collection[str]) -> float:
    return sum(30 + 6.4 * len(words) for kind, (_, _, words) in COLOURS.items() if kind in kinds) + 150


def _legend(kinds: Collection[str]) -> list[str]:
    """Of the kinds of cuts that there are."""
    shapes, x = [], float(MARGIN)
    for fill, line, words in (colours for kind, colours in COLOURS.items() if kind in kinds):
        shapes.append(
            f'<rect class="box {_CLASSES[line]}" x="{x:.0f}" y="64" width="14" height="14" rx="3" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        shapes.append(_text(x + 19, 75, words, 11, SOFT))
        x += 30 + 6.4 * len(words)
    shapes.append(_lines([(x, 71, x + 22, 71)], TRAVEL).replace('width="1"', 'width="2.2"'))
    shapes.append(_text(x + 28, 75, "rows travel here", 11, SOFT))
    return shapes


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    head = room // 2
    return f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"
