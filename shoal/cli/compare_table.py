"""How a comparison shows itself while it goes on: a table that grows on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.comparing.watcher import Watcher
from shoal.comparison import Cell, Comparison
from shoal.reporting.figures import first_reached
from shoal.reporting.records import RunRecord, read_run
from shoal.units import show_seconds

LINE_SECONDS = 10.0
"""Where there is no terminal, a line about a run at most this often."""
WIDTH = 80
NAME_WIDTH = 30
"""Of a strategy, in columns."""
REDRAWN = 4
"""Times a second."""


def watcher_for_people(*, quiet: bool) -> "Folder":
    """The watcher that suits standard output; `quiet`: what is printed is for another program."""
    if quiet:
        return Folder()
    console = Console(highlight=False)
    return _Growing(console) if console.is_terminal else _Lines(console)


class Folder(Watcher):
    """Remembers where the comparison and its page lie."""

    folder: Path | None = None
    page: Path | None = None

    def began(self, comparison: Comparison, folder: Path) -> None:  # noqa: ARG002  (for those that show it)
        """Note the folder."""
        self.folder = folder

    def wrote(self, page: Path) -> None:
        """Note the page."""
        self.page = page


class _Lines(Folder):
    """One line per run that begins or ends, and one every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last = 0.0

    def began(self, comparison: Comparison, folder: Path) -> None:
        super().began(comparison, folder)
        kept = sum(cell.state == "done" for cell in comparison.cells)
        before = f", of which {kept} are done" if kept else ""
        self._print(f"{len(comparison.cells)} runs{before}; results: {folder}")

    def stage(self, what: str) -> None:
        if time.monotonic() - self._last > LINE_SECONDS or not what.startswith(
            ("timing steps:", "searching the plan auto:")
        ):
            self._print(what)

    def run_began(self, cell: Cell, how: str) -> None:
        self._print(f"{_name(cell)}: {how}")

    def run_wrote(self, cell: Cell, line: Mapping[str, Any]) -> None:
        if line["event"] == "test" and time.monotonic() - self._last > LINE_SECONDS:
            self._print(f"{_name(cell)}: {line['samples']:,} samples, test accuracy {line['test_accuracy']:.4f}")

    def run_ended(self, cell: Cell, comparison: Comparison) -> None:  # noqa: ARG002
        if cell.state == "failed":
            self._print(f"{_name(cell)}: FAILED: {cell.why}")
            return
        assert self.folder is not None
        result = read_run(self.folder / cell.folder).result
        assert result is not None
        self._print(
            f"{_name(cell)}: test accuracy {result.test_accuracy:.4f}, {result.samples_per_second:,.0f} samples/s"
        )

    def told(self, text: str) -> None:
        self._print(f"note: {text}")

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=not self.console.is_terminal, markup=False)
        self._last = time.monotonic()


class _Growing(Folder):
    """A row per run: its state, accuracy, time to the target and speed, as it goes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._comparison: Comparison | None = None
        self._now: dict[str, dict[str, Any]] = {}
        """What a run under way said last, by its folder."""
        self._done: dict[str, RunRecord] = {}
        self._stage = ""
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=REDRAWN, transient=True)

    def began(self, comparison: Comparison, folder: Path) -> None:
        super().began(comparison, folder)
        self._comparison = comparison
        self._done = {cell.folder: read_run(folder / cell.folder) for cell in comparison.cells if cell.state == "done"}
        self.console.print(f"{len(comparison.cells)} runs; results: {folder}", markup=False)
        self._live.start()

    def stage(self, what: str) -> None:
        self._stage = what

    def run_began(self, cell: Cell, how: str) -> None:
        self._now[cell.folder], self._stage = {"state": how}, ""

    def run_starting(self, cell: Cell, what: str) -> None:
        self._now[cell.folder]["state"] = what

    def run_wrote(self, cell: Cell, line: Mapping[str, Any]) -> None:
        now = self._now[cell.folder]
        if line["event"] in ("steps", "test"):
            now.update({name: line[name] for name in ("samples", "samples_per_sec", "test_accuracy") if name in line})
            now["state"] = f"{line['samples']:,} samples"

    def run_ended(self, cell: Cell, comparison: Comparison) -> None:
        self._now.pop(cell.folder, None)
        self._comparison = comparison
        if cell.state == "done":
            assert self.folder is not None
            self._done[cell.folder] = read_run(self.folder / cell.folder)

    def told(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

    def ended(self) -> None:
        self._live.stop()

    def _drawn(self) -> RenderableType:
        comparison = self._comparison
        if comparison is None:
            return Text("")
        table = _table("run", "state", "accuracy", "to target", "samples/s")
        for cell in comparison.cells:
            table.add_row(_short(_name(cell)), *self._cells(cell, comparison))
        return Group(table, Text(self._stage[:WIDTH]))

    def _cells(self, cell: Cell, comparison: Comparison) -> tuple[str, ...]:
        done = self._done.get(cell.folder)
        if done is not None and (result := done.result) is not None:
            test = first_reached(done, comparison.target)
            missed = "" if comparison.target is None else "never"
            reached = missed if test is None else show_seconds(test.seconds)
            return "done", f"{result.test_accuracy:.4f}", reached, f"{result.samples_per_second:,.0f}"
        if cell.state == "failed":
            return "FAILED", "", "", ""
        now = self._now.get(cell.folder)
        if now is None:
            return "", "", "", ""
        accuracy, speed = now.get("test_accuracy"), now.get("samples_per_sec")
        return (
            str(now["state"])[:22],
            "" if accuracy is None else f"{accuracy:.4f}",
            "",
            "" if speed is None else f"{speed:,.0f}",
        )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _name(cell: Cell) -> str:
    return f"{cell.strategy}, seed {cell.settings['seed']}"


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
