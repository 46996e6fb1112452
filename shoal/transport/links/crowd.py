"""Many links that are mostly quiet, heard by few threads: not a thread for each of them.

Promise   whatever comes on a link is received by one thread at a time; a link that is watched and on which nothing came
          for some time is reported as silent, again and again.
Cost      one thread that looks for silent links, up to `SPARE` that wait for whatever comes, and one for each link that
          is being received from at a moment. What comes wakes one thread, which receives it: nothing is handed over.
Failure   of a link that is lost the receiver is called once more, and gets the error; one that was closed here is
          forgotten without a call. What a receiver or a report of silence raises goes to `on_error`; that receiver's
          link is closed, and all others are heard as before.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.transport.links.link import Link
from shoal.transport.links.readiness import readiness
from shoal.transport.links.sockets import keep_from_children

SPARE = 4
"""Threads that are kept waiting for the next link on which something comes."""
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
        self._ready = readiness()
        self._guests: dict[int, Guest] = {}
        """By file number."""
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        """Threads that wait for something to come, or are about to."""
        self._closed = threading.Event()
        self._open_end, self._end = socket.socketpair()
        for sock in (self._open_end, self._end):
            keep_from_children(sock)
        self._ready.arm(self._end.fileno(), again=False)  # wakes everybody once it is over
        self._clock = threading.Thread(target=self._look_for_silence, name=name, daemon=True)
        self._clock.start()
        with self._lock:
            self._start_waiting()

    def add(self, link: Link, hear: Hear, on_silence: Callable[[], None] = lambda: None) -> Guest:
        """Hear `link` from now on. `on_silence` is called by the thread that looks for all: it must not take long."""
        guest = Guest(link, hear, on_silence)
        self._arm(guest)
        return guest

    def close(self, seconds: float) -> bool:
        """Hear nobody any more; links stay as they are. False if some thread had not ended after `seconds`."""
        with self._lock:
            self._closed.set()
            threads = {self._clock, *self._threads} - {threading.current_thread()}
            self._open_end.close()
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        self._ready.close()
        self._end.close()
        return True

    def _arm(self, guest: Guest) -> None:
        """Listen to a link, or forget it if it is closed."""
        with self._lock:
            number = guest.link.fileno()
            guest.busy = False
            with suppress(OSError):  # closed just now
                if number >= 0:
                    self._guests[number] = guest
                    self._ready.arm(number)
                    return
            self._forget(guest)

    def _forget(self, guest: Guest) -> None:
        """Under the lock."""
        for number in [number for number, known in self._guests.items() if known is guest]:
            del self._guests[number]

    # The thread that looks

    def _look_for_silence(self) -> None:
        while not self._closed.wait(min(SLOWEST_LOOK, self._silence / LOOKS)):
            now, silent = time.monotonic(), []
            with self._lock:
                for guest in list(self._guests.values()):
                    if guest.busy:
                        continue
                    if guest.link.closed:
                        self._forget(guest)
                    elif guest.watched and now - guest.last > self._silence:
                        guest.last = now
                        silent.append(guest)
            for guest in silent:
                try:
                    guest.on_silence()
                except Exception as error:
                    self._on_error(error)

    # Threads that wait and receive

    def _start_waiting(self) -> None:
        """One thread more that waits. Under the lock."""
        thread = threading.Thread(target=self._serve, name=f"{self._name}-ready", daemon=True)
        with suppress(RuntimeError):  # the system has no thread left: whoever is done next will wait again
            thread.start()
            self._waiting += 1
            self._threads.add(thread)

    def _serve(self) -> None:
        while True:
            ready = self._ready.wait()
            with self._lock:
                if self._closed.is_set():
                    break
                guest = next((self._guests[number] for number in ready if number in self._guests), None)
                if guest is None or guest.busy:  # its file number was another's when it became ready
                    continue
                guest.busy = True
                self._waiting -= 1
                if not self._waiting:
                    self._start_waiting()
            goes_on = self._heard(guest)
            guest.last = time.monotonic()
            if not goes_on:
                guest.link.close()
            self._arm(guest)
            with self._lock:
                if self._closed.is_set() or self._waiting >= SPARE:
                    break
                self._waiting += 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _heard(self, guest: Guest) -> bool:
        try:
            return guest.hear(guest)
        except Exception as error:
            self._on_error(error)
            return False
