"""`metrics.jsonl`: one JSON object per line, written as the run goes."""

import io
import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.training.evaluate import Evaluation


def line_of_steps(
    *,
    epoch: int,
    step: int,
    loss: float | None,
    lr: float,
    steps: int,
    seconds: float,
    samples: int,
    of_these_steps: int,
) -> dict[str, Any]:
    """The line about the `steps` until `step`, which took so many seconds; samples until then, and of these steps."""
    return {
        "event": "steps",
        "epoch": epoch,
        "step": step,
        "samples": samples,
        "loss": loss,
        "lr": lr,
        "samples_per_sec": of_these_steps / max(seconds, 1e-9),
        "step_time_ms": 1000 * seconds / max(steps, 1),
    }


def line_of_test(
    tested: Evaluation, *, epoch: int, step: int, samples: int, train_seconds: float, wall_seconds: float
) -> dict[str, Any]:
    """The line about a test of the weights of `step`, after training on so many samples.

    `train_seconds`: of steps alone, until then; `wall_seconds`: since the first step until the end of this test.
    """
    line = {
        "event": "test",
        "epoch": epoch,
        "step": step,
        "test_loss": tested.loss,
        "test_accuracy": tested.accuracy,
        "samples": samples,
        "train_seconds": train_seconds,
        "wall_seconds": wall_seconds,
    }
    return line if tested.iou is None else {**line, "test_iou": tested.iou}


def length_of_whole_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line; a killed process may have left half a line."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0


class MetricsFile:
    """Appends whole lines. Opened at a given length, so that a resumed run repeats no line.

    A file that is shorter, or gone, keeps the whole lines that it has: see `lacks_lines`. Without a path nothing is
    written: of many ranks one keeps the file.
    """

    def __init__(self, path: Path | None, *, length: int = 0) -> None:
        self._file: io.BytesIO | io.FileIO = io.BytesIO() if path is None else _opened(path)
        there = self._file.read()[: max(0, length)]  # whatever length a checkpoint says, no more than there is
        self.lacks_lines = path is not None and len(there) < length
        """Whether lines of the steps before are missing."""
        length = there.rfind(b"\n") + 1 if self.lacks_lines else len(there)
        self._file.truncate(length)
        self._file.seek(length)

    def write(self, **values: object) -> None:
        """One line, visible to readers at once. A value that JSON cannot hold is our bug and raises.

        Where the line cannot be written, as on a full disk, the lines before it stay whole.
        """
        left = memoryview((json.dumps(values, allow_nan=False) + "\n").encode())
        begin = self._file.tell()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(begin)
                self._file.seek(begin)
            raise

    @property
    def length(self) -> int:
        """Bytes written so far: what `__init__` needs to go on from here."""
        return self._file.tell()

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _opened(path: Path) -> io.FileIO:
    """Without a buffer: what could not be written must not be tried again when the file is closed."""
    path.touch()
    return path.open("r+b", buffering=0)


def lines_are_missing(steps: int) -> str:
    """What to tell people of a file that `lacks_lines`."""
    return f"metrics.jsonl is not whole: lines about the first {steps} steps are missing. The run goes on without them."
