"""What a paper asks, answered: every question's cells as numbers with a mark, or the reason why there is none."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.paper import (
    Asked,
    Case,
    Cell,
    Cuts,
    Kernels,
    Mark,
    Missing,
    Number,
    Paper,
    Rate,
    Replicas,
    SearchTime,
    Seconds,
    Sent,
    Staleness,
)
from shoal.repeating.steps import Steps, matching
from shoal.simulating.served import Served, Service, serve
from shoal.units import parse_quantity, show_seconds

Progress = Callable[[int, int, str], None]
"""Told how many cells are done, of how many, and what is next."""
SIMULATED = "shoal papers: from data sheets, nothing fitted"
NOT_MEASURED = Missing("not measured: ask with --measure")


def answered(paper: Paper, progress: Progress, *, measure: bool = False, steps: Steps | None = None) -> Paper:
    """The paper with a number in place of all that it asks. What is measured is left out unless `measure`."""
    answers = Answers(steps or Steps(), measure=measure)
    total, done = sum(1 for _ in paper.asked()), 0

    def answer(cell: Cell, label: str) -> Cell:
        nonlocal done
        if isinstance(cell, Number | Missing):
            return cell
        progress(done, total, label)
        done += 1
        return answers.answer(cell)

    questions = []
    for question in paper.questions:
        lines = [replace(line, cells=tuple(answer(cell, line.label) for cell in line.cells)) for line in question.lines]
        questions.append(replace(question, lines=tuple(lines)))
    progress(total, total, "")
    return replace(paper, questions=tuple(questions))


@dataclass
class Answers:
    """Answers one thing after the other, and keeps what it has simulated."""

    steps: Steps
    measure: bool = False
    _served: dict[Replicas, tuple[Service, int]] = field(default_factory=dict)

    def answer(self, asked: Asked) -> Number | Missing:
        """A number with its mark."""
        match asked:
            case Rate(of=of, over=over, per=per):
                ratio = max(map(self._rate, of)) / max(map(self._rate, over)) / per
                return _simulated(f"{ratio:.2f}", ratio)
            case Seconds(of=step):
                seconds = self.steps.outcome(step).seconds
                return _simulated(show_seconds(seconds), seconds)
            case Kernels(of=step, layers=layers):
                kernels = self.steps.outcome(step).kernels
                seconds = sum(kernels[name] for name in matching(layers, kernels))
                return _simulated(show_seconds(seconds), seconds)
            case Sent(of=step, less_than=None):
                sent = float(self.steps.outcome(step).bytes)
                return _simulated(f"{sent / 1e9:.2f} GB", sent)
            case Sent(of=step, less_than=other):
                assert other is not None
                ratio = self.steps.outcome(other).bytes / self.steps.outcome(step).bytes
                return _simulated(f"{ratio:.1f}", ratio)
            case Staleness(of=replicas):
                staleness = self._service(replicas)[0].mean_staleness
                return _simulated(f"{staleness:.1f}", staleness)
            case Cuts(of=step, layers=layers):
                cuts = self.steps.outcome(step).cuts
                return _simulated("/".join(dict.fromkeys(str(cuts[name]) for name in matching(layers, cuts))), None)
            case SearchTime(of=step):
                if not self.measure:
                    return NOT_MEASURED
                seconds = self.steps.search_seconds(step)
                return Number(f"{seconds:.2g} s", Mark.MEASURED, "this machine, now", seconds)

    def _rate(self, case: Case) -> float:
        if isinstance(case, Replicas):
            service, samples = self._service(case)
            return service.rate * samples
        return self.steps.outcome(case).rate

    def _service(self, case: Replicas) -> tuple[Service, int]:
        """What came of it, and the samples of one worker's step."""
        if case not in self._served:
            outcome = self.steps.outcome(case.step)
            size = self.steps.parameter_bytes(case.step)
            served = Served(
                workers=case.workers,
                step=outcome.seconds,
                pushed=size * case.pushed,
                fetched=size,
                bandwidth=parse_quantity(case.bandwidth, "bytes/s"),
                latency=case.latency,
                servers=case.servers,
                every=case.every,
                together=case.together,
                jitter=case.jitter,
            )
            self._served[case] = serve(served), outcome.samples
        return self._served[case]


def _simulated(text: str, value: float | None) -> Number:
    return Number(text, Mark.SIMULATED, SIMULATED, value)
