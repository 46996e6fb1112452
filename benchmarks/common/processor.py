"""Processor time of this process and of those that it started: what work costs, however busy the machine is. Linux."""

import os
import time
from collections.abc import Callable

import psutil

_SCHEDULED = 2
"""The kernel's clock of the time for which a process's threads were on a core (CPUCLOCK_SCHED)."""


def processor_seconds(pid: int) -> float:
    """So far, of all threads that a process has or had; 0 for one that is gone.

    To the nanosecond: what /proc tells is of hundredths of a second.
    """
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0


class ProcessorTime:
    """Notes the processor time of each call of a turn, in this process and its descendants at that time.

    `until` returns when all ranks have done their part of the turn, for which servers of one of them may work.
    """

    def __init__(self, until: Callable[[], object] = lambda: None) -> None:
        self._until = until
        self.seconds: dict[str, list[tuple[float, float]]] = {}
        """By name, of each call: all of it, and the part of it that `part` counted."""

    def noting(self, name: str, turn: Callable[[], object], part: Callable[[], float]) -> Callable[[], None]:
        """The turn, which notes its time under `name`; `part` counts seconds of a part of what it does."""

        def noted() -> None:
            before, counted = _by_process(), part()
            turn()
            self._until()
            after = _by_process()
            taken = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
            self.seconds.setdefault(name, []).append((taken, part() - counted))

        return noted


def _by_process() -> dict[int, float]:
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return {pid: processor_seconds(pid) for pid in pids}
