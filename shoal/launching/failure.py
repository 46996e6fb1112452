"""What went wrong on which rank, and which of several failures was the cause. Pure but for reading the clock."""

import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import (
    DiedError,
    PeerError,
    RunError,
    ShoalError,
    SilentError,
    StoppedError,
    network_trouble,
    show_ranks,
)

FailureKind = Literal["raised", "gone", "silent", "died", "stopped"]


@dataclass(frozen=True)
class Failure:
    """How one rank ended. Survives pickling between processes.

    raised   its own error
    died     it ended without a word: killed by a signal, or by os._exit
    gone     it lost its connection to another rank
    silent   another rank did not answer it in time
    stopped  it was asked to stop and did so in good order
    """

    rank: int
    kind: FailureKind
    when: float
    """Wall clock: comparable between the processes of one host."""
    what: str
    """Type and message, one line for people."""
    error: ShoalError | None = None
    """The error itself where it is one of ours."""
    notes: tuple[str, ...] = ()
    """Where it happened: the engine notes the layer."""
    trace: str = ""
    remote: str = ""
    """The traceback of the process before it, where it only passes on what another told it."""

    @property
    def is_cause(self) -> bool:
        """Whether it can be why others failed; a rank that merely lost another cannot."""
        return self.kind in ("raised", "died")

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """The failure that `error`, caught on `rank`, stands for."""
        lines = str(error).strip().splitlines() or [""]
        return cls(
            rank=rank,
            kind=_kind(error),
            when=time.time(),
            what=f"{type(error).__name__}: {lines[0]}".rstrip(": ."),
            error=_alone(error) if isinstance(error, ShoalError) else None,
            notes=tuple(getattr(error, "__notes__", ())),
            trace=RemoteError.of(error).trace,
            remote=error.__cause__.trace if isinstance(error.__cause__, RemoteError) else "",
        )

    def described(self) -> ShoalError:
        """The error that tells of a cause: its own class where it is one of ours, with the rank and the layer."""
        where = "".join(f", {note}" for note in self.notes)
        if self.error is not None:
            return type(self.error)(f"rank {self.rank}{where}: {self.error.problem}", self.error.remedy)
        if self.kind == "died":
            return DiedError(
                f"rank {self.rank} {self.what}.",
                "The other ranks were ended. What was killed may have run out of memory: see the system's log.",
            )
        error = RunError(
            f"rank {self.rank} failed{where}: {self.what}.",
            "The run ends on all ranks. The failed rank's traceback follows.",
        )
        error.__cause__ = RemoteError(self.trace)
        return error

    @classmethod
    def of_death(cls, rank: int, exit_code: int | None) -> "Failure":
        """A process that ended without a report."""
        return cls(rank, "died", time.time(), _death(exit_code))


class RemoteError(Exception):
    """The traceback of another process or thread, as text; stands as the cause of the error raised here."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f"\n{self.trace}"

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """The traceback of an error that was caught here, to be told by another thread or process."""
        return cls("".join(traceback.format_exception(error)))


def explain(failures: Sequence[Failure], ended: Sequence[int], running: Sequence[int], timeout: float) -> ShoalError:
    """The one error to raise for all that happened: the first cause, however late its report came.

    `ended` are ranks that had finished their work, `running` those that had neither finished nor failed.
    """
    first = min(failures, key=lambda failure: (not failure.is_cause, failure.when))
    if first.is_cause or first.kind == "stopped":
        same = len({str(failure.error) for failure in failures}) == 1 and not (ended or running)
        return first.error if same and first.error is not None else first.described()
    return _lost(first, failures, ended, running, timeout)


def _lost(
    first: Failure, failures: Sequence[Failure], ended: Sequence[int], running: Sequence[int], timeout: float
) -> ShoalError:
    """No rank failed by itself: some waited for others that did not answer."""
    waited = sorted(failure.rank for failure in failures)
    where = "".join(f", {note}" for note in first.notes)
    if running:
        problem = (
            f"{show_ranks(running)} did not answer within {timeout:g} seconds; {show_ranks(waited)} waited{where}."
        )
    elif ended:
        problem = f"{show_ranks(waited)} waited for {show_ranks(ended)}, which had already finished{where}."
    elif any(failure.kind == "silent" for failure in failures):
        problem = f"{show_ranks(waited)} waited for each other, and none answered within {timeout:g} seconds{where}."
    else:
        problem = f"{show_ranks(waited)} lost their connections to each other{where}: {first.what}."
    error = DiedError(
        problem, "If a step may take longer, give a longer time-out (--timeout); else look at what those ranks did."
    )
    error.__cause__ = RemoteError(first.trace)
    return error


def _alone(error: ShoalError) -> ShoalError:
    """The same error without what it came from, which may not survive pickling."""
    alone = type(error)(error.problem, error.remedy)
    if isinstance(error, RunError) and isinstance(alone, RunError):
        alone.loss = error.loss
    return alone


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, StoppedError):
        return "stopped"
    for origin in _chain(error):
        if isinstance(origin, PeerError):
            return "silent" if isinstance(origin, SilentError) else "gone"
        if trouble := network_trouble(origin):
            return trouble
    return "raised"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those it was raised from, each once: one may have been raised from itself."""
    origin: BaseException | None = error
    seen: set[int] = set()
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        yield origin
        origin = origin.__cause__ or (None if origin.__suppress_context__ else origin.__context__)


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = str(-exit_code)
        return f"was killed by signal {name}"
    return f"ended without a word, with exit code {exit_code}"
