"""`shoal.trace`: steps of a training loop of one's own.

with shoal.trace() as recorded:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()                     # a step ends here
if recorded.trace is not None:               # on rank 0
    recorded.trace.save("trace.json")
"""

from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shoal.diary import Diary, now
from shoal.errors import RunError
from shoal.timeline import Trace
from shoal.tracing.recording import gathered
from shoal.transport import Transport


def trace(title: str = "a loop of one's own") -> "OwnSteps":
    """Record the steps that are taken inside, on all ranks: `with shoal.trace() as recorded:`.

    Networks of `shoal.parallelize` note their layers, messages and waits; every `optimizer.step()` ends a step. What is
    between a step and the next forward pass, such as reading data, counts as data. Afterwards `recorded.trace` is the
    `Trace` of all ranks, on rank 0, and None elsewhere. Entering and leaving it is a collective: all ranks of the world
    do both. Costs about a microsecond for each thing noted, and holds at most 200,000 of them.
    """
    return OwnSteps(title)


class OwnSteps:
    """The steps inside a `with`."""

    def __init__(self, title: str) -> None:
        self.trace: Trace | None = None
        """What was recorded, on rank 0, when it is over."""
        self.missing: str | None = None
        """What is missing in it, if anything is."""
        self.notes = Diary(notes_passes=True)
        """What this rank noted so far."""
        self._title = title
        self._begun = self._updating = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Record from here on."""
        if Transport.diary is not None:
            raise RunError("shoal.trace() is recording already.", "Leave the first one before the next begins.")
        Transport.diary = self.notes
        self._handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self._begin_step(self.notes.step + 1)

    def pause(self) -> None:
        """Record no more; no collective."""
        Transport.diary = None
        for handle in self._handles:
            handle.remove()

    def _begin_step(self, number: int) -> None:
        self.notes.begin_step(number)
        self._begun = now()

    def _before_update(self, *_: Any) -> None:
        self._updating = now()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.notes.note_pass("update", type(optimizer).__name__, self._updating)
        self.notes.note_step(self._begun, now())
        self._begin_step(self.notes.step + 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.pause()
        if error is not None:  # others may not come here: nobody is waited for
            return
        told = gathered(Transport(), self.notes, self._title, "rank {}".format)
        if told is not None:
            trace, self.missing = told
            self.trace = trace.from_zero()
