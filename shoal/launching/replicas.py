"""Replicas on this host: groups of ranks of which some may be lost while the others go on.

A rank that dies takes its replica with it and nobody else, where the exchange survives that; an error that a rank
raised itself ends the run, because it would come again. The caller's `over` says whether the run is over.
"""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from shoal.launching.failure import Failure, explain
from shoal.launching.process import (
    OnStage,
    Process,
    Signals,
    Stages,
    end,
    environment,
    environment_of,
    packed,
    start,
)
from shoal.launching.ranks import GRACE_SECONDS, LOOK_SECONDS, SEARCH_SECONDS
from shoal.launching.world import LOOPBACK, World

LEAVE_SECONDS = 10.0
"""Time that replicas have to leave when the run is over."""


class Replicas:
    """`function(*args, replica)` on `ranks` processes for each of `replicas`, each joined in a group of its own.

    `survives`: whether the run goes on when a replica is lost. `table` is where ranks meet.
    """

    def __init__(self, replicas: int, ranks: int, *, threads: int, timeout: float, device: str, survives: bool) -> None:
        from shoal.transport.table import OwnTable

        self._replicas, self._ranks = replicas, ranks
        self._threads, self._timeout, self._device, self._survives = threads, timeout, device, survives
        self._table = OwnTable()
        self._processes: list[Process] = []

    @property
    def table(self) -> str:
        """Where ranks meet."""
        return self._table.url

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        over: Callable[[], bool],
        on_stop: Callable[[], None],
        on_lost: Callable[[int, Failure], None],
        others: Callable[[], bool] = lambda: False,
        on_stage: OnStage = lambda *_: None,
    ) -> None:
        """Until `over`, or until every rank has finished. `on_stop`: the user asked to stop. `on_lost`: a replica died.
        `others`: whether replicas that were started elsewhere go on, which are then waited for.
        `on_stage`: as in `ranks.py`.

        Raises as `run` in `ranks.py` does; where replicas may be lost, only when none is left. No process outlives it.
        """
        processes = self._processes
        with Signals(processes) as signals:
            try:
                with environment(**environment_of(self._threads)):
                    for number in range(self._replicas * self._ranks):
                        processes.append(self._start(function, args, number))
                self._watch(signals, over, on_stop, on_lost, others, Stages(on_stage))
            finally:
                end(processes)
                self._table.close()

    def _start(self, function: Callable[..., Any], args: Sequence[object], number: int) -> Process:
        every = self._replicas * self._ranks
        world = World(number, every, number, every, LOOPBACK, 0, "shoal", table=self.table).in_replica(self._ranks)
        payload = packed(function, (*args, number // self._ranks))
        return start(world, payload, self._threads, self._timeout, self._device)

    def _of(self, replica: int) -> list[Process]:
        return [process for process in self._processes if process.number // self._ranks == replica]

    def _watch(
        self,
        signals: Signals,
        over: Callable[[], bool],
        on_stop: Callable[[], None],
        on_lost: Callable[[int, Failure], None],
        others: Callable[[], bool],
        stages: Stages,
    ) -> None:
        told_to_stop = False
        lost: set[int] = set()
        deadline = float("inf")
        while (waiting := [process for process in self._processes if not process.told]) or others():
            handles = [handle for process in waiting for handle in (process.pipe, process.process.sentinel)]
            wait(handles, timeout=LOOK_SECONDS)
            for process in waiting:
                process.hear()
            stages.look(self._processes)
            if signals.asked > 1:
                raise KeyboardInterrupt
            if signals.asked and not told_to_stop:
                told_to_stop = True
                on_stop()
            failures = [process.failure for process in self._processes if process.failure is not None]
            fatal = self._fatal(failures)
            if fatal:
                deadline = min(deadline, time.monotonic() + _patience(fatal))
            elif over():
                deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
            for replica in {failure.rank // self._ranks for failure in failures} - lost:
                lost.add(replica)
                own = [failure for failure in failures if failure.rank // self._ranks == replica]
                on_lost(replica, min(own, key=lambda failure: (not failure.is_cause, failure.when)))
                if self._survives:
                    for process in self._of(replica):
                        process.process.kill()
            if time.monotonic() > deadline:
                break
        self._raise_if_failed(signals, over)

    def _fatal(self, failures: Sequence[Failure]) -> list[Failure]:
        return [failure for failure in failures if not self._survives or failure.kind == "raised"]

    def _raise_if_failed(self, signals: Signals, over: Callable[[], bool]) -> None:
        failures = [process.failure for process in self._processes if process.failure is not None]
        fatal = self._fatal(failures)
        finished = [process.number for process in self._processes if process.finished]
        if fatal or (failures and not finished and not over()):
            signals.raise_if_interrupted(failures)
            running = [process.number for process in self._processes if not process.told]
            raise explain(fatal or failures, finished, running, self._timeout)


def _patience(failures: Sequence[Failure]) -> float:
    """Time in which the others must show the cause."""
    return GRACE_SECONDS if any(failure.is_cause for failure in failures) else SEARCH_SECONDS
