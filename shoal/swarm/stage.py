"""Actors on a stage: code that waits for others, run one at a time in the order of simulated time.

Exchanges are written as a replica sees them: ask, wait, go on. Here every replica is a thread of which one runs at a
time, whichever the agenda says; all others wait for their turn. So the same seed gives the same run, and no lock is
ever waited for. A switch from one to another costs some 10 microseconds.
"""

import threading
from collections.abc import Callable
from typing import Any

from shoal.simulating.links import Agenda


class Gone(BaseException):
    """Raised in an actor whose host died while it waited. No exchange catches it."""


class Moment:
    """Something that happens once, and that actors may wait for."""

    def __init__(self) -> None:
        self.come = False
        self.value: Any = None
        self.error: Exception | None = None
        self._waiting: list[Actor] = []

    def happen(self, value: Any = None, error: Exception | None = None) -> None:
        """It happens now; a second time is nothing. Those who wait go on, in the order in which they came."""
        if self.come:
            return
        self.come, self.value, self.error = True, value, error
        for actor in self._waiting:
            actor.call()

    def wait(self) -> Any:
        """Called by an actor: its value, once it has happened; its error is raised."""
        if not self.come:
            actor = _current()
            self._waiting.append(actor)
            actor.pause()
        if self.error is not None:
            raise self.error
        return self.value


class Stage:
    """All actors and the agenda that calls them."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self._back = threading.Semaphore(0)
        self._actors: set[Actor] = set()
        self._error: BaseException | None = None

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.agenda.now

    def enter(self, play: Callable[[], None]) -> "Actor":
        """A new actor, which begins now."""
        actor = Actor(self, play)
        self._actors.add(actor)
        actor.call()
        return actor

    def sleep(self, seconds: float) -> None:
        """Called by an actor: go on later."""
        moment = Moment()
        self.agenda.note(self.now + seconds, lambda _: moment.happen())
        moment.wait()

    def run(self) -> None:
        """Until nothing is left to happen; then all who still wait are gone. What an actor raised is raised here."""
        try:
            self.agenda.run()
        finally:
            for actor in list(self._actors):
                actor.end()
        if self._error is not None:
            raise self._error

    def give_turn(self, actor: "Actor") -> None:
        """Let an actor run until it waits or is done."""
        if actor not in self._actors:
            return
        actor.turn.release()
        self._back.acquire()
        if self._error is not None:
            self.agenda.end()

    def take_back(self) -> None:
        """Called by an actor that waits or is done."""
        self._back.release()

    def leave(self, actor: "Actor", error: BaseException | None) -> None:
        """An actor is done."""
        self._actors.discard(actor)
        self._error = self._error or error


class Actor:
    """One thread, which runs only while it has the turn."""

    def __init__(self, stage: Stage, play: Callable[[], None]) -> None:
        self._stage, self._play = stage, play
        self.turn = threading.Semaphore(0)
        self._gone = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def there(self) -> bool:
        """Whether it is not done yet."""
        return self._thread.is_alive()

    def call(self) -> None:
        """It goes on, as soon as what happens now has happened."""
        self._stage.agenda.note(self._stage.now, lambda _: self._stage.give_turn(self))

    def pause(self) -> None:
        """Called by the actor itself: wait to be called."""
        self._stage.take_back()
        self.turn.acquire()
        if self._gone:
            raise Gone

    def end(self) -> None:
        """It ends where it waits. Not called by itself."""
        self._gone = True
        self._stage.give_turn(self)
        self._thread.join()

    def _run(self) -> None:
        self.turn.acquire()
        _ACTING.actor = self
        error: BaseException | None = None
        try:
            if not self._gone:
                self._play()
        except Gone:
            pass
        except BaseException as raised:
            error = raised
        self._stage.leave(self, error)
        self._stage.take_back()


_ACTING = threading.local()


def _current() -> Actor:
    actor: Actor = _ACTING.actor
    return actor
