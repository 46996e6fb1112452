"""Runs on a Ray cluster of two nodes of this machine: what they reach, and how long they take to go on after a loss.

    python -m benchmarks.on_ray.bench [--only NAME] [--epochs 3]

Each run is `shoal train --on ray` with two workers, on two nodes of one core each, so that every run is on both. Those
that are struck lose an actor or a node once they have logged steps; a node comes back five seconds after it was lost.
The exit is 1 where a run failed, trained on fewer samples than it should, or left something on the cluster.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.on_ray.cluster import Nodes, nodes
from shoal.exchanges import EXCHANGE_NAMES

SETTINGS = ("--model", "lenet5", "--data", "digits", "--batch", "64", "--log-every", "5", "--seed", "0")
SAMPLES = 3968
"""Of digits, in whole batches of an epoch."""
AWAY_SECONDS = 5.0
"""That a lost node stays away."""
NEEDS_ONE_HOST = ("hogwild",)
Strike = Literal["actor", "rank", "node"]
"""What a run loses; torchrun has no actors, and Ray no ranks of its own."""


@dataclass(frozen=True)
class Case:
    """A run, and what happens to it."""

    name: str
    options: tuple[str, ...]
    strike: Strike | None = None
    epochs: int | None = None
    """Where it must last for a strike and what follows."""


PLANS = tuple(Case(plan, ("--workers", "2", "--plan", plan)) for plan in ("data", "spatial", "model"))
EXCHANGES = tuple(
    Case(name, ("--replicas", "2", "--exchange", name)) for name in EXCHANGE_NAMES if name not in NEEDS_ONE_HOST
)
STRUCK = tuple(
    Case(f"{name}, a lost {strike}", (*options, "--restarts", "1"), strike, epochs=12)
    for name, options in (
        ("spatial", ("--workers", "2", "--plan", "spatial", "--checkpoint-every", "20steps")),
        ("downpour", ("--replicas", "2", "--exchange", "downpour")),
        ("allreduce", ("--replicas", "2", "--exchange", "allreduce", "--checkpoint-every", "20steps")),
    )
    for strike in ("actor", "node")
)


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    result: dict[str, Any]
    seconds: float
    goes_on: float | None
    """Seconds from the strike until all workers trained again."""
    trouble: str = ""


def lines(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    whole = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in whole if line.endswith("\n")]


def steps_logged(out: Path) -> int:
    return sum(line["event"] == "steps" for line in lines(out))


def wait_until(condition: Callable[[], object], run: "subprocess.Popen[str]", seconds: float = 180.0) -> float:
    begun = time.monotonic()
    while not condition():
        if run.poll() is not None or time.monotonic() > begun + seconds:
            raise TimeoutError("the run ended, or nothing happened, before it went on")
        time.sleep(0.02)
    return time.monotonic() - begun


def strike(case: Case, cluster: Nodes, out: Path, run: "subprocess.Popen[str]") -> float:
    """Strike, once it trains; seconds until a whole gang trains again."""
    wait_until(lambda: steps_logged(out) >= 3 and len(cluster.ranks()) == 2, run)  # a replica may come late
    is_late_replica = "downpour" in case.options
    begun = time.monotonic()
    if case.strike == "actor":
        cluster.kill_actor(1)
    else:
        cluster.lose()
        time.sleep(AWAY_SECONDS)
        cluster.add()
    if is_late_replica:
        wait_until(lambda: any(line["event"] == "joined" and line["replica"] > 1 for line in lines(out)), run)
    else:
        wait_until(lambda: (out / "restarts.jsonl").exists(), run)
        before = steps_logged(out)
        wait_until(lambda: steps_logged(out) > before, run)
    return time.monotonic() - begun


def outcome_of(case: Case, cluster: Nodes, folder: Path, epochs: int) -> Outcome:
    out = folder / case.name.replace(", ", "-").replace(" ", "-")
    epochs = case.epochs or epochs
    command = [sys.executable, "-m", "shoal", "train", "--on", "ray", *SETTINGS, *case.options]
    command += ["--epochs", str(epochs), "--eval-every", str(epochs), "--out", str(out)]
    begun = time.monotonic()
    environment = {**os.environ, **cluster.variables, "NO_COLOR": "1"}
    with (folder / "printed").open("w+") as printed:
        run = subprocess.Popen(command, cwd=folder, env=environment, stdout=printed, stderr=printed, text=True)
        goes_on, trouble = None, ""
        try:
            if case.strike is not None:
                goes_on = strike(case, cluster, out, run)
            run.wait(600)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGKILL)
                run.wait()
        seconds = time.monotonic() - begun
        printed.seek(0)
        if run.returncode:
            trouble = trouble or printed.read()[-2000:]
    result = json.loads((out / "result.json").read_text()) if not trouble else {}
    if not trouble and result["samples"] < SAMPLES * epochs:
        trouble = f"{result['samples']} samples of {SAMPLES * epochs}"
    left = cluster.leftovers()
    return Outcome(result, seconds, goes_on, trouble or (f"left behind: {left}" if left else ""))


def shown(case: Case, outcome: Outcome) -> str:
    if outcome.trouble:
        return f"| {case.name} | failed: {outcome.trouble} |"
    goes_on = "" if outcome.goes_on is None else f"{outcome.goes_on:.1f}"
    accuracy, samples = outcome.result["test_accuracy"], outcome.result["samples"]
    training = outcome.result["wall_seconds"]
    return f"| {case.name} | {accuracy:.4f} | {samples:,} | {training:.1f} | {outcome.seconds:.1f} | {goes_on} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--epochs", type=int, default=3, help="of runs that are not struck")
    asked = parser.parse_args()
    failed = 0
    print("| run | accuracy | samples | s training | s in all | s to go on |\n|---|---|---|---|---|---|", flush=True)
    with nodes(count=2, cores=1) as cluster, tempfile.TemporaryDirectory(prefix="shoal-on-ray-") as folder:
        for case in (*PLANS, *EXCHANGES, *STRUCK):
            if asked.only in case.name:
                outcome = outcome_of(case, cluster, Path(folder), asked.epochs)
                failed += bool(outcome.trouble)
                print(shown(case, outcome), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
