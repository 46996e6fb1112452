"""Kill a run again and again while it saves after every step, and let it go on each time.

    python -m benchmarks.checkpoints.kills --kills 200 --epochs 15

Every attempt is forked from this process, which has loaded torch and done nothing else, saves after every step, and is
killed with SIGKILL at a random moment. After each kill the newest checkpoint must be whole. At the
end weights, losses and tests must be those of a run that was never killed, bit for bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import shoal
from shoal import running
from shoal.config import TrainConfig
from shoal.training.run_folder import RunFolder

TIMES = ("samples_per_sec", "step_time_ms", "wall_seconds", "train_seconds")


def settings(**more: Any) -> dict[str, Any]:
    """Of a run of some seconds."""
    common = {"model": "lenet5", "data": "synthetic:480", "input": (1, 28, 28), "batch": 8, "log_every": 5, "seed": 3}
    return {**common, "threads": 1, "checkpoint_every": "1step", "augment": "shift:2", "ema": 0.9, **more}


def begin_or_go_on(values: dict[str, Any]) -> None:
    """As `--resume auto` does."""
    folder = RunFolder(Path(values["out"]))
    if folder.can_go_on and folder.config.exists():
        running.resume(folder.path)
    else:
        running.train(TrainConfig(**values))


def forked(values: dict[str, Any]) -> int:
    """A process that begins the run or goes on with it, in a group of its own; its number."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    code = 1
    try:
        begin_or_go_on(values)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Score:
    """What happened."""

    kills: int = 0
    while_writing: int = 0
    """Kills that left a draft: the checkpoint was being written."""
    steps: list[int] = field(default_factory=list)
    """Of the newest checkpoint after each kill."""
    wrong: list[str] = field(default_factory=list)


def strike(values: dict[str, Any], kills: int, draw: random.Random, longest: float) -> Score:
    """Kill the run so often, unless it finishes before; then let it finish."""
    folder, score = RunFolder(Path(values["out"])), Score()
    while score.kills < kills and not folder.result.exists():
        child = forked(values)
        before = _newest(folder)
        while _newest(folder) == before and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)  # until it trains
        time.sleep(draw.uniform(0, longest))
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        score.kills += 1
        score.while_writing += any(folder.checkpoints.path.glob(".*.tmp"))
        newest, damaged = folder.checkpoints.newest_whole()
        score.wrong += damaged
        if newest is None:
            score.wrong.append("no checkpoint is whole")
            break
        score.steps.append(newest.steps)
    if not folder.result.exists():
        _, status = os.waitpid(forked(values), 0)
        if status:
            score.wrong.append(f"the last attempt ended with status {status}")
    return score


def _newest(folder: RunFolder) -> Path | None:
    checkpoints = folder.checkpoints.all()
    return checkpoints[-1].path if checkpoints else None


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs do not have in common, but for times."""
    weights, others = (load_file(out / "model.safetensors") for out in (one, other))
    wrong = [f"weight {name} differs" for name in weights if not weights[name].equal(others[name])]
    lines = [_timeless(out / "metrics.jsonl") for out in (one, other)]
    if lines[0] != lines[1]:
        wrong.append(f"metrics differ: {len(lines[0])} and {len(lines[1])} lines")
    results = [json.loads((out / "result.json").read_text()) for out in (one, other)]
    wrong += [
        f"{name}: {results[0][name]} and {results[1][name]}"
        for name in ("steps", "samples", "final_loss", "test_loss", "samples_repeated")
        if results[0][name] != results[1][name]
    ]
    return wrong


def _timeless(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def main() -> None:
    """Print how it went; exit code 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description="kills while checkpoints are written")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--longest", type=float, default=0.1, help="seconds that an attempt trains before it is killed")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="shoal-kills-"))
    begun = time.perf_counter()
    try:
        values = settings(epochs=options.epochs, eval_every=options.epochs)
        whole, struck = ({**values, "out": str(base / name)} for name in ("whole", "struck"))
        os.waitpid(forked({**whole, "checkpoint_every": f"{options.epochs}epochs"}), 0)
        score = strike(struck, options.kills, random.Random(options.seed), options.longest)
        score.wrong += differences(base / "whole", base / "struck")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(f"shoal {shoal.__version__}: {score.kills} kills, {score.while_writing} while a checkpoint was written")
    print(f"steps of the newest checkpoint: {score.steps[0]} after the first kill, {score.steps[-1]} after the last")
    print(f"{time.perf_counter() - begun:.0f} seconds; wrong: {len(score.wrong)}")
    for line in score.wrong:
        print("  " + line)
    sys.exit(bool(score.wrong))


if __name__ == "__main__":
    main()
