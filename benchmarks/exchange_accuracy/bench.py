"""Test accuracy of two replicas under each exchange beside one worker's, at equal samples, over seeds.

    python -m benchmarks.exchange_accuracy.bench --study exchanges [--data fashion-mnist --model lenet5 --epochs 5]
    python -m benchmarks.exchange_accuracy.bench --study dasgd --data audiomnist --model acoustic
    python -m benchmarks.exchange_accuracy.bench --study periods
    python -m benchmarks.exchange_accuracy.bench --study modes

dasgd: ablation, cold start. periods: clients x n_sync, cold and warm (Paine). modes: sync, async, mixed; 1 and 2
servers (Campos).

Every row is first tuned, unless one rate is given: short runs over a grid of learning rates on a seed that is not
reported, the best of which is then run on the seeds. All runs go through the command line; what is printed comes from
their result.json and metrics.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUNING_SEED = 1000


@dataclass(frozen=True)
class Row:
    """One configuration, beside the common settings."""

    name: str
    options: tuple[str, ...]


def _exchange(
    name: str, options: str = "", replicas: int = 2, workers: int | None = None, *more: str
) -> tuple[str, ...]:
    found = ["--replicas", str(replicas), "--workers", str(workers or replicas), "--exchange", name]
    return (*found, *(["--exchange-options", options] if options else []), *more)


STUDIES = {
    "exchanges": [
        Row("one worker", ("--workers", "1")),
        Row("allreduce", _exchange("allreduce")),
        Row("backup, 2 + 1", _exchange("backup", "backups=1", 3)),
        Row("downpour", _exchange("downpour")),
        Row("dasgd", _exchange("dasgd")),
        Row("downpour over links, n_sync 4", _exchange("downpour", "servers=processes,n_sync=4")),
        Row("dasgd over links, n_sync 4", _exchange("dasgd", "servers=processes")),
    ],
    "dasgd": [
        Row("one worker", ("--workers", "1")),
        *(
            Row(
                f"sparse {sparse}, momentum {momentum}, decay {decay}",
                _exchange(
                    "dasgd",
                    f"servers=processes,sparse={sparse},decay={decay},momentum_at=worker",
                    2,
                    2,
                    *(() if momentum == "on" else ("--momentum", "0")),
                ),
            )
            for sparse in ("none", "sampled")
            for momentum in ("off", "on")
            for decay in ("none", "exponential")
        ),
    ],
    "periods": [
        Row(
            f"{clients} clients, n_sync {period}, {'warm' if warm else 'cold'}",
            _exchange("downpour", f"n_sync={period},warm_start={warm}", clients),
        )
        for clients in (1, 2, 4)
        for period in (1, 10, 50)
        for warm in ((0, 500) if clients > 1 else (0,))
    ],
    "modes": [
        Row("one worker", ("--workers", "1")),
        Row("synchronous, 2 nodes", _exchange("allreduce")),
        Row("synchronous, 4 workers", _exchange("allreduce", "", 4)),
        Row("asynchronous, 4 workers, 1 server", _exchange("downpour", "servers=processes,shards=1", 4)),
        Row("asynchronous, 4 workers, 2 servers", _exchange("downpour", "servers=processes,shards=2", 4)),
        Row(
            "mixed, 2 nodes of 2, 1 server", _exchange("downpour", "servers=processes,shards=1", 2, 4, "--plan", "data")
        ),
        Row(
            "mixed, 2 nodes of 2, 2 servers",
            _exchange("downpour", "servers=processes,shards=2", 2, 4, "--plan", "data"),
        ),
    ],
}


def main() -> None:
    """Tune, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="exchanges")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="0.0125,0.025,0.05,0.1")
    parser.add_argument("--tuning-epochs", type=int, default=2)
    parser.add_argument("--rows", default="", help="names of rows, with semicolons between; all unless given")
    parser.add_argument("--target", type=float, default=0.85, help="test accuracy for the column time to accuracy")
    args = parser.parse_args()
    common = ["--model", args.model, "--data", args.data, "--batch", str(args.batch), "--threads", "1"]
    print(
        f"{args.model} on {args.data}, batch {args.batch}, {args.epochs} epochs, {args.seeds} seeds; "
        f"tuned over {args.rates} with {args.tuning_epochs} epochs",
        flush=True,
    )
    print(
        "| | tuning (rate: accuracy) | rate | accuracy, mean (seeds) | - one worker | samples/s "
        "| time to accuracy s | staleness mean, max | MB pushed, fetched per step | dropped | diverged |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    base: float | None = None
    for row in STUDIES[args.study]:
        if args.rows and row.name not in args.rows.split(";"):
            continue
        rate, shown = _tuned([*common, *row.options], args.rates.split(","), args.tuning_epochs)
        runs = [
            _run([*common, *row.options, "--lr", rate, "--epochs", str(args.epochs), "--seed", str(seed)])
            for seed in range(args.seeds)
        ]
        done = [run for run in runs if run is not None]
        if not done:
            print(f"| {row.name} | {shown} | {rate} | | | | | | | | {len(runs)} |", flush=True)
            continue
        accuracies = [run["test_accuracy"] for run in done]
        mean = statistics.fmean(accuracies)
        base = mean if base is None else base
        speed = statistics.median(run["samples_per_second"] for run in done)
        reached = [run["reached"](args.target) for run in done]
        times = ", ".join("never" if one is None else f"{one:.0f}" for one in reached)
        of_seeds = ", ".join(f"{one:.4f}" for one in accuracies)
        print(
            f"| {row.name} | {shown} | {rate} | **{mean:.4f}** ({of_seeds}) | {100 * (mean - base):+.2f} "
            f"| {speed:,.0f} | {times} | {_staleness(done)} | {_bytes(done)} "
            f"| {_dropped(done)} | {len(runs) - len(done)} |",
            flush=True,
        )


def _tuned(options: list[str], rates: list[str], epochs: int) -> tuple[str, str]:
    """The best rate by short runs, and what these gave; the only one, if there is one."""
    if len(rates) == 1:
        return rates[0], "not tuned"
    tried = {
        rate: _run([*options, "--lr", rate, "--epochs", str(epochs), "--seed", str(TUNING_SEED)]) for rate in rates
    }
    shown = ", ".join(f"{rate}: {_accuracy(one)}" for rate, one in tried.items())
    return max(rates, key=lambda rate: (tried[rate] or {"test_accuracy": -1.0})["test_accuracy"]), shown


def _run(options: list[str]) -> dict[str, Any] | None:
    """The result of one run, and a function that tells when it reached an accuracy; None where it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ran = subprocess.run(
            [sys.executable, "-m", "shoal", "train", *options, "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            if "the loss" not in ran.stderr:
                sys.exit(f"{options}\n{ran.stdout}\n{ran.stderr}")
            return None
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tests = [(line["wall_seconds"], line["test_accuracy"]) for line in lines if line["event"] == "test"]
    result["reached"] = lambda target: next((when for when, found in tests if found >= target), None)
    return result


def _accuracy(run: dict[str, Any] | None) -> str:
    return "diverged" if run is None else f"{run['test_accuracy']:.4f}"


def _staleness(runs: list[dict[str, Any]]) -> str:
    found = [run["staleness"] for run in runs if run.get("staleness")]
    return f"{statistics.fmean(one['mean'] for one in found):.2f}, {max(one['max'] for one in found)}" if found else ""


def _bytes(runs: list[dict[str, Any]]) -> str:
    found = [one for run in runs if run.get("exchanged") for one in run["exchanged"]["replicas"].values()]
    steps = sum(one["steps"] for one in found)
    if not steps:
        return ""
    pushed, fetched = (sum(one[way] for one in found) / steps / 1e6 for way in ("sent_bytes", "received_bytes"))
    return f"{pushed:.3f}, {fetched:.3f}"


def _dropped(runs: list[dict[str, Any]]) -> str:
    return str(
        sum(one["dropped"] for run in runs if run.get("exchanged") for one in run["exchanged"]["replicas"].values())
    )


if __name__ == "__main__":
    main()
