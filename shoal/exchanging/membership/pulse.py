"""Signs of life: a thread that sends a message four times per heartbeat, to show that this process lives."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from shoal.transport.links import JSON, Link, LinkLost

BEATS = 4
"""Signs of life in one heartbeat."""


class Pulse:
    """Sends what `word` gives on `link`, which it does not own, until `stop` or until the link is lost."""

    def __init__(self, link: Link, heartbeat: float, word: Callable[[], Mapping[str, JSON]] = dict) -> None:
        self._link, self._pause, self._word = link, heartbeat / BEATS, word
        self._quiet = threading.Event()
        with suppress(LinkLost):  # whoever asks next is told
            link.send(word())  # so that one that freezes before its first beat is missed too
        self._thread = threading.Thread(target=self._beat, name="shoal-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more signs. A thread that hangs while it sends is left behind."""
        self._quiet.set()
        self._thread.join(1.0)

    def _beat(self) -> None:
        while not self._quiet.wait(self._pause):
            try:
                self._link.send(self._word())
            except LinkLost:
                return  # whoever uses the link next gets the error
