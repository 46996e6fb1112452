"""`shoal train`: settings from a recipe and options; progress and a summary for people."""

from pathlib import Path
from typing import Any

import click

from shoal.cli.options import options_of
from shoal.config import TrainConfig, read_recipe
from shoal.errors import ConfigError, OutputError
from shoal.launching import load_ahead, surrounding
from shoal.machine import cores, has_gpu_driver
from shoal.result import RunResult

AUTO = "auto"


@click.command()
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@options_of(TrainConfig)
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="Go on with the stopped run in this folder, or from this one of its checkpoints; auto: with the run in --out, "
    "or begin it.",
)
@click.option(
    "--join",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Add one more replica to the run in this folder, which is under way with an asynchronous exchange.",
)
@click.option("--print-config", is_flag=True, help="Print all settings as a recipe, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print result.json to standard output, all else to the other.")
def train(
    recipe: Path | None,
    resume: str | None,
    join: Path | None,
    print_config: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Train a network and write its results to a folder.

    RECIPE is a YAML file of the settings below; an option given here wins over it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if join is not None:
        _join(join, recipe, given)
        return
    if resume is not None and resume != AUTO:
        _go_on(Path(resume), recipe, given, as_json=as_json)
        return
    values = {**_from_recipe(recipe), **given}
    config = TrainConfig.parse(values)
    if resume == AUTO and _goes_on_by_itself(config, values, as_json=as_json):
        return
    if print_config:
        click.echo(config.to_yaml(), nl=False)
        return
    _say(f"loading {config.model} and the data set {config.data} ...", aside=as_json)
    if surrounding() is None and config.on == "here":
        if told := crowded(config):
            _say(told, aside=as_json)
        if config.workers > 1:
            load_ahead(config.workers, config.threads)
    # torch loads here and not before: a wrong option is answered at once
    from shoal import running
    from shoal.cli.progress import progress_for_people

    _print_result(running.train(config, progress_for_people(aside=as_json)), as_json=as_json)


def _say(line: str, *, aside: bool = False) -> None:
    """Before torch is loaded, which takes seconds; of many ranks the first speaks. `aside`: to standard error."""
    if _first_rank():
        click.echo(line, err=aside)


def _first_rank() -> bool:
    world = surrounding()
    return world is None or world.rank == 0


def _print_result(result: RunResult, *, as_json: bool) -> None:
    if as_json and _first_rank():
        click.echo(result.to_json(), nl=False)


def crowded(config: TrainConfig) -> str:
    """What to expect where more workers than cores are asked for on a host without GPUs; nothing otherwise."""
    if config.workers <= cores() or config.device.startswith("cuda") or (config.device == "auto" and has_gpu_driver()):
        return ""
    return f"note: {config.workers} workers share {cores()} cores and take turns: starting takes a while."


def _from_recipe(recipe: Path | None) -> dict[str, Any]:
    """The recipe's settings, checked on their own so that a mistake is blamed on the file."""
    if recipe is None:
        return {}
    values = read_recipe(recipe)
    TrainConfig.parse(values, source=f"recipe {str(recipe)!r}: ")
    return values


def _goes_on_by_itself(config: TrainConfig, values: dict[str, Any], *, as_json: bool) -> bool:
    """Go on with the run in --out, if one is there that has a checkpoint; a finished one is left as it is."""
    if config.out is None:
        raise ConfigError("--resume auto does not know which run is meant.", "Name its folder with --out DIR.")
    from shoal.training.run_folder import RunFolder

    folder = RunFolder(config.out)
    if folder.holds_old_checkpoint:
        RunFolder.open(config.out)
    if not (folder.can_go_on and folder.config.exists()):
        return False
    from shoal import running
    from shoal.cli.progress import progress_for_people

    changes = running.changes_to(folder, values)
    if folder.result.exists() and not {"epochs", "patience"} & changes.keys():
        _say(f"the run in {folder.path} is finished: see {folder.result}", aside=as_json)
        _print_result(_read_result(folder.result), as_json=as_json)
        return True
    _say(f"going on with the run in {folder.path} ...", aside=as_json)
    _print_result(running.resume(folder.path, changes, progress_for_people(aside=as_json)), as_json=as_json)
    return True


def _read_result(path: Path) -> RunResult:
    """Of a finished run. The file is whole or absent as we write it; others may have touched it."""
    try:
        return RunResult.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise OutputError(
            f"the run is finished, but {str(path)!r} cannot be read: {why}.",
            "Remove that file: the same command then goes on from the last checkpoint, and writes it anew.",
        ) from None


def _go_on(folder: Path, recipe: Path | None, changes: dict[str, str], *, as_json: bool) -> None:
    if recipe is not None:
        raise ConfigError(
            f"--resume takes its settings from {str(folder)!r}, not from the recipe {str(recipe)!r}.",
            "Leave the recipe out; options such as --epochs may be given anew.",
        )
    _say(f"loading the run in {folder} ...", aside=as_json)
    from shoal import running
    from shoal.cli.progress import progress_for_people

    _print_result(running.resume(folder, changes, progress_for_people(aside=as_json)), as_json=as_json)


def _join(folder: Path, recipe: Path | None, given: dict[str, str]) -> None:
    if recipe is not None or given:
        raise ConfigError(
            f"--join takes its settings from the run in {str(folder)!r}.",
            "Leave out the recipe and all other options.",
        )
    _say(f"joining the run in {folder} ...")
    from shoal.replicas.run import join_run

    join_run(folder)
