"""Runs of `shoal train`, and a file that remembers those that are done, one line each."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.exchange_accuracy.studies import Row


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
    """Seconds since the start, and the accuracy then."""
    staleness_mean: float | None = None
    staleness_max: int = 0
    steps: int = 0
    """Of all replicas together."""
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: int = 0

    def seconds_to(self, accuracy: float) -> float | None:
        """From the start until the first test with so much."""
        return next((seconds for seconds, tested in self.tests if tested >= accuracy), None)


class RunFailedError(Exception):
    """`shoal train` ended with an error that is not a loss which is no number."""


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


def _run(row: Row, options: Sequence[str], seed: int) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "train", *options, "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode and "the loss" not in ended.stderr:
            raise RunFailedError(f"{' '.join(options)}\n{ended.stdout}\n{ended.stderr}")
        measured = {} if ended.returncode else _measured(out)
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


def _measured(out: Path) -> dict[str, Any]:
    """The numbers of an `Outcome`, from what a run left in its folder."""
    result = json.loads((out / "result.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    staleness = result.get("staleness")
    replicas = (result.get("exchanged") or {"replicas": {}})["replicas"].values()
    return {
        "accuracy": result["test_accuracy"],
        "samples_per_second": result["samples_per_second"],
        "tests": [(line["wall_seconds"], line["test_accuracy"]) for line in lines if line["event"] == "test"],
        "staleness_mean": staleness["mean"] if staleness else None,
        "staleness_max": staleness["max"] if staleness else 0,
        **{
            count: sum(replica[count] for replica in replicas)
            for count in ("steps", "sent_bytes", "received_bytes", "dropped")
        },
    }
