"""`shoal report`: one page of runs, and its numbers for the terminal and for programs."""

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.verify import Announcer
from shoal.errors import OutputError
from shoal.reporting import Report, read_study, report_of, write_page
from shoal.reporting.page import PAGE

NARROW = 80
"""A table has at most so many columns of a screen."""


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
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror or error}.", "Name a file with --out.") from None
    finally:
        making("")
    console = Console(highlight=False)
    show(said, console)
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def show(said: Report, console: Console) -> None:
    """The page's headline and its numbers, on at most 80 columns."""
    console.print(said.headline, markup=False, soft_wrap=not console.is_terminal)
    table = Table(box=None, pad_edge=False, show_header=said.table is not None)
    if said.table is None:
        for row in said.rows:
            table.add_row(escape(f"  {row.label}" if row.under else row.label), escape(row.value))
    else:
        table.add_column("strategy", overflow="ellipsis", no_wrap=True, max_width=24)
        for heading in said.table.headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, entries in said.table.rows:
            table.add_row(escape(name), *(entry.value for entry in entries))
    if table.row_count:
        console.print(table, soft_wrap=False)
    for note in said.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=not console.is_terminal)
