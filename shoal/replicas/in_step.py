"""Steps that all replicas take together: what a replica hears of the others, and why a step of its own fails.

With `allreduce` and `sync` a step waits for all replicas. One that is gone, or has finished, never comes: those that
wait for it are woken, and told who it is.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal.errors import PeerError, RunError, SilentError, network_trouble
from shoal.exchanging import OutOfStepError

GRACE_SECONDS = 1.0
"""Time that a step has to end by itself when another replica is gone, which may have done its part of it; and that the
news has to arrive when the step failed."""


class InStep:
    """One replica's steps. `survives`: whether the exchange makes them without the others. `show` names a replica."""

    def __init__(self, exchange: str, number: int, show: Callable[[int], str], *, survives: bool) -> None:
        self._exchange, self._number, self._show, self._survives = exchange, number, show, survives
        self.steps = 0
        """Steps so far, with the one that is being taken."""
        self._stepping = False
        self._gone: dict[int, str] = {}
        """Other replicas that are gone, and how: lost, or left."""
        self._finished: dict[int, tuple[int, int]] = {}
        """Other replicas that have finished: after how many steps, and in which round."""
        self._together = -1
        """The last round in which all have finished together. What is heard of it, or of one before, comes too late."""
        self._changed = threading.Condition()

    def hear(self, notice: Mapping[str, Any], interrupt: Callable[[], None]) -> None:
        """What the coordinator says, in a thread of its own. `interrupt` lets the step fail that is being taken."""
        with self._changed:
            if notice.get("gone", self._number) != self._number:
                self._gone[notice["gone"]] = notice["how"]
            if notice.get("finished", self._number) != self._number and notice["round"] > self._together:
                self._finished[notice["finished"]] = notice["steps"], notice["round"]
            self._changed.notify_all()
            step = self.steps
            if not self._stepping or not self._would_never_end():
                return
            if self._changed.wait_for(lambda: not self._stepping or self.steps != step, timeout=GRACE_SECONDS):
                return
        interrupt()

    @contextmanager
    def step(self, tell: Callable[[], None]) -> Iterator[None]:
        """Around a step: what goes wrong in it is told in words that name the cause.

        `tell` is called where another replica has finished, before that is raised: it has to be told too.
        """
        if self._survives:  # nobody is waited for, and nothing is heard of the others
            self.steps += 1
            yield
            return
        with self._changed:
            self.steps += 1
            self._stepping = True
        try:
            if self._would_never_end():
                raise OutOfStepError  # noqa: TRY301  (told below, as those are that come while it waits)
            yield
        except (OutOfStepError, RuntimeError, PeerError) as error:
            why = self._why(error, tell)
            if why is None:
                raise
            raise why from error
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def go_on(self, after: int) -> None:
        """All have finished together in round `after`, and may take steps again."""
        with self._changed:
            self._together = after
            self._finished = {who: known for who, known in self._finished.items() if known[1] > after}

    def uneven(self, done: int, steps: int, other: int, step: int) -> RunError:
        """Replica `done` has finished, and `other` takes a step more."""
        return RunError(
            f"{self._show(done)} has finished after {steps} steps, and {self._show(other)} takes its step {step}: with "
            f"{self._exchange!r} all replicas take the same steps.",
            "Give all the same number of batches; or use an exchange that does not wait for all of them, such as "
            "downpour or backup.",
        )

    def _would_never_end(self) -> bool:
        """Whether the step that this replica takes would wait for one that does not take it."""
        return bool(self._gone) or any(steps < self.steps for steps, _ in self._finished.values())

    def _why(self, error: Exception, tell: Callable[[], None]) -> RunError | None:
        """The error that names the cause; None where the given error does so itself."""
        if self._survives:
            return None
        with self._changed:
            self._changed.wait_for(self._would_never_end, timeout=GRACE_SECONDS)
            behind = [(who, steps) for who, (steps, _) in self._finished.items() if steps < self.steps]
            gone = list(self._gone.items())
        if behind:
            tell()
            return self.uneven(*behind[0], self._number, self.steps)
        if gone:
            who, how = gone[0]
            was = "was lost" if how == "lost" else "has left"
            return PeerError(
                f"{self._show(who)} {was}, and {self._exchange!r} cannot make a step without it.",
                "Start again from what you saved; or use an exchange that goes on without it: downpour, dasgd, backup.",
            )
        if isinstance(error, OutOfStepError):
            return RunError("another replica has finished.", "Give all replicas the same number of batches.")
        trouble = network_trouble(error)
        if trouble is None:
            return None
        kind, what = (SilentError, "is silent") if trouble == "silent" else (PeerError, "is gone")
        return kind(
            f"another replica {what}: {str(error).splitlines()[0]}",
            "Look at the message of the rank that failed first; this one only noticed.",
        )
