"""Two real replicas beside two simulated ones: throughput and staleness.

    python -m benchmarks.swarm.bench [--exchanges downpour,easgd] [--epochs 1]

Each exchange is run by `shoal train` on this machine, with weights in shared memory where it may. The simulation is
given what was measured: the times of 180 steps of each replica without what it spent in the exchange (from its trace),
and the seconds of one push and fetch, from a run of one replica. It is not told the throughput or the staleness.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from shoal.exchanges import parse_exchange
from shoal.swarm import Setting, simulate_swarm
from shoal.swarm.work import StandIn
from shoal.timeline import Trace

TRACED = "20-200"
"""Steps of each replica whose times are recorded."""
PARTS = ("push to", "fetch from", "ask", "answer of")
"""Labels of slices that lie within a push and fetch."""
MODEL, DATA, BATCH = "lenet5", "fashion-mnist", 256
SIDES = {
    "downpour": ("downpour", {}),
    "downpour n_sync=4": ("downpour", {"n_sync": 4}),
    "softsync": ("softsync", {}),
    "dasgd": ("dasgd", {}),
    "easgd": ("easgd", {}),
    "gossip": ("gossip", {}),
    "local": ("local", {}),
    "sync": ("sync", {}),
}


def real(name: str, options: dict[str, Any], replicas: int, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "train", "--model", MODEL, "--data", DATA, "--exchange", name]
        command += ["--replicas", str(replicas), "--batch", str(BATCH * replicas // 2), "--epochs", str(epochs)]
        command += ["--threads", "1", "--out", str(out), "--trace", TRACED]
        if options:
            command += ["--exchange-options", ",".join(f"{key}={value}" for key, value in options.items())]
        subprocess.run(command, check=True, timeout=280, capture_output=True)
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return {**result, "draws": step_times(Trace.load(out / "trace.json"), replicas)}


def step_times(trace: Trace, replicas: int) -> list[list[float]]:
    """Of each replica: from the beginning of a step to that of the next, without what it spent in the exchange."""
    draws = []
    for row in range(replicas):
        own = [piece for piece in trace.slices if piece.rank == row]
        begins = sorted((piece.step, piece.start) for piece in own if piece.kind == "step")
        spent: Counter[int] = Counter()
        for piece in own:
            if piece.kind == "exchange" and piece.lane == "compute" and not piece.label.startswith(PARTS):
                spent[piece.step] += piece.seconds  # type: ignore[assignment]
        draws.append([after - start - spent[step] for (step, start), (_, after) in pairwise(begins)])
    return draws


def exchange_seconds(result: dict[str, Any]) -> float:
    """Of one push and fetch, in the mean."""
    rows = result["exchanged"]["replicas"].values()
    waited: float = sum(row["wait_seconds"] for row in rows)
    updates: int = sum(row["updates"] for row in rows)
    return waited / max(1, updates)


def distribution(histogram: dict[Any, int]) -> dict[int, float]:
    total = sum(histogram.values())
    return {int(age): count / total for age, count in histogram.items()} if total else {}


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Total variation distance: 0 where two distributions are the same, 1 where they have nothing in common."""
    return sum(abs(one.get(age, 0.0) - other.get(age, 0.0)) for age in one.keys() | other.keys()) / 2


@click.command()
@click.option("--exchanges", default=",".join(SIDES))
@click.option("--epochs", default=1)
@click.option("--show", is_flag=True, help="Print a real run's numbers alone.")
def main(exchanges: str, epochs: int, show: bool) -> None:
    print("| exchange | samples/s real | simulated | error | staleness real | simulated | distance |")
    print("|---|---|---|---|---|---|---|")
    for side in exchanges.split(","):
        name, options = SIDES[side]
        two = real(name, options, 2, epochs)
        if show:
            print(json.dumps({key: two.get(key) for key in ("exchanged", "staleness", "samples_per_second")}, indent=1))
            continue
        alone = real(name, options, 1, epochs)
        kind = parse_exchange(name, options).among(2)
        steps = min(row["steps"] for row in two["exchanged"]["replicas"].values())
        setting = Setting(
            replicas=2,
            steps=steps,
            step_seconds=1.0,
            draws=two["draws"],
            bandwidth=float("inf"),
            apply_seconds=exchange_seconds(alone),
            one_host=True,
            samples=BATCH // 2,
        )
        played = simulate_swarm(kind, setting, StandIn(250e3))
        histogram = {int(age): count for age, count in two["staleness"].get("histogram", {}).items()}
        simulated = Counter(played.staleness)
        if sum(histogram.values()) >= played.steps:  # result.json counts steps that push nothing as not stale
            simulated[0] += played.steps - sum(simulated.values())
        seen, said = distribution(histogram), distribution(dict(simulated))
        mean, played_mean = (sum(age * part for age, part in of.items()) for of in (seen, said))
        rate = two["samples_per_second"]
        print(
            f"| {side} | {rate:,.0f} | {played.samples_per_second:,.0f} | {played.samples_per_second / rate - 1:+.1%} "
            f"| {mean:.2f} | {played_mean:.2f} | {apart(seen, said):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
