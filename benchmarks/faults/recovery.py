"""Whoever a run loses, it goes on: three workers, the conductor and a server are killed, in a run of every exchange.

    python -m benchmarks.faults.recovery [--seed 0] [--only downpour]

Each run is `shoal train` on three workers (three replicas where it has an exchange), with `--restarts`, and `--elastic`
where all workers are needed. At moments drawn at random it loses two workers, its conductor, another worker and a
server, each by SIGKILL, each after the run has gone on from the one before. Then it is stopped as people stop it, and
goes on with `--resume` to the end of the next epoch. What must follow:

    told      `metrics.jsonl` or `restarts.jsonl` says who was lost
    counted   samples in the result, and those left out at the ends of epochs, are epochs times the data set; none twice
    nothing   no process and no shared memory of the run is left, all files are whole

Prints for each run, in seconds from a kill, when it was noticed, when the next step was counted and, of a replica that
the others went on without, when another had joined in its place: the longest of the three workers, the conductor, the
server.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from benchmarks.faults.bench import MODES, START_SECONDS, Mode, Run
from shoal.exchanges import EXCHANGES
from shoal.training.run_folder import RunFolder

MORE_STEPS = 20
"""Steps between two kills, at least."""
GO_ON_SECONDS = 180.0
"""Within which a run must go on: it may have to load torch twice, on a busy machine."""
DATA_SET = 4000
VICTIMS = ("worker", "worker", "conductor", "worker", "server")
WITH_SERVERS = {"softsync": "servers=processes", "easgd": "servers=processes"}
RUNS: dict[str, Mode] = {
    "plan data": Mode("", survives=False),
    "plan model": Mode("", "model", survives=False),
    **{
        MODES[name].exchange: replace(MODES[name], options=WITH_SERVERS.get(name, MODES[name].options))
        for name in (
            "downpour processes",
            "dasgd processes",
            "admm processes",
            *(name for name in EXCHANGES if name in MODES),
        )
    },
}


@dataclass
class Seconds:
    """From a kill: until it was noticed, and until a step was counted again."""

    notice: float
    go_on: float
    joined: float | None = None
    """Until another replica had taken the place of one that the others went on without."""


@dataclass
class Score:
    """What became of the kills in one run."""

    kills: dict[str, list[Seconds]] = field(default_factory=dict)
    samples: int = 0
    wrong: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        """Of the table."""
        cells = [self._cell(victim) for victim in ("worker", "conductor", "server")]
        what = "; ".join(self.wrong) or "all well"
        return f"{name:12}" + "".join(f"{cell:>18}" for cell in cells) + f"{self.samples:>9,}  {what}"

    def _cell(self, victim: str) -> str:
        found = self.kills.get(victim)
        if not found:
            return "-"
        whole = f"{max(one.notice for one in found):.1f}, {max(one.go_on for one in found):.1f}"
        joined = [one.joined for one in found if one.joined is not None]
        return f"{whole}, {max(joined):.1f}" if joined else whole


class Struck(Run):
    """A run that is to go on, whoever is killed."""

    def settings(self, *, saving: bool) -> list[str]:
        settings = super().settings(saving=saving)
        if not self.mode.exchange:
            begin = settings.index("--replicas")
            end = settings.index("--lr")
            settings = [*settings[:begin], "--workers", str(self.mode.replicas), *settings[end:]]
            settings[settings.index("--plan") + 1] = self.mode.options or "data"
        if not self.mode.survives:
            settings += ["--elastic", f"1:{self.mode.replicas}:5"]
        settings[settings.index("--checkpoint-every") + 1] = "50steps"
        return [*settings, "--restarts", "20", "--schedule", "constant"]

    def begin(self) -> str | None:
        """Wait until it trains and has a checkpoint. Why it does not."""
        if self.wait_until(lambda: self.counted() > 50, 2 * START_SECONDS) is None:
            return f"only {self.counted()} batches were counted within {2 * START_SECONDS:g} s"
        if self.wait_until(lambda: RunFolder(self.out).can_go_on, START_SECONDS) is None:
            return f"no checkpoint within another {START_SECONDS:g} s"
        return None

    def processes(self, victim: str) -> list[psutil.Process]:
        """Those of this kind that live."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                name, words = process.name(), " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            self.family.add(process)
            server = "shoal.exchanging.servers.process" in words
            if {"worker": name.startswith("shoal rank"), "conductor": name == "shoal conductor", "server": server}[
                victim
            ]:
                found.append(process)
        return found

    def note_shared(self) -> None:
        """Which memory it has now."""
        meeting = self.out / "meeting.json"
        shared = json.loads(meeting.read_text())["shared"] if meeting.exists() else None
        self.shared = None if shared is None else Path(shared)


def _strike(run: Struck, victim: str, draw: random.Random, score: Score) -> None:
    """One kill, where the run has such a process."""
    alive = run.processes(victim)
    if victim == "worker" and run.mode.survives and len(alive) < 2:
        return
    if not alive:
        return
    lost, came = len(run.lines("lost")), len(run.lines("joined"))
    times = len(RunFolder(run.out).went_on)
    time.sleep(draw.random() * 0.5)
    struck, process = time.time(), draw.choice(alive)
    process.kill()
    if psutil.wait_procs([process], timeout=10)[1]:
        score.wrong.append(f"the {victim} was not killed")
        return
    if victim == "worker" and run.mode.survives:
        noticed = run.wait_until(lambda: len(run.lines("lost")) > lost, GO_ON_SECONDS)
        went_on = run.wait_for_batches(3, GO_ON_SECONDS)
        joined = run.wait_until(lambda: len(run.lines("joined")) > came, GO_ON_SECONDS)
        if noticed is None or went_on is None or joined is None:
            seconds = None
        else:
            seconds = Seconds(noticed, noticed + went_on, noticed + went_on + joined)
    else:
        seconds = _after_restart(run, times, struck)
    if seconds is None:
        score.wrong.append(f"did not go on after the {victim} was killed: {run.said()[-300:]}")
    else:
        score.kills.setdefault(victim, []).append(seconds)


def _after_restart(run: Struck, times: int, struck: float) -> Seconds | None:
    """When the run had gone on by itself after this: an elastic one may have grown by itself in the moment before."""
    folder = RunFolder(run.out)

    def gone_on() -> list[tuple[float, float]]:
        changes = [(change.noticed, change.seconds_to_go_on) for change in folder.went_on[times:]]
        return [(noticed, seconds) for noticed, seconds in changes if noticed >= struck and seconds is not None]

    if run.wait_until(lambda: bool(gone_on()), GO_ON_SECONDS) is None:
        return None
    noticed, seconds = gone_on()[0]
    return Seconds(noticed - struck, noticed + seconds - struck)


def _finish(run: Struck, folder: Path, score: Score) -> None:
    """Let the stopped run go on to the end of an epoch, and see what it counts."""
    lines = run.lines("steps")
    epochs = 1 + max(line["epoch"] for line in lines)
    command = [sys.executable, "-m", "shoal", "train", "--resume", str(run.out), "--epochs", str(epochs)]
    last = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if last.returncode:
        score.wrong.append(f"did not finish: {last.stderr[-300:]}")
        return
    result = json.loads((run.out / "result.json").read_text())
    score.samples = result["samples"]
    if result["samples"] + result["samples_left_out"] != epochs * DATA_SET or result["samples_repeated"]:
        score.wrong.append(f"counted {result['samples']} samples of {epochs} epochs")


def struck(mode: Mode, draw: random.Random) -> Score:
    """One run with all its kills."""
    score = Score()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Struck(folder, mode, saving=False)
        try:
            if (why := run.begin()) is not None:
                score.wrong.append(f"did not begin: {why}; {run.said()[-300:]}")
                return score
            for victim in VICTIMS:
                _strike(run, victim, draw, score)
                if score.wrong or run.wait_for_batches(MORE_STEPS, GO_ON_SECONDS) is None:
                    score.wrong.append(f"ended: {run.said()[-300:]}")
                    return score
            for victim in set(VICTIMS):
                run.processes(victim)
            run.note_shared()
        finally:
            score.wrong += run.end()
        if not score.wrong:
            _finish(run, folder, score)
    return score


def main(arguments: Sequence[str] | None = None) -> int:
    """Strike every run; the number of those in which something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="runs with this in their name")
    args = parser.parse_args(arguments)
    failed = 0
    print(f"{'run':12}{'worker':>18}{'conductor':>18}{'server':>18}{'samples':>9}", flush=True)
    for number, (name, mode) in enumerate(RUNS.items()):
        if args.only in name:
            score = struck(mode, random.Random(1000 * args.seed + number))
            failed += bool(score.wrong)
            print(score.row(name), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
