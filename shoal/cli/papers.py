"""`shoal papers`: what papers report, beside what the simulator says of their clusters."""

import json
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal import papers as library
from shoal.cli.bar import Bar
from shoal.cli.verify import Announcer
from shoal.paper import Cell, Mark, Missing, Number, Paper, Question

SIGNS = {
    Mark.PAPER: "p",
    Mark.SECOND_HAND: "q",
    Mark.RECALLED: "?",
    Mark.ASSUMED: "a",
    Mark.DERIVED: "d",
    Mark.SIMULATED: "≈",
    Mark.MEASURED: "m",
}
"""What stands behind every number. Not s for simulated: that would read as seconds."""
LEGEND = """p the paper's own   q quoted by others   d our arithmetic on the paper's
≈ simulated         m measured now       a assumed by us
? recalled, not confirmed: not to be taken for the paper's"""


@click.command()
@click.argument("name", required=False)
@click.option("--measure", is_flag=True, help="Also measure what this machine can: how long searches take.")
@click.option("--json", "as_json", is_flag=True, help="Print everything, with marks and sources, as JSON.")
def papers(name: str | None, measure: bool, as_json: bool) -> None:
    """Show what papers report beside what the simulator says of their clusters.

    Without NAME: which papers there are. Simulated from published hardware numbers and one assumed efficiency for all
    papers, none fitted; a minute or more for OptCNN, whose plans are searched for.
    """
    if name is None:
        if measure:
            raise click.UsageError("--measure is for one paper, as in `shoal papers optcnn --measure`.")
        _show_list(as_json=as_json)
        return
    paper = library.load(name)
    starting = Announcer()
    starting("loading")
    from shoal.repeating.answers import answered

    starting("")
    done = answered(paper, Bar(), measure=measure)
    if as_json:
        click.echo(json.dumps(numbers(done), indent=1))
    else:
        show(done, Console(highlight=False))


def _show_list(*, as_json: bool) -> None:
    known = [library.load(name) for name in library.NAMES]
    if as_json:
        fields = ("name", "title", "authors", "year", "where", "read")
        click.echo(json.dumps([{field: getattr(paper, field) for field in fields} for paper in known], indent=1))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "year", "paper", "what we could read of it"):
        table.add_column(heading, no_wrap=heading in ("name", "year"))
    for paper in known:
        table.add_row(paper.name, str(paper.year), paper.title, paper.read)
    console.print(table)
    console.print("\nshoal papers NAME simulates its tables.", markup=False)


def show(paper: Paper, console: Console) -> None:
    """An answered paper on at most 80 columns: what it rests on, then its tables."""
    console.print(f"{paper.title}\n{paper.authors} {paper.year}, {paper.where}", markup=False)
    console.print(f"read: {paper.read}\n", markup=False)
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for setting in paper.settings:
        facts.add_row(setting.what, shown(setting.value))
    console.print(facts)
    for question in paper.questions:
        console.print(f"\n[bold]{question.title}[/bold]")
        console.print(_table(question))
        for note in (*question.notes, *_reasons(question)):
            console.print(Padding(Text(note), (0, 0, 0, 2)))
    console.print()
    for note in paper.notes:
        console.print(note, markup=False)
    console.print(LEGEND, markup=False)


def _table(question: Question) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in question.headings:
        table.add_column(heading, justify="right")
    for line in question.lines:
        table.add_row(line.label, *map(shown, line.cells))
    return table


def shown(cell: Cell) -> str:
    """A number with the sign of its mark, or a dash.

    >>> shown(Number("12.2", Mark.PAPER, "its table"))
    '12.2 p'
    """
    return f"{cell.text} {SIGNS[cell.mark]}" if isinstance(cell, Number) else "-"


def _reasons(question: Question) -> list[str]:
    """Why cells are empty, each reason once."""
    cells = [cell for line in question.lines for cell in line.cells]
    return [f"-: {why}" for why in dict.fromkeys(cell.why for cell in cells if isinstance(cell, Missing))]


def numbers(paper: Paper) -> dict[str, Any]:
    """An answered paper for other programs: every number with its mark and its source."""
    return {
        "name": paper.name,
        "title": paper.title,
        "authors": paper.authors,
        "year": paper.year,
        "where": paper.where,
        "read": paper.read,
        "settings": {setting.what: _cell(setting.value) for setting in paper.settings},
        "tables": [
            {
                "title": question.title,
                "notes": list(question.notes),
                "rows": [
                    {"label": line.label, "cells": dict(zip(question.headings, map(_cell, line.cells), strict=True))}
                    for line in question.lines
                ],
            }
            for question in paper.questions
        ],
        "notes": list(paper.notes),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    if isinstance(cell, Missing):
        return {"missing": cell.why}
    assert isinstance(cell, Number), "an answered paper has no open question"
    value = {} if cell.value is None else {"value": cell.value}
    return {"text": cell.text, **value, "mark": str(cell.mark), "source": cell.source}
