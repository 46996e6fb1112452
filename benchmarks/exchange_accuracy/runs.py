"""Runs of `shoal.compare`, and a file that remembers those that are done, one line each."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shoal
from benchmarks.exchange_accuracy.studies import Row
from shoal.reporting.records import METRICS, RunRecord, read_run


@dataclass(frozen=True)
class Outcome:
    """What one run gave; without an accuracy where it diverged."""

    row: str
    exchange: str
    replicas: int
    seed: int
    options: list[str]
    """All of `shoal train`'s, but for the folder of results: what the run is known by."""
    when: str
    seconds: float
    accuracy: float | None = None
    samples_per_second: float = 0.0
    tests: Sequence[tuple[float, float]] = ()
    """Seconds of training, tests excluded, and the accuracy then."""
    staleness_mean: float | None = None
    staleness_max: int = 0
    steps: int = 0
    """Of all replicas together."""
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: int = 0
    pushed: Sequence[tuple[int, int]] = ()
    """Steps until each line of metrics, and the bytes that had been sent by then."""

    def seconds_to(self, accuracy: float) -> float | None:
        """From the start until the first test with so much."""
        return next((seconds for seconds, tested in self.tests if tested >= accuracy), None)


class RunFailedError(Exception):
    """A run ended with an error that is not a loss which is no number."""


class Runs:
    """Starts runs, unless they are in the file already.

    file  where a line is added for each run that is done; None remembers nothing
    only_kept  start none
    """

    def __init__(self, file: Path | None, *, only_kept: bool = False) -> None:
        self._file, self._only_kept = file, only_kept
        self._kept = {tuple(outcome.options): outcome for outcome in _read(file)}

    def outcome(self, row: Row, options: Sequence[str], seed: int) -> Outcome | None:
        """Of this row with these common options; None where it is not in the file and may not be started."""
        whole = (*options, *row.options, "--seed", str(seed))
        if whole not in self._kept:
            if self._only_kept:
                return None
            self._keep(_run(row, whole, seed))
        return self._kept[whole]

    def _keep(self, outcome: Outcome) -> None:
        self._kept[tuple(outcome.options)] = outcome
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")


def _read(file: Path | None) -> list[Outcome]:
    if file is None or not file.exists():
        return []
    return [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


NEVER = 10**9
"""Steps from one test to the next, where only the ends of epochs are tested."""


def _run(row: Row, options: Sequence[str], seed: int) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "comparison"
        recipes = {row.name: _settings(options)}
        (cell,) = shoal.compare(recipes, seeds=(seed,), baseline=False, rounds=0, out=out).cells
        if cell.why is not None and "the loss" not in cell.why:
            raise RunFailedError(f"{' '.join(options)}\n{cell.why}")
        measured = {} if cell.why is not None else _measured(read_run(out / cell.folder))
    return Outcome(
        row=row.name,
        exchange=row.exchange,
        replicas=row.replicas,
        seed=seed,
        options=list(options),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - begun,
        **measured,
    )


def _settings(options: Sequence[str]) -> dict[str, str | int]:
    """Of a recipe, from options of `shoal train` with a value each; the seed is the comparison's.

    >>> _settings(["--exchange", "local", "--weight-decay", "0.1", "--seed", "3"])
    {'eval_steps': 1000000000, 'exchange': 'local', 'weight_decay': '0.1'}
    """
    pairs = zip(options[::2], options[1::2], strict=True)
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    del given["seed"]
    return {"eval_steps": NEVER, **given}


def _measured(run: RunRecord) -> dict[str, Any]:
    """The numbers of an `Outcome`, from what a run left in its folder."""
    result = run.result
    assert result is not None
    replicas = [] if result.exchanged is None else list(result.exchanged.replicas.values())
    return {
        "accuracy": result.test_accuracy,
        "samples_per_second": result.samples_per_second,
        "tests": [(test.seconds, test.accuracy) for test in run.tests],
        "staleness_mean": None if result.staleness is None else result.staleness.mean,
        "staleness_max": 0 if result.staleness is None else result.staleness.max,
        "pushed": _pushed(run.folder / METRICS),
        **{
            count: sum(getattr(replica, count) for replica in replicas)
            for count in ("steps", "sent_bytes", "received_bytes", "dropped")
        },
    }


def _pushed(metrics: Path) -> list[tuple[int, int]]:
    """Of the last line that says so in each quarter of a run."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    sent = [(line["step"], line["sent_bytes"]) for line in lines if line["event"] == "steps" and "sent_bytes" in line]
    return [sent[len(sent) * quarter // 4 - 1] for quarter in range(1, 5)] if len(sent) >= 4 else []
