"""What each replica of a run did, added up over all parts of a run that was resumed. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.exchanging import Tally
from shoal.replicas.orders import StepsDone
from shoal.result import ReplicaReport, Staleness


@dataclass
class Score:
    """One replica's work."""

    tally: Tally = field(default_factory=Tally)
    train_seconds: float = 0.0
    peak_bytes: Sequence[int] = ()

    def report(self) -> ReplicaReport:
        """For `result.json`."""
        tally = self.tally
        return ReplicaReport(
            steps=tally.steps,
            updates=tally.updates,
            dropped=tally.dropped,
            wait_seconds=tally.wait_seconds,
            train_seconds=self.train_seconds,
            sent_bytes=tally.sent_bytes,
            received_bytes=tally.received_bytes,
        )


class Scores:
    """All replicas' work. `before`: what `saved` gave in an earlier part of the run."""

    def __init__(self, before: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        self._of: dict[int, Score] = {
            number: Score(Tally.from_dict(saved["tally"]), saved["train_seconds"])
            for number, saved in (before or {}).items()
        }
        self._steps_here: Counter[int] = Counter()
        self.step_seconds: list[float] = []
        """Of all replicas' steps in this part of the run."""
        self.training_seconds = 0.0
        """In this part of the run: how long some replica trained, without tests during which nobody did."""
        self._until = -math.inf

    def __iter__(self) -> Iterator[tuple[int, Score]]:
        return iter(sorted(self._of.items()))

    def note(self, replica: int, done: StepsDone, now: float) -> None:
        """Add what a replica reports after a push, `now` in seconds of a clock that only goes forward."""
        score = self._of.setdefault(replica, Score())
        seconds = [step.seconds for step in done.steps]
        score.tally.add(done.tally)
        score.train_seconds += sum(seconds)
        score.peak_bytes = done.peaks
        self._steps_here[replica] += done.tally.steps
        self.step_seconds += seconds
        # These steps have just ended; time that other replicas' steps cover already is not counted twice.
        self.training_seconds += max(0.0, now - max(now - sum(seconds), self._until))
        self._until = now

    def steps_here(self, replica: int) -> int:
        """Steps that a replica took in this part of the run."""
        return self._steps_here[replica]

    def total(self, what: str) -> int:
        """The sum of one count over all replicas."""
        return sum(getattr(score.tally, what) for score in self._of.values())

    def staleness(self) -> Staleness | None:
        """Staleness of all pushes; None without any."""
        counts: Counter[int] = Counter()
        for score in self._of.values():
            counts.update(score.tally.staleness)
        if not counts:
            return None
        return Staleness(
            mean=sum(age * count for age, count in counts.items()) / counts.total(),
            max=max(counts),
            histogram=dict(sorted(counts.items())),
        )

    def spread(self) -> float | None:
        """The largest distance of a replica from the common weights, as last measured by each."""
        measured = [score.tally.spread for score in self._of.values() if score.tally.spread is not None]
        return max(filter(math.isfinite, measured), default=None)

    def median_seconds(self, before: Sequence[float]) -> float:
        """Median seconds of a step, with those of earlier parts of the run."""
        return statistics.median([*before, *self.step_seconds] or [0.0])

    def saved(self) -> dict[int, dict[str, Any]]:
        """For a checkpoint: numbers, lists and dicts only."""
        return {
            number: {"tally": score.tally.to_dict(), "train_seconds": score.train_seconds}
            for number, score in self._of.items()
        }
