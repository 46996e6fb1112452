"""What is printed of a row's runs: one line of a Markdown table each."""

import statistics
from collections.abc import Sequence

from benchmarks.exchange_accuracy.runs import Outcome
from benchmarks.exchange_accuracy.studies import Row

Outcomes = Sequence[Outcome]

TUNED_HEAD = (
    "| | tuning (rate: accuracy) | rate | accuracy, mean (seeds) | - one worker | samples/s | time to accuracy s "
    "| staleness mean, max | MB pushed, fetched per step | kB pushed per step by quarters | dropped | diverged |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
UNTOLD_HEAD = (
    "| exchange, replicas | mean accuracy | all seeds | worst seed | - one worker, points | goal | | samples/s |\n"
    "|---|---|---|---|---|---|---|---|"
)
FLOOR = 0.80
"""No run of the study `untold` may end below."""
GOALS = {
    **dict.fromkeys(("allreduce", "sync", "backup", "gossip", "easgd", "local"), 0.5),
    **dict.fromkeys(("downpour", "dasgd", "hogwild", "softsync"), 1.0),
    "admm": 1.5,
}
"""Points that the mean of an exchange may be below one worker's."""
WITHOUT_GOAL = (("admm", 8),)


def mean_accuracy(outcomes: Outcomes) -> float | None:
    """Of those that did not diverge."""
    accuracies = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
    return statistics.fmean(accuracies) if accuracies else None


def learned(outcomes: Outcomes) -> Outcomes:
    """Those that did not end below `FLOOR`: beside one worker that learned nothing anything would look good."""
    return [outcome for outcome in outcomes if (outcome.accuracy or 0.0) >= FLOOR]


def tuned_line(row: Row, tuning: str, rate: str, outcomes: Outcomes, base: float | None, target: float) -> str:
    """A row whose rate was chosen; `base` is one worker's mean."""
    done = [outcome for outcome in outcomes if outcome.accuracy is not None]
    diverged = len(outcomes) - len(done)
    mean = mean_accuracy(outcomes)
    if mean is None:
        return f"| {row.name} | {tuning} | {rate} | | | | | | | | | {diverged} |"
    return (
        f"| {row.name} | {tuning} | {rate} | **{mean:.4f}** ({_seeds(done)}) | {_points(mean, base)} "
        f"| {_speed(done)} | {_times_to(done, target)} | {_staleness(done)} | {_megabytes(done)} "
        f"| {_over_time(done)} | {sum(outcome.dropped for outcome in done)} | {diverged} |"
    )


def untold_line(row: Row, outcomes: Outcomes, base: float | None) -> str:
    """A row with the rates that nobody gave, and whether it reached its goal; `base` is one worker's mean."""
    mean = mean_accuracy(outcomes)
    worst = "diverged" if _diverged(outcomes) else f"{min(outcome.accuracy or 0.0 for outcome in outcomes):.4f}"
    shown = "" if mean is None else f"**{mean:.4f}**"
    return (
        f"| {row.name} | {shown} | {_seeds(outcomes)} | {worst} | {_points(mean, base)} "
        f"| {_goal(row)} | {_verdict(row, outcomes, base)} | {_speed(outcomes)} |"
    )


def accuracy_of(outcome: Outcome) -> str:
    """For people."""
    return "diverged" if outcome.accuracy is None else f"{outcome.accuracy:.4f}"


def _goal_points(row: Row) -> float | None:
    return None if (row.exchange, row.replicas) in WITHOUT_GOAL else GOALS.get(row.exchange)


def _goal(row: Row) -> str:
    points = _goal_points(row)
    return f"worst {FLOOR:.2f}" if points is None else f"-{points}, worst {FLOOR:.2f}"


def _verdict(row: Row, outcomes: Outcomes, base: float | None) -> str:
    mean, points = mean_accuracy(outcomes), _goal_points(row)
    if mean is None or _diverged(outcomes) or any((outcome.accuracy or 0.0) < FLOOR for outcome in outcomes):
        return "MISSED"
    if points is None:
        return "met"
    if base is None:
        return ""
    return "met" if 100 * (mean - base) >= -points else "MISSED"


def _diverged(outcomes: Outcomes) -> bool:
    return any(outcome.accuracy is None for outcome in outcomes)


def _points(mean: float | None, base: float | None) -> str:
    return "" if mean is None or base is None else f"{100 * (mean - base):+.2f}"


def _seeds(outcomes: Outcomes) -> str:
    return ", ".join(accuracy_of(outcome) for outcome in outcomes)


def _speed(outcomes: Outcomes) -> str:
    return f"{statistics.median(outcome.samples_per_second for outcome in outcomes):,.0f}"


def _times_to(outcomes: Outcomes, accuracy: float) -> str:
    times = [outcome.seconds_to(accuracy) for outcome in outcomes]
    return ", ".join("never" if seconds is None else f"{seconds:.0f}" for seconds in times)


def _staleness(outcomes: Outcomes) -> str:
    means = [outcome.staleness_mean for outcome in outcomes if outcome.staleness_mean is not None]
    return f"{statistics.fmean(means):.2f}, {max(outcome.staleness_max for outcome in outcomes)}" if means else ""


def _megabytes(outcomes: Outcomes) -> str:
    steps = sum(outcome.steps for outcome in outcomes)
    if not steps:
        return ""
    pushed = sum(outcome.sent_bytes for outcome in outcomes)
    fetched = sum(outcome.received_bytes for outcome in outcomes)
    return f"{pushed / steps / 1e6:.3f}, {fetched / steps / 1e6:.3f}"


def _over_time(outcomes: Outcomes) -> str:
    """What was pushed per step in each quarter of the run, mean of the seeds; nothing where no message is sent."""
    marks = [[(0, 0), *outcome.pushed] for outcome in outcomes if outcome.pushed and outcome.pushed[-1][1]]
    if not marks:
        return ""
    quarters = [
        statistics.fmean((mark[i + 1][1] - mark[i][1]) / max(1, mark[i + 1][0] - mark[i][0]) for mark in marks)
        for i in range(len(marks[0]) - 1)
    ]
    return ", ".join(f"{quarter / 1e3:.2f}" for quarter in quarters)
