"""Replicas that are killed or frozen at random moments, many times, in runs of every exchange and every mode.

    python -m benchmarks.faults.bench --kills 300 --stops 300 [--seed 0] [--only downpour]

Each run is `shoal train` in a process of its own, with three replicas and a heartbeat of half a second. A strike is a
SIGKILL or a SIGSTOP of one process that trains, at a moment drawn between two lines of metrics. What must follow:

    survives      the others count new batches within the heartbeat and a margin, the run says who was lost or frozen;
                  one that is woken (SIGCONT) trains again
    does not      the run ends with an error that names the replica, or waits for a frozen one until it is woken
    always        at the end no process and no shared memory of the run is left, all files are whole

Prints one line per mode: strikes, the longest stall, and what failed. The exit is 1 if anything did.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HEARTBEAT = 0.5
MARGIN = 10.0
"""Seconds on top of the heartbeat in which somebody must count a batch: two busy cores."""
START_SECONDS = 60.0
REPLICAS = 3
MODES: dict[str, tuple[str, bool]] = {
    "downpour direct": ("downpour:servers=direct,shards=4", True),
    "downpour processes": ("downpour:servers=processes,shards=2", True),
    "downpour period": ("downpour:n_sync=4", True),
    "dasgd direct": ("dasgd:servers=direct", True),
    "dasgd processes": ("dasgd:servers=processes", True),
    "softsync": ("softsync:", True),
    "hogwild": ("hogwild:", True),
    "easgd": ("easgd:", True),
    "admm": ("admm:shards=2", True),
    "gossip": ("gossip:", True),
    "local": ("local:shards=2", True),
    "average once": ("local:average=once", True),
    "backup": ("backup:backups=1,shards=2", True),
    "sync": ("sync:shards=2", False),
    "allreduce": ("allreduce:", False),
}
"""Exchange and options, and whether training goes on without a replica."""
NET = """
from torch import nn

def net(input, classes):
    pool = nn.AdaptiveAvgPool2d(4)
    return nn.Sequential(nn.Conv2d(input[0], 8, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(128, classes))
"""


@dataclass
class Score:
    """What became of the strikes in one mode."""

    kills: int = 0
    stops: int = 0
    longest: float = 0.0
    """Seconds until somebody counted a batch again."""
    wrong: list[str] = field(default_factory=list)
    unbegun: int = 0
    """Runs that did not even begin."""

    def row(self, mode: str) -> str:
        """Of the table."""
        return f"{mode:20} {self.kills:6} {self.stops:6} {self.longest:8.2f} s   {'; '.join(self.wrong) or 'all well'}"


class Run:
    """One `shoal train`, with its folder."""

    def __init__(self, folder: Path, options: str) -> None:
        self.out = folder / "run"
        name, _, settings = options.partition(":")
        (folder / "mine.py").write_text(NET)
        together = ",".join(filter(None, [settings, f"heartbeat={HEARTBEAT}"]))
        command = [sys.executable, "-m", "shoal", "train", "--model", "mine:net", "--data", "digits", "--batch", "24"]
        command += ["--replicas", str(REPLICAS), "--exchange", name, "--exchange-options", together, "--lr", "0.001"]
        command += ["--epochs", "100000", "--eval-every", "100000", "--checkpoint-every", "100000", "--log-every", "1"]
        command += ["--threads", "1", "--timeout", "60", "--out", str(self.out)]
        self.printed = (folder / "printed").open("w+")
        self.process = subprocess.Popen(command, cwd=folder, stdout=self.printed, stderr=subprocess.STDOUT)
        self.family: set[psutil.Process] = set()
        self.shared: Path | None = None
        """Its folder of shared memory."""

    def replicas(self) -> list[psutil.Process]:
        """The processes that train and live."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            self.family.update(children)
            return [child for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]
        return []

    def find_shared(self) -> None:
        """Where it shares memory, if it does."""
        shared = json.loads((self.out / "meeting.json").read_text())["shared"]
        self.shared = None if shared is None else Path(shared)

    def counted(self) -> int:
        """Batches so far."""
        try:
            whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        except FileNotFoundError:
            return 0
        steps = [line["step"] for line in map(json.loads, whole.splitlines()) if line["event"] == "steps"]
        return max(steps, default=0)

    def wait_for_batches(self, more: int, seconds: float) -> float | None:
        """Seconds until so many more batches are counted; None if they were not."""
        before, begun = self.counted(), time.monotonic()
        while time.monotonic() - begun < seconds:
            if self.counted() >= before + more:
                return time.monotonic() - begun
            if self.process.poll() is not None:
                return None
            time.sleep(0.05)
        return None

    def said(self) -> str:
        """What the run printed."""
        self.printed.flush()
        return Path(self.printed.name).read_text()

    def end(self) -> list[str]:
        """Stop it as a user does; what is wrong with what it leaves."""
        self.replicas()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        wrong = []
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            wrong.append("did not stop within 30 s")
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(list(self.family), timeout=5)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if alive:
            wrong.append(f"{len(alive)} processes left")
        if self.shared is not None and self.shared.exists():
            wrong.append(f"shared memory left: {self.shared.name}")
        self.printed.close()
        return wrong


def strike(mode: str, kills: int, stops: int, draw: random.Random, score: Score) -> None:
    """One run: all its stops, then one kill."""
    options, survives = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options)
        try:
            if run.wait_for_batches(5, START_SECONDS) is None or len(run.replicas()) < REPLICAS:
                score.wrong.append(f"did not begin: {run.said()[-200:]}")
                score.unbegun += 1
                return
            run.find_shared()
            for _ in range(stops):
                _freeze(run, draw, score, survives=survives)
                if run.process.poll() is not None:
                    score.wrong.append(f"ended after a stop: {run.said()[-200:]}")
                    return
            if kills:
                _kill(run, draw, score, survives=survives)
        finally:
            score.wrong += run.end()


def _freeze(run: Run, draw: random.Random, score: Score, *, survives: bool) -> None:
    victim = draw.choice(run.replicas())
    time.sleep(draw.random() * 0.2)
    try:
        victim.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        score.wrong.append("a replica was gone before it was stopped")
        return
    score.stops += 1
    if survives:
        took = run.wait_for_batches(3, HEARTBEAT + MARGIN)
        if took is None:
            score.wrong.append(f"nothing was counted after a stop of {victim.pid}")
        score.longest = max(score.longest, took or HEARTBEAT + MARGIN)
    else:
        time.sleep(2 * HEARTBEAT)
    with suppress(psutil.NoSuchProcess):  # one that was stopped inside an update of shared weights is killed
        victim.send_signal(signal.SIGCONT)
    if run.wait_for_batches(3, HEARTBEAT + MARGIN) is None and run.process.poll() is None:
        score.wrong.append("nothing was counted after a replica was woken")


def _kill(run: Run, draw: random.Random, score: Score, *, survives: bool) -> None:
    alive = run.replicas()
    if not alive:
        return
    time.sleep(draw.random() * 0.2)
    with suppress(psutil.NoSuchProcess):
        draw.choice(alive).kill()
    score.kills += 1
    if survives and len(alive) > 1:
        took = run.wait_for_batches(3, HEARTBEAT + MARGIN)
        if took is None:
            score.wrong.append(f"nothing was counted after a kill: {run.said()[-200:]}")
        score.longest = max(score.longest, took or HEARTBEAT + MARGIN)
    elif not survives:
        try:
            run.process.wait(HEARTBEAT + MARGIN)
        except subprocess.TimeoutExpired:
            score.wrong.append("did not end after a kill")
            return
        if "replica" not in run.said() and "rank" not in run.said():
            score.wrong.append(f"does not say who was lost: {run.said()[-200:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Strike; the number of modes in which something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--stops", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modes with this in their name")
    args = parser.parse_args(arguments)
    modes = [mode for mode in MODES if args.only in mode]
    scores = {mode: Score() for mode in modes}
    draw = random.Random(args.seed)
    number = 0
    while True:
        mode = modes[number % len(modes)]
        kills, stops = (sum(getattr(score, kind) for score in scores.values()) for kind in ("kills", "stops"))
        if (kills >= args.kills and stops >= args.stops) or scores[mode].unbegun > 2:
            break
        per_run = max(1, round(args.stops / max(args.kills, 1)))
        strike(mode, min(1, args.kills - kills), min(per_run, args.stops - stops), draw, scores[mode])
        number += 1
        print(f"\r{kills} kills and {stops} stops so far", end="", file=sys.stderr)
    print(f"\n{'mode':20} {'kills':>6} {'stops':>6} {'longest':>8}")
    for mode, score in scores.items():
        print(score.row(mode))
    return sum(bool(score.wrong) for score in scores.values())


if __name__ == "__main__":
    sys.exit(min(1, main()))
