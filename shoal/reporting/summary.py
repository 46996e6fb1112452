"""The numbers of a run, and of strategies beside each other, as text: what the terminal prints and the page shows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.reporting.figures import Figures, Spread, figures_of, target_of
from shoal.reporting.records import Study
from shoal.result import ExchangeReport, RunResult, WentOn
from shoal.units import show_bytes, show_seconds

SHOWN_PEAKS = 4
"""Workers whose memory is shown one by one."""


@dataclass(frozen=True)
class Row:
    """One fact of a run."""

    label: str
    value: str
    under: str = ""
    """The label that this one belongs under."""
    important: bool = False

    @property
    def whole_label(self) -> str:
        """Where it does not stand under the other."""
        return ", ".join(filter(None, (self.under, self.label)))


def rows_of(result: RunResult) -> list[Row]:
    """What a run did, a line each."""
    rows = [Row("test accuracy", f"{result.test_accuracy:.4f}", important=True)]
    if result.test_iou is not None:
        rows.append(Row("foreground IoU", f"{result.test_iou:.4f}", important=True))
    if result.best is not None and result.best.step < result.steps:
        score = result.best.test_accuracy if result.best.test_iou is None else result.best.test_iou
        rows.append(Row("best", f"{score:.4f} in epoch {result.best.epoch}, see best.safetensors", "test accuracy"))
    rows.append(Row("speed", f"{result.samples_per_second:,.0f} images/s"))
    rows.append(Row("step", f"{show_seconds(result.step_seconds_median)} (median)"))
    if result.step_seconds_predicted is not None:
        error = result.step_seconds_predicted / result.step_seconds_median - 1
        rows.append(Row("predicted", f"{show_seconds(result.step_seconds_predicted)} ({error:+.0%})", "step"))
    rows.append(Row("time", show_seconds(result.wall_seconds)))
    if result.peak_memory_bytes:
        rows.append(Row("peak memory", show_peaks(result.peak_memory_bytes)))
    if result.went_on:
        rows.append(Row("went on", ", ".join(map(_show_going_on, result.went_on))))
    if result.exchanged is not None:
        rows += _exchange_rows(result, result.exchanged)
    elif result.workers > 1:
        rows.append(Row("plan", show_plan(result.plan, result.plan_in_words or "")))
        sent = result.bytes_per_step
        if sent.counted is not None:
            rows.append(Row("sent per step", f"{show_bytes(sent.counted)}, by {result.workers} workers together"))
        if sent.predicted is not None:
            rows.append(Row("predicted", show_bytes(sent.predicted), "sent per step"))
    return rows


def _show_going_on(change: WentOn) -> str:
    seconds = "" if change.seconds_to_go_on is None else f", within {show_seconds(change.seconds_to_go_on)}"
    return f"with {change.workers_after} workers after step {change.step}{seconds}"


def show_peaks(peaks: Sequence[int]) -> str:
    """Of each worker; of many workers the least and the most.

    >>> show_peaks([1 << 20, 2 << 20]), show_peaks([3 << 20, 1 << 20, 2 << 20, 1 << 20, 1 << 20])
    ('1.0 MiB, 2.0 MiB', '1.0 MiB to 3.0 MiB per worker')
    """
    if len(peaks) <= SHOWN_PEAKS:
        return ", ".join(map(show_bytes, peaks))
    return f"{show_bytes(min(peaks))} to {show_bytes(max(peaks))} per worker"


def show_plan(name: str, words: str) -> str:
    """A plan's name with how its layers are cut, where that is known."""
    return ": ".join(part for part in (name, words) if part)


def _exchange_rows(result: RunResult, exchanged: ExchangeReport) -> Iterator[Row]:
    """Who did what between replicas."""
    each = exchanged.replicas
    if result.plan_in_words:
        yield Row("plan", f"in each replica {show_plan(result.plan, result.plan_in_words)}")
    yield Row("updates", ", ".join(f"replica {number}: {score.updates:,}" for number, score in each.items()))
    waits = [f"{score.wait_seconds / max(score.train_seconds, 1e-9):.0%}" for score in each.values()]
    yield Row("time in the exchange", ", ".join(waits))
    if result.staleness is not None:
        yield Row("staleness", f"mean {result.staleness.mean:.2f}, at most {result.staleness.max}")
    dropped = sum(score.dropped for score in each.values())
    if dropped:
        yield Row("dropped gradients", f"{dropped:,}")
    moved = result.bytes_per_step
    if exchanged.servers == "direct":
        yield Row("exchanged per step", "in shared memory")
    elif moved.counted is not None:
        yield Row("exchanged per step", show_bytes(moved.counted))
        if moved.predicted is not None:
            yield Row("predicted", show_bytes(moved.predicted), "exchanged per step")
    lost = [event["who"] for event in exchanged.events if event["what"] == "lost"]
    if lost:
        yield Row("lost replicas", ", ".join(map(str, lost)))


@dataclass(frozen=True)
class Entry:
    """A number in a table: the median, and the range over seeds or rounds where there is one."""

    value: str
    range: str = ""


@dataclass(frozen=True)
class StrategyTable:
    """Strategies beside each other."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    """Of every strategy its name and a number for each heading."""


def table_of(study: Study) -> StrategyTable:
    """Every strategy with its numbers; a column in which nobody has a number is left out."""
    figures, target = figures_of(study), target_of(study)
    reach = "to target" if target is None else f"to {target:.1%}".replace(".0%", "%")
    columns: dict[str, list[Entry]] = {
        reach: [_time_to_target(each) for each in figures],
        "accuracy": [_entry(each.accuracy, lambda value: f"{value:.4f}") for each in figures],
        "images/s": [_entry(each.samples_per_second, lambda value: f"{value:,.0f}") for each in figures],
        "step": [_entry(each.step_seconds, show_seconds) for each in figures],
        "sent/step": [_size(each.bytes_counted) for each in figures],
        "peak": [_size(max(each.memory, default=None)) for each in figures],
        "predicted": [_prediction(each) for each in figures],
        "waiting": [Entry("-" if each.waiting is None else f"{each.waiting:.0%}") for each in figures],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell.value != "-" for cell in cells)}
    rows = tuple((each.name, tuple(cells[number] for cells in kept.values())) for number, each in enumerate(figures))
    return StrategyTable(tuple(kept), rows)


def _entry(spread: Spread | None, show: Callable[[float], str]) -> Entry:
    if spread is None:
        return Entry("-")
    least, most = show(spread.least), show(spread.most)
    return Entry(show(spread.median), "" if least == most else f"{least} to {most}")


def _time_to_target(each: Figures) -> Entry:
    if each.to_target is None:
        return Entry("-")
    entry = _entry(each.to_target, show_seconds)
    missed = each.asked - each.reached
    return entry if not missed else Entry("-", f"{each.reached} of {each.asked} seeds, in {entry.value}")


def _prediction(each: Figures) -> Entry:
    if each.step_seconds_predicted is None:
        return Entry("-")
    error = each.prediction_error
    return Entry(show_seconds(each.step_seconds_predicted), "" if error is None else f"{error:+.0%}")


def _size(count: int | None) -> Entry:
    return Entry("-" if count is None else show_bytes(count))
