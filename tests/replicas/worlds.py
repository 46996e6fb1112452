"""A world of ranks that a test starts by hand, as srun would: none of them is ended because another was.

Each runs cases of `own_loop_cases.py`, one after the other, and prints a line of JSON for each.
"""

import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "replicas" / "world_script.py"
SECONDS = 100.0


class Rank:
    """One process, and what it printed."""

    def __init__(self, number: int, ranks: int, port: int, cases: Sequence[str], pipes: Path) -> None:
        from tests.cli.commands import Command  # which asks for `free_port`

        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        world |= {"RANK": str(number), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self._pipes = [pipes / f"{number}-{name}" for name in ("out", "err")]
        for pipe in self._pipes:
            os.mkfifo(pipe)
        self.process = Command(ROOT, tuple(cases), {**os.environ, **world}, self._pipes, script=SCRIPT)
        self.said: dict[str, Any] = {}
        self.errors = ""
        self._heard = threading.Condition()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        with self._pipes[0].open() as printed:
            for line in printed:
                if line.startswith("{"):
                    with self._heard:
                        self.said |= json.loads(line)
                        self._heard.notify_all()

    def _read_errors(self) -> None:
        with self._pipes[1].open() as printed:
            self.errors = printed.read()

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
    with tempfile.TemporaryDirectory() as pipes:
        started = [Rank(number, ranks, port, cases, Path(pipes)) for number in range(ranks)]
        try:
            yield started
        finally:
            for rank in started:
                if rank.process.poll() is None:
                    rank.process.send_signal(signal.SIGKILL)
                rank.end()


def said_of(ranks: int, *cases: str, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What every rank says of the cases, when all have ended well."""
    with world(ranks, *cases) as started:
        codes = [rank.end(seconds) for rank in started]
        assert codes == [0] * ranks, "\n".join(rank.errors for rank in started)
        return [rank.said for rank in started]
