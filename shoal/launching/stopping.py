"""How people, batch systems and terminals ask a process to stop: by which signals, and how many are one request."""

import signal
from time import monotonic

from shoal.launching.forked import STOP_SIGNALS

TOGETHER_SECONDS = 0.3
"""Signals that come within this time of the first are one request: whoever sends a signal to a process and to its whole
group, as `timeout` does, sends it twice."""


def stop_signals() -> list[signal.Signals]:
    """Signals that ask for an end in good order.

    SIGHUP, the end of the terminal, unless it is ignored (`nohup`); SIGUSR1 unless this program uses it itself.
    """
    return [number for number in STOP_SIGNALS if not _means_something_else(number)]


def _means_something_else(number: signal.Signals) -> bool:
    match number.name:
        case "SIGHUP":
            return signal.getsignal(number) == signal.SIG_IGN
        case "SIGUSR1":
            return signal.getsignal(number) != signal.SIG_DFL
    return False


class Requests:
    """How often this process was asked to stop: once means in good order, twice means now."""

    def __init__(self) -> None:
        self.count = 0
        self._earliest_next = 0.0

    def add(self) -> bool:
        """A signal came; whether it is a request of its own."""
        now = monotonic()
        if now < self._earliest_next:
            return False
        self._earliest_next = now + TOGETHER_SECONDS  # at once: the next signal may come before the next line
        self.count += 1
        return True
