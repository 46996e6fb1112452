"""Ctrl-C, SIGTERM and their like as a question the loop asks, not an exception in the middle of a step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from shoal.launching import Requests, stop_signals


class StopSignal:
    """True after the first of `stop_signals`; the second acts as if this class were not there.

    The first lets the loop finish its step and leave whole files; whoever is in a hurry presses again. Signals that
    come together are one. They can be caught in the main thread only; elsewhere this is never true.
    """

    def __init__(self) -> None:
        self._requests = Requests()
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self._requests.count > 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (signal's own signature)
        if self._requests.add() and self._requests.count > 1:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
