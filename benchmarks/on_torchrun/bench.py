"""Runs under torchrun on two nodes of this machine: what they reach, and how long they take to go on after a loss.

    python -m benchmarks.on_torchrun.bench [--only NAME] [--epochs 3]

Each run is `torchrun --nnodes 1:2 --max-restarts 3 -m shoal train --resume auto`, started twice: two nodes of one rank
each, which meet on this machine. Those that are struck lose, once they have saved twice, a rank by SIGKILL, or the
second node with all its processes, which comes back once the others have saved again. The exit is 1 where a run failed,
trained on fewer samples than it should, or left a process behind.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.on_ray.bench import EXCHANGES, PLANS, SAMPLES, SETTINGS, Case, Outcome, Strike, shown, wait_until
from shoal.training.run_folder import RunFolder
from tests.replicas.worlds import free_port

LOSSES: tuple[tuple[str, tuple[str, ...], tuple[Strike, ...]], ...] = (
    ("data", ("--plan", "data"), ("rank", "node")),
    ("spatial", ("--plan", "spatial"), ("rank", "node")),
    ("allreduce", ("--replicas", "2", "--exchange", "allreduce"), ("rank",)),
    ("downpour", ("--replicas", "2", "--exchange", "downpour"), ("rank",)),
)
STRUCK = tuple(
    Case(f"{name}, a lost {strike}", ("--checkpoint-every", "20steps", *options), strike, epochs=40)
    for name, options, strikes in LOSSES
    for strike in strikes
)


def on_two_nodes(options: tuple[str, ...]) -> tuple[str, ...]:
    """A world has a size: nobody says how many workers there are."""
    return options[2:] if options[0] == "--workers" else options


@dataclass
class Nodes:
    """Two agents of torchrun, of which the second can be lost."""

    folder: Path
    settings: list[str]
    meeting: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    agents: list["subprocess.Popen[str]"] = field(default_factory=list)
    family: set[psutil.Process] = field(default_factory=set)

    @property
    def printed(self) -> Path:
        """What all said."""
        return self.folder / "printed"

    def add(self) -> None:
        """One more node; the first keeps the meeting."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", self.meeting]
        command += ["--rdzv-conf", f"is_host={int(not self.agents)},last_call_timeout=3", "-m", "shoal", "train"]
        variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "NO_COLOR": "1"}
        with self.printed.open("a") as printed:
            self.agents.append(
                subprocess.Popen(
                    [*command, *self.settings],
                    cwd=self.folder,
                    env=variables,
                    stdout=printed,
                    stderr=printed,
                    text=True,
                )
            )

    def processes(self, agent: "subprocess.Popen[str]") -> list[psutil.Process]:
        """Of a node, the agent first."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(agent.pid)
            family = [root, *root.children(recursive=True)]
            self.family.update(family)
            return family
        return []

    def kill_rank(self) -> None:
        """Of the second node, whose agent lives on."""
        for process in self.processes(self.agents[1])[1:]:
            process.kill()

    def lose(self) -> None:
        """The second node with all its processes, without a word."""
        agent = self.agents.pop()
        for process in self.processes(agent):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    def wait(self, until: float) -> None:
        """For the end of all agents."""
        for agent in self.agents:
            while agent.poll() is None:
                self.processes(agent)
                if time.monotonic() > until:
                    raise TimeoutError("did not end in time")
                time.sleep(0.2)

    def left(self) -> int:
        """End what still runs; how many had not ended by themselves."""
        _, alive = psutil.wait_procs(list(self.family), timeout=10)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(alive)

    def end(self) -> None:
        """Now, all."""
        for agent in self.agents:
            for process in self.processes(agent):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            agent.wait()


def strike(case: Case, nodes: Nodes, kept: RunFolder) -> float:
    """Strike, once it trains; seconds until all were started anew and have saved, which they do every 20 steps."""

    def saved() -> int:
        found = kept.checkpoints.all()
        return found[-1].steps if found else 0

    def went_on() -> int:
        return nodes.printed.read_text().count("going on with the run")

    first = nodes.agents[0]
    wait_until(lambda: saved() >= 40, first)
    begun, earlier = time.monotonic(), went_on()
    if case.strike == "node":
        nodes.lose()
    else:
        nodes.kill_rank()
    wait_until(lambda: went_on() > earlier, first)
    before = saved()
    wait_until(lambda: saved() > before, first)
    took = time.monotonic() - begun
    if case.strike == "node":
        nodes.add()
    return took


def outcome_of(case: Case, folder: Path, epochs: int) -> Outcome:
    """Of one run, from its start to its end."""
    folder.mkdir()
    epochs, out = case.epochs or epochs, folder / "run"
    settings = [*SETTINGS, *on_two_nodes(case.options), "--epochs", str(epochs), "--eval-every", str(epochs)]
    nodes = Nodes(folder, [*settings, "--out", str(out), "--resume", "auto", "--threads", "1"])
    begun, goes_on, trouble = time.monotonic(), None, ""
    try:
        nodes.add()
        nodes.add()
        if case.strike is not None:
            goes_on = strike(case, nodes, RunFolder(out))
        nodes.wait(begun + 600)
    except TimeoutError as error:
        trouble = str(error)
    finally:
        nodes.end()
    seconds = time.monotonic() - begun
    if left := nodes.left():
        trouble = trouble or f"{left} processes left"
    if codes := [agent.returncode for agent in nodes.agents if agent.returncode]:
        trouble = trouble or f"exit {codes}"
    if trouble:
        trouble += f": {nodes.printed.read_text()[-2000:]}"
    result = json.loads((out / "result.json").read_text()) if not trouble else {}
    if not trouble and result["samples"] < SAMPLES * epochs:
        trouble = f"{result['samples']} samples of {SAMPLES * epochs}"
    return Outcome(result, seconds, goes_on, trouble)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--epochs", type=int, default=3, help="of runs that are not struck")
    asked = parser.parse_args()
    failed = 0
    print("| run | accuracy | samples | s training | s in all | s to go on |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-on-torchrun-") as folder:
        for number, case in enumerate((*PLANS, *EXCHANGES, *STRUCK)):
            if asked.only in case.name:
                outcome = outcome_of(case, Path(folder) / str(number), asked.epochs)
                failed += bool(outcome.trouble)
                print(shown(case, outcome), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
