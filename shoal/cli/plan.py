"""`shoal plan`: find a plan, and show, compare and draw plans."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from shoal.cli.options import given, options_of
from shoal.cli.verify import Announcer
from shoal.config import PlanConfig, PricedConfig
from shoal.errors import InputError, OutputError
from shoal.files import write_atomically, write_text_atomically
from shoal.plan import Plan

if TYPE_CHECKING:
    from shoal.graph import LayerGraph
    from shoal.planning.price import Price

PICTURE = click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw the network with its cuts, as .svg, or as .png where cairosvg is installed.",
)


@click.group(invoke_without_command=True, subcommand_metavar="[show FILE | diff FILE FILE]")
@options_of(PlanConfig)
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the plan as JSON.")
@PICTURE
@click.pass_context
def plan(ctx: click.Context, /, out: Path | None, picture: Path | None, **options: Any) -> None:
    """Find the plan with the shortest step.

    With --cluster from a data sheet, with --timings from a profile; with neither it is measured, searched and raced
    on workers that are started here, minutes the first time. `shoal plan show` and `diff` read plan files.
    """
    chosen = given(options)
    if ctx.invoked_subcommand is not None:
        if chosen or out or picture:
            name = ctx.invoked_subcommand
            raise click.UsageError(f"options of {name!r} stand after it, as in `shoal plan {name} FILE ...`.", ctx)
        return
    config = PlanConfig.parse(chosen)
    _ = config.pins  # a pin that cannot be read is told before torch loads
    _check_writable(out, picture)
    from shoal import launching
    from shoal.cli import plan_job
    from shoal.cli.bar import Bar

    starting, rank = Announcer(), launching.surrounding()
    starting("loading")
    try:
        if config.cluster is not None or config.timings is not None:
            captured, report = plan_job.described(config)
        else:
            captured, report = plan_job.measured(config, Bar())
    finally:
        starting("")
    if rank is not None and rank.rank != 0:
        return
    graph = captured.graphs[True]
    if out is not None:
        report.plan.save(out)
    if picture is not None:
        _draw(picture, config.model, graph, report.price, losses=captured.tail is not None and captured.tail.mean)
    from shoal.cli import plan_table

    console = Console(highlight=False)
    where = config.cluster or (f"timings {config.timings}" if config.timings else "this machine, measured")
    console.print(_headline(config.model, graph, report.plan, where) + "\n", markup=False, soft_wrap=True)
    plan_table.show_layers(console, report.price, graph, report.why)
    console.print()
    plan_table.show_totals(console, report.price, report.search)
    console.print()
    plan_table.show_rivals(console, report.price, report.plan.name, report.entrants, report.search.fixed, report.race)
    if report.remembered:
        console.print("Remembered from before; --fresh measures, searches and races again.")
    for file in (out, picture):
        if file is not None:
            console.print(f"wrote {file}", markup=False, soft_wrap=True)


@plan.command()
@click.argument("file", type=click.Path(path_type=Path))
@options_of(PricedConfig)
@PICTURE
def show(file: Path, picture: Path | None, **options: Any) -> None:
    """Show a plan file: its cuts, and with --model and --cluster or --timings what each layer costs."""
    config = PricedConfig.parse(given(options))
    loaded = Plan.load(file)
    _check_writable(picture)
    if picture is not None and not config.model:
        raise InputError("a picture needs the network.", "Give --model, and --cluster or --timings beside it.")
    from shoal.cli import plan_table

    console = Console(highlight=False)
    if not config.model:
        console.print(f"plan {loaded.name} for {loaded.ranks} ranks\n", markup=False)
        plan_table.show_lines(console, loaded)
        return
    from shoal.cli import plan_job
    from shoal.planning.why import explained

    (priced,) = plan_job.priced(config, loaded)
    if picture is not None:
        _draw(picture, config.model, priced.graph, priced.price, losses=priced.model.losses)
    where = config.cluster or f"timings {config.timings}"
    console.print(_headline(config.model, priced.graph, loaded, where) + "\n", markup=False, soft_wrap=True)
    plan_table.show_layers(console, priced.price, priced.graph, explained(priced.model, priced.price.cuts))
    console.print()
    plan_table.show_totals(console, priced.price)
    if picture is not None:
        console.print(f"wrote {picture}", markup=False, soft_wrap=True)


@plan.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@options_of(PricedConfig)
def diff(first: Path, second: Path, **options: Any) -> None:
    """Compare two plan files layer by layer: cuts, and with --model and --cluster or --timings time and bytes."""
    config = PricedConfig.parse(given(options))
    plans = Plan.load(first), Plan.load(second)
    if plans[0].ranks != plans[1].ranks:
        raise InputError(
            f"plan {str(first)!r} is for {plans[0].ranks} ranks and {str(second)!r} for {plans[1].ranks}.",
            "Compare plans for the same number of ranks.",
        )
    from shoal.cli import plan_table

    console = Console(highlight=False)
    if not config.model:
        plan_table.show_differing_lines(console, *plans)
        return
    from shoal.cli import plan_job

    before, after = plan_job.priced(config, *plans)
    plan_table.show_difference(console, plans, (before.price, after.price), before.graph)


def _headline(model: str, graph: "LayerGraph", shown: Plan, where: str) -> str:
    batch = " x ".join(map(str, next(iter(graph.inputs.values())).shape))
    return f"{model} under {shown.name} on {shown.ranks} ranks ({where}): batch {batch}"


def _check_writable(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise OutputError(f"{str(file)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
        if file is not None and file.is_dir():
            raise OutputError(f"{str(file)!r} cannot be written: it is a folder.", "Name a file.")
    picture = files[-1]
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise OutputError(f"{str(picture)!r} is neither .svg nor .png.", "Name the picture with one of these endings.")
    if picture is not None and picture.suffix == ".png":
        _converter()


def _converter() -> Any:
    """What makes a PNG of an SVG, which few need."""
    try:
        import cairosvg  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, OSError):  # the package, or the library that it wraps
        raise OutputError(
            "a .png picture needs cairosvg, which is not installed.",
            "pip install cairosvg (and the system's cairo library), or name a .svg file.",
        ) from None
    return cairosvg


def _draw(file: Path, model: str, graph: "LayerGraph", price: "Price", *, losses: bool) -> None:
    from shoal.lowering.boundary import Boundary
    from shoal.planning.outlining import outline_of
    from shoal.reporting.picture import picture

    outline = outline_of(graph, price.cuts, Boundary("tile", price.ranks), price.name, losses=losses, priced=price)
    svg = picture(outline, title=f"{model} under {price.name} on {price.ranks} ranks")
    if file.suffix == ".svg":
        write_text_atomically(file, svg)
    else:
        png: bytes = _converter().svg2png(bytestring=svg.encode(), scale=1.5)
        write_atomically(file, lambda draft: draft.write_bytes(png))
