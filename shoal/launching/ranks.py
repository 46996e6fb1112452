"""Ranks that work together on this host: the first that fails ends all.

Failure     the first cause is raised, as decided in `failure.py`; the other ranks get a moment to tell their side,
            then they are ended. `process.py` says what a process inherits and how it ends.
Offers      a rank that lost another may offer to save what it has (`process.py` `offer`). Of all that have the whole
            of it the one that is furthest does so, before all are ended.
"""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

from shoal.errors import Loss, RunError, ShoalError, StoppedError
from shoal.launching.failure import Failure, explain
from shoal.launching.group import TIMEOUT
from shoal.launching.place import HERE, Gang, Place
from shoal.launching.process import OnSaid, OnStage, Process, Signals, Stages, decline, end, let_save, packed

GRACE_SECONDS = 1.0
"""Time that the other ranks have to report after the cause is known."""
SEARCH_SECONDS = 5.0
"""Time in which the cause must show after a rank lost another: a report, or a process that ended."""
LOOK_SECONDS = 0.1
"""Time between two looks at what happened. Signals are a reason: of two that come together another thread may take
both, and then the one that waits here is not woken."""

Result = TypeVar("Result")


class TimeOverError(Exception):
    """All ranks stopped in good order, because the time that they were given was over."""

    workers: int | None = None
    """On how many the run can go on, where that is known."""


def run(
    function: Callable[..., Result],
    *args: object,
    workers: int,
    threads: int = 1,
    timeout: float = TIMEOUT,
    device: str = "cpu",
    on_stage: OnStage = lambda *_: None,
    on_said: OnSaid = lambda _: None,
    offering: bool = False,
    time_is_up: Callable[[], bool] = lambda: False,
    place: Place = HERE,
) -> list[Result]:
    """`function(*args)` on `workers` new processes, joined in one process group; what each returned.

    They are started on this host, or where `place` starts them.

    Function, arguments and results must be picklable, by cloudpickle; a rank learns who it is from `torch.distributed`.
    A rank that waits longer than `timeout` seconds for another gives up. `on_stage` hears how far they are with what
    they tell by `tell_stage`, `on_said` what they tell by `say`. `offering`: whether ranks that lose another make
    offers, which are then waited for.
    Once `time_is_up`, they are asked to stop in good order, as by a user; if all do, that is a `TimeOverError`.

    Raises the first failing rank's error: a `ShoalError` as its own class, any other as a `RunError` that names the
    rank, the layer where the engine noted it, and the error, with the rank's traceback as its cause; its `loss` says
    who died or fell silent, if that is why; a `KeyboardInterrupt` when asked to stop before the ranks could do so in
    good order. No process outlives the call.
    Costs some seconds at the first call, in which torch is loaded, and some tenths of a second at the next ones.
    """
    payload = packed(function, args)
    table = place.table(timeout)  # kept here and not by rank 0, which may be the first to die
    ranks: list[Process] = []
    with Signals(ranks) as signals:
        try:
            place.start(Gang(range(workers), workers, payload, threads, timeout, device, table.url), ranks)
            if signals.asked:  # the signal may have missed ranks that had not started yet
                raise KeyboardInterrupt
            watch = _Watch(ranks, Stages(on_stage), on_said, timeout if offering else 0.0, time_is_up)
            watch.until_all_told()
            failures = [rank.failure for rank in ranks if rank.failure is not None]
            if failures:
                signals.raise_if_interrupted(failures)
                if watch.asked and not signals.asked and {failure.kind for failure in failures} == {"stopped"}:
                    raise TimeOverError
                finished = [rank.number for rank in ranks if rank.finished]
                running = [rank.number for rank in ranks if not rank.told and rank.offer is None]
                raise with_loss(explain(failures, finished, running, timeout), ranks)
            return [rank.result for rank in ranks]
        finally:
            end(ranks)
            table.close()


class _Watch:
    """Waits until every rank has reported how it ended, or its time for that is over."""

    def __init__(
        self,
        ranks: Sequence[Process],
        stages: Stages,
        on_said: OnSaid,
        offer_seconds: float,
        time_is_up: Callable[[], bool],
    ) -> None:
        """`offer_seconds`: time in which offers must come after the cause is known; 0 where there are none."""
        self._ranks, self._stages, self._on_said = ranks, stages, on_said
        self._offer_seconds, self._time_is_up = offer_seconds, time_is_up
        self.asked = False
        """Whether ranks were asked to stop because their time was over."""
        self._saves: Process | None = None
        """The rank whose offer was accepted: what it saves takes the time that it takes."""

    def until_all_told(self) -> None:
        """See the class."""
        deadline = float("inf")
        while waiting := [rank for rank in self._ranks if not rank.told]:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or (self._offers_made(waiting) and self._saves is None):
                self._accept()
                if self._saves is None:
                    self._decline()
                    return
                deadline = float("inf")
            if self._saves is not None and self._saves.told:
                return
            handles = [handle for rank in waiting for handle in (rank.pipe, rank.process.sentinel)]
            wait(handles, timeout=max(0.0, min(deadline - time.monotonic(), LOOK_SECONDS)))
            for rank in waiting:
                rank.hear()
                for what in rank.take_said():
                    self._on_said(what)
            self._stages.look(self._ranks)
            self._ask_if_time_is_up()
            if self._saves is None:
                deadline = min(deadline, time.monotonic() + self._patience())

    def _offers_made(self, waiting: Sequence[Process]) -> bool:
        """Whether all that still live have told how far they are."""
        return all(rank.offer is not None for rank in waiting)

    def _accept(self) -> None:
        """Let the rank save that is furthest of those that have all of it, once."""
        able = [(rank.offer.steps, -rank.number, rank) for rank in self._ranks if _can_save(rank) and rank.offer]
        if able:  # of equals the first rank, which has heard most from the others
            self._saves = max(able)[2]
            let_save(self._saves)

    def _decline(self) -> None:
        """Nobody saves: those that offered it tell why they end, which may be all that is heard of a loss."""
        offering = [rank for rank in self._ranks if rank.offer is not None and not rank.told]
        for rank in offering:
            decline(rank)
        deadline = time.monotonic() + SEARCH_SECONDS
        while (waiting := [rank for rank in offering if not rank.told]) and time.monotonic() < deadline:
            wait([handle for rank in waiting for handle in (rank.pipe, rank.process.sentinel)], timeout=LOOK_SECONDS)
            for rank in waiting:
                rank.hear()
        for rank in waiting:
            rank.failure = Failure(rank.number, "gone", time.time(), "it lost another rank, and says no more")

    def _ask_if_time_is_up(self) -> None:
        if not self.asked and self._time_is_up():
            self.asked = True
            for rank in self._ranks:
                if rank.process.is_alive():
                    rank.process.terminate()

    def _patience(self) -> float:
        """Seconds that the others still have. A stop in good order takes the time it takes: files are being written."""
        kinds = {rank.failure.kind for rank in self._ranks if rank.failure is not None}
        offered = any(rank.offer is not None for rank in self._ranks)  # who comes later is a step further at most
        if "raised" in kinds or ("died" in kinds and offered):
            return GRACE_SECONDS
        if "died" in kinds:
            return max(GRACE_SECONDS, self._offer_seconds)
        return SEARCH_SECONDS if offered or kinds & {"gone", "silent"} else float("inf")


def _can_save(rank: Process) -> bool:
    return not rank.told and rank.offer is not None and rank.offer.whole


def with_loss(error: ShoalError, ranks: Sequence[Process], *, each: int = 1) -> ShoalError:
    """The error with what is known of who was lost, unless a rank failed by itself or was stopped.

    Where replicas have `each` so many ranks, the lost are replicas.
    """
    kinds = {rank.failure.kind for rank in ranks if rank.failure is not None}
    if not isinstance(error, RunError) or isinstance(error, StoppedError) or "raised" in kinds:
        return error
    died = [rank.number for rank in ranks if rank.failure is not None and rank.failure.kind == "died"]
    silent = [rank.number for rank in ranks if not rank.told and rank.offer is None]
    offers = [rank.offer for rank in ranks if rank.offer is not None]
    furthest = max(offers, key=lambda offer: offer.steps, default=None)
    error.loss = Loss(
        lost=tuple(sorted({number // each for number in died or silent})),  # after a death, who is silent may be busy
        noticed=min((rank.failure.when for rank in ranks if rank.failure is not None), default=time.time()),
        steps=None if furthest is None else furthest.steps,
        stepped=None if furthest is None else furthest.stepped,
    )
    return error
