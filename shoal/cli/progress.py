"""How a run shows itself: a moving bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.result import RunResult
from shoal.training import Listener
from shoal.training.checkpoint import Progress as RunProgress
from shoal.training.folder import RunFolder
from shoal.training.job import Job
from shoal.units import show_bytes, show_seconds

PLAIN_LINE_SECONDS = 10.0
"""Where there is no terminal, a line at least this often while steps go on."""


def progress_for_people() -> Listener:
    """The listener that suits standard output."""
    console = Console(highlight=False)
    return _Bar(console) if console.is_terminal else _Lines(console)


def _workers(job: Job) -> str:
    ranks = job.network.ranks
    return f"{ranks} workers, plan {job.network.plan.name}, " if ranks > 1 else ""


class _Lines(Listener):
    """One line per test, and one every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._epochs = 0
        self._last_line = time.monotonic()
        self._loss = float("nan")

    def __reduce__(self) -> tuple[Callable[[], Listener], tuple[()]]:
        """On its way to rank 0, which shows the run: whatever suits the output there."""
        return progress_for_people, ()

    def planning(self, done: int, of: int, what: str) -> None:
        if done == 0 or time.monotonic() - self._last_line > PLAIN_LINE_SECONDS:
            self._print(f"finding a plan: {what} ({done} of {of})")

    def started(self, job: Job, progress: RunProgress, folder: RunFolder) -> None:
        config = job.config
        self._epochs = config.epochs
        self._print(
            f"{config.model} ({job.network.parameters:,} parameters) on {config.data} "
            f"({len(job.splits.train):,} + {len(job.splits.test):,} samples, {job.splits.origin})"
        )
        self._print(
            f"{config.epochs} epochs of {job.loader.order.steps_per_epoch} steps, batch {config.batch}, "
            f"{_workers(job)}{job.device}, threads {config.threads}, results in {folder.path}"
        )
        if progress.steps:
            self._print(f"going on after step {progress.steps}")

    def logged(self, metrics: Mapping[str, Any]) -> None:
        if metrics["event"] == "test":
            iou = f", IoU {metrics['test_iou']:.4f}" if "test_iou" in metrics else ""
            self._print(
                f"epoch {metrics['epoch']}/{self._epochs}: loss {self._loss:.4f}, "
                f"test accuracy {metrics['test_accuracy']:.4f}{iou}"
            )
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
        table.add_row("test accuracy", f"[bold]{result.test_accuracy:.4f}[/bold]")
        if result.test_iou is not None:
            table.add_row("foreground IoU", f"[bold]{result.test_iou:.4f}[/bold]")
        table.add_row("speed", f"{result.samples_per_second:,.0f} images/s")
        table.add_row("step", f"{show_seconds(result.step_seconds_median)} (median)")
        table.add_row("time", show_seconds(result.wall_seconds))
        table.add_row("peak memory", ", ".join(map(show_bytes, result.peak_memory_bytes)))
        if result.workers > 1:
            sent = result.bytes_per_step
            table.add_row("sent per step", f"{show_bytes(sent.counted)}, by {result.workers} workers together")
            table.add_row("  predicted", show_bytes(sent.predicted))
        table.add_row("results", str(folder.path))
        self.console.print(table)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)
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

    def started(self, job: Job, progress: RunProgress, folder: RunFolder) -> None:
        if self._finding is not None:
            self._bar.remove_task(self._finding)
        super().started(job, progress, folder)
        self._task = self._bar.add_task("", total=job.total_steps, facts="")
        self._bar.start()

    def stepped(self, progress: RunProgress) -> None:
        description = f"epoch {progress.position.epoch + 1}/{self._epochs}"
        self._bar.update(self._task, completed=progress.steps, description=description)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        super().logged(metrics)
        if metrics["event"] == "steps":
            facts = f"loss {metrics['loss']:.3f}  {metrics['samples_per_sec']:,.0f}/s"
            self._bar.update(self._task, facts=facts)

    def _progress_line(self, metrics: Mapping[str, Any]) -> None:
        """The bar shows it already."""

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        self._bar.stop()
        super().finished(result, folder)

    def ended(self) -> None:
        self._bar.stop()
