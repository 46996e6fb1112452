"""Where replicas that are done with their steps wait for each other: the coordinator's side of `finish`.

Every replica that gives signs of life says where it is, in rounds: when all have said something the round is closed,
and all get what all said. So all know the same and decide alike. One that is lost or frozen is not awaited; one that
wakes takes part in the round that is open then.

Where all must take the same steps, those that take another one are told that somebody has finished, and that somebody
is gone, because they would wait for ever.
"""

import time
from collections.abc import Mapping
from typing import Any

from shoal.errors import RunError
from shoal.exchanging import Event, Member
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.transport.links import Frame, fields

AGAIN_SECONDS = 5.0
"""A replica that waits for so long is told to ask again: its other ranks wait for it meanwhile, and theirs
is a group with a time-out."""
PHASES = ("done", "same", "step")
"""done: it has pushed its last step; same: it has the common weights; step: it takes a step though another is done."""


class Rendezvous:
    """Answers what replicas ask in `finish`. `in_step`: whether all must take the same steps."""

    def __init__(self, *, in_step: bool) -> None:
        self._in_step = in_step
        self._coordinator: Coordinator | None = None
        self._said: dict[int, Mapping[str, Any]] = {}
        """In the round that is open."""
        self._waiting: dict[int, int] = {}
        """Who waits for the end of which round."""
        self._records: list[Mapping[str, Any]] = []
        """What was said in each closed round, by replica."""
        self._uneven: list[int] = []
        """A replica that takes a step more than another, and which step."""
        self._closed = False

    def open(self, coordinator: Coordinator) -> None:
        """Before the first replica comes."""
        self._coordinator = coordinator

    def close(self) -> None:
        """Answer everybody who waits."""
        if self._coordinator is not None:
            with self._coordinator.changed:
                self._closed = True
                self._coordinator.answer_waiting()

    def answer(self, member: Member, frame: Frame) -> tuple[Mapping[str, Any], list[Any]] | None:
        """The answer to what a replica says: what all said, once all have."""
        if frame.head["ask"] != "meet":
            raise fields.refused(f"a replica asked for {frame.head['ask']!r}, which is not answered here.")
        phase, steps = fields.text(frame.head, "phase", PHASES), fields.integer(frame.head, "steps")
        assert self._coordinator is not None
        with self._coordinator.changed:
            if phase == "step":
                self._uneven = [member.replica, steps]
                self._coordinator.answer_waiting()
                return {}, []
            if member.replica not in self._waiting:
                said = {"phase": phase, "steps": steps, "marks": frame.head.get("marks")}
                self._say(self._coordinator, member.replica, said)
            until = time.monotonic() + AGAIN_SECONDS
            self._coordinator.answer_later(member, lambda: self._reply(member.replica, until))
        return None

    def on_event(self, event: Event) -> None:
        """Under the coordinator's lock."""
        assert self._coordinator is not None
        if event.what == "server lost":
            self._coordinator.fail(
                RunError(
                    f"server {event.who} was lost, and with it a part of the weights.",
                    "Look at what it printed above; start again from what you saved.",
                )
            )
        elif event.what in ("lost", "left") and self._in_step:
            self._coordinator.tell_all({"gone": event.who, "how": event.what})

    def _reply(self, replica: int, until: float) -> Mapping[str, Any] | None:
        """The answer to a replica that waits; None while it has to wait on. Under the coordinator's lock."""
        assert self._coordinator is not None
        number = self._waiting[replica]
        self._close_if_all_said(self._coordinator)
        if len(self._records) <= number and not self._uneven and not self._closed:
            return {"again": True} if time.monotonic() > until else None
        del self._waiting[replica]
        if len(self._records) > number:
            return {"said": self._records[number], "round": number}
        return {"uneven": self._uneven}

    def _say(self, coordinator: Coordinator, replica: int, said: Mapping[str, Any]) -> None:
        self._waiting[replica] = len(self._records)
        self._said[replica] = said
        if self._in_step and said["phase"] == "done":
            coordinator.tell_all({"finished": replica, "steps": said["steps"], "round": len(self._records)})
        coordinator.rest(replica, resting=True)  # nobody waits for its gradients meanwhile

    def _close_if_all_said(self, coordinator: Coordinator) -> None:
        if self._uneven:  # the replica that said so may be gone, but all must still learn of it
            return
        if self._said and all(replica in self._said for replica in coordinator.active()):
            gone = {number for number, member in coordinator.members.items() if member.state in ("lost", "left")}
            said, self._said = self._said, {}
            self._records.append({str(who): words for who, words in sorted(said.items()) if who not in gone})
            for replica in said:  # all at once, so that no step of theirs is made without the others
                coordinator.rest(replica, resting=False)
