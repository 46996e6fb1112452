"""Start ranks on this host, watch over them, and leave none behind.

Processes   `spawn`, each in a session of its own: a Ctrl-C on the terminal reaches this process alone, which passes
            it on once. A rank ends when this process does, however that happens.
Failure     the first cause is raised, as decided in `failure.py`; the other ranks get a moment to tell their side,
            then they are ended.
Signals     the first SIGINT or SIGTERM asks every rank to stop (SIGTERM), as a training loop knows how to; the second
            kills them.
"""

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, TypeVar

from shoal.errors import ConfigError
from shoal.launching.failure import Failure, explain
from shoal.launching.group import TIMEOUT, joined, store
from shoal.launching.world import LOOPBACK, World
from shoal.machine import HUGE_PAGES

GRACE_SECONDS = 1.0
"""After a cause is known, what the other ranks have to tell theirs."""
SEARCH_SECONDS = 5.0
"""After a rank lost another, what the cause has to show itself: a report, or a process that ended."""
END_SECONDS = 1.0
"""From asking a process to end to killing it."""

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    *args: object,
    workers: int,
    threads: int = 1,
    timeout: float = TIMEOUT,
    device: str = "cpu",
) -> list[Result]:
    """`function(*args)` on `workers` new processes of this host, joined in one process group; what each returned.

    `function` must be importable, arguments and results picklable; a rank learns who it is from `torch.distributed`.
    A rank that waits longer than `timeout` seconds for another gives up.

    Raises the first failing rank's error: a `ShoalError` as its own class, any other as a `RunError` that names the
    rank, the layer where the engine noted it, and the error, with the rank's traceback as its cause; a
    `KeyboardInterrupt` when asked to stop before the ranks could do so in good order. No process outlives the call.
    Costs about a second per rank: each loads torch anew.
    """
    payload = _packed(function, args)
    meeting = store(0, timeout, serves=True)  # kept here and not by rank 0, which may be the first to die
    ranks: list[_Rank] = []
    with _Signals(ranks) as signals:
        try:
            with signals.held(), _environment(**_for_ranks(threads)):
                for number in range(workers):
                    world = World(number, workers, number, workers, LOOPBACK, meeting.port, "shoal")
                    ranks.append(_start(world, payload, threads, timeout, device))
            if signals.asked:  # it may have missed the ranks that were yet to start
                raise KeyboardInterrupt
            _supervise(ranks)
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
            _end(ranks)


@dataclass
class _Rank:
    """One process, as the launcher sees it."""

    number: int
    process: SpawnProcess
    pipe: Connection
    finished: bool = False
    result: Any = None
    failure: Failure | None = None

    @property
    def told(self) -> bool:
        """Whether it is known how it ended."""
        return self.finished or self.failure is not None

    def hear(self) -> None:
        """Take its report, if there is one; a process that ended without one has died."""
        try:
            while not self.told and self.pipe.poll():
                report = pickle.loads(self.pipe.recv_bytes())
                if isinstance(report, Failure):
                    self.failure = report
                else:
                    self.finished, self.result = True, report[0]
        except (EOFError, OSError):  # it closed its end; the exit code follows at once
            self.process.join(END_SECONDS)
        if not self.told and self.process.exitcode is not None:
            self.failure = Failure.of_death(self.number, self.process.exitcode)


def _for_ranks(threads: int) -> dict[str, str]:
    """What ranks find in their environment before torch loads."""
    wanted = os.environ.get(HUGE_PAGES, "1")
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), HUGE_PAGES: wanted}


def _packed(function: Callable[..., Any], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"what the ranks are to do cannot be sent to them: {error}.",
            "Give a function that can be imported, and arguments (such as a listener) that survive pickling.",
        ) from None


def _start(world: World, payload: bytes, threads: int, timeout: float, device: str) -> _Rank:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(world, payload, threads, timeout, device, theirs), name=f"shoal rank {world.rank}"
    )
    process.start()
    theirs.close()
    return _Rank(world.rank, process, ours)


def _supervise(ranks: Sequence[_Rank]) -> None:
    """Until every rank told how it ended, or had its chance to."""
    deadline = float("inf")
    while waiting := [rank for rank in ranks if not rank.told]:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        handles = [handle for rank in waiting for handle in (rank.pipe, rank.process.sentinel)]
        wait(handles, timeout=None if seconds == float("inf") else seconds)
        for rank in waiting:
            rank.hear()
        deadline = min(deadline, time.monotonic() + _patience(ranks))


def _patience(ranks: Sequence[_Rank]) -> float:
    """Seconds that the others still have. A stop in good order takes the time it takes: files are being written."""
    kinds = {rank.failure.kind for rank in ranks if rank.failure is not None}
    if kinds & {"raised", "died"}:
        return GRACE_SECONDS
    return SEARCH_SECONDS if kinds & {"gone", "silent"} else float("inf")


def _end(ranks: Sequence[_Rank]) -> None:
    """Leave no process: say goodbye to those that wait for it, ask the others to end, kill what is left."""
    in_order = all(rank.finished or (rank.failure and rank.failure.kind == "stopped") for rank in ranks)
    for rank in ranks:
        rank.pipe.close()  # what a rank waits for after its report
    if in_order:
        _join(ranks, seconds=10 * END_SECONDS)
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.terminate()
    _join(ranks, seconds=END_SECONDS)
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()


def _join(ranks: Sequence[_Rank], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


@dataclass
class _Signals:
    """Passes this process's SIGINT and SIGTERM on to the ranks. Only the main thread can; elsewhere it does nothing."""

    ranks: list[_Rank]
    asked: int = 0
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (signal's own signature)
        self.asked += 1
        for rank in self.ranks:
            if rank.process.is_alive():
                if self.asked == 1:
                    rank.process.terminate()
                else:
                    rank.process.kill()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait while ranks start: a rank inherits this and so gets none before it is in its own session."""
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def raise_if_interrupted(self, failures: Sequence[Failure]) -> None:
        """After a signal, a rank that died of it tells nothing but that it came too early for a stop in good order."""
        if self.asked > 1 or (self.asked and not any(failure.kind in ("stopped", "raised") for failure in failures)):
            raise KeyboardInterrupt


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables that processes started inside inherit; torch reads them while it loads."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# In the ranks


def _serve(world: World, payload: bytes, threads: int, timeout: float, device: str, pipe: Connection) -> None:
    """One rank's whole life."""
    _stand_alone()
    try:
        import torch

        torch.set_num_threads(threads)
        function, args = pickle.loads(payload)
        with joined(world, device, timeout):
            pipe.send_bytes(pickle.dumps((function(*args),)))
            _wait_for_goodbye(pipe)
    except BaseException as error:  # whatever it is, the launcher tells people
        failure = Failure.of(error, world.rank)
        with suppress(OSError):  # the launcher may have heard enough
            pipe.send_bytes(pickle.dumps(failure))
        if failure.kind == "stopped":
            _wait_for_goodbye(pipe)
        leave(1)


def _stand_alone() -> None:
    """Out of the terminal's reach, and never without a parent."""
    if hasattr(os, "setsid"):
        os.setsid()
        # A Ctrl-C that came while this process started was meant for the parent, which passes it on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":  # also ends a rank that is stopped or deep in C
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    threading.Thread(target=_die_with_parent, name="shoal-parent", daemon=True).start()


def _die_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _wait_for_goodbye(pipe: Connection) -> None:
    """Until all ranks are done: a rank that leaves earlier would cut its connections under a slower one."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        return


def leave(code: int) -> None:
    """End this process now. An ordinary end would wait for messages that will never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
