"""What a comparison says, strategy by strategy, from the files of its runs. Starts and writes nothing."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.comparison import Cell, Comparison
from shoal.result import RunResult
from shoal.training.run_folder import RunFolder


@dataclass(frozen=True)
class Finished:
    """A run that has its result."""

    result: RunResult
    tests: tuple[tuple[float, float], ...]
    """Seconds of training until a test, and its accuracy."""

    @property
    def best(self) -> float:
        """Of all tests."""
        return max((accuracy for _, accuracy in self.tests), default=self.result.test_accuracy)

    def seconds_to(self, accuracy: float) -> float | None:
        """Of training, tests excluded, until the first test with so much; None where none has."""
        return next((seconds for seconds, tested in self.tests if tested >= accuracy), None)


@dataclass(frozen=True)
class Row:
    """One strategy, over its seeds. What no run has given is None."""

    strategy: str
    done: int
    failed: int
    waiting: int
    why: str | None
    """Of the first run that failed."""
    lr: float | None
    accuracy: float | None
    """Mean of the last tests."""
    accuracy_spread: float | None
    """Between the best and the worst seed."""
    seconds_to_target: float | None
    """Mean over seeds, of training alone; None where a seed never got there."""
    samples_per_second: float | None
    speedup: float | None
    """Samples per second over those of one worker."""
    efficiency: float | None
    """Speedup by worker."""
    step_seconds: float | None
    """Median of the steps that were timed in turns."""


@dataclass(frozen=True)
class Summary:
    """Of a whole comparison."""

    target: float | None
    """Accuracy whose time is compared."""
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row | None:
        """Who has the target first."""
        there = [row for row in self.rows if row.seconds_to_target is not None]
        return min(there, key=lambda row: row.seconds_to_target or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """For other programs."""
        return {"target": self.target, "strategies": [asdict(row) for row in self.rows]}


def summarize(comparison: Comparison, folder: Path) -> Summary:
    """Of a comparison whose runs lie in `folder`, as far as they are."""
    runs = {cell.folder: finished(folder / cell.folder) for cell in comparison.cells if cell.state == "done"}
    target = comparison.target
    if target is None and runs:
        target = min(run.best for run in runs.values())  # so that time to it is known of all
    base = None
    rows = []
    for strategy in dict.fromkeys(cell.strategy for cell in comparison.cells):
        cells = [cell for cell in comparison.cells if cell.strategy == strategy]
        row = _row(cells, [runs[cell.folder] for cell in cells if cell.folder in runs], target, comparison, base)
        if strategy == comparison.baseline:
            base = row.samples_per_second
            row = _row(cells, [runs[cell.folder] for cell in cells if cell.folder in runs], target, comparison, base)
        rows.append(row)
    return Summary(target, tuple(rows))


def _row(
    cells: Sequence[Cell], done: Sequence[Finished], target: float | None, comparison: Comparison, base: float | None
) -> Row:
    strategy = cells[0].strategy
    accuracies = [run.result.test_accuracy for run in done]
    times = [None if target is None else run.seconds_to(target) for run in done]
    reached = [seconds for seconds in times if seconds is not None]
    speed = statistics.fmean(run.result.samples_per_second for run in done) if done else None
    speedup = None if speed is None or not base else speed / base
    steps = comparison.step_seconds.get(strategy)
    lr = cells[0].settings.get("lr")
    return Row(
        strategy=strategy,
        done=len(done),
        failed=sum(cell.state == "failed" for cell in cells),
        waiting=sum(cell.state == "waiting" for cell in cells),
        why=next((cell.why for cell in cells if cell.state == "failed"), None),
        lr=None if lr is None else float(lr),
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        accuracy_spread=max(accuracies) - min(accuracies) if accuracies else None,
        seconds_to_target=statistics.fmean(reached) if reached and len(reached) == len(times) else None,
        samples_per_second=speed,
        speedup=speedup,
        efficiency=None if speedup is None else speedup / done[0].result.workers,
        step_seconds=statistics.median(steps) if steps else None,
    )


def finished(path: Path) -> Finished:
    """The run in this folder, which has its result."""
    folder = RunFolder(path)
    result = RunResult.model_validate_json(folder.result.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    return Finished(result, tuple(_test(line) for line in lines if line["event"] == "test"))


def _test(line: Mapping[str, Any]) -> tuple[float, float]:
    return line["train_seconds"], line["test_accuracy"]
