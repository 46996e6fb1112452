"""Signs of life: a thread that says four times per heartbeat on a link that this process lives."""

import threading

from shoal.linking import Link, LinkLost

BEATS = 4
"""Signs of life within one heartbeat."""


class Pulse:
    """Beats on `link`, which it does not own, until `stop` or until nobody hears it any more."""

    def __init__(self, link: Link, heartbeat: float) -> None:
        self._link, self._pause = link, heartbeat / BEATS
        self._quiet = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="shoal-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more beats after this; a thread that hangs in one is left behind."""
        self._quiet.set()
        self._thread.join(1.0)

    def _beat(self) -> None:
        while not self._quiet.wait(self._pause):
            try:
                self._link.send({})
            except LinkLost:
                return  # whoever asks next is told
