"""The rows that a page shows and gives away: charts, the JSON and the CSV inside are made of these and nothing else.

A run has at most `MOST_POINTS` points: of more lines of metrics, as many in a row as needed make one, with their mean
loss and speed; of more tests every so-manyth is kept, and the last. Of a step's slices the `MOST_SLICES` longest are
shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeVar

from shoal.reporting.figures import Figures, scaling_of
from shoal.reporting.records import RunRecord, StepPoint, Study, TestPoint
from shoal.reporting.waits import waits_of
from shoal.timeline import Trace

MOST_POINTS = 240
MOST_SLICES = 1500
MOST_CLASSES = 100
Row = dict[str, Any]
Dataset = list[Row]
Point = TypeVar("Point", StepPoint, TestPoint)


def datasets_of(study: Study, figures: Sequence[Figures]) -> dict[str, Dataset]:
    """By name; without those that have no row."""
    every = {
        "tests": list(_tests(study)),
        "steps": list(_steps(study)),
        "strategies": list(_strategies(figures)),
        "step_times": list(_step_times(study)),
        "scaling": list(_scaling(study, figures)),
        "bytes": list(_bytes(figures)),
        "memory": list(_memory(figures)),
        "predictions": list(_predictions(figures)),
        "staleness": list(_staleness(study)),
        "spreads": list(_spreads(study)),
        "happenings": list(_happenings(study)),
        "replicas": list(_replicas(study)),
        "slices": list(_slices(study)),
        "waits": list(_waits(study)),
        "confusion": list(_confusion(study)),
        "classes": list(_classes(study)),
        "rates": list(_rates(study)),
    }
    return {name: rows for name, rows in every.items() if rows}


def stride_of(count: int) -> int:
    """How many lines make one point."""
    return -(-count // MOST_POINTS)


def _groups(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    stride = max(stride_of(len(points)), 1)
    return (points[start : start + stride] for start in range(0, len(points), stride))


def _who(strategy: str, run: RunRecord) -> Row:
    return {"strategy": strategy, "run": run.name, "seed": run.seed}


def _tests(study: Study) -> Iterator[Row]:
    for entry in study.runs:
        for group in _groups(entry.run.tests):
            point = group[-1]
            yield {
                **_who(entry.strategy, entry.run),
                "step": point.step,
                "samples": point.samples,
                "seconds": round(point.seconds, 4),
                "accuracy": point.accuracy,
                "loss": point.loss,
                **({} if point.iou is None else {"iou": point.iou}),
            }


def _steps(study: Study) -> Iterator[Row]:
    for entry in study.runs:
        for group in _groups(entry.run.steps):
            losses = [point.loss for point in group if point.loss is not None]
            yield {
                **_who(entry.strategy, entry.run),
                "step": group[-1].step,
                "samples": group[-1].samples,
                "seconds": round(group[-1].seconds, 4),
                "loss": fmean(losses) if losses else None,
                "samples_per_second": round(fmean(point.samples_per_second for point in group), 2),
            }


def _strategies(figures: Sequence[Figures]) -> Iterator[Row]:
    for each in figures:
        row: Row = {"strategy": each.name, "runs": each.asked, "finished": each.finished, "reached": each.reached}
        for name in ("to_target", "samples_to_target", "accuracy", "samples_per_second", "step_seconds"):
            spread = getattr(each, name)
            for part in ("median", "least", "most"):
                row[name if part == "median" else f"{name}_{part}"] = None if spread is None else getattr(spread, part)
        row["step_seconds_in_turns"] = each.in_turns
        row["waiting"] = each.waiting
        yield row


def _step_times(study: Study) -> Iterator[Row]:
    for strategy, seconds in study.turns.items():
        for number, value in enumerate(seconds):
            yield {"strategy": strategy, "round": number + 1, "milliseconds": 1000 * value}


def _scaling(study: Study, figures: Sequence[Figures]) -> Iterator[Row]:
    for each in scaling_of(study, figures):
        yield {
            "strategy": each.name,
            "beside": each.beside,
            "speedup": each.speedup.median,
            "least": each.speedup.least,
            "most": each.speedup.most,
            "efficiency": each.efficiency,
        }


def _bytes(figures: Sequence[Figures]) -> Iterator[Row]:
    for each in figures:
        for kind, count in (("counted", each.bytes_counted), ("predicted", each.bytes_predicted)):
            if count is not None:
                yield {"strategy": each.name, "kind": kind, "bytes": count}


def _memory(figures: Sequence[Figures]) -> Iterator[Row]:
    for each in figures:
        for rank, peak in enumerate(each.memory):
            yield {"strategy": each.name, "rank": rank, "bytes": peak}


def _predictions(figures: Sequence[Figures]) -> Iterator[Row]:
    for each in figures:
        if each.step_seconds_predicted is not None and each.step_seconds is not None:
            yield {
                "strategy": each.name,
                "predicted": 1000 * each.step_seconds_predicted,
                "measured": 1000 * each.step_seconds.median,
                "error": each.prediction_error,
            }


def _staleness(study: Study) -> Iterator[Row]:
    for name in study.strategies:
        counts: dict[int, int] = {}
        for run in study.of(name):
            stale = None if run.result is None else run.result.staleness
            for behind, updates in {} if stale is None else stale.histogram.items():
                counts[behind] = counts.get(behind, 0) + updates
        total = sum(counts.values())
        for behind, updates in sorted(counts.items()):
            yield {"strategy": name, "behind": behind, "updates": updates, "share": updates / total}


def _spreads(study: Study) -> Iterator[Row]:
    for entry in study.runs:
        measured = [point for point in entry.run.steps if point.spread is not None]
        for group in _groups(measured):
            last = group[-1]
            yield {**_who(entry.strategy, entry.run), "seconds": round(last.seconds, 4), "spread": last.spread}


def _happenings(study: Study) -> Iterator[Row]:
    for entry in study.runs:
        for event in entry.run.happenings:
            who = _who(entry.strategy, entry.run)
            yield {**who, "what": event.what, "who": event.who, "seconds": round(event.seconds, 3)}


def _replicas(study: Study) -> Iterator[Row]:
    for entry in study.runs:
        exchanged = None if entry.run.result is None else entry.run.result.exchanged
        for number, each in {} if exchanged is None else exchanged.replicas.items():
            yield {
                **_who(entry.strategy, entry.run),
                "replica": number,
                "steps": each.steps,
                "updates": each.updates,
                "dropped": each.dropped,
                "waiting": each.wait_seconds / max(each.train_seconds, 1e-9),
            }


def traced(study: Study) -> Iterator[tuple[str, Trace, Trace | None]]:
    """Of every strategy that has one a trace as it happened, with the predicted one."""
    for name in study.strategies:
        run = next((run for run in study.of(name) if run.trace is not None and run.trace.slices), None)
        if run is not None and run.trace is not None:
            yield name, run.trace, run.predicted_trace


def shown_step(trace: Trace) -> int:
    """The step of a trace whose length is in the middle; of several the first ones, which warm up, count less."""
    lengths = {
        step: max(piece.end for piece in pieces) - min(piece.start for piece in pieces)
        for step, pieces in trace.steps().items()
    }
    middle = median(sorted(lengths.values()))
    return min(lengths, key=lambda step: (abs(lengths[step] - middle), -step))


def _slices(study: Study) -> Iterator[Row]:
    for strategy, measured, predicted in traced(study):
        for trace in (measured, predicted):
            if trace is None or not trace.slices:
                continue
            step = trace.of_step(shown_step(trace))
            pieces = sorted((piece for piece in step.slices if piece.lane != "steps"), key=lambda piece: -piece.seconds)
            for piece in sorted(pieces[:MOST_SLICES], key=lambda piece: (piece.rank, piece.start)):
                yield {
                    "strategy": strategy,
                    "origin": trace.origin,
                    "rank": trace.ranks[piece.rank],
                    "lane": piece.lane,
                    "kind": piece.kind,
                    "label": piece.label,
                    "start": 1000 * piece.start,
                    "end": 1000 * piece.end,
                    "milliseconds": 1000 * piece.seconds,
                    "bytes": piece.bytes,
                }


def _waits(study: Study) -> Iterator[Row]:
    for strategy, trace, _ in traced(study):
        for each in waits_of(trace):
            yield {
                "strategy": strategy,
                "rank": each.rank,
                "share": each.share,
                "late": each.late,
                "steps": each.steps,
            }


def _confusion(study: Study) -> Iterator[Row]:
    run = study.alone
    result = None if run is None else run.result
    if result is None or result.confusion is None or len(result.per_class) > MOST_CLASSES:
        return
    names = list(result.per_class)
    for truth, counts in zip(names, result.confusion, strict=False):
        total = sum(counts)
        for found, count in zip(names, counts, strict=False):
            yield {"truth": truth, "found": found, "count": count, "share": count / total if total else 0.0}


def _classes(study: Study) -> Iterator[Row]:
    run = study.alone
    scores: Mapping[str, Any] = {} if run is None or run.result is None else run.result.per_class
    for name, score in scores.items():
        if score.accuracy is not None:
            yield {"name": name, "samples": score.samples, "accuracy": score.accuracy}


def _rates(study: Study) -> Iterator[Row]:
    for strategy, rates in study.rates.items():
        for rate, accuracy in rates.items():
            yield {"strategy": strategy, "rate": rate, "accuracy": accuracy}
