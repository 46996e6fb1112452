"""One piece of work in a process apart from this one, which only watches over it and so can do it again.

Whoever conducts a run hears its replicas, holds its weights' memory and writes its files: much that can fail or be
killed. The process that people started does none of that, and outlives it.
"""

from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TypeVar

from shoal.errors import DiedError, RunError, ShoalError
from shoal.launching.failure import Failure, RemoteError
from shoal.launching.process import OnStage, Process, Signals, Stages, end, environment, environment_of, packed, start
from shoal.launching.ranks import LOOK_SECONDS, TimeOverError
from shoal.launching.world import LOOPBACK, World

Result = TypeVar("Result")


def run_apart(
    function: Callable[..., Result],
    *args: object,
    called: str,
    threads: int,
    timeout: float,
    on_stage: OnStage = lambda *_: None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Result:
    """`function(*args)` in a new process of this host, called `called`, such as "conductor"; what it returned.

    Function, arguments and result must be picklable, by cloudpickle. Stop signals of this process are passed on to it.
    `on_stage` hears what it tells by `tell_stage`. Once `time_is_up`, it is asked to stop in good order, as by a user;
    if it does, that is a `TimeOverError`. Costs some tenths of a second: processes that it starts itself are
    forked from the helper that it was forked from.

    Raises its error, as its own class where it is one of ours; a `DiedError` where it ended without a word; a
    `KeyboardInterrupt` when asked to stop before it could do so in good order. It never outlives the call, nor do
    processes that it started.
    """
    payload = packed(function, args)
    world = World(0, 1, 0, 1, LOOPBACK, 0, "shoal", group=called)
    processes: list[Process] = []
    with Signals(processes) as signals:
        try:
            with environment(**environment_of(threads)):
                process = start(world, payload, threads, timeout, "cpu", name=f"shoal {called}")
            processes.append(process)
            if signals.asked:  # the signal may have missed it
                raise KeyboardInterrupt
            stages, asked = Stages(on_stage), False
            while not process.told:
                wait([process.pipe, process.process.sentinel], timeout=LOOK_SECONDS)
                process.hear()
                stages.look(processes)
                if not asked and time_is_up():
                    asked = True
                    process.process.terminate()
            if process.failure is None:
                result: Result = process.result
                return result
            signals.raise_if_interrupted([process.failure])
            if asked and not signals.asked and process.failure.kind == "stopped":
                raise TimeOverError
            raise _told(process.failure, called)
        finally:
            end(processes)


def _told(failure: Failure, called: str) -> ShoalError:
    if failure.kind == "died":
        return DiedError(
            f"the {called} {failure.what}.",
            "All that it had started was ended. What was killed may have run out of memory: see the system's log.",
        )
    if failure.error is not None:
        error, trace = failure.error, failure.remote
    else:
        error, trace = RunError(f"the {called} failed: {failure.what}.", "Its traceback follows."), failure.trace
    error.__cause__ = RemoteError(trace) if trace else None
    return error
