"""Replicas: groups of ranks of which some may be lost while the others go on.

A rank that dies takes its replica with it and nobody else, where the exchange survives that; an error that a rank
raised itself ends the run, because it would come again. The caller's `over` says whether the run is over. In the place
of a lost replica another may be started, as often as the caller says.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from shoal.launching.failure import Failure, explain
from shoal.launching.place import HERE, Gang, Place
from shoal.launching.process import OnStage, Process, Signals, Stages, end, packed
from shoal.launching.ranks import GRACE_SECONDS, LOOK_SECONDS, SEARCH_SECONDS, with_loss

LEAVE_SECONDS = 10.0
"""Time that replicas have to leave when the run is over."""


@dataclass(frozen=True)
class Again:
    """What is started in the place of lost replicas: `function(*args, replica)`, so many times in all.

    Their numbers go on after those of the first ones.
    """

    function: Callable[..., Any]
    args: tuple[object, ...]
    times: int
    told: Callable[[int, int], None] = lambda *_: None
    """Hears in the place of which replica one is started, and how many more may be."""


class Replicas:
    """`function(*args, replica)` on `ranks` processes for each of `replicas`, each joined in a group of its own.

    `survives`: whether the run goes on when a replica is lost. `table` is where ranks meet. `place`: who starts them.
    """

    def __init__(
        self,
        replicas: int,
        ranks: int,
        *,
        threads: int,
        timeout: float,
        device: str,
        survives: bool,
        place: Place = HERE,
    ) -> None:
        self._replicas, self._ranks, self._place = replicas, ranks, place
        self._threads, self._timeout, self._device, self._survives = threads, timeout, device, survives
        self._table = place.table(timeout)
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
        given_up: Callable[[], Iterable[int]] = lambda: (),
        others: Callable[[], bool] = lambda: False,
        on_stage: OnStage = lambda *_: None,
        again: Again | None = None,
    ) -> None:
        """Until `over`, or until every rank has finished. `on_stop`: the user asked to stop. `on_lost`: a replica died.
        `given_up`: replicas that nobody waits for any longer, which are ended at once, so that those notice that do.
        `others`: whether replicas that were started elsewhere go on, which are then waited for.
        `on_stage`: as in `ranks.py`. `again`: what takes the place of replicas that are lost.

        Raises as `run` in `ranks.py` does, with replicas as those that are lost; where replicas may be lost, only when
        none is left. No process outlives it.
        """
        processes = self._processes
        with Signals(processes) as signals:
            try:
                for replica in range(self._replicas):
                    self._start(function, args, replica)
                self._watch(signals, over, on_stop, on_lost, given_up, others, Stages(on_stage), again)
            finally:
                end(processes)
                self._table.close()

    def _start(self, function: Callable[..., Any], args: Sequence[object], replica: int) -> None:
        gang = Gang(
            range(replica * self._ranks, (replica + 1) * self._ranks),
            self._replicas * self._ranks,
            packed(function, (*args, replica)),
            self._threads,
            self._timeout,
            self._device,
            self.table,
            is_replica=True,
            patient=replica >= self._replicas,
        )
        self._place.start(gang, self._processes)

    def _of(self, replica: int) -> list[Process]:
        return [process for process in self._processes if process.number // self._ranks == replica]

    def _watch(
        self,
        signals: Signals,
        over: Callable[[], bool],
        on_stop: Callable[[], None],
        on_lost: Callable[[int, Failure], None],
        given_up: Callable[[], Iterable[int]],
        others: Callable[[], bool],
        stages: Stages,
        again: Again | None,
    ) -> None:
        told_to_stop = False
        begun, most = self._replicas, self._replicas + (0 if again is None else again.times)
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
            for process in (process for replica in given_up() for process in self._of(replica)):
                if not process.told:
                    process.process.kill()
            failures = [process.failure for process in self._processes if process.failure is not None]
            fatal = self._fatal(failures)
            if fatal:
                deadline = min(deadline, time.monotonic() + _patience(fatal))
            elif over():
                deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
                self._end_those_to_come()
            for replica in {failure.rank // self._ranks for failure in failures} - lost:
                lost.add(replica)
                own = [failure for failure in failures if failure.rank // self._ranks == replica]
                on_lost(replica, min(own, key=lambda failure: (not failure.is_cause, failure.when)))
                if self._survives:
                    for process in self._of(replica):
                        process.process.kill()
                goes_on = self._survives and not (fatal or told_to_stop or over())
                if again is not None and goes_on and begun < most:
                    self._start(again.function, again.args, begun)
                    begun += 1
                    again.told(replica, most - begun)
            if time.monotonic() > deadline:
                break
        self._raise_if_failed(signals, over)

    def _end_those_to_come(self) -> None:
        """The run is over: a replica that waits for its place in it need not come."""
        for process in self._processes:
            if process.number >= self._replicas * self._ranks and process.stage is None and not process.told:
                process.process.kill()

    def _fatal(self, failures: Sequence[Failure]) -> list[Failure]:
        return [failure for failure in failures if not self._survives or failure.kind == "raised"]

    def _raise_if_failed(self, signals: Signals, over: Callable[[], bool]) -> None:
        failures = [process.failure for process in self._processes if process.failure is not None]
        fatal = self._fatal(failures)
        finished = [process.number for process in self._processes if process.finished]
        if fatal or (failures and not finished and not over()):
            signals.raise_if_interrupted(failures)
            running = [process.number for process in self._processes if not process.told]
            error = explain(fatal or failures, finished, running, self._timeout)
            raise with_loss(error, self._processes, each=self._ranks)


def _patience(failures: Sequence[Failure]) -> float:
    """Time in which the others must show the cause."""
    return GRACE_SECONDS if any(failure.is_cause for failure in failures) else SEARCH_SECONDS
