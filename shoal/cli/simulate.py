"""`shoal simulate`: a plan on a cluster that need not be here, in time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.options import given, options_of
from shoal.cli.verify import Announcer
from shoal.config import SimulateConfig
from shoal.errors import OutputError
from shoal.simulating.what_if import parse_change
from shoal.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from shoal.cli.simulate_job import Simulated


@click.command()
@click.argument("plan")
@options_of(SimulateConfig)
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path), help="Write the trace, for Perfetto, as JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def simulate(plan: str, trace: Path | None, as_json: bool, **options: Any) -> None:
    """Play a plan on any cluster: its step, its trace, what if.

    PLAN is a plan file, or data, model, owt, spatial, RxG such as 2x2. Speeds are a cluster's data sheet, or what
    `shoal profile` measured; nothing is trained and no process is started.
    """
    config = SimulateConfig.parse(given(options))
    changes = [parse_change(text) for text in config.what_if]
    if trace is not None and not trace.absolute().parent.is_dir():
        raise OutputError(f"{str(trace)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
    from shoal.cli import simulate_job

    starting = Announcer()
    starting("loading")
    try:
        cases = simulate_job.simulated(plan, config, changes)
    finally:
        starting("")
    if trace is not None:
        cases[0].trace().save(trace)
    if as_json:
        click.echo(json.dumps([case.numbers() for case in cases], indent=1))
        return
    _show(cases, config, Console(highlight=False))
    if trace is not None:
        click.echo(f"wrote {trace}: open it at https://ui.perfetto.dev")


def _show(cases: "list[Simulated]", config: SimulateConfig, console: Console) -> None:
    first = cases[0]
    where = config.cluster or f"timings {config.timings}"
    console.print(
        f"{config.model} under {first.price.name} on {first.price.ranks} ranks ({where}), simulated: "
        f"batch {config.batch}\n",
        markup=False,
        soft_wrap=True,
    )
    totals = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    price = first.price
    totals.add_row("step", f"[bold]{show_seconds(first.seconds)}[/bold], {config.batch / first.seconds:,.0f} samples/s")
    totals.add_row("computing", f"{show_seconds(price.compute)} on the busiest rank")
    totals.add_row("sums not hidden", show_seconds(price.exposed))
    totals.add_row("optimizer", show_seconds(price.update))
    totals.add_row("sent per step", f"{show_bytes(price.bytes)}, by {price.ranks} ranks together")
    totals.add_row("peak per rank", show_bytes(price.peak))
    console.print(totals)
    if len(cases) == 1:
        return
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what if")
    for heading in ("ranks", "step", "samples/s", "speedup", "sent"):
        table.add_column(heading, justify="right")
    for case in cases:
        table.add_row(
            str(case.change),
            str(case.price.ranks),
            show_seconds(case.seconds),
            f"{config.batch / case.seconds:,.0f}",
            f"{first.seconds / case.seconds:.2f}",
            show_bytes(case.price.bytes),
        )
    console.print(table)
