"""A replica of an allreduce is killed and comes back: Shoal's elastic run beside torchft's, on the same small job.

    python -m benchmarks.surviving_allreduce.bench --torchft PYTHON [--rounds 3] [--seed 0]

PYTHON: that of an environment with torchft and torch. Three replicas of LeNet-5 with a batch of 96 together, one thread
each, on this host. One of them is killed by SIGKILL at a random moment. In each round both sides are struck, one after
the other. Prints, in seconds from the kill:

    step again    until the others had taken their next step
    in step       until all three had taken a step together again, with the one that was started in the lost one's place

torchft's replica is started anew by this benchmark as soon as the others step again, as its users' schedulers would;
Shoal starts its own again after a second (`--elastic 2:3:1`).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch import nn

from shoal.training.run_folder import RunFolder

WORKERS, LEAST, BATCH, RATE, SEED = 3, 2, 96, 0.01, 5
PATIENCE = 180.0


def network() -> nn.Module:
    """What both train."""
    from shoal.zoo.by_name import build

    return build("lenet5", input=(1, 32, 32), classes=10)


class Seconds(NamedTuple):
    """From a kill."""

    step_again: float
    in_step: float


def wait_for(condition: Callable[[], Any]) -> Any:
    """What it gives, once that is something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError("nothing happened")


class Replica:
    """One of torchft's, with what it has printed."""

    def __init__(self, python: str, number: int, address: str) -> None:
        words = [python, "-m", "benchmarks.surviving_allreduce.with_torchft", "replica", str(number), address]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def after(self, when: float, together: int) -> float | None:
        """When it first took a step after that, in which at least so many took part."""
        lines = list(self.lines)
        if self.process.poll() is not None:
            self._errors.seek(0)
            raise RuntimeError(f"a replica of torchft ended: {self._errors.read()[-3000:]}")
        return next((line["when"] for line in lines if line["when"] > when and line["together"] >= together), None)

    def end(self) -> None:
        """Now."""
        self.process.kill()
        self.process.wait()


def of_torchft(python: str, draw: random.Random) -> Seconds:
    """One run with one loss."""
    with ExitStack() as stack:
        words = [python, "-m", "benchmarks.surviving_allreduce.with_torchft", "lighthouse"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        stack.callback(server.wait)
        stack.callback(server.kill)
        assert server.stdout is not None
        address = server.stdout.readline().strip()

        def begin(number: int) -> Replica:
            begun = Replica(python, number, address)
            stack.callback(begun.end)
            return begun

        replicas = [begin(number) for number in range(WORKERS)]
        wait_for(lambda: all(len(one.lines) > 20 and one.lines[-1]["together"] == WORKERS for one in replicas))
        time.sleep(draw.random())
        victim = replicas.pop(draw.randrange(WORKERS))
        struck = time.time()
        victim.end()
        others = [wait_for(partial(one.after, struck, LEAST)) for one in replicas]
        late = begin(WORKERS)
        joined = wait_for(lambda: late.after(struck, WORKERS))
        return Seconds(max(others) - struck, joined - struck)


def of_shoal(draw: random.Random) -> Seconds:
    """One run with one loss."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "shoal", "train", "--model", "lenet5", "--data", "synthetic:960", "--input"]
        words += ["1,32,32", "--classes", "10", "--batch", str(BATCH), "--lr", str(RATE), "--threads", "1"]
        words += ["--replicas", str(WORKERS), "--exchange", "allreduce", "--elastic", f"{LEAST}:{WORKERS}:1"]
        words += ["--epochs", "100000", "--eval-every", "100000", "--checkpoint-every", "50steps", "--log-every", "1"]
        run = subprocess.Popen([*words, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        family: list[psutil.Process] = []
        try:
            kept = RunFolder(out)
            wait_for(lambda: kept.can_go_on)
            time.sleep(draw.random())
            family = psutil.Process(run.pid).children(recursive=True)
            ranks = [process for process in family if process.name().startswith("shoal rank")]
            struck, victim = time.time(), draw.choice(ranks)
            victim.kill()
            wait_for(lambda: len(kept.went_on) == 2 and kept.went_on[1].seconds_to_go_on is not None)
            shrunk, grown = kept.went_on
            assert (shrunk.workers_after, grown.workers_after) == (LEAST, WORKERS)
            times = [change.noticed + (change.seconds_to_go_on or 0.0) - struck for change in (shrunk, grown)]
            return Seconds(*times)
        finally:
            family += psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
            run.kill()
            run.wait()
            psutil.wait_procs(family, timeout=30)


def main(arguments: Sequence[str] | None = None) -> None:
    """Strike both in turns, and print the median and the largest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", metavar="PYTHON", help="without it Shoal alone is struck")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    draw = random.Random(args.seed)
    sides: dict[str, Callable[[], Seconds]] = {"shoal --elastic": lambda: of_shoal(draw)}
    if args.torchft:
        sides["torchft"] = lambda: of_torchft(args.torchft, draw)
    found: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, strike in sides.items():
            found[name].append(strike())
            print(
                f"{name:16} step again {found[name][-1].step_again:6.1f} s, in step {found[name][-1].in_step:6.1f} s",
                flush=True,
            )
    for name, all_of in found.items():
        for what, values in zip(Seconds._fields, zip(*all_of, strict=True), strict=True):
            print(f"{name:16} {what:10} median {statistics.median(values):6.1f} s, most {max(values):6.1f} s")


if __name__ == "__main__":
    main()
