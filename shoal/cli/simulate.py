"""`shoal simulate`: a plan on a cluster that need not be here, in time."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.options import given, options_of
from shoal.cli.verify import Announcer
from shoal.config import SimulateConfig
from shoal.errors import ConfigError, OutputError
from shoal.files import write_text_atomically
from shoal.simulating.what_if import parse_change
from shoal.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from shoal.cli.simulate_job import Simulated
    from shoal.swarm import Outcome, Setting

PROGRESS_SECONDS = 2.0
"""Without a word."""


@click.command()
@click.argument("plan", required=False)
@options_of(SimulateConfig)
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path), help="Write the trace, for Perfetto, as JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="With replicas: write the numbers as JSON."
)
def simulate(plan: str | None, trace: Path | None, as_json: bool, out: Path | None, **options: Any) -> None:
    """Play a plan on any cluster: its step, its trace, what if.

    PLAN is a plan file, or data, model, owt, spatial, RxG such as 2x2. Speeds are a cluster's data sheet, or what
    `shoal profile` measured; nothing is trained and no process is started.

    Without PLAN and with --replicas: so many replicas over many steps, with an exchange between them.
    """
    config = SimulateConfig.parse(given(options))
    changes = [parse_change(text) for text in config.what_if]
    for file in (trace, out):
        if file is not None and not file.absolute().parent.is_dir():
            raise OutputError(f"{str(file)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
    if config.replicas is not None:
        if plan is not None:
            raise ConfigError(
                f"plan {plan!r} with {config.replicas} replicas: here a replica is one device.",
                "Leave the plan out, or --replicas.",
            )
        _simulate_replicas(config, trace, out, as_json=as_json)
        return
    if plan is None or out is not None:
        raise ConfigError(
            "what is to be simulated was not said." if plan is None else "--out is for several replicas.",
            "Name a plan, such as data, or give --replicas and --exchange." if plan is None else "Give --json.",
        )
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


def _simulate_replicas(config: SimulateConfig, trace: Path | None, out: Path | None, *, as_json: bool) -> None:
    from shoal.cli import swarm_job

    starting, bar = Announcer(), _Progress()
    starting("loading")
    try:
        swarm = swarm_job.swarm_of(config, bar, traced=trace is not None)
    finally:
        starting("")
    outcome = swarm.run()
    bar.close()
    if trace is not None:
        swarm.trace().save(trace)
    numbers = {**outcome.numbers(), "step_seconds": swarm.setting.step_seconds, "samples": swarm.setting.samples}
    if out is not None:
        write_text_atomically(out, json.dumps(numbers, indent=1))
    if as_json:
        click.echo(json.dumps(numbers, indent=1))
        return
    _show_replicas(outcome, swarm.setting, config, Console(highlight=False))


class _Progress:
    """How far a run is, on the error stream, from its third second on and then every two."""

    def __init__(self) -> None:
        self._told = time.monotonic()
        self._lines = 0

    def __call__(self, counted: int, total: int, seconds: float) -> None:
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._told, self._lines = time.monotonic(), self._lines + 1
            text = f"{counted:,} of {total:,} batches after {show_seconds(seconds)} of simulated time"
            click.echo(f"\r{text:<78}" if sys.stderr.isatty() else text, err=True, nl=not sys.stderr.isatty())

    def close(self) -> None:
        """Leave the line."""
        if self._lines and sys.stderr.isatty():
            click.echo(err=True)


def _show_replicas(outcome: "Outcome", setting: "Setting", config: SimulateConfig, console: Console) -> None:
    console.print(
        f"{config.model}: {config.exchange} among {setting.replicas} replicas on {config.cluster}, simulated: "
        f"{setting.samples} samples per replica and step of {show_seconds(setting.step_seconds)}\n",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    counted, steps = outcome.counted, outcome.steps
    table.add_row("throughput", f"[bold]{outcome.samples_per_second:,.1f} samples/s[/bold]")
    table.add_row("time", f"{show_seconds(outcome.seconds)} for {counted:,} batches")
    table.add_row("computing", f"{outcome.computing:.0%} of replicas' time")
    table.add_row("sent per step", f"{show_bytes(round(outcome.bytes_per_step))}, by and to a replica")
    table.add_row("busiest link", f"{outcome.busiest_link:.0%} of the time")
    if outcome.staleness:
        oldest = max(outcome.staleness)
        table.add_row("staleness", f"{outcome.mean_staleness:.1f} in the mean, at most {oldest}")
    table.add_row("deaths, joins", f"{outcome.deaths}, {outcome.joins}")
    lost = f"{steps - counted:,} of {steps:,} steps not counted"
    table.add_row("lost", f"{lost}: {outcome.dropped} dropped; {outcome.lost_steps} died unshared")
    console.print(table)
    if outcome.ended:
        console.print(f"\nended early: {outcome.ended}", markup=False, soft_wrap=True)
    if outcome.curve:
        curve = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("simulated", "batches", "accuracy"):
            curve.add_column(heading, justify="right")
        for seconds, batches, accuracy in outcome.curve:
            curve.add_row(show_seconds(seconds), f"{batches:,}", f"{accuracy:.2%}")
        console.print()
        console.print(curve)


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
