"""One run of a comparison: begun, or gone on with, and watched from beside by the lines that it writes."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal import launching, running
from shoal.config import TrainConfig
from shoal.machine import threads_each
from shoal.result import RunResult
from shoal.training.device import kind_of_device
from shoal.training.listener import Listener
from shoal.training.run_folder import RunFolder

LOOK_SECONDS = 0.3
"""Time between two looks at the lines of a run."""

OnLine = Callable[[Mapping[str, Any]], None]


def is_finished(path: Path) -> bool:
    """Whether the run in this folder has its result."""
    return RunFolder(path).result.exists()


def can_go_on(path: Path) -> bool:
    """Whether the run in this folder left a checkpoint; without one it starts anew."""
    folder = RunFolder(path)
    return folder.checkpoint.exists() and folder.config.exists()


def carry_out(config: TrainConfig, on_line: OnLine, on_stage: Callable[[str, int, int], None]) -> RunResult:
    """Train to the end into `config.out`, from its checkpoint if there is one; raises what the run raises.

    One worker too has a process of its own, so that its memory is its own.
    """
    assert config.out is not None
    with _following(RunFolder(config.out).metrics, on_line):
        if config.workers > 1:
            return _begin_or_resume(config, _Stages(on_stage))
        results = launching.run(
            _begin_or_resume,
            config,
            Listener(),
            workers=1,
            threads=threads_each(config.threads, 1),
            timeout=config.timeout,
            device=kind_of_device(config, 1),
        )
        return results[0]


def _begin_or_resume(config: TrainConfig, listener: Listener) -> RunResult:
    assert config.out is not None
    if can_go_on(config.out):
        return running.resume(config.out, {"plan": config.plan}, listener)
    return running.train(config, listener)


class _Stages(Listener):
    """Hears in this process how workers start; the rest is read from the run's files."""

    def __init__(self, on_stage: Callable[[str, int, int], None]) -> None:
        self._on_stage = on_stage

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        """On its way to rank 0: nobody listens there."""
        return Listener, ()

    def starting(self, done: str, by: int, of: int) -> None:
        """Tell whoever watches."""
        self._on_stage(done, by, of)


@contextmanager
def _following(path: Path, on_line: OnLine) -> Iterator[None]:
    """Within, every line of a file that grows is told, soon after it was written; at the end the last ones too."""
    over = threading.Event()
    begin = 0

    def look() -> None:
        nonlocal begin
        try:
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
        except OSError:  # not there yet
            return
        whole = text[: text.rfind(b"\n") + 1]
        begin += len(whole)
        for line in whole.splitlines():
            on_line(json.loads(line))

    def follow() -> None:
        while not over.wait(LOOK_SECONDS):
            look()

    thread = threading.Thread(target=follow, name="lines of a run", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
