"""A thread that pushes and fetches while its replica computes: one task at a time."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Runs one task at a time in a thread of its own. `begin` and `end` alternate; the same thread calls both."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], T]) -> None:
        """Run this in the thread, and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._done.clear()
        self._given.put(work)

    @property
    def done(self) -> bool:
        """Whether the task is finished, so that `end` would not wait."""
        return self._done.is_set()

    def end(self) -> T:
        """Wait for the task and give its result; an error that it raised is raised here."""
        self._done.wait()
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def close(self, seconds: float = 1.0) -> None:
        """End the thread. Close what it may wait for before; a thread that hangs is left behind."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            try:
                self._results.append(work())
            except BaseException as error:
                self._errors.append(error)
            self._done.set()
