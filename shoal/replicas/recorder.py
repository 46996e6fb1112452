"""The files of a run of replicas, and nothing else of it: lines of metrics, checkpoint, plan, weights, result."""

import io
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import TrainConfig
from shoal.errors import PlanError
from shoal.files import write_atomically, write_text_atomically
from shoal.plan import Plan
from shoal.replicas.effects import (
    ForFiles,
    HowFar,
    WriteBest,
    WriteCheckpoint,
    WriteOwn,
    WritePlan,
    WriteResult,
    WriteTrace,
)
from shoal.result import RunResult
from shoal.timeline import Trace
from shoal.tracing.merge import together
from shoal.training import checkpoint
from shoal.training.best import Best
from shoal.training.checkpoint import Progress
from shoal.training.listener import About
from shoal.training.metrics import MetricsFile
from shoal.training.outcome import result_of
from shoal.training.run_folder import RunFolder


class Recorder:
    """Writes what it is told to into `folder`. `length`: bytes of metrics that belong to earlier parts of the run."""

    def __init__(self, folder: RunFolder, config: TrainConfig, about: About, *, length: int = 0) -> None:
        self._folder, self._config, self._about = folder, config, about
        with folder.writing(folder.metrics):
            self._metrics = MetricsFile(folder.metrics, length=length)
        self.lacks_lines = self._metrics.lacks_lines
        """Whether lines of earlier steps are missing."""
        self._marks: dict[int, int] = {}
        """How long the metrics were when a replica took the weights that it saves, or had tested them."""
        self._traces: dict[int, Trace] = {}
        """What replicas recorded, on the conductor's clock."""
        self._tracing = threading.Lock()
        """Held while their common file is written: replicas may send at the same time."""
        self.result: RunResult | None = None
        """The result, once it is written."""

    def log(self, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        with self._folder.writing(self._folder.metrics):
            self._metrics.write(**values)

    def mark(self, replica: int) -> None:
        """What was logged so far belongs to what this replica saves."""
        self._marks[replica] = self._metrics.length

    def write(self, effect: ForFiles, buffers: Sequence[Tensor]) -> None:
        """A file, from what a replica sent: its state, then the weights alone."""
        folder = self._folder
        match effect:
            case WritePlan():
                self._write_text(folder.plan, effect.text)
            case WriteTrace():
                self._write_trace(effect.replica, buffers[0])
            case WriteOwn():
                self._write_bytes(folder.own_state(effect.replica, effect.moment), buffers[0])
            case WriteBest():
                self._write_bytes(folder.best, buffers[-1])
            case WriteCheckpoint():
                with folder.writing(folder.checkpoint):
                    self._write_checkpoint(effect, self._marks[effect.replica], buffers[0])
            case WriteResult():
                self._write_bytes(folder.weights, buffers[-1])
                about = replace(self._about, plan_in_words=self._plan_in_words())
                result = result_of(self._config, about, effect.tested, effect.measured)
                self._write_text(folder.result, result.to_json())
                self.result = result

    def _plan_in_words(self) -> str | None:
        """As the first replica told of it; None where it came to no plan, or each replica is one worker."""
        with suppress(PlanError):
            plan = Plan.load(self._folder.plan)
            return plan.in_words() if plan.ranks > 1 else None
        return None

    def _write_trace(self, replica: int, text: Tensor) -> None:
        """The traces of all replicas that sent theirs, as one: whoever is lost before that is left out."""
        try:
            trace = Trace.from_chrome(json.loads(text.numpy().tobytes()))
        except ValueError as error:  # no reason to end the run
            self.log({"event": "warning", "text": f"the trace of replica {replica} cannot be read: {error}."})
            return
        config = self._config
        title = f"{config.model}, {config.replicas} replicas, {self._about.exchange}, plan {config.plan}"
        with self._tracing, self._folder.writing(self._folder.trace):
            self._traces[replica] = trace
            whole = together((self._traces[number] for number in sorted(self._traces)), title)
            whole.from_zero().save(self._folder.trace)

    def _write_text(self, path: Path, text: str) -> None:
        with self._folder.writing(path):
            write_text_atomically(path, text)

    def _write_bytes(self, path: Path, content: Tensor) -> None:
        with self._folder.writing(path):
            write_atomically(path, lambda draft: draft.write_bytes(content.numpy().tobytes()))

    def close(self) -> None:
        """Nothing more is logged."""
        self._metrics.close()

    def _write_checkpoint(self, effect: WriteCheckpoint, length: int, state: Tensor) -> None:
        how_far = effect.how_far
        progress = Progress(
            position=how_far.position,
            steps=how_far.counted,
            losses=torch.zeros(2, dtype=torch.float64),
            last_loss=how_far.last_loss,
            step_seconds=list(how_far.step_seconds),
            wall_seconds=how_far.wall_seconds,
            metrics_length=length,
            tested=how_far.tested,
            best=how_far.best,
        )
        checkpoint.write(
            self._folder.checkpoint,
            self._config,
            torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True),
            progress,
            losses=[[0.0, 0.0]],
            more={
                "again": list(how_far.again),
                "train_seconds": how_far.train_seconds,
                "replicas": how_far.scores,
                "events": [dict(event) for event in how_far.events],
                "own": dict(effect.own),
            },
        )
        self._folder.keep_own_states(effect.own)


def read_past(content: Mapping[str, Any]) -> HowFar:
    """How far the run was whose checkpoint this is."""
    return HowFar(
        counted=content["steps"],
        again=tuple(content.get("again", ())),
        wall_seconds=content["wall_seconds"],
        train_seconds=content.get("train_seconds", 0.0),
        last_loss=content["last_loss"],
        step_seconds=tuple(content["step_seconds"].tolist()),
        tested=content["tested"],
        scores=content.get("replicas", {}),
        events=tuple(content.get("events", ())),
        best=Best.from_dict(content["best"]),
    )
