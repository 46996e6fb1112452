"""Strangers at every port of a live run, from the same host and from another (a network namespace).

    python -m benchmarks.strangers [--crowd 2000] [--seconds 20] [--here]

Each row is a run of two replicas that may open 1,024 files per process. At every port at once: bytes that are no frame,
a wrong token, a byte every half second, and a crowd. The run must go on with both replicas, no port may answer or keep
anybody, and on one host nothing may be bound beyond loopback. `--here`: from this host alone, which needs no rights.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import Host, two_hosts
from benchmarks.strangers.ports import Port, ports_of, tree
from shoal.replicas.journal import TROUBLES

FILES = 1024
START_SECONDS = 120.0
EXCHANGES = {
    "downpour": ["--exchange", "downpour", "--exchange-options", "servers=processes"],
    "allreduce": ["--exchange", "allreduce"],
    "gossip": ["--exchange", "gossip"],
}
TRAINING = [
    *("--data", "digits", "--model", "lenet5", "--batch", "8", "--threads", "1", "--log-every", "5"),
    *("--epochs", "4000", "--eval-every", "1000", "--checkpoint-every", "1000", "--replicas", "2"),
]
HERE = Host("127.0.0.1")


@dataclass
class Run:
    """A run that goes on."""

    folder: Path
    processes: "list[subprocess.Popen[str]]"
    hosts: Sequence[Host]
    """Where each of them is."""

    def steps(self) -> int:
        """How many steps it has made with both replicas."""
        lines = [line for line in self._lines() if line["event"] == "steps"]
        return int(lines[-1]["step"]) if lines and lines[-1]["active"] == [0, 1] else 0

    def troubles(self) -> list[str]:
        """What happened to replicas and servers."""
        return [line["event"] for line in self._lines() if line["event"] in TROUBLES]

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def ports(self) -> list[tuple[Host, Port]]:
        """Where it listens."""
        found = []
        for host, process in zip(self.hosts, self.processes, strict=True):
            found += [(host, port) for port in ports_of(tree(process.pid), host.prefix)]
        return found

    def settled_ports(self) -> list[tuple[Host, Port]]:
        """The same, once none has come or gone for two seconds: the last replica may just have begun."""
        ports: list[tuple[Host, Port]] = []
        while ports != (ports := self.ports()):
            time.sleep(2.0)
        return ports

    def over(self) -> bool:
        """Whether a process of it ended."""
        return any(process.poll() is not None for process in self.processes)


@contextmanager
def running(exchange: str, hosts: Sequence[Host]) -> Iterator[Run]:
    """A run on one host, or a rank of it on each; it is ended at the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "shoal", "train", *TRAINING, *EXCHANGES[exchange], "--out", f"{folder}/run"]
        processes = []
        for rank, host in enumerate(hosts):
            variables = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
            if len(hosts) > 1:
                variables |= {"RANK": f"{rank}", "LOCAL_RANK": "0", "WORLD_SIZE": f"{len(hosts)}"}
                variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29511"}
                variables |= {"GLOO_SOCKET_IFNAME": host.device}
            process = subprocess.Popen(
                [*host.prefix, *command],
                env={**os.environ, **variables},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=_few_files,
            )
            stack.callback(_end, process)
            processes.append(process)
        run = Run(Path(folder) / "run", processes, hosts)
        deadline = time.monotonic() + START_SECONDS
        while not run.steps():
            if run.over() or time.monotonic() > deadline:
                raise SystemExit(f"the run did not start: {_said(processes)}")
            time.sleep(0.1)
        yield run


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def _said(processes: "Sequence[subprocess.Popen[str]]") -> str:
    for process in processes:
        process.kill()
    return " ".join(process.communicate()[1][-500:] for process in processes)


def attacked(run: Run, ports: Sequence[Port], attacker: Host, crowd: int, seconds: float) -> dict[str, Any]:
    """What a process on `attacker` sees at all of these ports, which it tries at once."""
    commands = [
        [sys.executable, "-m", "benchmarks.strangers.attack", f"--crowd={crowd}", f"--seconds={seconds:g}", str(port)]
        for port in ports
    ]
    trying = [subprocess.Popen([*attacker.prefix, *command], stdout=subprocess.PIPE, text=True) for command in commands]
    start, before = time.monotonic(), run.steps()
    seen: dict[str, Any] = {}
    for process in trying:
        seen |= json.loads(process.communicate()[0])
    return {"seen": seen, "rate": (run.steps() - before) / (time.monotonic() - start)}


def row(exchange: str, what: str, run: Run, attacker: Host, args: argparse.Namespace) -> bool:
    """One line of the table; whether all is well."""
    token = json.loads((run.folder / "meeting.json").read_text())["token"]
    every = run.settled_ports()
    wide = [port for _, port in every if not port.loopback]
    on_hosts = [port for host, port in every if host.prefix != attacker.prefix and not port.loopback]
    # From its own host a stranger reaches everything, from another what is bound there, and what it guesses.
    ports = on_hosts if attacker.prefix else [port for _, port in every]
    guessed = [Port(run.hosts[0].address, port.port, 0) for _, port in every if port.loopback]
    if attacker.prefix:
        ports = [*ports, *guessed]
    ports = [port.seen_from(run.hosts[0].address) for port in ports]
    idle_start, idle_steps = time.monotonic(), run.steps()
    time.sleep(min(10.0, args.seconds))
    idle = (run.steps() - idle_steps) / (time.monotonic() - idle_start)
    found = attacked(run, ports, attacker, args.crowd, args.seconds)
    seen = found["seen"].values()
    answered = b"".join(bytes.fromhex(one["answered"]) for one in seen)
    after = run.steps()
    time.sleep(3.0)
    troubles = [*run.troubles(), *(["it ended"] if run.over() else [])]
    well = run.steps() > after and not troubles
    needs_network = len(run.hosts) > 1
    well = well and not answered and not any(one["left"] for one in seen) and (needs_network or not wide)
    well = well and token.encode() not in answered and sorted(run.ports(), key=str) == sorted(every, key=str)
    run.processes[0].send_signal(signal.SIGINT)
    for process in run.processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            well = False
    took = sum(one["took"] for one in seen)
    print(
        f"| {exchange} | {what} | {len(every)}, {len(wide)} | {len(ports)} | {took:,} | {len(answered)} | {idle:.0f} | "
        f"{found['rate']:.0f} | {'yes' if well else '**no**: ' + ', '.join(troubles)} |",
        flush=True,
    )
    return well


def main() -> None:
    """Print the table; exit code 1 where a run was harmed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=2000, help="connections at each port")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--here", action="store_true", help="no network namespaces")
    args = parser.parse_args()
    print(
        "| exchange | the run, the stranger | ports, beyond loopback | tried | connections taken | bytes answered | "
        "steps/s before | during | unharmed |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    well = []
    for exchange in EXCHANGES:
        with running(exchange, [HERE]) as run:
            well.append(row(exchange, "on one host, from it", run, HERE, args))
    if not args.here:
        for exchange in EXCHANGES:
            with two_hosts() as (first, second):
                with running(exchange, [first]) as run:
                    well.append(row(exchange, "on one host, from another", run, second, args))
                with running(exchange, [first, second]) as run:
                    well.append(row(exchange, "on two hosts, from the second", run, second, args))
    raise SystemExit(0 if all(well) else 1)


if __name__ == "__main__":
    main()
