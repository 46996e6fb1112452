"""Real CPU processes, one per rank, that stay alive between cases.

Every case has a time-out. A rank that fails or dies ends the case with that rank's own error; the pool is then
thrown away, because its ranks may wait for each other, and the next case gets a new one.
"""

import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.launching import forked
from shoal.launching.process import environment, environment_of

CASE_SECONDS = 110.0


class RankError(AssertionError):
    """What went wrong on the first rank that failed."""


class Pool:
    """`world` processes in one Gloo group; a case that takes longer than `seconds` has failed."""

    def __init__(self, world: int, seconds: float = CASE_SECONDS) -> None:
        self._seconds = seconds
        with environment(**environment_of(threads=1)):
            forked.load_ahead()
        context = mp.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """`case(*args, **options)` on every rank; what each returned."""
        for pipe in self._pipes:
            pipe.send((case, args, options))
        deadline = time.monotonic() + self._seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank in answers:
                    continue
                try:
                    if pipe.poll(0.005):
                        good, answer = pipe.recv()
                        if not good:
                            raise RankError(f"rank {rank} failed:\n{answer}")
                        answers[rank] = answer
                except (EOFError, ConnectionResetError):
                    raise RankError(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None
            if time.monotonic() > deadline:
                silent = sorted(set(range(len(self._pipes))) - set(answers))
                raise RankError(f"ranks {silent} gave no answer within {self._seconds:.0f} s")
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all ranks; none is left behind."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            case, args, options = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            pipe.send((True, case(*args, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
