"""What strategies did, in numbers with their spread over seeds. Pure; nothing is estimated.

A number that a run does not have is None, and no strategy gets one because another has it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.reporting.records import RunRecord, Study, TestPoint

DDP = "ddp"
"""torch's own, which readers know: others are held against it where it was run."""


@dataclass(frozen=True)
class Spread:
    """A number of several runs, or several measurements: its median, least and most."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half are smaller."""
        return median(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)

    def overlaps(self, other: "Spread") -> bool:
        """Whether a value of one lies within the range of the other."""
        return self.least <= other.most and other.least <= self.most

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of those that are known; None where none is."""
        known = tuple(value for value in values if value is not None)
        return cls(known) if known else None


@dataclass(frozen=True)
class Figures:
    """One strategy. Seconds to the target are those of runs that reach it."""

    name: str
    asked: int
    """Runs, whatever became of them."""
    finished: int
    reached: int
    """Finished runs that reach the target."""
    to_target: Spread | None
    samples_to_target: Spread | None
    accuracy: Spread | None
    """At the end."""
    samples_per_second: Spread | None
    step_seconds: Spread | None
    """Of steps that were timed in turns; where there were none, each run's own median."""
    in_turns: bool
    step_seconds_predicted: float | None
    bytes_counted: int | None
    bytes_predicted: int | None
    memory: tuple[int, ...]
    """Per rank, the most of all runs."""
    waiting: float | None
    """Share of their time that replicas spend in the exchange; the mean over replicas and runs."""
    workers: int | None

    @property
    def reaches(self) -> bool:
        """Whether all of its runs finished and reach the target."""
        return self.finished > 0 and self.reached == self.finished == self.asked

    @property
    def prediction_error(self) -> float | None:
        """Predicted beside measured: -0.1 is a tenth too short."""
        if self.step_seconds_predicted is None or self.step_seconds is None:
            return None
        return self.step_seconds_predicted / self.step_seconds.median - 1


@dataclass(frozen=True)
class Scaling:
    """How much faster a strategy trains than another one, per sample."""

    name: str
    beside: str
    speedup: Spread
    efficiency: float | None
    """Speedup by how many times as many workers; None where that is not known."""


def target_of(study: Study) -> float | None:
    """The accuracy whose time is compared: as asked, else the most that all finished runs reach, in whole percents."""
    if study.target is not None:
        return study.target
    best = [max(point.accuracy for point in run.tests) for run in _finished(study) if run.tests]
    return math.floor(min(best) * 100 + 1e-9) / 100 if best else None


def _finished(study: Study) -> list[RunRecord]:
    return [entry.run for entry in study.runs if entry.run.state == "finished"]


def first_reached(run: RunRecord, target: float | None) -> TestPoint | None:
    """The first test of a run with this accuracy or more."""
    return next((point for point in run.tests if target is not None and point.accuracy >= target), None)


def figures_of(study: Study) -> tuple[Figures, ...]:
    """Every strategy, in the order in which they were asked for."""
    target = target_of(study)
    return tuple(_figures(study, name, target) for name in study.strategies)


def _figures(study: Study, name: str, target: float | None) -> Figures:
    everything = study.of(name)
    runs = [run for run in everything if run.state == "finished"]
    results = [run.result for run in runs if run.result is not None]
    reached = [point for run in runs if (point := first_reached(run, target)) is not None]
    turns = study.turns.get(name)
    peaks = [result.peak_memory_bytes for result in results]
    sent = [result.bytes_per_step for result in results]
    return Figures(
        name=name,
        asked=len(everything),
        finished=len(runs),
        reached=len(reached),
        to_target=Spread.of(point.seconds for point in reached),
        samples_to_target=Spread.of(point.samples for point in reached),
        accuracy=Spread.of(result.test_accuracy for result in results),
        samples_per_second=Spread.of(result.samples_per_second for result in results),
        step_seconds=Spread(tuple(turns)) if turns else Spread.of(result.step_seconds_median for result in results),
        in_turns=bool(turns),
        step_seconds_predicted=_middle(result.step_seconds_predicted for result in results),
        bytes_counted=_middle_count(each.counted for each in sent),
        bytes_predicted=_middle_count(each.predicted for each in sent),
        memory=tuple(max(ranks) for ranks in zip(*peaks, strict=False)) if peaks else (),
        waiting=_middle(waiting_share(run) for run in runs),
        workers=results[0].workers if results else None,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    spread = Spread.of(values)
    return None if spread is None else spread.median


def _middle_count(values: Iterable[int | None]) -> int | None:
    middle = _middle(values)
    return None if middle is None else round(middle)


def waiting_share(run: RunRecord) -> float | None:
    """Of the time of replicas that which they spend in the exchange; None for one without any."""
    exchanged = None if run.result is None else run.result.exchanged
    if exchanged is None or not exchanged.replicas:
        return None
    shares = [each.wait_seconds / max(each.train_seconds, 1e-9) for each in exchanged.replicas.values()]
    return sum(shares) / len(shares)


def fastest_first(figures: Sequence[Figures]) -> list[Figures]:
    """Those whose runs all reach the target, by the median of their times."""
    arrived = [each for each in figures if each.reaches and each.to_target is not None]
    return sorted(arrived, key=lambda each: each.to_target.median if each.to_target else math.inf)


def scaling_of(study: Study, figures: Sequence[Figures]) -> list[Scaling]:
    """Samples per second beside the baseline, DDP, or the first strategy that has some, whichever there is first."""
    known = {each.name: each for each in figures if each.samples_per_second is not None}
    wanted = [name for name in (study.baseline, "one worker", DDP, *known) if name in known]
    if len(known) < 2:
        return []
    base = known[wanted[0]]
    assert base.samples_per_second is not None
    pace = base.samples_per_second.median
    scaled = []
    for each in known.values():
        assert each.samples_per_second is not None
        speedup = Spread(tuple(value / pace for value in each.samples_per_second.values))
        times = each.workers / base.workers if each.workers and base.workers else None
        scaled.append(Scaling(each.name, base.name, speedup, speedup.median / times if times else None))
    return scaled
