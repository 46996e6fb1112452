"""`shoal verify`: a plan against one device, as a table of differences, a sentence and an exit code."""

import sys
import threading
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.options import options_of
from shoal.config import VerifyConfig
from shoal.errors import OutputError
from shoal.files import write_text_atomically
from shoal.verdict import LayerDifferences, Verdict

WORST = 12
"""Layers that are shown unless all are asked for."""
LATE_SECONDS = 2.0
"""What lasts longer is announced."""


@click.command()
@options_of(VerifyConfig)
@click.option("--json", "file", metavar="FILE", type=click.Path(path_type=Path), help="Write the verdict as JSON too.")
@click.option("--all", "everything", is_flag=True, help=f"Show every layer, not only the {WORST} with most difference.")
def verify(file: Path | None, everything: bool, **options: str | None) -> None:
    """Compare a plan with one device, number by number.

    Both train the same network on the same batch. Compared are outputs, loss, gradients, buffers, the parameters after
    some steps, and an evaluation. Exits 0 if all are equal to rounding, 1 if not, with the layer at fault.
    """
    config = VerifyConfig.parse({name: value for name, value in options.items() if value is not None})
    if file is not None and not file.absolute().parent.is_dir():
        raise OutputError(f"{str(file)!r} cannot be written: its folder is not there.", "Name a file in a folder.")
    # torch loads here and not before: a wrong option is answered at once
    from shoal import launching
    from shoal.verifying import from_settings

    starting, rank = Announcer(), launching.surrounding()
    starting("loading")
    try:
        verdict = from_settings.start(config, Announcer())
    finally:
        starting("")
    if rank is None or rank.rank == 0:
        if file is not None:
            write_text_atomically(file, verdict.to_json())
        show(verdict, Console(highlight=False), everything=everything)
    if not verdict.passed:
        sys.exit(1)


class Announcer:
    """Says on the error stream what is going on, if it goes on for long. Survives pickling until it is first used."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str) -> None:
        """Something begins, and what was going on has ended; an empty text: nothing is going on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if stage:
            self._timer = threading.Timer(LATE_SECONDS, lambda: click.echo(f"{stage} ...", err=True))
            self._timer.daemon = True
            self._timer.start()


def show(verdict: Verdict, console: Console, *, everything: bool = False) -> None:
    """The table, in the network's order, and what it means, on at most 80 columns."""
    batch = " x ".join(map(str, verdict.input))
    console.print(
        f"{verdict.model} under {verdict.plan} on {verdict.workers} workers beside one device: "
        f"batch {batch}, {verdict.dtype}, {verdict.steps} steps\n"
    )
    rows = verdict.rows if everything else worst(verdict.rows, WORST)
    console.print(_table(verdict, rows))
    if len(rows) < len(verdict.rows):
        console.print(f"The {len(rows)} of {len(verdict.rows)} layers with most difference; --all shows every one.")
    whole = {
        "output": (verdict.output, verdict.tolerance),
        "loss": (verdict.loss, verdict.tolerance),
        "input gradient": (verdict.input_gradient, verdict.tolerance),
        "evaluation after the steps": (verdict.evaluation, verdict.later_tolerance),
    }
    console.print("\nWhole network: " + ", ".join(f"{name} {_cell(*of)}" for name, of in whole.items()))
    for sentence in sentences(verdict):
        console.print(sentence, markup=False)


def worst(rows: tuple[LayerDifferences, ...], count: int) -> tuple[LayerDifferences, ...]:
    """Those with most difference, still in the network's order."""
    chosen = sorted(range(len(rows)), key=lambda index: -rows[index].worst)[:count]
    return tuple(rows[index] for index in sorted(chosen))


def sentences(verdict: Verdict) -> list[str]:
    """The verdict in words."""
    limits = f"the largest relative difference is {verdict.worst:.1e} (tolerance {verdict.tolerance:.0e})"
    later = f"after the steps {verdict.worst_later:.1e} (tolerance {verdict.later_tolerance:.0e})"
    lines = [f"{'Equal' if verdict.passed else 'DIFFERENT'}: {limits}, {later}."]
    if verdict.later_tolerance > verdict.tolerance:
        lines.append("One device is that far from itself after the steps when its weights change in their last bit.")
    if verdict.culprit is not None:
        lines.append(f"At fault: {verdict.culprit}.")
        if verdict.batch_norm == "local" and verdict.culprit.mixes_samples:
            lines.append("--batch-norm local asks for this: each worker's samples have statistics of their own.")
    return lines


def _table(verdict: Verdict, rows: tuple[LayerDifferences, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column("cut", no_wrap=True)
    for heading in ("output", "gradient", "buffers", f"after {verdict.steps} steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(number, verdict.tolerance) for number in (row.output, row.gradient, row.buffers)]
        table.add_row(_name(row.layer), row.cut, *cells, _cell(row.after_steps, verdict.later_tolerance))
    return table


def _name(layer: str) -> str:
    return layer.replace("[", chr(92) + "[")


def _cell(difference: float | None, tolerance: float) -> str:
    if difference is None:
        return "-"
    text = f"{difference:.0e}" if difference else "0"
    return text if difference <= tolerance else f"[bold red]{text}[/bold red]"
