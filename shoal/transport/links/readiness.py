"""Which of many sockets have something to be read, told to whichever thread asks first, and once.

Several threads may wait at a time; what came is told to one of them, and of that socket nothing more until it is armed
again. The kernel does all of it (epoll on Linux, kqueue on BSD and macOS): no thread hands work to another.
"""

import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol


class Readiness(Protocol):
    """Sockets by file number. A file that is closed is forgotten. All calls from any thread."""

    def arm(self, number: int, *, again: bool = True) -> None:
        """Tell once when something comes; without `again` for good, to everybody who waits, as often as they ask.

        An `OSError` where the file is closed.
        """

    def wait(self, seconds: float | None = None) -> Sequence[int]:
        """At most one that is ready; none after `seconds`."""

    def close(self) -> None:
        """Nobody may wait any more."""


class _Epoll:
    def __init__(self) -> None:
        self._epoll: Any = select.epoll()

    def arm(self, number: int, *, again: bool = True) -> None:
        wanted = select.EPOLLIN | (select.EPOLLONESHOT if again else 0)
        try:
            self._epoll.modify(number, wanted)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another thread was faster
                self._epoll.register(number, wanted)

    def wait(self, seconds: float | None = None) -> Sequence[int]:
        return [number for number, _ in self._epoll.poll(seconds, 1)]

    def close(self) -> None:
        self._epoll.close()


class _Kqueue:
    """The same elsewhere. Never run: no such machine was at hand."""

    def __init__(self) -> None:
        self._kqueue: Any = select.kqueue()  # type: ignore[attr-defined]

    def arm(self, number: int, *, again: bool = True) -> None:
        flags = select.KQ_EV_ADD | (select.KQ_EV_ONESHOT if again else 0)  # type: ignore[attr-defined]
        event = select.kevent(number, select.KQ_FILTER_READ, flags)  # type: ignore[attr-defined]
        self._kqueue.control([event], 0)

    def wait(self, seconds: float | None = None) -> Sequence[int]:
        return [event.ident for event in self._kqueue.control(None, 1, seconds)]

    def close(self) -> None:
        self._kqueue.close()


def readiness() -> Readiness:
    """What this system has."""
    return _Epoll() if sys.platform == "linux" else _Kqueue()
