"""The command `shoal`: finds the subcommand, turns errors into one message and an exit code."""

import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

import click

from shoal._version import __version__
from shoal.errors import ConfigError, DivergedError, InputError, LeftError, ShoalError, StoppedError, suggestion
from shoal.machine import ask_for_huge_pages

COMMANDS = {
    "train": ("shoal.cli.train:train", "Train a network and write its results to a folder."),
    "compare": ("shoal.cli.compare:compare", "Train one network under several plans and exchanges, beside each other."),
    "verify": ("shoal.cli.verify:verify", "Compare a plan with one device, number by number."),
    "evaluate": ("shoal.cli.evaluate:evaluate", "Test a trained network, on its own or other data, under any plan."),
    "predict": ("shoal.cli.predict:predict", "Predict images with a trained network: classes and scores, or masks."),
    "export": ("shoal.cli.export:export", "Write a trained network as one file: safetensors, torch.export, ONNX."),
    "report": ("shoal.cli.report:report", "Make one page of a run, of a comparison, or of several runs."),
    "profile": ("shoal.cli.profile:profile", "Measure a network's layers and the links of this machine."),
    "plan": ("shoal.cli.plan:plan", "Find the plan with the shortest step; show, diff and draw plans."),
    "simulate": ("shoal.cli.simulate:simulate", "Play a plan on any cluster: its step, its trace, what if."),
    "papers": ("shoal.cli.papers:papers", "Show what papers report beside what the simulator says of their clusters."),
    "trace": ("shoal.cli.trace:trace", "Look at recorded steps: who did what when, and who waited for whom."),
    "doctor": ("shoal.cli.doctor:doctor", "Show what this machine has, what is missing and how to add it."),
}


LOST_SECONDS = 1.0
"""What a rank that lost another waits before it says so, for the cause to be told first."""

_ALIKE = (InputError, DivergedError, StoppedError, click.ClickException, click.Abort, KeyboardInterrupt)
"""What all ranks find at the same time."""


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
    """Run the command line. Exit 0: done, or left to others; 1: a run failed; 2: bad input; 130: interrupted."""
    ask_for_huge_pages()
    try:
        with _terminable():
            shoal.main(prog_name="shoal", standalone_mode=False)
    except BrokenPipeError:  # the reader of our output has gone, as in `shoal doctor | head -1`
        sys.stderr.close()
        sys.exit(1)
    except BaseException as error:
        _end_as_rank(error)
        text, code = _told(error)
        _print(text, err=not isinstance(error, click.exceptions.NoArgsIsHelpError))
        sys.exit(code)
    sys.exit(0)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, also before there is anything that could stop in good order."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _told(error: BaseException) -> tuple[str, int]:
    """The message for people and the exit code; for what nobody expected, a traceback follows the message."""
    match error:
        case LeftError():
            return f"shoal: {error.problem}", error.exit_code
        case ShoalError():
            remote = f"\n{error.__cause__}" if type(error.__cause__).__name__ == "RemoteError" else ""
            return f"shoal: {error}{remote}", error.exit_code
        case click.exceptions.NoArgsIsHelpError():
            return error.format_message(), 2
        case click.ClickException():
            command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "shoal"
            return f"shoal: {error.format_message()}\nSee `{command} --help`.", 2
        case KeyboardInterrupt() | click.Abort():
            remedy = "Run the command again; a training whose folder has a checkpoint goes on with --resume."
            return f"shoal: interrupted.\n{remedy}", 130
        case SystemExit():
            raise error
        case _:
            from shoal import launching  # only now: `shoal --help` need not load it

            failure = launching.Failure.of(error, 0)
            remedy = "If it comes from your own code, the end of the traceback shows where; else it is a bug of ours."
            return f"shoal: {failure.what}.\n{remedy}\n\n{failure.trace}", 1


def _end_as_rank(error: BaseException) -> None:
    """Where torchrun or srun started this process beside others, end it so that people read the cause first.

    What all ranks found alike rank 0 tells; a rank whose replica left the others in good order says so and has not
    failed, so that nobody ends the others because of it; a rank's own failure that rank tells at once; a rank that
    merely lost another waits a moment and says no more than that.
    """
    from shoal import launching  # only now: `shoal --help` need not load it

    try:
        world = launching.surrounding()
    except ConfigError:  # which may be what is told here
        return
    if world is None or world.size == 1 or isinstance(error, SystemExit):
        return
    failure = launching.Failure.of(error, world.rank)
    text, code = "", 1
    if isinstance(error, LeftError):
        text, code = _told(error)
    elif isinstance(error, _ALIKE):
        text, code = _told(error)
        text = text if world.rank == 0 else ""
    elif failure.is_cause:
        text, code = _told(failure.described())
    else:
        time.sleep(LOST_SECONDS)
        where = "".join(f", {note}" for note in failure.notes)
        text = f"shoal: rank {world.rank} lost another rank{where}: {failure.what}."
    if text:
        _print(text)
    launching.leave(code)


def _print(text: str, *, err: bool = True) -> None:
    on_screen = err and sys.stderr.isatty()
    click.echo(between_words(text, shutil.get_terminal_size().columns) if on_screen else text, err=err)


def between_words(text: str, columns: int) -> str:
    """A message broken between words for a screen; a traceback below it stays as it is.

    >>> print(between_words("Known: lenet5, vgg16.\\nGive one.\\n\\nTraceback: as long as it is", 15))
    Known: lenet5,
    vgg16.
    Give one.
    <BLANKLINE>
    Traceback: as long as it is
    """
    message, blank, rest = text.partition("\n\n")
    lines = (
        textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False) for line in message.split("\n")
    )
    return "\n".join(part for line in lines for part in line) + blank + rest
