"""`shoal profile`: what this machine takes for a network's layers, as a file for `shoal plan --timings`."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.options import given, options_of
from shoal.cli.verify import Announcer
from shoal.config import ProfileConfig
from shoal.errors import OutputError
from shoal.timings import Timings
from shoal.units import show_quantity

SLOWEST = 10
"""Kernels that are shown."""


@click.command()
@options_of(ProfileConfig)
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the timings as JSON.")
def profile(out: Path | None, **options: Any) -> None:
    """Measure a network's layers and the links of this machine.

    Times each distinct part of a layer that a plan may ask for, with all workers at work as in training. Minutes the
    first time; what was measured is remembered.
    """
    config = ProfileConfig.parse(given(options))
    if out is not None and not out.absolute().parent.is_dir():
        raise OutputError(f"{str(out)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
    from shoal import launching
    from shoal.cli import plan_job
    from shoal.cli.bar import Bar

    starting, rank = Announcer(), launching.surrounding()
    starting("loading")
    try:
        timings = plan_job.profiled(config, Bar())
    finally:
        starting("")
    if rank is not None and rank.rank != 0:
        return
    if out is not None:
        timings.save(out)
    show(timings, Console(highlight=False))
    if out is not None:
        click.echo(f"wrote {out}")


def show(timings: Timings, console: Console) -> None:
    """Links, overheads and the slowest kernels, on at most 80 columns."""
    console.print(
        f"{timings.ranks} ranks of {timings.threads} threads on {timings.machine}, {timings.date}\n",
        markup=False,
        soft_wrap=True,
    )
    links = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    links.add_column("links")
    for heading in ("ranks", "latency", "bandwidth", "bandwidth of sums"):
        links.add_column(heading, justify="right", no_wrap=True)
    for level in timings.cluster.levels:
        rate = level.sum_bandwidth or level.bandwidth
        links.add_row(level.name, str(level.size), _micro(level.latency), _rate(level.bandwidth), _rate(rate))
    console.print(links)
    rest = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rest.add_row("overhead per layer", _micro(timings.layer_overhead))
    rest.add_row("overhead per step", _micro(timings.step_overhead))
    rest.add_row("optimizer", f"{1e12 * timings.update_per_byte:.0f} us/MB")
    rest.add_row("copies", f"{1e12 * timings.copy_per_byte:.0f} us/MB")
    rest.add_row("kernels", str(len(timings.kernels)))
    console.print()
    console.print(rest)
    slowest = sorted(timings.kernels.items(), key=lambda item: -sum(item[1]))[:SLOWEST]
    if not slowest:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"the {len(slowest)} slowest kernels", no_wrap=True, overflow="ellipsis", max_width=54)
    for heading in ("forward", "backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, (forward, *backward) in slowest:
        table.add_row(name.replace("[", chr(92) + "["), _micro(forward), _micro(sum(backward)))
    console.print()
    console.print(table)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _rate(rate: float) -> str:
    return show_quantity(float(f"{rate:.3g}"), "bytes/s")
