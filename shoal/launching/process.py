"""One process of a run: how it is started, heard and ended, and what it does on its side.

Processes   as `forked.py` begins them, in this one's present folder, each in a session of its own: a Ctrl-C on the
            terminal reaches this process alone, which passes it on once. A process ends when this one does, however
            that happens.
Signals     the first of `stop_signals` asks every process to stop (SIGTERM), as a training loop knows how to; the
            second kills them. Signals that come together count as one.
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
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import cloudpickle

from shoal.errors import ConfigError
from shoal.launching import forked
from shoal.launching.failure import Failure
from shoal.launching.group import joined
from shoal.launching.stopping import Requests, stop_signals
from shoal.launching.world import World
from shoal.machine import HUGE_PAGES, threads_each

END_SECONDS = 1.0
"""Time between asking a process to end and killing it."""


OnStage = Callable[[str, int, int], None]
"""Told (what was done, by how many, of how many processes) while processes are on their way to their work."""


@dataclass(frozen=True)
class Stage:
    """What a process says on its way to its work: its how many-th word, and what it has done."""

    number: int
    done: str


@dataclass(frozen=True)
class Said:
    """What a process says while it works, for whoever started it."""

    what: object


OnSaid = Callable[[Any], None]
"""Told what a process says while it works."""


@dataclass(frozen=True)
class Offer:
    """What a process that lost another says before it ends: how far it is, and whether it could save that."""

    steps: int
    stepped: float
    """Wall clock of the last step."""
    whole: bool
    """Whether all of the run's state is in this process."""


class Started(Protocol):
    """A process that was started, here or elsewhere; multiprocessing's own has all this."""

    @property
    def sentinel(self) -> int:
        """A file that can be read once it has ended."""

    @property
    def exitcode(self) -> int | None:
        """None while it lives."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def terminate(self) -> None:
        """Ask it to stop, by SIGTERM."""

    def kill(self) -> None:
        """End it at once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""


@dataclass
class Process:
    """One process, as the launcher sees it."""

    number: int
    process: Started
    pipe: Connection
    stage: "Stage | None" = None
    """How far it is on its way to its work."""
    said: list[Any] = field(default_factory=list)
    """What it has said and nobody has taken yet."""
    offer: Offer | None = None
    """It lost another, and waits to hear whether it should save what it has."""
    finished: bool = False
    result: Any = None
    failure: Failure | None = None

    @property
    def told(self) -> bool:
        """Whether it is known how it ended."""
        return self.finished or self.failure is not None

    def hear(self) -> None:
        """Take what it tells; a process that ended without a report has died."""
        try:
            while not self.told and self.pipe.poll():
                report = pickle.loads(self.pipe.recv_bytes())
                if isinstance(report, Stage):
                    self.stage = report
                elif isinstance(report, Said):
                    self.said.append(report.what)
                elif isinstance(report, Offer):
                    self.offer = report
                elif isinstance(report, Failure):
                    self.failure = report
                else:
                    self.finished, self.result = True, report[0]
        except (EOFError, OSError):  # the process closed the pipe; its exit code follows at once
            self.process.join(END_SECONDS)
        if not self.told and self.process.exitcode is not None:
            self.failure = Failure.of_death(self.number, self.process.exitcode)

    def take_said(self) -> list[Any]:
        """What it has said since this was asked last."""
        said, self.said = self.said, []
        return said


def let_save(process: Process) -> None:
    """Accept what a process offered."""
    with suppress(OSError):  # it may have died meanwhile
        process.pipe.send_bytes(b"save")


def decline(process: Process) -> None:
    """Refuse what a process offered: it tells why it ends."""
    with suppress(OSError):  # it may have died meanwhile
        process.pipe.send_bytes(b"end")


def environment_of(threads: int) -> dict[str, str]:
    """What ranks find in their environment before torch loads."""
    wanted = os.environ.get(HUGE_PAGES, "1")
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), HUGE_PAGES: wanted}


def load_ahead(ranks: int, threads: int | None) -> None:
    """Load what `ranks` of `threads` each will need, while this process does other things: they will begin earlier."""
    with environment(**environment_of(threads_each(threads, ranks))):
        forked.load_ahead()


def packed(function: Callable[..., Any], args: tuple[object, ...]) -> bytes:
    """What a process is to do, pickled, with all that is not to be imported; a `ConfigError` where it cannot be."""
    try:
        payload: bytes = cloudpickle.dumps((function, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"what the ranks are to do cannot be sent to them: {error}.",
            "Give a function and arguments (such as a listener) that survive pickling.",
        ) from None
    return payload


def start(
    world: World, payload: bytes, threads: int, timeout: float, device: str, *, name: str | None = None
) -> Process:
    """Start one process, which joins `world` and does what `payload` says. `name`: what `ps` shows, if no rank."""
    ours, theirs = mp.Pipe()
    args = (world, payload, threads, timeout, device, Path.cwd(), theirs)
    process = forked.begin(_serve, args, name=name or f"shoal rank {world.number}")
    theirs.close()
    return Process(world.number, process, ours)


class Stages:
    """How far processes are, told when it has changed: of what the first of them did last, how many did it too."""

    def __init__(self, on_stage: OnStage) -> None:
        self._on_stage = on_stage
        self._told: tuple[str, int] | None = None

    def look(self, processes: Sequence[Process]) -> None:
        """After what they said was heard."""
        stages = [one.stage for one in processes if one.stage is not None]
        if not stages:
            return
        latest = max(stages, key=lambda stage: stage.number)
        told = (latest.done, stages.count(latest))
        if told != self._told:
            self._told = told
            self._on_stage(*told, len(processes))


def end(ranks: Sequence[Process]) -> None:
    """Leave no process: let those go that have reported, ask the others to end, kill what is left."""
    in_order = all(rank.finished or (rank.failure and rank.failure.kind == "stopped") for rank in ranks)
    for rank in ranks:
        rank.pipe.close()  # a rank waits for this after its report
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


def _join(ranks: Sequence[Process], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


@dataclass
class Signals:
    """Passes this process's `stop_signals` on to the ranks. Only the main thread can; elsewhere it does nothing."""

    ranks: list[Process]
    _requests: Requests = field(default_factory=Requests)
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """How often the user asked for an end."""
        return self._requests.count

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (signal's own signature)
        if not self._requests.add():
            return
        for rank in self.ranks:
            if rank.process.is_alive():
                if self.asked == 1:
                    rank.process.terminate()
                else:
                    rank.process.kill()

    def raise_if_interrupted(self, failures: Sequence[Failure]) -> None:
        """After a signal, a rank that died of it tells nothing but that it came too early for a stop in good order."""
        if self.asked > 1 or (self.asked and not any(failure.kind in ("stopped", "raised") for failure in failures)):
            raise KeyboardInterrupt


@contextmanager
def environment(**values: str) -> Iterator[None]:
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

_launcher: Connection | None = None
"""The way to whoever started this process."""
_words = count(1)


def tell_stage(done: str) -> None:
    """Tell whoever started this process, for people to read, what it has done on its way to its work."""
    _tell_launcher(Stage(next(_words), done))


def say(what: object) -> None:
    """Tell whoever started this process something while it works, which the launcher's `on_said` hears."""
    _tell_launcher(Said(what))


def _tell_launcher(report: Stage | Said) -> None:
    if _launcher is not None:
        with suppress(OSError):  # it may have ended
            _launcher.send_bytes(cloudpickle.dumps(report))


def offer(steps: int, stepped: float, *, whole: bool) -> bool:
    """After this process lost another: tell whoever started it what it could save; whether it should.

    Waits for the answer, which comes when all have told how far they are or no longer can.
    """
    if _launcher is None:
        return False
    try:
        _launcher.send_bytes(pickle.dumps(Offer(steps, stepped, whole)))
        return _launcher.recv_bytes() == b"save"
    except (EOFError, OSError):  # nobody wants it, or nobody is there any more
        return False


def _serve(
    world: World, payload: bytes, threads: int, timeout: float, device: str, folder: Path, pipe: Connection
) -> None:
    """One rank's whole life."""
    global _launcher
    _stand_alone()
    _launcher = pipe
    try:
        os.chdir(folder)  # it starts where the parent was when that began, and a script may have gone elsewhere
        import torch

        torch.set_num_threads(threads)
        function, args = pickle.loads(payload)
        tell_stage("have begun")
        with joined(world, device, timeout):
            pipe.send_bytes(cloudpickle.dumps((function(*args),)))
            _wait_for_goodbye(pipe)
    except BaseException as error:  # whatever it is, the launcher reports it
        failure = Failure.of(error, world.number)
        with suppress(OSError):  # the launcher may have closed the pipe
            pipe.send_bytes(pickle.dumps(failure))
        if failure.kind == "stopped":
            _wait_for_goodbye(pipe)
        leave(1)


def _stand_alone() -> None:
    """A session of its own, away from the terminal, and an end as soon as the parent ends."""
    if hasattr(os, "setsid"):
        os.setsid()
        # A Ctrl-C that came while this process started was meant for the parent, which passes it on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forked.STOP_SIGNALS)
    if sys.platform == "linux":  # also ends a rank that is stopped or deep in C
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    threading.Thread(target=_die_with_parent, name="shoal-parent", daemon=True).start()


def _die_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _wait_for_goodbye(pipe: Connection) -> None:
    """Wait until all ranks are done: a rank that leaves earlier would cut its connections to slower ones."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        return


def leave(code: int) -> None:
    """End this process now. An ordinary end would wait for messages that will never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
