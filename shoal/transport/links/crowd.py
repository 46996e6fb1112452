"""Many links that are mostly quiet, heard by one thread: not a thread for each of them.

Promise   whatever comes on a link is received in a thread of its own, one at a time for each link; a link that
          is watched and on which nothing came for some time is reported as silent, again and again.
Cost      one thread, `SPARE` more that wait for work, and one for each link that is being received from at a moment.
Failure   of a link that is lost the receiver is called once more, and gets the error; one that was closed here is
          forgotten without a call. What a receiver or a report of silence raises goes to `on_error`; that receiver's
          link is closed, and all others are heard as before.
"""

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.transport.links.link import Link
from shoal.transport.links.sockets import keep_from_children

SPARE = 4
"""Idle threads that are kept for the next link on which something comes."""
LOOKS = 4
"""Checks for silent links in each `silence` seconds."""
SLOWEST_LOOK = 1.0
"""Most seconds between two checks which links were closed."""


@dataclass(eq=False)
class Guest:
    """One link of a crowd."""

    link: Link
    hear: "Hear"
    on_silence: Callable[[], None]
    watched: bool = False
    """Whether `on_silence` is called when it is silent."""
    last: float = field(default_factory=time.monotonic)
    """When something last came, or `on_silence` was last called."""
    busy: bool = False
    """Whether a thread is receiving from it now."""


Hear = Callable[[Guest], bool]
"""Receives what came; False where the link is over. It may take long."""


class Crowd:
    """Hears links until `close`. Thread-safe."""

    def __init__(self, silence: float, *, on_error: Callable[[Exception], None], name: str = "shoal-crowd") -> None:
        """`silence`: seconds without anything received after which `on_silence` of a `watched` link is called.

        `on_error` gets what receivers and `on_silence` raise, in any thread.
        """
        self._name, self._silence, self._on_error = name, silence, on_error
        self._lock = threading.Lock()
        self._idle = 0
        self._work: queue.SimpleQueue[Guest | None] = queue.SimpleQueue()
        self._to_hear: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self._guests: dict[int, Guest] = {}
        """By file number. Used by the listening thread only."""
        self._closed = False
        self._wakes, self._wake = socket.socketpair()
        for sock in (self._wakes, self._wake):
            keep_from_children(sock)
            sock.setblocking(False)
        self._lent: set[threading.Thread] = set()
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)
        self._listener.start()

    def add(self, link: Link, hear: Hear, on_silence: Callable[[], None] = lambda: None) -> Guest:
        """Hear `link` from now on. `on_silence` is called by the thread that hears all: it must not take long."""
        guest = Guest(link, hear, on_silence)
        self._arm(guest)
        return guest

    def close(self, seconds: float) -> bool:
        """Hear nobody any more; links stay as they are. False if some thread had not ended after `seconds`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
            lent = set(self._lent)
        for _ in range(idle):
            self._work.put(None)
        self._nudge()
        deadline = time.monotonic() + seconds
        others = [thread for thread in (self._listener, *lent) if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._listener.is_alive():
            self._wakes.close()
            self._wake.close()
        return not any(thread.is_alive() for thread in others)

    def _arm(self, guest: Guest) -> None:
        self._to_hear.put(guest)
        self._nudge()

    def _nudge(self) -> None:
        with suppress(OSError):  # the thread is awake anyway, or has ended
            self._wake.send(b"!")

    # The thread that listens

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakes, selectors.EVENT_READ)
            looked, pause = time.monotonic(), min(SLOWEST_LOOK, self._silence / LOOKS)
            while not self._closed:
                for number in [key.fd for key, _ in selector.select(pause)]:
                    if (guest := self._guests.get(number)) is not None and not guest.busy:
                        selector.unregister(number)
                        guest.busy = True
                        self._lend(guest)
                self._take_in(selector)
                now = time.monotonic()
                if now - looked >= pause:
                    looked = now
                    self._look(selector, now)

    def _take_in(self, selector: selectors.BaseSelector) -> None:
        with suppress(BlockingIOError):
            while self._wakes.recv(4096):
                pass
        while not self._to_hear.empty():
            guest = self._to_hear.get()
            guest.busy = False
            number = guest.link.fileno()
            if number < 0:
                self._forget(guest)
                continue
            with suppress(KeyError):  # the file number was that of a link that is closed
                selector.unregister(number)
            self._guests[number] = guest
            with suppress(OSError, ValueError):  # closed just now
                selector.register(number, selectors.EVENT_READ)

    def _look(self, selector: selectors.BaseSelector, now: float) -> None:
        for number, guest in list(self._guests.items()):
            if guest.busy:
                continue
            if guest.link.closed:
                self._forget(guest)
                with suppress(KeyError, ValueError):
                    selector.unregister(number)
            elif guest.watched and now - guest.last > self._silence:
                guest.last = now
                try:
                    guest.on_silence()
                except Exception as error:
                    self._on_error(error)

    def _forget(self, guest: Guest) -> None:
        for number in [number for number, known in self._guests.items() if known is guest]:
            del self._guests[number]

    # Threads that receive

    def _lend(self, guest: Guest) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._work.put(guest)
                return
            thread = threading.Thread(target=self._serve, args=(guest,), name=f"{self._name}-lent", daemon=True)
            self._lent.add(thread)
        thread.start()

    def _heard(self, guest: Guest) -> bool:
        try:
            return guest.hear(guest)
        except Exception as error:
            self._on_error(error)
            return False

    def _serve(self, first: Guest) -> None:
        guest: Guest | None = first
        while guest is not None:
            goes_on = self._heard(guest)
            guest.last = time.monotonic()
            if not goes_on:
                guest.link.close()
            self._arm(guest)  # listen to it again, or forget it
            with self._lock:
                if self._closed or self._idle >= SPARE:
                    break
                self._idle += 1
            guest = self._work.get()
        with self._lock:
            self._lent.discard(threading.current_thread())
