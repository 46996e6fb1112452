"""Which replicas take part, and whether each makes progress. Pure: time comes in as an argument.

A process that hangs still gives signs of life, from a thread of its own. So progress is watched too: a replica that was
given something to do asks for more when it is done, and one that has not asked for much longer than any step of the run
took is suspected to hang.
"""

import math
from collections.abc import Mapping, Set

PATIENCE = 10.0
"""How many times as long as the run's slowest step a replica may be silent before it is suspected."""
FORGETS = 0.99
"""Factor by which a slow step counts less with every report: the first steps of a run may take very long."""


class Watch:
    """Replicas as the coordinator told of them.

    `heartbeat`: the shortest silence that counts. `timeout`: the silence of a replica of which no step is known yet.
    `waits`: whether replicas wait for each other in a step, so that one that hangs silences all.
    """

    def __init__(self, *, heartbeat: float, timeout: float, waits: bool) -> None:
        self._heartbeat, self._timeout, self._waits = heartbeat, timeout, waits
        self.active: set[int] = set()
        """Replicas that take part now."""
        self.suspected: dict[int, float] = {}
        """Replicas that are suspected to hang, and since when."""
        self._frozen: dict[int, float] = {}
        """Replicas that give no sign of life or of progress, and since when they have been taken for frozen."""
        self._silent_servers: set[int] = set()
        self._heard: dict[int, float] = {}
        """When a replica that has been given an order last asked something."""
        self._joined: dict[int, float] = {}
        """When a replica came that has not asked anything yet. It counts once some replica has been given an order: all
        may take long to build their networks."""
        self._begun = False
        """Whether some replica has been given an order."""
        self._slowest: dict[int, float] = {}
        """Seconds of each replica's slowest step lately, without what it waited for others."""
        self._at_once: dict[int, int] = {}
        """How many steps each replica was last told to take before it asks again."""
        self._disturbed: set[int] = set()
        """Replicas whose next report is of a time in which they, or a server, were frozen."""
        self._doubted: set[int] = set()
        """Replicas whose next report is of a time in which they were suspected to hang."""
        self._waited: Set[int] = frozenset()
        """Replicas that waited for others when this was last looked at."""
        self._looked = float("-inf")

    def happened(self, what: str, replica: int, now: float) -> None:
        """A replica joined, was lost, froze, is back or left."""
        if what in ("joined", "back"):
            self.active.add(replica)
        else:
            self.active.discard(replica)
        self._frozen.pop(replica, None)
        if what == "joined" or (what == "back" and replica in self._joined):
            self._joined[replica] = now
        if what == "frozen":
            self._frozen[replica] = now
            (self._doubted if replica in self.suspected else self._disturbed).add(replica)
        elif what == "back" and replica in self._heard:
            self._heard[replica] = now
        elif what in ("lost", "left"):
            self._heard.pop(replica, None)
            self._joined.pop(replica, None)
            self._slowest.pop(replica, None)
            self._at_once.pop(replica, None)
        if what != "frozen":
            self.suspected.pop(replica, None)

    def server(self, number: int, now: float, *, silent: bool) -> None:
        """A server froze or is back: while one is silent, replicas that wait for it are too."""
        if silent:
            self._silent_servers.add(number)
            self._disturbed |= self.active
        else:
            self._silent_servers.discard(number)
            self._restart(now)

    def hear(self, replica: int, now: float) -> bool:
        """A replica that was given an order, or is given its first now, asks something; whether it is suspected."""
        if not self._begun:  # the first order of all: from here on it counts who has not asked
            self._begun, self._joined = True, dict.fromkeys(self._joined, now)
        self._heard[replica] = now
        self._joined.pop(replica, None)
        if replica not in self.suspected:
            return False
        self.active.add(replica)  # a replica that asks takes part, even before others are told that it is back
        return True

    def order(self, replica: int, steps: int) -> None:
        """A replica is told to take so many steps before it asks again."""
        self._at_once[replica] = steps

    def note(self, replica: int, seconds: float) -> None:
        """A replica reports steps; `seconds`: the slowest of them, without what it waited for others.

        Of a time in which the replica was frozen they say nothing. After one in which it was suspected it was slow, and
        may be again: it is given twice as long, or a host that became slow would be suspected in every step from then.
        """
        if replica not in self._disturbed:
            if replica in self._doubted:
                seconds *= 2 * self._at_once.get(replica, 1) / self._steps(replica)
            self._slowest[replica] = max(seconds, FORGETS * self._slowest.get(replica, 0.0))
        self._disturbed.discard(replica)
        self._doubted.discard(replica)

    def look(
        self, now: float, heard: Mapping[int, float], waiting: Set[int], longer: Mapping[int, float]
    ) -> tuple[int | None, list[int]]:
        """Who is suspected from now on, if anybody, and whose suspicion was wrong.

        `heard`: when replicas last asked anything of anybody. `waiting`: replicas that say that they wait for others;
        each has the whole time-out, and longer while one is silent that does not wait: that one keeps them, though it
        may have asked a moment later than they. `longer`: replicas with an order that takes longer than a step, and how
        many times as long; infinity for one that is not waited for. One is suspected at a time, the one that has been
        silent for longest.
        """
        cleared = [replica for replica, since in self.suspected.items() if heard.get(replica, since) > since]
        for replica in cleared:
            self.hear(replica, now)
        for replica, when in heard.items():
            if replica in self._heard:
                self._heard[replica] = max(when, self._heard[replica])
        excused = {replica for replica, factor in longer.items() if math.isinf(factor)} | (self._waited - waiting)
        for replica in excused & self._heard.keys():
            self._heard[replica] = now  # its time begins when it is waited for again, or has waited for others
        self._waited = frozenset(waiting)
        if now - self._looked > self._heartbeat:  # this process itself was held up, and may have missed questions
            self._restart(now)
        self._looked = now
        if self._silent_servers:
            return None, cleared
        since = {**(self._joined if self._begun else {}), **self._heard}
        silent = {replica: now - when for replica, when in since.items() if replica in self.active}
        keeps_others = any(seconds > self._heartbeat for replica, seconds in silent.items() if replica not in waiting)
        stuck = [
            replica
            for replica, seconds in silent.items()
            if seconds > self._limit(replica, waits=replica in waiting) * longer.get(replica, 1)
            and not (keeps_others and replica in waiting)
        ]
        if self._waits and not any(seconds <= self._heartbeat for seconds in silent.values()):
            stuck = []  # all wait for each other, and waiting in a step has a time-out of its own
        if not stuck:
            return None, cleared
        suspect = max(stuck, key=lambda replica: silent[replica])
        self._restart(now)
        self.suspected[suspect] = now
        return suspect, cleared

    def _limit(self, replica: int, *, waits: bool) -> float:
        """Seconds that a replica may be silent. It may wait for another, so the slowest of all counts."""
        if waits or replica not in self._slowest:
            return self._timeout
        return max(self._heartbeat, self._steps(replica) * max(self._slowest.values()))

    def _steps(self, replica: int) -> float:
        """How many times the slowest step it may be silent."""
        return PATIENCE + self._at_once.get(replica, 1) - 1

    def _restart(self, now: float) -> None:
        self._heard = dict.fromkeys(self._heard, now)
        self._joined = dict.fromkeys(self._joined, now)

    def frozen_for(self, now: float) -> dict[int, float]:
        """Replicas that are taken for frozen, and for how many seconds they gave no sign of life."""
        return {replica: now - since + self._heartbeat for replica, since in self._frozen.items()}
