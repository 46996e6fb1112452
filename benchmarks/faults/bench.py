"""Replicas that are killed or frozen at random moments, many times, in runs of every exchange and every mode.

    python -m benchmarks.faults.bench --kills 300 --stops 300 [--seed 0] [--only downpour]

Each run is `shoal train` in a process of its own, with three replicas (in groups: two of two ranks) and a heartbeat of
half a second. A strike is a SIGKILL or a SIGSTOP of one process that trains, at a moment drawn between two lines of
metrics; in every second run of a mode tests and checkpoints happen all the time, so that strikes hit them too. What
must follow:

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.faults.files import what_is_not_whole
from shoal.replicas.journal import HAPPENINGS
from shoal.training.run_folder import RunFolder

HEARTBEAT = 0.5
MARGIN = 10.0
"""Seconds on top of the heartbeat in which somebody must count a batch: two busy cores."""
START_SECONDS = 60.0


@dataclass(frozen=True)
class Mode:
    """What is struck."""

    exchange: str
    options: str = ""
    survives: bool = True
    """Whether training goes on without a replica."""
    replicas: int = 3
    ranks: int = 1
    """Of each replica."""

    @property
    def kills(self) -> int:
        """How many a run can have: all but the last replica, or the one that ends it."""
        return self.replicas - 1 if self.survives else 1


MODES: dict[str, Mode] = {
    "downpour direct": Mode("downpour", "servers=direct,shards=4"),
    "downpour processes": Mode("downpour", "servers=processes,shards=2"),
    "downpour threads": Mode("downpour", "servers=threads", survives=False),
    "downpour period": Mode("downpour", "n_sync=4"),
    "downpour overlap": Mode("downpour", "overlap=true"),
    "downpour int8": Mode("downpour", "compress=int8,servers=processes"),
    "downpour groups": Mode("downpour", "servers=processes", replicas=2, ranks=2),
    "dasgd direct": Mode("dasgd", "servers=direct"),
    "dasgd processes": Mode("dasgd", "servers=processes"),
    "softsync": Mode("softsync"),
    "hogwild": Mode("hogwild"),
    "easgd": Mode("easgd"),
    "admm direct": Mode("admm", "servers=direct,shards=2"),
    "admm processes": Mode("admm", "servers=processes,shards=2"),
    "gossip": Mode("gossip"),
    "gossip push": Mode("gossip", "mode=push"),
    "gossip int8": Mode("gossip", "compress=int8"),
    "gossip groups": Mode("gossip", replicas=2, ranks=2),
    "local": Mode("local", "shards=2"),
    "local sign": Mode("local", "compress=sign"),
    "local groups": Mode("local", replicas=2, ranks=2),
    "average once": Mode("local", "average=once"),
    "backup": Mode("backup", "backups=1,shards=2"),
    "sync": Mode("sync", "shards=2", survives=False),
    "allreduce": Mode("allreduce", survives=False),
    "allreduce int8": Mode("allreduce", "compress=int8", survives=False),
}
NET = """
from torch import nn

def net(input, classes):
    pool = nn.AdaptiveAvgPool2d(4)
    return nn.Sequential(nn.Conv2d(input[0], 8, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(128, classes))
"""


@dataclass
class Score:
    """What became of the strikes in one mode."""

    runs: int = 0
    kills: int = 0
    stops: int = 0
    longest: float = 0.0
    """Seconds until somebody counted a batch again."""
    wrong: list[str] = field(default_factory=list)
    unbegun: int = 0
    """Runs that did not even begin."""

    def row(self, mode: str) -> str:
        """Of the table."""
        what = "; ".join(self.wrong) or "all well"
        return f"{mode:20} {self.runs:5} {self.kills:6} {self.stops:6} {self.longest:11.2f} s   {what}"


class Begun(Protocol):
    """A process that was begun; `subprocess` gives one that has all this."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


Begin = Callable[[Path, Sequence[str], Path], Begun]
"""What begins `shoal ARGUMENTS` in a folder, all that it prints in a file."""


def as_a_program(folder: Path, arguments: Sequence[str], printed: Path) -> "subprocess.Popen[bytes]":
    """As people begin it."""
    with printed.open("wb") as file:
        command = [sys.executable, "-m", "shoal", *arguments]
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)


class Run:
    """One `shoal train`, with its folder. `saving`: tests and checkpoints happen all the time."""

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        *,
        saving: bool,
        heartbeat: float = HEARTBEAT,
        begin: Begin = as_a_program,
    ) -> None:
        self.out, self.mode, self.heartbeat, self.patience = folder / "run", mode, heartbeat, heartbeat + MARGIN
        (folder / "mine.py").write_text(NET)
        self.printed = folder / "printed"
        self.process = begin(folder, ["train", *self.settings(saving=saving), "--out", str(self.out)], self.printed)
        self.family: set[psutil.Process] = set()
        self.ranks: list[psutil.Process] = []
        """Of all replicas, as they were started."""
        self.shared: Path | None = None
        """Its folder of shared memory."""

    def settings(self, *, saving: bool) -> list[str]:
        """Of a run that does not end by itself."""
        mode, every = self.mode, "1" if saving else "100000"
        together = ",".join(filter(None, [mode.options, f"heartbeat={self.heartbeat}"]))
        settings = ["--model", "mine:net", "--data", "digits", "--batch", "24", "--plan", "data"]
        settings += ["--replicas", str(mode.replicas), "--workers", str(mode.replicas * mode.ranks)]
        settings += ["--exchange", mode.exchange, "--exchange-options", together, "--lr", "0.001", "--log-every", "1"]
        settings += ["--epochs", "100000", "--eval-every", every, "--checkpoint-every", every]
        return [*settings, "--threads", "1", "--timeout", "60"]

    def begin(self) -> str | None:
        """Wait until all replicas train: one that is stopped before it came would not be missed. Why they do not."""
        everybody = list(range(self.mode.replicas))
        if self.wait_until(lambda: self.active() == everybody, START_SECONDS) is None:
            return f"not all replicas trained within {START_SECONDS:g} s, but {self.active()}"
        if self.wait_for_batches(5, START_SECONDS) is None:
            return f"no 5 more batches were counted within {START_SECONDS:g} s"
        with suppress(psutil.NoSuchProcess):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))
        ranks = {}
        for child in self.family:
            with suppress(psutil.NoSuchProcess):  # a helper of a moment, such as one that asks the system something
                name, _, number = child.name().rpartition(" ")
                if name == "shoal rank":
                    ranks[int(number)] = child
        self.ranks = [ranks[number] for number in sorted(ranks)]
        shared = json.loads((self.out / "meeting.json").read_text())["shared"]
        self.shared = None if shared is None else Path(shared)
        if len(self.ranks) != self.mode.replicas * self.mode.ranks:
            return f"of its ranks there are {sorted(ranks)}"
        return None

    def replicas(self) -> list[int]:
        """Those of which every process lives."""
        each = self.mode.ranks
        lives = [rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in self.ranks]
        return [number for number in range(self.mode.replicas) if all(lives[number * each : (number + 1) * each])]

    def rank_of(self, replica: int, draw: random.Random) -> psutil.Process:
        """One of its processes."""
        return self.ranks[replica * self.mode.ranks + draw.randrange(self.mode.ranks)]

    def lines(self, *events: str) -> list[dict[str, Any]]:
        """Of metrics, so far."""
        try:
            whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        except FileNotFoundError:
            return []
        return [line for line in map(json.loads, whole.splitlines()) if line["event"] in events]

    def active(self) -> list[int]:
        """Replicas that take part, as of the last steps."""
        return [replica for line in self.lines("steps")[-1:] for replica in line["active"]]

    def counted(self) -> int:
        """Batches so far."""
        return max((line["step"] for line in self.lines("steps")), default=0)

    def wait_for_batches(self, more: int, seconds: float) -> float | None:
        """Seconds until so many more batches are counted; None if they were not."""
        before = self.counted()
        return self.wait_until(lambda: self.counted() >= before + more, seconds)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> float | None:
        """Seconds until it holds; None if it does not, or the run ends."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if condition():
                return time.monotonic() - begun
            if self.process.poll() is not None:
                return None
            time.sleep(0.05)
        return None

    def tells(self, replica: int, *states: str) -> bool:
        """Whether it says, now or soon, that a replica is one of these.

        Its last word counts, not a new one: on a busy machine a replica may count as frozen before it is stopped.
        """
        return self.wait_until(lambda: self.last_word_of(replica) in states, self.patience) is not None

    def last_word_of(self, replica: int) -> str | None:
        """What it said last of a replica."""
        words = [line["event"] for line in self.lines(*HAPPENINGS) if line.get("replica") == replica]
        return words[-1] if words else None

    def said(self) -> str:
        """What the run printed."""
        return self.printed.read_text() if self.printed.exists() else ""

    def end(self) -> list[str]:
        """Stop it as a user does; what is wrong with what it leaves."""
        goes_on = self.process.poll() is None
        if goes_on:
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
        if goes_on and not wrong and not RunFolder(self.out).can_go_on:
            wrong.append("was stopped and left no checkpoint")
        return [*wrong, *what_is_not_whole(self.out)]


def strike(
    mode: str,
    kills: int,
    stops: int,
    draw: random.Random,
    score: Score,
    *,
    saving: bool,
    heartbeat: float = HEARTBEAT,
    begin: Begin = as_a_program,
) -> None:
    """One run: all its stops, then its kills."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), MODES[mode], saving=saving, heartbeat=heartbeat, begin=begin)
        score.runs += 1
        try:
            if (why := run.begin()) is not None:
                told = [f"{line['step']}: {line['event']} {line['replica']}" for line in run.lines(*HAPPENINGS)[-10:]]
                score.wrong.append(f"did not begin: {why}; {', '.join(told)}; {run.said()[-200:]}")
                score.unbegun += 1
                return
            for _ in range(stops):
                _freeze(run, draw, score)
                if run.process.poll() is not None:
                    score.wrong.append(f"ended after a stop: {run.said()[-200:]}")
                    return
            for _ in range(kills):
                _kill(run, draw, score)
        finally:
            score.wrong += run.end()


def _freeze(run: Run, draw: random.Random, score: Score) -> None:
    """Of a run that goes on without a replica, never the last one."""
    alive = run.replicas()
    if len(alive) < 2:
        return
    replica = draw.choice(alive)
    victim = run.rank_of(replica, draw)
    time.sleep(draw.random() * 0.2)
    try:
        victim.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        score.wrong.append("a replica was gone before it was stopped")
        return
    score.stops += 1
    if run.mode.survives:
        _goes_on(run, score, f"a stop of replica {replica}")
    else:
        time.sleep(2 * run.heartbeat)
    if not run.tells(replica, "frozen", "lost"):
        score.wrong.append(f"does not say that replica {replica} is frozen")
    with suppress(psutil.NoSuchProcess):  # one that was stopped inside an update of shared weights is killed
        victim.send_signal(signal.SIGCONT)
    if replica in run.replicas() and not run.tells(replica, "back", "lost"):
        score.wrong.append(f"does not say that replica {replica} is back")
    if run.wait_for_batches(3, run.patience) is None and run.process.poll() is None:
        score.wrong.append("nothing was counted after a replica was woken")


def _kill(run: Run, draw: random.Random, score: Score) -> None:
    alive = run.replicas()
    if len(alive) < 2:
        return
    replica = draw.choice(alive)
    time.sleep(draw.random() * 0.2)
    with suppress(psutil.NoSuchProcess):
        run.rank_of(replica, draw).kill()
    score.kills += 1
    if run.mode.survives:
        _goes_on(run, score, f"a kill of replica {replica}")
        if not run.tells(replica, "lost") or f"replica {replica} was lost" not in run.said():
            score.wrong.append(f"does not say that replica {replica} was lost")
        return
    try:
        run.process.wait(run.patience)
    except subprocess.TimeoutExpired:
        score.wrong.append("did not end after a kill")
        return
    if not any(f"{word} {replica}" in run.said() for word in ("replica", "rank", "server")):
        score.wrong.append(f"does not say that replica {replica} was lost: {run.said()[-200:]}")


def _goes_on(run: Run, score: Score, after: str) -> None:
    took = run.wait_for_batches(3, run.patience)
    if took is None:
        score.wrong.append(f"nothing was counted after {after}: {run.said()[-200:]}")
    score.longest = max(score.longest, took or run.patience)


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
        killed = min(MODES[mode].kills, args.kills - kills)
        stopped = min(max(1, round(killed * args.stops / max(args.kills, 1))), args.stops - stops)
        strike(mode, killed, stopped, draw, scores[mode], saving=scores[mode].runs % 2 == 1)
        number += 1
        print(f"\r{kills} kills and {stops} stops so far", end="", file=sys.stderr)
    print(f"\n{'mode':20} {'runs':>5} {'kills':>6} {'stops':>6} {'longest stall':>13}")
    for mode, score in scores.items():
        print(score.row(mode))
    return sum(bool(score.wrong) for score in scores.values())


if __name__ == "__main__":
    sys.exit(min(1, main()))
