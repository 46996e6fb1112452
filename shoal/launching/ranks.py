"""Ranks that work together on this host: the first that fails ends all.

Failure     the first cause is raised, as decided in `failure.py`; the other ranks get a moment to tell their side,
            then they are ended. `process.py` says what a process inherits and how it ends.
"""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

from shoal.launching.failure import explain
from shoal.launching.group import TIMEOUT
from shoal.launching.place import HERE, Gang, Place
from shoal.launching.process import OnSaid, OnStage, Process, Signals, Stages, end, packed

GRACE_SECONDS = 1.0
"""Time that the other ranks have to report after the cause is known."""
SEARCH_SECONDS = 5.0
"""Time in which the cause must show after a rank lost another: a report, or a process that ended."""
LOOK_SECONDS = 0.1
"""Time between two looks at what happened. Signals are a reason: of two that come together another thread may take
both, and then the one that waits here is not woken."""

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    *args: object,
    workers: int,
    threads: int = 1,
    timeout: float = TIMEOUT,
    device: str = "cpu",
    on_stage: OnStage = lambda *_: None,
    on_said: OnSaid = lambda _: None,
    place: Place = HERE,
) -> list[Result]:
    """`function(*args)` on `workers` new processes, joined in one process group; what each returned.

    They are started on this host, or where `place` starts them.

    Function, arguments and results must be picklable, by cloudpickle; a rank learns who it is from `torch.distributed`.
    A rank that waits longer than `timeout` seconds for another gives up. `on_stage` hears how far they are with what
    they tell by `tell_stage`, `on_said` what they tell by `say`.

    Raises the first failing rank's error: a `ShoalError` as its own class, any other as a `RunError` that names the
    rank, the layer where the engine noted it, and the error, with the rank's traceback as its cause; a
    `KeyboardInterrupt` when asked to stop before the ranks could do so in good order. No process outlives the call.
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
            _supervise(ranks, Stages(on_stage), on_said)
            failures = [rank.failure for rank in ranks if rank.failure is not None]
            if failures:
                signals.raise_if_interrupted(failures)
                raise explain(
                    failures,
                    [rank.number for rank in ranks if rank.finished],
                    [rank.number for rank in ranks if not rank.told],
                    timeout,
                )
            return [rank.result for rank in ranks]
        finally:
            end(ranks)
            table.close()


def _supervise(ranks: Sequence[Process], stages: Stages, on_said: OnSaid) -> None:
    """Wait until every rank has reported how it ended, or its time for that is over."""
    deadline = float("inf")
    while waiting := [rank for rank in ranks if not rank.told]:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        handles = [handle for rank in waiting for handle in (rank.pipe, rank.process.sentinel)]
        wait(handles, timeout=min(seconds, LOOK_SECONDS))
        for rank in waiting:
            rank.hear()
            for what in rank.take_said():
                on_said(what)
        stages.look(ranks)
        deadline = min(deadline, time.monotonic() + _patience(ranks))


def _patience(ranks: Sequence[Process]) -> float:
    """Seconds that the others still have. A stop in good order takes the time it takes: files are being written."""
    kinds = {rank.failure.kind for rank in ranks if rank.failure is not None}
    if kinds & {"raised", "died"}:
        return GRACE_SECONDS
    return SEARCH_SECONDS if kinds & {"gone", "silent"} else float("inf")
