"""A world of ranks that a test starts by hand, as srun would: none of them is ended because another was.

    python -m tests.replicas.worlds CASE ...

runs the cases of `own_loop_cases.py`, one after the other, on this rank, and prints a line of JSON for each.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 100.0


class Rank:
    """One process, and what it printed."""

    def __init__(self, number: int, ranks: int, port: int, cases: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.replicas.worlds", *cases],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "RANK": str(number),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: dict[str, Any] = {}
        self.errors = ""
        self._heard = threading.Condition()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                with self._heard:
                    self.said |= json.loads(line)
                    self._heard.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def hear(self, case: str, seconds: float = SECONDS) -> Any:
        """What it says of a case, once it does."""
        deadline = time.monotonic() + seconds
        with self._heard:
            while case not in self.said:
                over = self.process.poll() is not None and not self._threads[0].is_alive()
                if over or time.monotonic() > deadline:
                    raise AssertionError(f"{case} was not told of: {self.said} {self.errors}")
                self._heard.wait(0.1)
            return self.said[case]

    def end(self, seconds: float = SECONDS) -> int:
        """Its exit code, when it has ended by itself."""
        code = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(10)
        return code


def free_port() -> int:
    """One that nobody has, and that the system gives to no connection in the seconds until rank 0 listens there."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(10_000, 32_000)))  # below those for outgoing connections
            return int(free.getsockname()[1])


@contextmanager
def world(ranks: int, *cases: str) -> Iterator[list[Rank]]:
    """So many ranks that run these cases. No process outlives it."""
    port = free_port()
    started = [Rank(number, ranks, port, cases) for number in range(ranks)]
    try:
        yield started
    finally:
        for rank in started:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL)
            rank.end()
            for pipe in (rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()


def said_of(ranks: int, *cases: str, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What every rank says of the cases, when all have ended well."""
    with world(ranks, *cases) as started:
        codes = [rank.end(seconds) for rank in started]
        assert codes == [0] * ranks, "\n".join(rank.errors for rank in started)
        return [rank.said for rank in started]


if __name__ == "__main__":
    from tests.replicas import own_loop_cases

    own_loop_cases.run(sys.argv[1:])
