"""Start a benchmark's own script once per rank, one thread each, and wait for all of them."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from benchmarks.common.hosts import Host, loopback, two_hosts
from benchmarks.common.memory import go_first
from shoal.machine import HUGE_PAGES


def is_rank() -> bool:
    """Whether this process was started by `start_ranks`."""
    return "RANK" in os.environ


def become_rank() -> int:
    """Meet the others that `start_ranks` started, with the settings that every side has; the rank."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    return dist.get_rank()


def start_ranks(module: str, arguments: Sequence[str], link: str, *, ranks: int = 2, seconds: float = 3600) -> None:
    """Run `python -m module arguments` on every rank; `link` is "loopback", or the speed between two hosts: "1gbit"."""
    go_first()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that hosts and ranks are removed
    places: AbstractContextManager[list[Host]]
    places = nullcontext(loopback(ranks)) if link == "loopback" else two_hosts(link)
    with places as hosts:
        port = str(random.randint(20_000, 30_000))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, host in enumerate(hosts):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(hosts)),
                    "MASTER_ADDR": hosts[0].address,
                    "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": host.device,
                    **({"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} if link == "loopback" else {}),
                    "OMP_NUM_THREADS": "1",
                    HUGE_PAGES: os.environ.get(HUGE_PAGES, "1"),  # for every side alike
                }
                command = [*host.prefix, sys.executable, "-m", module, *arguments]
                started.append(subprocess.Popen(command, env=environment))
            for rank, process in enumerate(started):
                if code := process.wait(seconds):
                    sys.exit(f"rank {rank} ended with {code}{' (killed: out of memory?)' if code == -9 else ''}")
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
