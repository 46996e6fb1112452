"""The command `shoal`: finds the subcommand, turns errors into one message and an exit code."""

import sys
from importlib import import_module
from typing import NoReturn

import click

from shoal._version import __version__
from shoal.errors import ShoalError, suggestion

COMMANDS = {
    "train": ("shoal.cli.train:train", "Train a network and write its results to a folder."),
    "doctor": ("shoal.cli.doctor:doctor", "Show what this machine has, what is missing and how to add it."),
}


class _LazyGroup(click.Group):
    """Imports a subcommand when it is called: `shoal --help` answers without loading torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's own signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            raise click.UsageError(f"there is no command {args[0]!r}. {suggestion(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shoal")
def shoal() -> None:
    """Train convolutional networks on many devices: any plan per layer, any exchange between replicas."""


def main() -> NoReturn:
    """Run the command line. Exit 0: done; 1: a run failed; 2: bad input; 130: interrupted."""
    try:
        shoal.main(prog_name="shoal", standalone_mode=False)
    except ShoalError as error:
        _say(error.problem, error.remedy)
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "shoal"
        _say(error.format_message(), f"See `{command} --help`.")
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted before training began.", "Nothing was left behind; run the command again.")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as in `shoal doctor | head -1`
        sys.stderr.close()
        sys.exit(1)
    sys.exit(0)


def _say(problem: str, remedy: str) -> None:
    click.echo(f"shoal: {problem}\n{remedy}", err=True)
