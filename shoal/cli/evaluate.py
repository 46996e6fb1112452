"""`shoal evaluate`: a trained network on test data, under any plan."""

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import given, options_of
from shoal.cli.verify import Announcer
from shoal.config import EvaluateConfig
from shoal.launching import load_ahead, surrounding
from shoal.result import EvaluateResult
from shoal.units import show_seconds

WORST = 20
"""Classes that are shown unless all are asked for."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@options_of(EvaluateConfig)
@click.option("--all", "everything", is_flag=True, help=f"Show every class, not only the {WORST} worst.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead.")
def evaluate(run: Path, everything: bool, as_json: bool, **options: str | None) -> None:
    """Test a trained network on the test part of its data, or of other data.

    RUN is the folder of a finished run, or its model.safetensors. Other data are normalised as in training, and their
    classes are told apart by name.
    """
    config = EvaluateConfig.parse(given(options))
    # torch loads here and not before: a wrong option is answered at once
    rank = surrounding()
    if config.workers > 1 and rank is None:
        load_ahead(config.workers, config.threads)
    from shoal.using import testing

    testing_now = Announcer()
    if rank is None or rank.rank == 0:
        testing_now("testing")
    try:
        result = testing.start(run, config)
    finally:
        testing_now("")
    if rank is not None and rank.rank:
        return
    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        show(result, Console(highlight=False), everything=everything)


def show(result: EvaluateResult, console: Console, *, everything: bool = False) -> None:
    """Accuracy, loss and what else applies, then the classes, on at most 80 columns."""
    where = f"{result.workers} workers, plan {result.plan}, " if result.workers > 1 else ""
    console.print(
        f"{result.run} on {result.data}: {result.samples:,} test samples ({result.origin}), "
        f"{where}batch {result.batch}, {result.device}",
        soft_wrap=True,
        markup=False,
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("accuracy", f"[bold]{result.accuracy:.4f}[/bold]")
    if result.iou is not None:
        table.add_row("foreground IoU", f"[bold]{result.iou:.4f}[/bold]")
    table.add_row("cross entropy", f"{result.loss:.4f}")
    table.add_row("time", show_seconds(result.seconds))
    console.print(table)
    if result.own_loss is not None:
        console.print(
            f"The run was trained with another loss, {result.own_loss}, which is not computed here.", markup=False
        )
    console.print()
    scores = result.per_class
    shown = list(scores) if everything else _worst(result, WORST)
    classes = Table(box=None, pad_edge=False)
    classes.add_column("class", overflow="ellipsis", no_wrap=True, max_width=40)
    classes.add_column("pixels" if result.iou is not None else "samples", justify="right", no_wrap=True)
    classes.add_column("accuracy", justify="right", no_wrap=True)
    for name in shown:
        accuracy = scores[name].accuracy
        classes.add_row(escape(name), f"{scores[name].samples:,}", "-" if accuracy is None else f"{accuracy:.4f}")
    console.print(classes)
    if len(shown) < len(scores):
        console.print(f"The {len(shown)} of {len(scores)} classes with the worst accuracy; --all shows every one.")


def _worst(result: EvaluateResult, count: int) -> list[str]:
    """Names of the classes with the worst accuracy; those without samples last, all in order where they are few."""
    scores = result.per_class
    if len(scores) <= count:
        return list(scores)
    known = {name: score.accuracy for name, score in scores.items() if score.accuracy is not None}
    return sorted(known, key=lambda name: known[name])[:count]
