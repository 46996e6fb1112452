"""How a run shows itself: a moving bar on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.planning.strategies import AUTO
from shoal.reporting.summary import Row, rows_of, show_plan
from shoal.result import RunResult, WentOn
from shoal.training.listener import About, Listener
from shoal.training.run_folder import RunFolder

STARTING_LINE_SECONDS = 3.0
"""While workers start, a line at most this often."""
PLAIN_LINE_SECONDS = 10.0
"""Where there is no terminal, a line at least this often while steps go on."""
_TOLD = {
    "lost": "replica {} was lost; the others go on with its batches",
    "frozen": "replica {} gives no sign of life; the others go on with its batches",
    "back": "replica {} is back",
    "replaced": "another is started in the place of replica {} (--restarts)",
    "server lost": "server {} was lost",
    "server frozen": "server {} gives no sign of life; all replicas wait for it, {:g} s at most (--timeout)",
    "server back": "server {} is back",
}
_TOLD_IN_LOCKSTEP = _TOLD | {
    "lost": "replica {} was lost",
    "frozen": "replica {} gives no sign of life; the others wait for it, {:g} s at most (--timeout)",
}
"""What people want to hear of replicas and servers; that they came and left as expected is not news."""


def progress_for_people(*, aside: bool = False) -> Listener:
    """The listener that suits standard output; `aside`: standard error, where the other is for programs."""
    console = Console(highlight=False, stderr=aside)
    return _Bar(console) if console.is_terminal else _Lines(console)


def _workers(about: About) -> str:
    if about.exchange != "none":
        each = about.workers // about.replicas
        inside = f" of {each} workers, plan {about.plan}" if each > 1 else ""
        return f"{about.replicas} replicas{inside}, exchange {about.exchange}, "
    plan = AUTO if about.searched else about.plan  # what it chose is told in words, on a line of its own
    return f"{about.workers} workers, plan {plan}, " if about.workers > 1 else ""


class _Lines(Listener):
    """One line per test, and one every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._epochs = self._steps_per_epoch = 0
        self._told, self._timeout = _TOLD, 0.0
        self._last_line = time.monotonic()
        self._loss = float("nan")

    def __reduce__(self) -> tuple[Callable[[], Listener], tuple[()]]:
        """On its way to rank 0, which shows the run: whatever suits the output there."""
        return partial(progress_for_people, aside=self.console.stderr), ()

    def starting(self, done: str, by: int, of: int) -> None:
        if by < of and time.monotonic() - self._last_line > STARTING_LINE_SECONDS:
            self._print(f"starting: {by} of {of} workers {done}")

    def restarting(self, why: str, left: int) -> None:
        self._print(f"{why} Going on from the last checkpoint; {left} of the restarts are left.")

    def regrouping(self, change: WentOn) -> None:
        again = f"; {change.samples_again:,} samples are trained on again" if change.samples_again else ""
        where = f"after step {change.step}{again}" if change.checkpoint else "from the beginning"
        why = change.why.rstrip(".")
        self._print(f"{why}. Going on with {change.workers_after} workers {where}.")

    def planning(self, done: int, of: int, what: str) -> None:
        if done == 0 or time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._print(f"finding a plan: {what} ({done} of {of})")

    def started(self, about: About, folder: RunFolder) -> None:
        self._epochs, self._steps_per_epoch = about.epochs, about.steps_per_epoch
        self._told, self._timeout = _TOLD if about.survives else _TOLD_IN_LOCKSTEP, about.timeout
        self._print(
            f"{about.model} ({about.parameters:,} parameters) on {about.data} "
            f"({about.train_samples:,} + {about.test_samples:,} samples)"
        )
        self._print(f"data: {about.origin}; results: {folder.path}")
        batch = f"{about.batch}" if about.accumulate == 1 else f"{about.accumulate} x {about.batch}"
        self._print(
            f"{about.epochs} epoch{'s' if about.epochs > 1 else ''} of {about.steps_per_epoch} steps, "
            f"batch {batch}, {_workers(about)}{about.device}, threads {about.threads}"
        )
        if about.searched and about.plan_in_words:
            name = "" if about.plan.startswith(AUTO) else about.plan
            self._print(f"plan auto chose {show_plan(name, about.plan_in_words)}")
        if about.done:
            self._print(f"going on after step {about.done}")

    def happened(self, what: str, replica: int) -> None:
        if what in self._told:
            self._print(self._told[what].format(replica, self._timeout))

    def logged(self, metrics: Mapping[str, Any]) -> None:
        if metrics["event"] == "test":
            iou = f", IoU {metrics['test_iou']:.4f}" if "test_iou" in metrics else ""
            inside = metrics["step"] < metrics["epoch"] * self._steps_per_epoch
            where = f", step {metrics['step']}" if inside else ""
            loss = "" if math.isnan(self._loss) else f"loss {self._loss:.4f}, "  # a test may come before the first line
            self._print(
                f"epoch {metrics['epoch']}/{self._epochs}{where}: {loss}"
                f"test accuracy {metrics['test_accuracy']:.4f}{iou}"
            )
            return
        if metrics["event"] == "warning":
            self._print(f"note: {metrics['text']}")
        if metrics["event"] != "steps" or metrics["loss"] is None:
            return
        self._loss = metrics["loss"]
        if time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._progress_line(metrics)

    def _progress_line(self, metrics: Mapping[str, Any]) -> None:
        self._print(
            f"epoch {metrics['epoch']}/{self._epochs}, step {metrics['step']}: loss {metrics['loss']:.4f}, "
            f"{metrics['samples_per_sec']:,.0f} samples/s"
        )

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        table = Table(show_header=False, box=None, pad_edge=False)
        for row in (*rows_of(result), Row("results", str(folder.path))):
            value = escape(row.value)
            label = f"  {row.label}" if row.under else row.label
            table.add_row(label, f"[bold]{value}[/bold]" if row.important else value)
        self.console.print(table)
        if folder.trace.exists():
            self._print(f"trace of steps: {folder.trace}")
            self._print(f"look at it with: shoal trace open {folder.path}  or: shoal trace show {folder.path}")

    def _print(self, line: str) -> None:
        """A whole line in a file, whole words on a screen."""
        self.console.print(line, soft_wrap=not self.console.is_terminal, markup=False)
        self._last_line = time.monotonic()


class _Bar(_Lines):
    """A bar over the whole run, with loss, speed and time left; a line above it per test."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task = TaskID(0)
        self._finding: TaskID | None = None

    def planning(self, done: int, of: int, what: str) -> None:
        if self._finding is None:
            self._finding = self._bar.add_task("finding a plan", total=of, facts="")
            self._bar.start()
        self._bar.update(self._finding, completed=done, total=of, facts=what[:40])

    def started(self, about: About, folder: RunFolder) -> None:
        if self._finding is not None:
            self._bar.remove_task(self._finding)
        super().started(about, folder)
        self._task = self._bar.add_task("", total=about.epochs * about.steps_per_epoch, facts="")
        self._bar.start()

    def stepped(self, steps: int, epoch: int) -> None:
        self._bar.update(
            self._task, completed=steps, description=f"epoch {min(epoch + 1, self._epochs)}/{self._epochs}"
        )

    def logged(self, metrics: Mapping[str, Any]) -> None:
        super().logged(metrics)
        if metrics["event"] == "steps" and metrics["loss"] is not None:
            facts = f"loss {metrics['loss']:.3f}  {metrics['samples_per_sec']:,.0f}/s"
            self._bar.update(self._task, facts=facts)

    def _progress_line(self, metrics: Mapping[str, Any]) -> None:
        """The bar shows it already."""

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        self._bar.stop()
        super().finished(result, folder)

    def ended(self) -> None:
        self._bar.stop()
