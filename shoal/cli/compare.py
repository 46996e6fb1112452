"""`shoal compare`: one network under several strategies; a live table, and a summary for people."""

from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, create_model
from rich.console import Console

from shoal.cli.options import given, options_of
from shoal.config import CompareConfig, TrainConfig, read_recipe
from shoal.errors import ConfigError, RunError
from shoal.launching import load_ahead

NOT_OF_ALL = frozenset({"plan", "exchange", "exchange_options", "workers", "replicas", "seed", "out", "patience"})
"""Settings of a run that are not for all runs of a comparison alike."""


def _common() -> type[BaseModel]:
    """The settings of a run that all runs of a comparison may have."""
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in TrainConfig.model_fields.items() if name not in NOT_OF_ALL
    }
    return create_model("CommonSettings", __config__={"protected_namespaces": ()}, **fields)


@click.command()
@click.argument("recipes", nargs=-1, type=click.Path(path_type=Path))
@options_of(CompareConfig)
@options_of(_common())
@click.option(
    "--resume",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Go on with the comparison in this folder, as the command that began it would.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and nothing else.")
def compare(recipes: tuple[Path, ...], resume: Path | None, as_json: bool, **options: Any) -> None:
    """Train one network under several strategies at equal samples, in one folder.

    Every plan is a run over all workers; with --exchanges, every plan inside replicas with every exchange between them.
    Each RECIPE, a YAML file of settings of `shoal train`, is a strategy too. Options below the comparison's own are
    those of `shoal train`, for every run. The same command in the same folder goes on where it stopped.
    """
    told = given(options)
    if resume is not None and (recipes or told):
        first = str(recipes[0]) if recipes else f"--{next(iter(told)).replace('_', '-')}"
        raise ConfigError(
            f"--resume takes all settings from {str(resume)!r}, and {first} is given too.",
            "Leave it out, or begin another comparison with another --out.",
        )
    own = {name: value for name, value in told.items() if name in CompareConfig.model_fields}
    config = CompareConfig.parse(own)
    named = _read(recipes)
    if not as_json:
        click.echo("loading the network and its data ...")
    # torch loads here and not before: a wrong option is answered at once
    load_ahead(config.workers or 2, None)
    from shoal.cli.compare_table import watcher_for_people
    from shoal.cli.report import show
    from shoal.comparing.cells import Request
    from shoal.comparing.course import carry_out
    from shoal.comparing.course import resume as go_on
    from shoal.reporting import read_study, report_of

    watcher = watcher_for_people(quiet=as_json)
    if resume is not None:
        comparison = go_on(resume, watcher)
    else:
        train = {name: value for name, value in told.items() if name not in own}
        comparison = carry_out(Request(config, train, named), watcher)
    assert watcher.folder is not None
    said = report_of(read_study([watcher.folder]))
    if as_json:
        click.echo(said.to_json())
    else:
        console = Console(highlight=False)
        show(said, console)
        for where in (watcher.folder, watcher.page):
            if where is not None:
                console.print(f"wrote {where}", markup=False, soft_wrap=True)
    failed = [cell for cell in comparison.cells if cell.state == "failed"]
    if failed:
        raise RunsFailedError(
            f"{len(failed)} of {len(comparison.cells)} runs failed: "
            + "; ".join(f"{cell.folder}: {cell.why}" for cell in failed),
            f"Mend the cause and try them again: shoal compare --resume {watcher.folder}",
        )


class RunsFailedError(RunError):
    """Some runs of a comparison failed; the others are done."""


def _read(recipes: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """The recipes' settings by the files' names, each checked on its own so that a mistake is blamed on the file."""
    found: dict[str, dict[str, Any]] = {}
    for path in recipes:
        values = read_recipe(path)
        TrainConfig.parse(values, source=f"recipe {str(path)!r}: ")
        if path.stem in found:
            raise ConfigError(f"two recipes are called {path.stem!r}.", "Give one of the files another name.")
        found[path.stem] = {name: value for name, value in values.items() if name not in ("seed", "out")}
    return found
