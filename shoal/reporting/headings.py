"""What each chart says, in a sentence that is computed from its rows. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from shoal.reporting.figures import Figures, fastest_first, target_of
from shoal.reporting.records import Study
from shoal.units import show_bytes, show_seconds

Rows = Sequence[dict[str, Any]]


def clock_title(study: Study) -> str:
    """Of an axis of seconds."""
    clocks = {entry.run.clock for entry in study.runs if entry.run.tests}
    return "seconds of training, tests not counted" if clocks == {"training"} else "seconds, tests counted"


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.9), percent(0.9876)
    ('90%', '98.8%')
    """
    return f"{share:.1%}".replace(".0%", "%")


def _several(study: Study) -> bool:
    return len(study.strategies) > 1


def _best_accuracy(study: Study) -> tuple[float, str] | None:
    """The largest accuracy of any test, and whose."""
    reached = [(point.accuracy, entry.strategy) for entry in study.runs for point in entry.run.tests]
    return max(reached, default=None)


def accuracy_by_time(study: Study, figures: Sequence[Figures]) -> str:
    """Who is there first."""
    target, ranked = target_of(study), fastest_first(figures)
    if _several(study) and ranked and target is not None and ranked[0].to_target is not None:
        first = ranked[0]
        assert first.to_target is not None
        return f"{first.name} is the first at {percent(target)}, after {show_seconds(first.to_target.median)}"
    best = _best_accuracy(study)
    return "Accuracy against time" if best is None else f"Accuracy rises to {percent(best[0])}"


def accuracy_by_samples(study: Study, figures: Sequence[Figures]) -> str:
    """Who needs the fewest samples."""
    ranked = [each for each in figures if each.reaches and each.samples_to_target is not None]
    target = target_of(study)
    if _several(study) and ranked and target is not None:
        needs = {each.name: each.samples_to_target.median for each in ranked if each.samples_to_target is not None}
        least = min(needs.values())
        equal = len(needs) > 1 and least == max(needs.values())
        whose = "All strategies need as many" if equal else f"{_names(needs, least)} the fewest"
        return f"{whose} samples for {percent(target)}: {least:,.0f}"
    best = _best_accuracy(study)
    return "Accuracy against samples" if best is None else f"The best test has {percent(best[0])}"


def loss(study: Study) -> str:
    """Where the training loss ends."""
    ends = [
        (known[-1], entry.strategy)
        for entry in study.runs
        if (known := [point.loss for point in entry.run.steps if point.loss is not None])
    ]
    if not ends:
        return "Training loss against time"
    return _lowest("Training loss", ends, several=_several(study))


def test_loss(study: Study) -> str:
    """The lowest test loss."""
    reached = [(point.loss, entry.strategy) for entry in study.runs for point in entry.run.tests]
    if not reached:
        return "Test loss against samples"
    return _lowest("Test loss", reached, several=_several(study))


def _lowest(what: str, values: Sequence[tuple[float, str]], *, several: bool) -> str:
    """The lowest value, and whose it is where it is not everybody's."""
    least = min(value for value, _ in values)
    whose = {name for value, name in values if value == least}
    return f"{what} falls to {least:.3g}" + (f", lowest with {whose.pop()}" if several and len(whose) == 1 else "")


def _names(values: Mapping[str, float], least: float, verb: str = "need") -> str:
    """Whose value it is, with a verb: of several those who share it."""
    whose = [name for name, value in values.items() if value == least]
    if len(whose) > 1:
        return f"{', '.join(whose[:-1])} and {whose[-1]} {verb}"
    return f"{whose[0]} {verb}s"


def iou(study: Study) -> str:
    """The best foreground IoU."""
    best = max((point.iou for entry in study.runs for point in entry.run.tests if point.iou is not None), default=None)
    return "Foreground IoU against time" if best is None else f"Foreground IoU rises to {best:.3f}"


def pace(study: Study) -> str:
    """Whether the speed held."""
    run = study.alone
    speeds = [] if run is None else [point.samples_per_second for point in run.steps]
    if not speeds:
        return "Samples per second"
    return f"It trains {median(speeds):,.0f} samples/s, between {min(speeds):,.0f} and {max(speeds):,.0f}"


def step_times(study: Study) -> str:
    """Whose steps are shortest."""
    middles = {name: median(seconds) for name, seconds in study.turns.items() if seconds}
    if not middles:
        return "Steps timed in turns"
    name = min(middles, key=lambda name: middles[name])
    return f"Timed in turns, {name} has the shortest steps: {show_seconds(middles[name])}"


def _extreme(values: Iterable[tuple[float, str]], *, most: bool) -> tuple[float, str] | None:
    known = list(values)
    if not known:
        return None
    return max(known) if most else min(known)


def throughput(figures: Sequence[Figures]) -> str:
    """Who trains the most samples per second."""
    best = _extreme(
        ((each.samples_per_second.median, each.name) for each in figures if each.samples_per_second), most=True
    )
    return "Samples per second" if best is None else f"{best[1]} trains the most: {best[0]:,.0f} samples/s"


def speedup(rows: Rows) -> str:
    """The largest speedup."""
    best = max(rows, key=lambda row: row["speedup"])
    if best["strategy"] == best["beside"]:
        return f"None trains more samples per second than {best['beside']}"
    return f"{best['strategy']} trains {best['speedup']:.2f} times the samples per second of {best['beside']}"


def efficiency(rows: Rows) -> str:
    """The best use of workers."""
    known = [row for row in rows if row["efficiency"] is not None and row["strategy"] != row["beside"]]
    if not known:
        return "Efficiency"
    best = max(known, key=lambda row: row["efficiency"])
    return f"{best['strategy']} makes the best use of its workers: {best['efficiency']:.0%}"


def sent(figures: Sequence[Figures]) -> str:
    """Who sends least, and whether the prediction holds."""
    counted = {each.name: each.bytes_counted for each in figures if each.bytes_counted is not None}
    both = [
        abs(each.bytes_counted - each.bytes_predicted) / max(each.bytes_counted, 1)
        for each in figures
        if each.bytes_counted is not None and each.bytes_predicted is not None
    ]
    if not counted:
        return "Bytes per step"
    least = min(counted.values())
    equal = len(counted) > 1 and least == max(counted.values())
    whose = "All ranks together send" if len(counted) == 1 else f"{_names(counted, least, 'send')} the least:"
    whose = "All strategies send the same:" if equal else whose
    told = f"{whose} {show_bytes(least)} per step"
    if not both:
        return told
    return told + (", as predicted" if max(both) == 0 else f"; predictions are off by up to {max(both):.1%}")


def memory(figures: Sequence[Figures]) -> str:
    """Who needs the least memory on the fullest rank."""
    peaks = {each.name: max(each.memory) for each in figures if each.memory}
    if not peaks:
        return "Memory of each rank"
    least = min(peaks.values())
    if len(peaks) == 1:
        return f"The fullest rank needs {show_bytes(least)}"
    whose = "All strategies need the same" if least == max(peaks.values()) else f"{_names(peaks, least)} the least"
    return f"{whose} memory on the fullest rank: {show_bytes(least)}"


def predictions(figures: Sequence[Figures]) -> str:
    """How far off predictions are."""
    errors = [each.prediction_error for each in figures if each.prediction_error is not None]
    if not errors:
        return "Predicted and measured step"
    if len(errors) == 1:
        return f"The predicted step is off by {errors[0]:+.0%}"
    return f"Predicted steps are off by {min(errors):+.0%} to {max(errors):+.0%}"


def timeline(strategy: str, rows: Rows, waits: Rows) -> str:
    """How long the step is and who waits most in it."""
    measured = [row for row in rows if row["origin"] == "measured"]
    length = max((row["end"] for row in measured or rows), default=0.0)
    ranks = len({row["rank"] for row in measured or rows})
    told = f"One step of {strategy} on {ranks} rank{'' if ranks == 1 else 's'} takes {show_seconds(length / 1000)}"
    own = [row for row in waits if row["strategy"] == strategy]
    if not own:
        return told
    most = max(own, key=lambda row: row["share"])
    return f"{told}; {most['rank']} waits most, {most['share']:.0%} of the time"


def waits(rows: Rows) -> str:
    """Who was late most often."""
    if not rows:
        return "Waits"
    late = max(rows, key=lambda row: row["late"])
    return f"{late['rank']} of {late['strategy']} was late most often: in {late['late']} of {late['steps']} steps"


def staleness(study: Study) -> str:
    """Whose gradients are how far behind."""
    means = [
        (run.result.staleness.mean, entry.strategy)
        for entry in study.runs
        if (run := entry.run).result is not None and run.result.staleness is not None
    ]
    if not means:
        return "Staleness"
    value, strategy = max(means)
    return f"Gradients of {strategy} are {value:.2f} updates behind on average"


def spread(rows: Rows) -> str:
    """How far replicas are apart at most."""
    if not rows:
        return "Distance between replicas"
    most = max(rows, key=lambda row: row["spread"])
    return f"Replicas of {most['strategy']} were apart by up to {most['spread']:.2%} of the weights' length"


def exchange_share(rows: Rows) -> str:
    """Who spends most of its time in the exchange."""
    if not rows:
        return "Time in the exchange"
    most = max(rows, key=lambda row: row["waiting"])
    return f"Replica {most['replica']} of {most['run']} spends most time in the exchange: {most['waiting']:.0%}"


def happenings(rows: Rows) -> str:
    """Who was lost."""
    lost = sum(row["what"] == "lost" for row in rows)
    return "No replica was lost" if not lost else f"{lost} replica{'' if lost == 1 else 's'} were lost on the way"


def confusion(rows: Rows) -> str:
    """Which two classes are mixed up most."""
    wrong = [row for row in rows if row["truth"] != row["found"] and row["count"]]
    if not wrong:
        return "No test sample was taken for another class"
    most = max(wrong, key=lambda row: row["count"])
    return f"{most['truth']} is taken for {most['found']} most often: {most['count']:,} times"


def classes(rows: Rows) -> str:
    """The worst class."""
    if not rows:
        return "Accuracy of each class"
    worst = min(rows, key=lambda row: row["accuracy"])
    return f"{worst['name']} is found least often: {worst['accuracy']:.1%}"


def rates(rows: Rows) -> str:
    """The best rate of each strategy."""
    best: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row["accuracy"] is not None:
            best[row["strategy"]] = max(best.get(row["strategy"], (-1.0, "")), (row["accuracy"], row["rate"]))
    chosen = {rate for _, rate in best.values()}
    if len(chosen) == 1:
        return f"All strategies learn best with a rate of {chosen.pop()}"
    return "Best rates: " + ", ".join(f"{rate} for {name}" for name, (_, rate) in best.items())
