"""A bar for work that is told as (done, of how many, what is next)."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0
"""Where there is no terminal, a line at most this often."""


class Bar:
    """On the error stream: a bar on a terminal, a line now and then elsewhere. Survives pickling until first used."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Something is next; an empty `what` and all done: nothing is."""
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            if what and time.monotonic() - self._last > LINE_SECONDS:
                self._last = time.monotonic()
                console.print(f"{done}/{total} {what}", soft_wrap=True, markup=False)
            return
        if not what:
            if self._bar is not None:
                self._bar.stop()
            self._bar = None
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, description=f"{what[:30]:30}")
