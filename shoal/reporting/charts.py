"""The charts of a page, as Vega-Lite by Altair: what is drawn from which rows. Colours are the page's, by CSS.

A chart names its rows and does not hold them; the page has each set of rows once. Each is as wide as its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from shoal.reporting import headings
from shoal.reporting.datasets import Dataset
from shoal.reporting.figures import Figures, target_of
from shoal.reporting.records import Study

PALETTE = 8
"""Colours for strategies that the page has; beyond them lines are dashed."""
DASHES = ([1, 0], [7, 3], [2, 3])
KINDS = ("data", "forward", "backward", "move", "sum", "gradients", "exchange", "wait", "update", "test")
"""Of slices, in the order of their colours."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
BAR = 22
LINE_HEIGHT = 260


@dataclass(frozen=True)
class ChartSpec:
    """One chart in its place on the page."""

    name: str
    section: str
    heading: str
    """A statement, computed."""
    note: str
    """What is drawn."""
    data: str
    """The rows' name."""
    spec: Mapping[str, Any]
    wide: bool = False


@dataclass(frozen=True)
class _Look:
    """How strategies look in all charts alike."""

    names: tuple[str, ...]

    @property
    def colour(self) -> alt.Color:
        return alt.Color("strategy:N", scale=self.scale, legend=None)

    @property
    def scale(self) -> alt.Scale:
        colours = [f"var(--s{number % PALETTE})" for number in range(len(self.names))]
        return alt.Scale(domain=list(self.names), range=colours)

    @property
    def dash(self) -> alt.StrokeDash:
        dashes = [DASHES[number // PALETTE % len(DASHES)] for number in range(len(self.names))]
        return alt.StrokeDash("strategy:N", scale=alt.Scale(domain=list(self.names), range=dashes), legend=None)

    def bars(self) -> alt.Y:
        return alt.Y("strategy:N", sort=list(self.names), title=None, axis=alt.Axis(labelLimit=150))


def charts_of(study: Study, figures: Sequence[Figures], datasets: Mapping[str, Dataset]) -> list[ChartSpec]:
    """Those for which there are rows."""
    look = _Look(study.strategies)
    drawn = [
        *_curves(study, figures, datasets, look),
        *_speeds(study, figures, datasets, look),
        *_costs(figures, datasets, look),
        *_timelines(datasets),
        *_between_replicas(study, datasets, look),
        *_classes(datasets),
        *_rates(datasets, look),
    ]
    return [chart for chart in drawn if datasets.get(chart.data)]


def configured(chart: Any) -> dict[str, Any]:
    """A chart's specification with the looks of the page, without rows."""
    ink, soft, grid = "var(--ink)", "var(--soft)", "var(--grid)"
    styled = chart.configure(
        font=FONT,
        background="transparent",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            labelColor=soft, titleColor=soft, gridColor=grid, domainColor=grid, tickColor=grid, labelFontSize=12,
            titleFontSize=12, titleFontWeight="normal", titlePadding=10, labelPadding=6, gridOpacity=1,
        ),
        legend=alt.LegendConfig(
            labelColor=soft, titleColor=soft, orient="top", labelFontSize=12, titleFontSize=12, symbolType="square",
            titleFontWeight="normal", columns=4,
        ),
        header=alt.HeaderConfig(labelColor=ink, titleColor=ink, labelFontSize=12, labelFontWeight="bold"),
        text=alt.MarkConfig(color=ink, font=FONT, fontSize=12),
        rule=alt.MarkConfig(color=soft),
    )  # fmt: skip
    spec: dict[str, Any] = styled.to_dict()
    return spec


def _chart(rows: str, height: float = LINE_HEIGHT) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=rows), height=height, width="container")


def _tall(rows: Dataset, *names: str, each: float) -> float:
    """The height of a chart with a line for every value of these."""
    return each * max(len({tuple(row[name] for name in names) for row in rows}), 1)


# Learning


def _curves(
    study: Study, figures: Sequence[Figures], datasets: Mapping[str, Dataset], look: _Look
) -> Iterator[ChartSpec]:
    target = None if study.alone is not None else target_of(study)
    clock = headings.clock_title(study)
    samples = "training samples seen"
    yield ChartSpec(
        "accuracy-time", "learning", headings.accuracy_by_time(study, figures),
        "Test accuracy against time; a line for each run, a point for each test."
        + ("" if target is None else " The dotted line is the target."),
        "tests", _line("tests", "seconds", clock, "accuracy", "test accuracy", look, percent=True, target=target),
    )  # fmt: skip
    yield ChartSpec(
        "accuracy-samples", "learning", headings.accuracy_by_samples(study, figures),
        "Test accuracy against training samples: what the strategy costs in learning, whatever its speed.",
        "tests", _line("tests", "samples", samples, "accuracy", "test accuracy", look, percent=True, target=target),
    )  # fmt: skip
    yield ChartSpec(
        "loss-time", "learning", headings.loss(study), "Training loss against time.",
        "steps", _line("steps", "seconds", clock, "loss", "training loss", look, points=False),
    )  # fmt: skip
    yield ChartSpec(
        "loss-samples", "learning", headings.test_loss(study), "Test loss against training samples.",
        "tests", _line("tests", "samples", samples, "loss", "test loss", look),
    )  # fmt: skip
    if any("iou" in row for row in datasets.get("tests", ())):
        yield ChartSpec(
            "iou-time", "learning", headings.iou(study), "Foreground intersection over union against time.",
            "tests", _line("tests", "seconds", clock, "iou", "foreground IoU", look),
        )  # fmt: skip


def _line(
    rows: str,
    x: str,
    x_title: str,
    y: str,
    y_title: str,
    look: _Look,
    *,
    percent: bool = False,
    points: bool = True,
    target: float | None = None,
) -> dict[str, Any]:
    shown = [
        alt.Tooltip("strategy:N"), alt.Tooltip("run:N"), alt.Tooltip("step:Q", format=","),
        alt.Tooltip("samples:Q", format=","), alt.Tooltip("seconds:Q", format=".2f", title="seconds"),
        alt.Tooltip(f"{y}:Q", format=".2%" if percent else ".4f", title=y_title),
    ]  # fmt: skip
    base = _chart(rows).transform_filter(f"isValid(datum['{y}'])")
    axis_x = alt.X(
        f"{x}:Q",
        title=x_title,
        scale=alt.Scale(domainMin=0),
        axis=alt.Axis(grid=False, tickCount=6, format="~s" if x == "samples" else ""),
    )
    axis_y = alt.Y(f"{y}:Q", title=y_title, scale=alt.Scale(zero=False), axis=alt.Axis(format="%" if percent else ""))
    common = {"x": axis_x, "y": axis_y, "detail": "run:N", "color": look.colour}
    layers: list[alt.Chart] = [
        base.mark_line(strokeWidth=2, interpolate="linear", clip=True).encode(**common, strokeDash=look.dash)
    ]
    if points:
        layers.append(base.mark_point(filled=True, size=34, opacity=1).encode(**common, tooltip=shown))
    # A wide, invisible point around each: one need not aim well to read a number.
    layers.append(base.mark_point(filled=True, size=300, opacity=0).encode(**common, tooltip=shown))
    if target is not None:
        one = alt.Chart(alt.InlineData(values=[{"target": target}]))
        layers.append(one.mark_rule(strokeDash=[2, 4], strokeWidth=1.5, color="var(--ink)").encode(y=alt.Y("target:Q")))
    return configured(alt.layer(*layers))


# Speed


def _speeds(
    study: Study, figures: Sequence[Figures], datasets: Mapping[str, Dataset], look: _Look
) -> Iterator[ChartSpec]:
    if study.alone is not None:
        yield ChartSpec(
            "pace", "speed", headings.pace(study), "Samples per second of training as the run went.", "steps",
            _line("steps", "samples", "training samples seen", "samples_per_second", "samples/s", look, points=False),
        )  # fmt: skip
        return
    yield ChartSpec(
        "step-times", "speed", headings.step_times(study),
        "A dot for each round, in which every strategy took its turn; the line is the median.", "step_times",
        _dots(datasets.get("step_times", []), look),
    )  # fmt: skip
    ends = "samples_per_second_least", "samples_per_second_most"
    pace = _ranged_bars("strategies", datasets["strategies"], "samples_per_second", "samples/s", look, ",.0f", ends)
    yield ChartSpec(
        "throughput", "speed", headings.throughput(figures),
        "Training samples per second, data loading included, tests excluded; the line is the range over seeds.",
        "strategies", pace,
    )  # fmt: skip
    scaling = datasets.get("scaling", [])
    if len(scaling) > 1:
        beside = scaling[0]["beside"]
        title = f"times as fast as {beside}"
        yield ChartSpec(
            "speedup", "speed", headings.speedup(scaling),
            f"Samples per second beside {beside}; the line is the range over seeds.", "scaling",
            _ranged_bars("scaling", scaling, "speedup", title, look, ".2f", ("least", "most")),
        )  # fmt: skip
        workers = {each.workers for each in figures if each.workers is not None}
        if len(workers) > 1:
            yield ChartSpec(
                "efficiency", "speed", headings.efficiency(scaling), "Speedup by how many times as many workers.",
                "scaling", _ranged_bars("scaling", scaling, "efficiency", "efficiency", look, ".0%"),
            )  # fmt: skip


def _ranged_bars(
    name: str,
    rows: Dataset,
    value: str,
    title: str,
    look: _Look,
    number: str,
    ends: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Bars with a number behind each, and a line between `ends`, which are of the range, where there are such."""
    shown = [alt.Tooltip("strategy:N"), alt.Tooltip(f"{value}:Q", format=number, title=title)]
    known = [row for row in rows if row[value] is not None]
    base = _chart(name, _tall(known, "strategy", each=BAR * 1.5)).transform_filter(f"isValid(datum['{value}'])")
    x = alt.X(f"{value}:Q", title=title, axis=alt.Axis(tickCount=5, format="~s" if number == ",.0f" else number))
    y = look.bars()
    last, layers = value, []
    if ends is not None:
        low, last = ends
        shown += [
            alt.Tooltip(f"{end}:Q", format=number, title=title)
            for end, title in zip(ends, ("least", "most"), strict=True)
        ]
        rule = base.mark_rule(strokeWidth=1.5, color="var(--ink)")
        layers.append(rule.encode(x=alt.X(f"{low}:Q"), x2=f"{last}:Q", y=y, tooltip=shown))
    bars = base.mark_bar(height=BAR * 0.8, cornerRadiusEnd=3).encode(x=x, y=y, color=look.colour, tooltip=shown)
    numbers = base.mark_text(align="left", dx=7, color="var(--ink)")
    layers.append(numbers.encode(x=alt.X(f"{last}:Q"), y=y, text=alt.Text(f"{value}:Q", format=number)))
    return configured(alt.layer(bars, *layers))


def _dots(rows: Dataset, look: _Look) -> dict[str, Any]:
    base = _chart("step_times", _tall(rows, "strategy", each=BAR * 1.7))
    y = look.bars()
    x = alt.X("milliseconds:Q", title="milliseconds of a step", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    shown = [alt.Tooltip("strategy:N"), alt.Tooltip("round:Q"), alt.Tooltip("milliseconds:Q", format=".2f")]
    dots = base.mark_point(filled=True, size=40, opacity=0.55).encode(x=x, y=y, color=look.colour, tooltip=shown)
    middle = base.mark_tick(thickness=3, size=BAR, color="var(--ink)").encode(x=alt.X("median(milliseconds):Q"), y=y)
    return configured(alt.layer(dots, middle))


# Bytes, memory, predictions


def _costs(figures: Sequence[Figures], datasets: Mapping[str, Dataset], look: _Look) -> Iterator[ChartSpec]:
    yield ChartSpec(
        "bytes", "costs", headings.sent(figures),
        "Payload of all ranks together: counted at the transport, and predicted from the plan alone.",
        "bytes", _sent(datasets.get("bytes", []), look),
    )  # fmt: skip
    yield ChartSpec(
        "memory", "costs", headings.memory(figures),
        "Largest resident size of each rank's process, or largest allocation on an accelerator.", "memory",
        _memory(datasets.get("memory", []), look),
    )  # fmt: skip
    yield ChartSpec(
        "predictions", "costs", headings.predictions(figures),
        "Milliseconds of a step: what the cost model said beforehand beside what was measured.", "predictions",
        _predictions(datasets.get("predictions", []), look),
    )  # fmt: skip


def _sent(rows: Dataset, look: _Look) -> dict[str, Any]:
    kinds = ["counted", "predicted"]
    shown = [alt.Tooltip("strategy:N"), alt.Tooltip("kind:N"), alt.Tooltip("bytes:Q", format=",")]
    tall = _tall(rows, "strategy", "kind", each=BAR * 0.85)
    faded = alt.Scale(domain=kinds, range=[1, 0.45])
    bars = (
        _chart("bytes", tall)
        .transform_calculate(kibibytes="datum.bytes / 1024")
        .mark_bar(cornerRadiusEnd=3)
        .encode(
            x=alt.X("kibibytes:Q", title="KiB per step", axis=alt.Axis(tickCount=5, format="~s")),
            y=look.bars(),
            yOffset=alt.YOffset("kind:N", sort=kinds),
            color=look.colour,
            opacity=alt.Opacity("kind:O", scale=faded, legend=alt.Legend(title=None, symbolFillColor="var(--ink)")),
            tooltip=shown,
        )
    )
    return configured(bars)


def _memory(rows: Dataset, look: _Look) -> dict[str, Any]:
    shown = [alt.Tooltip("strategy:N"), alt.Tooltip("rank:O"), alt.Tooltip("mebibytes:Q", format=",.1f", title="MiB")]
    base = _chart("memory", _tall(rows, "strategy", "rank", each=13)).transform_calculate(
        mebibytes="datum.bytes / 1048576"
    )
    bars = base.mark_bar(cornerRadiusEnd=3).encode(
        x=alt.X("mebibytes:Q", title="MiB of each rank", axis=alt.Axis(tickCount=5)),
        y=look.bars(), yOffset=alt.YOffset("rank:O"), color=look.colour, tooltip=shown,
    )  # fmt: skip
    return configured(bars)


def _predictions(rows: Dataset, look: _Look) -> dict[str, Any]:
    shown = [
        alt.Tooltip("strategy:N"), alt.Tooltip("predicted:Q", format=".2f", title="predicted ms"),
        alt.Tooltip("measured:Q", format=".2f", title="measured ms"), alt.Tooltip("error:Q", format="+.0%"),
    ]  # fmt: skip
    base = _chart("predictions", _tall(rows, "strategy", each=BAR * 1.7))
    y = look.bars()
    x = alt.X(
        "measured:Q",
        title="milliseconds of a step; ring predicted, dot measured",
        scale=alt.Scale(zero=False, padding=20),
        axis=alt.Axis(tickCount=6),
    )
    line = base.mark_rule(strokeWidth=2, opacity=0.6).encode(
        x=x, x2="predicted:Q", y=y, color=look.colour, tooltip=shown
    )
    measured = base.mark_point(filled=True, size=110, opacity=1).encode(x=x, y=y, color=look.colour, tooltip=shown)
    predicted = base.mark_point(filled=False, size=110, strokeWidth=2, opacity=1).encode(
        x=alt.X("predicted:Q"), y=y, color=look.colour, tooltip=shown
    )
    error = base.transform_calculate(right="max(datum.measured, datum.predicted)").mark_text(
        align="left", dx=12, color="var(--ink)"
    ).encode(x=alt.X("right:Q"), y=y, text=alt.Text("error:Q", format="+.0%"))  # fmt: skip
    return configured(alt.layer(line, measured, predicted, error))


# Time lines


def _timelines(datasets: Mapping[str, Dataset]) -> Iterator[ChartSpec]:
    slices = datasets.get("slices", [])
    present = [kind for kind in KINDS if any(row["kind"] == kind for row in slices)]
    colours = alt.Scale(domain=present, range=[f"var(--k{KINDS.index(kind)})" for kind in present])
    for number, strategy in enumerate(dict.fromkeys(row["strategy"] for row in slices)):
        own = [row for row in slices if row["strategy"] == strategy]
        yield ChartSpec(
            f"timeline-{number}", "timeline", headings.timeline(strategy, own, datasets.get("waits", [])),
            f"{strategy}: one step of all ranks, what each computes and beneath it what travels meanwhile"
            + (
                ", as it was and as it was predicted."
                if len({row["origin"] for row in own}) > 1
                else ", as it was."
            ),
            "slices", _timeline(strategy, own, colours), wide=True,
        )  # fmt: skip
    yield ChartSpec(
        "waits", "timeline", headings.waits(datasets.get("waits", [])),
        "Share of the recorded steps that each rank waited for others.", "waits",
        _waits(datasets.get("waits", [])),
    )  # fmt: skip


def _timeline(strategy: str, rows: Dataset, colours: alt.Scale) -> dict[str, Any]:
    places = list(dict.fromkeys((row["origin"], row["rank"], row["lane"]) for row in rows))
    order = [_place(*place) for place in sorted(places, key=lambda place: (place[0], _natural(place[1]), place[2]))]
    shown = [
        alt.Tooltip("kind:N"), alt.Tooltip("label:N", title="layer"), alt.Tooltip("milliseconds:Q", format=".3f"),
        alt.Tooltip("bytes:Q", format=","), alt.Tooltip("place:N", title="where"),
    ]  # fmt: skip
    chart = (
        _chart("slices", 26 * len(order))
        .transform_filter(alt.FieldEqualPredicate(field="strategy", equal=strategy))
        .transform_calculate(
            place="(datum.origin == 'measured' ? '' : datum.origin + ' ') + datum.rank + ' ' + datum.lane"
        )
        .mark_bar(height=18, stroke="var(--paper)", strokeWidth=0.3)
        .encode(
            x=alt.X("start:Q", title="milliseconds since the step began", axis=alt.Axis(tickCount=8)), x2="end:Q",
            y=alt.Y("place:N", sort=order, title=None, axis=alt.Axis(labelLimit=190)),
            color=alt.Color("kind:N", scale=colours, legend=alt.Legend(title=None)), tooltip=shown,
        )
    )  # fmt: skip
    return configured(chart)


def _place(origin: str, rank: str, lane: str) -> str:
    return f"{'' if origin == 'measured' else origin + ' '}{rank} {lane}"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """So that rank 10 comes after rank 9."""
    return tuple((int(word), "") if word.isdigit() else (-1, word) for word in name.replace(",", " ").split())


def _waits(rows: Dataset) -> dict[str, Any]:
    shown = [
        alt.Tooltip("strategy:N"), alt.Tooltip("rank:N"), alt.Tooltip("share:Q", format=".1%", title="waited"),
        alt.Tooltip("late:Q", title="steps in which others waited for it"), alt.Tooltip("steps:Q"),
    ]  # fmt: skip
    base = _chart("waits", _tall(rows, "strategy", "rank", each=BAR * 1.4)).transform_calculate(
        place="datum.strategy + ': ' + datum.rank"
    )
    bars = base.mark_bar(height=BAR * 0.75, cornerRadiusEnd=3, color=f"var(--k{KINDS.index('wait')})").encode(
        x=alt.X("share:Q", title="share of the step", axis=alt.Axis(format="%")),
        y=alt.Y("place:N", title=None, sort=None, axis=alt.Axis(labelLimit=190)), tooltip=shown,
    )  # fmt: skip
    return configured(bars)


# Replicas


def _between_replicas(study: Study, datasets: Mapping[str, Dataset], look: _Look) -> Iterator[ChartSpec]:
    yield ChartSpec(
        "staleness", "replicas", headings.staleness(study),
        "How many updates of others came between a gradient's weights and its own update.", "staleness",
        _staleness(look),
    )  # fmt: skip
    clock = headings.clock_title(study)
    yield ChartSpec(
        "spread", "replicas", headings.spread(datasets.get("spreads", [])),
        "Largest distance of a replica from the common weights, relative to their length.", "spreads",
        _spread(clock, look),
    )  # fmt: skip
    yield ChartSpec(
        "replica-waits", "replicas", headings.exchange_share(datasets.get("replicas", [])),
        "Share of its time that each replica spends in the exchange.", "replicas",
        _replica_waits(datasets.get("replicas", []), look),
    )  # fmt: skip
    yield ChartSpec(
        "happenings", "replicas", headings.happenings(datasets.get("happenings", [])),
        "Who joined, was lost, froze, came back or left, and when.", "happenings",
        _happenings(datasets.get("happenings", []), look), wide=True,
    )  # fmt: skip


def _staleness(look: _Look) -> dict[str, Any]:
    shown = [
        alt.Tooltip("strategy:N"), alt.Tooltip("behind:Q", title="updates behind"),
        alt.Tooltip("updates:Q", format=","), alt.Tooltip("share:Q", format=".1%"),
    ]  # fmt: skip
    chart = _chart("staleness", 200).mark_bar(cornerRadiusEnd=2).encode(
        x=alt.X("behind:O", title="updates behind", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        xOffset=alt.XOffset("strategy:N", sort=list(look.names)),
        y=alt.Y("share:Q", title="share of updates", axis=alt.Axis(format="%", tickCount=4)),
        color=look.colour, tooltip=shown,
    )  # fmt: skip
    return configured(chart)


def _spread(clock: str, look: _Look) -> dict[str, Any]:
    shown = [
        alt.Tooltip("strategy:N"), alt.Tooltip("run:N"), alt.Tooltip("seconds:Q", format=".2f"),
        alt.Tooltip("spread:Q", format=".4f"),
    ]  # fmt: skip
    base = _chart("spreads", 200)
    common = {
        "x": alt.X("seconds:Q", title=clock, axis=alt.Axis(grid=False)),
        "y": alt.Y("spread:Q", title="relative distance"),
        "detail": "run:N", "color": look.colour,
    }  # fmt: skip
    line = base.mark_line(strokeWidth=2).encode(**common, strokeDash=look.dash)
    return configured(
        alt.layer(line, base.mark_point(filled=True, size=60, opacity=0.9).encode(**common, tooltip=shown))
    )


def _replica_waits(rows: Dataset, look: _Look) -> dict[str, Any]:
    shown = [
        alt.Tooltip("run:N"), alt.Tooltip("replica:O"), alt.Tooltip("waiting:Q", format=".1%", title="in the exchange"),
        alt.Tooltip("steps:Q", format=","), alt.Tooltip("updates:Q", format=","), alt.Tooltip("dropped:Q", format=","),
    ]  # fmt: skip
    base = _chart("replicas", _tall(rows, "run", "replica", each=14))
    bars = base.mark_bar(cornerRadiusEnd=3).encode(
        x=alt.X("waiting:Q", title="share of its time", axis=alt.Axis(format="%", tickCount=5)),
        y=alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=150)), yOffset=alt.YOffset("replica:O"),
        color=look.colour, tooltip=shown,
    )  # fmt: skip
    return configured(bars)


def _happenings(rows: Dataset, look: _Look) -> dict[str, Any]:
    shown = [
        alt.Tooltip("run:N"), alt.Tooltip("who:N"), alt.Tooltip("what:N"), alt.Tooltip("seconds:Q", format=".2f"),
    ]  # fmt: skip
    base = _chart("happenings", _tall(rows, "run", each=26))
    grey = alt.Legend(title=None, symbolFillColor="var(--soft)", symbolStrokeColor="var(--soft)")
    marks = base.mark_point(filled=True, size=90, opacity=0.9).encode(
        x=alt.X("seconds:Q", title="seconds since the run began", axis=alt.Axis(tickCount=8)),
        y=alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=150, grid=True)),
        shape=alt.Shape("what:N", legend=grey),
        color=look.colour, tooltip=shown,
    )  # fmt: skip
    return configured(marks)


# Classes and rates


def _classes(datasets: Mapping[str, Dataset]) -> Iterator[ChartSpec]:
    classes = datasets.get("classes", [])
    few = len(classes) <= 40
    yield ChartSpec(
        "confusion", "classes", headings.confusion(datasets.get("confusion", [])),
        "Of the test samples of a class (row) the share that was taken for each class (column).", "confusion",
        _confusion([row["name"] for row in classes], numbers=len(classes) <= 12),
    )  # fmt: skip
    if few:
        yield ChartSpec(
            "classes", "classes", headings.classes(classes), "Share of the test samples of each class that was found.",
            "classes", _class_bars(classes),
        )  # fmt: skip


def _confusion(names: Sequence[str], *, numbers: bool) -> dict[str, Any]:
    shown = [
        alt.Tooltip("truth:N", title="class"), alt.Tooltip("found:N", title="taken for"),
        alt.Tooltip("count:Q", format=",", title="samples"), alt.Tooltip("share:Q", format=".1%"),
    ]  # fmt: skip
    base = _chart("confusion", 340)
    x = alt.X(
        "found:N",
        sort=list(names),
        title="taken for",
        axis=alt.Axis(labelAngle=0 if numbers else -90, labelOverlap=True, labelLimit=80),
    )
    y = alt.Y("truth:N", sort=list(names), title="class", axis=alt.Axis(labelOverlap=True, labelLimit=110))
    strength = alt.Scale(domain=[0, 1], range=[0.04, 1], type="sqrt")
    cells = base.mark_rect(fill="var(--s0)").encode(
        x=x, y=y, opacity=alt.Opacity("share:Q", scale=strength, legend=None), tooltip=shown,
    )  # fmt: skip
    if not numbers:
        return configured(cells)
    counts = base.transform_filter("datum.count > 0").mark_text(fontSize=11).encode(
        x=x, y=y, text=alt.Text("count:Q", format=","), tooltip=shown,
        color=alt.condition("datum.share > 0.4", alt.value("var(--paper)"), alt.value("var(--ink)")),
    )  # fmt: skip
    return configured(alt.layer(cells, counts))


def _class_bars(rows: Dataset) -> dict[str, Any]:
    shown = [alt.Tooltip("name:N"), alt.Tooltip("accuracy:Q", format=".1%"), alt.Tooltip("samples:Q", format=",")]
    base = _chart("classes", _tall(rows, "name", each=BAR * 1.2))
    order = [row["name"] for row in sorted(rows, key=lambda row: -row["accuracy"])]
    y = alt.Y("name:N", sort=order, title=None, axis=alt.Axis(labelLimit=150))
    bars = base.mark_bar(height=BAR * 0.75, cornerRadiusEnd=3, color="var(--s0)").encode(
        x=alt.X("accuracy:Q", title="accuracy", axis=alt.Axis(format="%", tickCount=5)), y=y, tooltip=shown
    )
    text = base.mark_text(align="left", dx=6, color="var(--ink)").encode(
        x=alt.X("accuracy:Q"), y=y, text=alt.Text("accuracy:Q", format=".1%")
    )
    return configured(alt.layer(bars, text))


def _rates(datasets: Mapping[str, Dataset], look: _Look) -> Iterator[ChartSpec]:
    rates = datasets.get("rates", [])
    order = sorted({row["rate"] for row in rates}, key=float)
    shown = [alt.Tooltip("strategy:N"), alt.Tooltip("rate:N"), alt.Tooltip("accuracy:Q", format=".2%")]
    base = _chart("rates", 220).transform_filter("isValid(datum.accuracy)")
    common = {
        "x": alt.X("rate:N", sort=order, title="learning rate", axis=alt.Axis(labelAngle=0)),
        "y": alt.Y("accuracy:Q", title="test accuracy", scale=alt.Scale(zero=False), axis=alt.Axis(format="%")),
        "color": look.colour,
    }  # fmt: skip
    line = base.mark_line(strokeWidth=2).encode(**common, strokeDash=look.dash)
    points = base.mark_point(filled=True, size=70, opacity=1).encode(**common, tooltip=shown)
    yield ChartSpec(
        "rates", "rates", headings.rates(rates),
        "Accuracy of short runs with each rate; a rate that diverged has no point.", "rates",
        configured(alt.layer(line, points)),
    )  # fmt: skip
