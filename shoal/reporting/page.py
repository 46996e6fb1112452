"""One page of a run or of strategies beside each other: a single file that needs no network and no other file.

Text from files is escaped: by Jinja in the page, by Vega in charts, and `<` in the JSON inside.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shoal._version import __version__
from shoal.errors import InputError
from shoal.files import cache_folder, write_text_atomically
from shoal.outline import Outline
from shoal.reporting import verdict
from shoal.reporting.datasets import MOST_POINTS, MOST_SLICES, Dataset, datasets_of, stride_of
from shoal.reporting.figures import figures_of, target_of
from shoal.reporting.picture import picture
from shoal.reporting.plan_difference import PlanDifference, difference_of
from shoal.reporting.records import CONFIG, RunRecord, Study
from shoal.reporting.summary import Row, StrategyTable, rows_of, table_of
from shoal.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from shoal.reporting.charts import ChartSpec

PAGE = "report.html"
_UNIT = re.compile(r"(?<=\d) ((?:ms|s|min|h|B|[KMGT]iB|samples(?:/s)?|images/s)\b)")
SCHEMA = "shoal.report/1"
MOST_PLANS = 6
"""Plans that are drawn and compared, each with each."""
SECTIONS = (
    ("learning", "Learning"),
    ("speed", "Speed"),
    ("costs", "Bytes, memory and predictions"),
    ("plans", "Plans"),
    ("timeline", "One step in time"),
    ("replicas", "Between replicas"),
    ("classes", "Classes"),
    ("rates", "Rates that were searched"),
    ("runs", "Runs"),
    ("again", "Do it again"),
)


@dataclass(frozen=True)
class DrawnPlan:
    """A plan as a picture, and whose it is."""

    title: str
    svg: str


@dataclass(frozen=True)
class Report:
    """All that a page shows, without its looks."""

    title: str
    headline: str
    reasons: tuple[str, ...]
    target: float | None
    rows: tuple[Row, ...]
    """Of a single run."""
    table: StrategyTable | None
    """Of several."""
    datasets: Mapping[str, Dataset]
    notes: tuple[str, ...]
    """What was left out, and why."""

    def to_json(self) -> str:
        """For programs; the page holds the same text."""
        content = {
            "schema": SCHEMA,
            "shoal": __version__,
            "title": self.title,
            "headline": self.headline,
            "reasons": self.reasons,
            "target": self.target,
            "summary": [asdict(row) for row in self.rows],
            "table": None if self.table is None else asdict(self.table),
            "notes": self.notes,
            "data": self.datasets,
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False)


def report_of(study: Study) -> Report:
    """What the page of a study says."""
    alone = study.alone
    return Report(
        title=study.title,
        headline=verdict.headline(study),
        reasons=tuple(verdict.reasons(study)),
        target=None if alone is not None else target_of(study),
        rows=tuple(rows_of(alone.result)) if alone is not None and alone.result is not None else (),
        table=None if alone is not None else table_of(study),
        datasets=_finite(datasets_of(study, figures_of(study))),
        notes=tuple(_notes(study)),
    )


def _finite(datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """JSON has no infinity: such a number is told as none."""
    return {
        name: [{k: v if _is_plain(v) else None for k, v in row.items()} for row in rows]
        for name, rows in datasets.items()
    }


def _is_plain(value: object) -> bool:
    return not isinstance(value, float) or abs(value) < float("inf")


def _notes(study: Study) -> list[str]:
    notes = [*study.problems, *(problem for entry in study.runs for problem in entry.run.problems)]
    notes += [f"{strategy} was not timed in turns: {why}" for strategy, why in study.not_timed.items()]
    stride = max((stride_of(max(len(e.run.steps), len(e.run.tests))) for e in study.runs), default=1)
    if stride > 1:
        notes.append(
            f"Lines show at most {MOST_POINTS} points of a run: up to {stride} lines of metrics in a row make one, "
            "with their mean loss; of so many tests the last is kept. metrics.jsonl of each run has all."
        )
    longest = max((len(entry.run.trace.slices) for entry in study.runs if entry.run.trace is not None), default=0)
    if longest > MOST_SLICES:
        notes.append(f"A step's time line shows its {MOST_SLICES} longest slices; trace.json of the run has all.")
    return notes


def write_page(study: Study, path: Path) -> Path:
    """Write the page, whole or not at all. Without the extra `report` an `InputError` says what to install."""
    write_text_atomically(path, render(study, path.parent))
    return path


def render(study: Study, folder: Path) -> str:
    """The page's text; `folder` is where it will lie, from which runs are named."""
    jinja2, charts = needed("jinja2"), needed("shoal.reporting.charts")
    report, figures = report_of(study), figures_of(study)
    drawn: list[ChartSpec] = charts.charts_of(study, figures, report.datasets)
    plans, differences = _plans(study)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bytes=show_bytes, seconds=show_seconds, unbroken=_unbroken)
    template = environment.from_string(_own_file("page.html"))
    present = {chart.section for chart in drawn} | {"runs", "again"} | ({"plans"} if plans else set())
    text: str = template.render(
        report=report,
        study=study,
        sections=[(name, title) for name, title in SECTIONS if name in present],
        charts=drawn,
        strategies=[(name, number % charts.PALETTE) for number, name in enumerate(study.strategies)],
        seen={entry.strategy for entry in study.runs if entry.run.tests or entry.run.steps},
        plans=plans,
        differences=differences,
        runs=study.runs,
        repeated=[_recipe_path(entry.run, folder) for entry in study.runs if entry.run.settings],
        recipe=_recipe(study),
        versions=_versions(study),
        version=__version__,
        style=_own_file("page.css"),
        script=_own_file("page.js"),
        vega=_inside_script(vega_script()),
        data=_inside_json(report.to_json()),
        specs=_inside_json(json.dumps({chart.name: {"spec": chart.spec, "data": chart.data} for chart in drawn})),
        downloads=list(report.datasets),
    )
    return text


def needed(module: str) -> Any:
    """A module of the extra `report`, or one that needs it; an `InputError` where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("shoal"):
            raise
        raise InputError(
            f"a page needs {error.name}, which is not installed.", "pip install 'shoal-train[report]'"
        ) from None


def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, made once by vl-convert and then kept in the cache."""
    vl_convert, altair = needed("vl_convert"), needed("altair")
    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    kept = cache_folder() / f"vega-lite-{altair.SCHEMA_VERSION}-{vl_convert.__version__}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        script: str = vl_convert.javascript_bundle(vl_version=version)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(kept, script)
    except OSError:  # a cache that cannot be written is no error
        pass
    return script


def _unbroken(text: str) -> str:
    """No line ends between a number and its unit."""
    return _UNIT.sub("\u00a0\\1", text)


def _own_file(name: str) -> str:
    return files("shoal.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _inside_json(text: str) -> str:
    """JSON that no HTML reader mistakes for markup; it reads back as the same."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _inside_script(text: str) -> str:
    return text.replace("</script", "<\\/script")


def _plans(study: Study) -> tuple[list[DrawnPlan], list[PlanDifference]]:
    """Every plan that cuts the network differently, and each beside each other one."""
    different: dict[tuple[tuple[str, str | None], ...], tuple[list[str], Outline]] = {}
    for name in study.strategies:
        outline = verdict.outline_of_strategy(study, name)
        if outline is not None:
            cuts = tuple((stage.name, stage.cut) for stage in outline.stages)
            different.setdefault(cuts, ([], outline))[0].append(name)
    shown = [(" = ".join(names), outline) for names, outline in different.values()][:MOST_PLANS]
    drawn = []
    for name, outline in shown:
        ranks = f"{outline.ranks} rank{'' if outline.ranks == 1 else 's'}"
        drawn.append(DrawnPlan(name, picture(outline, title=f"{name} on {ranks}")))
    beside = [difference_of(first, second, (one, other)) for (one, first), (other, second) in combinations(shown, 2)]
    return drawn, beside


def _recipe_path(run: RunRecord, folder: Path) -> str:
    """Of the run's settings, as one names it in `folder`."""
    return shlex.quote(Path(os.path.relpath(run.folder / CONFIG, folder)).as_posix())


def _recipe(study: Study) -> str:
    """The settings that all runs share, or of the one there is."""
    every = [entry.run.settings for entry in study.runs if entry.run.settings]
    if not every:
        return ""
    first, *others = every
    common = {
        name: value for name, value in first.items() if name != "out" and all(o.get(name) == value for o in others)
    }
    return yaml.safe_dump(json.loads(json.dumps(common, default=str)), sort_keys=False, allow_unicode=True)


def _versions(study: Study) -> dict[str, str]:
    """Of libraries and machine; where runs differ, each value."""
    told: dict[str, list[str]] = {}
    for result in (entry.run.result for entry in study.runs if entry.run.result is not None):
        about = {**result.versions, "device": result.device, "threads": str(result.threads)}
        for name, value in about.items():
            if value not in told.setdefault(name, []):
                told[name].append(value)
    return {name: ", ".join(values) for name, values in told.items()}
