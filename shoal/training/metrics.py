"""`metrics.jsonl`: one JSON object per line, written as the run goes."""

import io
import json
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class MetricsFile:
    """Appends whole lines. Opened at a given length, so that a resumed run repeats no line.

    Without a path nothing is written: of many ranks one keeps the file.
    """

    def __init__(self, path: Path | None, *, length: int = 0) -> None:
        self._file: BinaryIO = io.BytesIO() if path is None else path.open("r+b")
        self._file.truncate(length)
        self._file.seek(length)

    def write(self, **values: object) -> None:
        """One line, visible to readers at once. A value that JSON cannot hold is our bug and raises."""
        self._file.write((json.dumps(values, allow_nan=False) + "\n").encode())
        self._file.flush()

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
