"""`shoal report`: one page of runs, and its numbers for the terminal and for programs."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.verify import Announcer
from shoal.errors import OutputError
from shoal.reporting import Report, read_study, report_of, write_page
from shoal.reporting.page import PAGE
from shoal.reporting.summary import Row, StrategyTable

SCREEN, NAMES = 80, 24
"""Columns of a screen, and those that a strategy's name may take."""


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="The page; DIR/report.html unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON instead of writing it.")
def report(folders: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Make one page of a run, of a comparison, or of several runs beside each other.

    DIR is the --out folder of `shoal train` or `shoal compare`, or a folder of such folders. The page is one file that
    needs no network. Of several folders it is ./report.html unless --out says otherwise.
    """
    study = read_study(folders)
    said = report_of(study)
    if as_json:
        click.echo(said.to_json())
        return
    path = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    making = Announcer()
    making("making the page")
    try:
        write_page(study, path)
    except OSError as error:
        problem = f"{str(path)!r} cannot be written: {error.strerror or error}."
        raise OutputError(problem, "Name a file with --out.") from None
    finally:
        making("")
    console = Console(highlight=False)
    show(said, console)
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def show(said: Report, console: Console) -> None:
    """The page's headline and its numbers, on at most 80 columns."""
    console.print(said.headline, markup=False, soft_wrap=not console.is_terminal)
    table = _rows(said.rows) if said.table is None else _strategies(said.table)
    if table.row_count:
        console.print(table, soft_wrap=False)
    for note in said.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=not console.is_terminal)


def _rows(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(escape(f"  {row.label}" if row.under else row.label), escape(row.value))
    return table


def _strategies(strategies: StrategyTable) -> Table:
    """As many columns as fit, from the first on; the page has all of them, and the ranges."""
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", overflow="ellipsis", no_wrap=True, max_width=NAMES)
    room = SCREEN - min(NAMES, max(len(name) for name, _ in strategies.rows))
    shown = 0
    for number, heading in enumerate(strategies.headings):
        room -= 2 + max(len(heading), *(len(entries[number].value) for _, entries in strategies.rows))
        if room < 0:
            break
        table.add_column(heading, justify="right", no_wrap=True)
        shown += 1
    for name, entries in strategies.rows:
        table.add_row(escape(name), *(entry.value for entry in entries[:shown]))
    return table
