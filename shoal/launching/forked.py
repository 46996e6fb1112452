"""How a process of a run begins: forked from a helper that has loaded torch, instead of loading it anew.

Promise   as if it had been spawned: it finds the environment, the streams and the cores that this process has at that
          moment, and draws random numbers of its own. The folder is its caller's to set, as after a spawn. Unlike one
          that is spawned it does not run the user's script again: what it needs of that must come with its arguments.
Cost      one helper for all processes that this one starts, and that those start, for as long as this one lives. It
          loads torch while the first of them waits, as that would do itself; the others begin at once and share the
          memory of what is loaded.
Failure   a process is spawned where there is no fork, on hosts with GPUs, whose drivers do not bear one once they were
          asked for their devices (no such host was at hand), and where variables that libraries read while they load
          have changed since the helper loaded them. A helper that is killed takes its processes with it. Whoever
          asked for a process is its parent in all but the system's table: it hears of its end, and its own end is told.
"""

import ctypes
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.machine import has_gpu_driver

READ_WHILE_LOADING = (
    *("CUDA", "DNNL", "GLIBC", "GOMP", "HIP", "KMP", "LD", "MALLOC", "MKL", "NCCL", "NUMEXPR", "OMP", "ONEDNN"),
    *("OPENBLAS", "PYTHON", "PYTORCH", "THP", "TORCH"),
)
"""How the names of such variables begin, up to their first underscore, or in `PYTHON...` as a whole."""
STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""Those that ask for an end in good order. SIGUSR1 is what batch systems are told to send some time before the end."""
_PR_SET_NAME = 15

_loaded_with: Mapping[str, str] | None = None
"""Those variables, as the helper found them."""


def begin(target: Callable[..., None], args: tuple[object, ...], name: str) -> BaseProcess:
    """A process called `name` that does `target(*args)`.

    A Ctrl-C on the terminal, or the terminal's end, does not reach it before it is ready: where it is spawned, stop
    signals are blocked until it unblocks them; where it is forked, it is away from the terminal.
    """
    with _signals_blocked():
        if _can_fork():
            _ensure_helper()
            with suppress(EOFError, ConnectionError):  # the helper was killed: then without one
                return _started(mp.get_context("forkserver"), (name, _Surroundings(), target, args))
        return _started(mp.get_context("spawn"), (name, None, target, args))


def load_ahead() -> None:
    """Let the helper load while this process still has other things to do."""
    with _signals_blocked():
        if _can_fork():
            _ensure_helper()


def _started(context: Any, args: tuple[Any, ...]) -> BaseProcess:
    process: BaseProcess = context.Process(target=_live, args=args, name=args[0])
    with _script_aside():
        process.start()
    return process


@contextmanager
def _script_aside() -> Iterator[None]:
    """Let no new process run the user's script once more, which may have no `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _can_fork() -> bool:
    """Whether a process that is forked from the helper, there or not yet, is as one that is spawned now."""
    if sys.platform != "linux" or has_gpu_driver():
        return False
    if _loaded_with is None:  # one that is there all the same is of the user's own program, with other things in it
        return _helper() is None
    return _loaded_with == _read_while_loading()


def _ensure_helper() -> None:
    """Start the helper, unless it runs. It finds modules where this process finds them, wherever that works by now."""
    global _loaded_with
    if _loaded_with is None:
        _loaded_with = _read_while_loading()
        forkserver.set_forkserver_preload(["shoal.launching.preload"])
        Finalize(None, _end_helper, exitpriority=-1)  # after all processes have been waited for
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    try:
        forkserver._forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _share_helper(loaded_with: Mapping[str, str]) -> None:
    """In a process that was just forked from the helper: what it starts itself is forked from there, too.

    The standard library knows where the helper is heard, but would start another, which would load torch again.
    """
    global _loaded_with
    _loaded_with = loaded_with
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def _helper() -> int | None:
    """The process from which others are forked, if this one has started it."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _end_helper() -> None:
    """At this process's end: the helper would notice that by itself, but a moment later, and nobody would reap it."""
    if (helper := _helper()) is not None:
        with suppress(OSError):
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)


def _read_while_loading() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _is_read_while_loading(name)}


def _is_read_while_loading(name: str) -> bool:
    return name.startswith("PYTHON") or name.partition("_")[0] in READ_WHILE_LOADING


@contextmanager
def _signals_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which itself unblocks them when it starts its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Surroundings:
    """What a spawned process inherits from this one and a forked one must be told. Made anew while it is sent."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Received, (
            self._environment,
            self._cores,
            {number: DupFd(number) for number in (1, 2) if _open(number)},
            _loaded_with,
        )


class _Received:
    """The same in the new process."""

    def __init__(
        self,
        environment: dict[str, str],
        cores: set[int],
        streams: Mapping[int, Any],
        loaded_with: Mapping[str, str],
    ) -> None:
        self._environment, self._cores, self._streams = environment, cores, streams
        self._loaded_with = loaded_with

    def take_over(self) -> None:
        _share_helper(self._loaded_with)
        for number, stream in self._streams.items():
            copy = stream.detach()
            os.dup2(copy, number)
            os.close(copy)
        for gone in os.environ.keys() - self._environment.keys():
            del os.environ[gone]
        os.environ.update(self._environment)
        with suppress(OSError):  # a core that was taken away meanwhile
            os.sched_setaffinity(0, self._cores)
        if "numpy" in sys.modules:  # `random` does so by itself; torch begins everywhere with the same seed
            sys.modules["numpy"].random.seed()


def _open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _live(name: str, surroundings: Any, target: Callable[..., None], args: tuple[object, ...]) -> None:
    """The whole life of the new process."""
    if sys.platform == "linux":  # what `ps` and `top` show
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    if surroundings is not None:
        surroundings.take_over()
    target(*args)
