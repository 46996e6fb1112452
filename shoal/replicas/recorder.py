"""The files of a run of replicas, and nothing else of it: lines of metrics, checkpoint, plan, weights, result."""

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
from shoal.replicas.bundle import unpacked
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
from shoal.result import RunResult, versions
from shoal.timeline import Trace
from shoal.tracing.merge import together
from shoal.training.best import Best
from shoal.training.checkpoints.carry_over import settings_saved
from shoal.training.checkpoints.folder import Checkpoint, Draft, new_token
from shoal.training.checkpoints.progress import Progress, nan_for_none
from shoal.training.checkpoints.restoring import done_before, settings_before, step_seconds
from shoal.training.checkpoints.saving import write_state
from shoal.training.checkpoints.tensor_files import view_of
from shoal.training.listener import About
from shoal.training.metrics import MetricsFile
from shoal.training.numbering import Numbering
from shoal.training.outcome import result_of
from shoal.training.run_folder import RunFolder


class Recorder:
    """Writes what it is told to into `folder`. `length`: bytes of metrics that belong to earlier parts of the run.

    `spared`: the checkpoint that the run goes on from, which a replica may read late: it stays, beside the newest.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig,
        about: About,
        *,
        length: int = 0,
        spared: Checkpoint | None = None,
    ) -> None:
        self._folder, self._config, self._about, self._spared = folder, config, about, spared
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
        self._token, self._plan = new_token(), "null"
        self._drafting = threading.Lock()
        self._drafts: dict[int, Draft] = {}
        """The checkpoint for which replicas hand in what they have of their own, by its moment."""

    def log(self, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        self._folder.check_there()
        with self._folder.writing(self._folder.metrics):
            self._metrics.write(**values)

    def note_first_step(self) -> None:
        """Of this part of the run."""
        self._folder.note_step_after_restart()

    def note_replaced(self, replica: int) -> None:
        """In its place another is started."""
        self._folder.note_replaced(replica)

    def mark(self, replica: int) -> None:
        """What was logged so far belongs to what this replica saves."""
        self._marks[replica] = self._metrics.length

    def write(self, effect: ForFiles, buffers: Sequence[Tensor]) -> None:
        """A file, from what a replica sent: its state, then the weights alone."""
        folder = self._folder
        folder.check_there()
        match effect:
            case WritePlan():
                self._plan = effect.text
                self._write_text(folder.plan, effect.text)
            case WriteTrace():
                self._write_trace(effect.replica, buffers[0])
            case WriteOwn():
                with folder.writing(folder.checkpoints.path):
                    _write_files(self._draft(effect.moment), buffers[0])
            case WriteBest():
                self._write_bytes(folder.best, buffers[-1])
            case WriteCheckpoint():
                with folder.writing(folder.checkpoints.path):
                    self._write_checkpoint(effect, self._marks[effect.replica], buffers[0])
            case WriteResult():
                self._write_bytes(folder.weights, buffers[-1])
                about = replace(self._about, plan_in_words=self._plan_in_words())
                measured = replace(effect.measured, went_on=tuple(folder.went_on))
                result = result_of(self._config, about, effect.tested, measured)
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
        """Nothing more is logged; what was handed in for a checkpoint that never came is removed."""
        self._metrics.close()
        with self._drafting:
            for draft in self._drafts.values():
                draft.discard()

    def _draft(self, moment: int) -> Draft:
        """The checkpoint of this moment; what was handed in for another is not needed any more."""
        with self._drafting:
            for other in [other for other in self._drafts if other != moment]:
                self._drafts.pop(other).discard()
            if moment not in self._drafts:
                self._drafts[moment] = Draft(self._folder.checkpoints, f"moment-{moment}", self._token)
            return self._drafts[moment]

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
            summed=[len(how_far.epoch_losses), 0],
            tested=how_far.tested,
            best=how_far.best,
            repeated=how_far.samples_repeated,
        )
        draft = self._draft(next(iter(effect.own.values()), how_far.counted))
        try:
            self._fill(draft, effect, progress, state)
            with self._drafting:
                self._drafts.clear()
            draft.commit(how_far.counted)
        except BaseException:
            draft.discard()  # on a full disk it would keep it full
            raise
        self._folder.checkpoints.keep(self._config.keep, self._spared)

    def _fill(self, draft: Draft, effect: WriteCheckpoint, progress: Progress, state: Tensor) -> None:
        how_far, options = effect.how_far, self._config.exchange_settings()
        common = _write_files(draft, state)
        content = {
            "config": settings_saved(self._config),
            "plan": json.loads(self._plan),
            "ranks": self._config.workers // self._config.replicas,
            "train_samples": self._about.train_samples,
            "versions": versions(),
            "progress": progress.to_dict([[sum(how_far.epoch_losses), 0.0]]),
            "epoch_losses": list(how_far.epoch_losses),
            "again": list(how_far.again),
            "train_seconds": how_far.train_seconds,
            "replicas": how_far.scores,
            "events": [dict(event) for event in how_far.events],
            "own": sorted(effect.own),
            "own_of_replicas": [options.own_in_words] if options is not None and effect.own else [],
            **common,
        }
        write_state(draft, content, progress.step_seconds)


COMMON = "common.json"
"""Of the files that a replica sends, the one whose content goes into the state of the checkpoint."""


def _write_files(draft: Draft, message: Tensor) -> dict[str, Any]:
    """Write the files that a replica sent; what is common is returned."""
    common: dict[str, Any] = {}
    for name, content in unpacked(view_of(message)).items():
        if name == COMMON:
            common = json.loads(bytes(content))
        else:
            draft.write_bytes(name, content)
    return common


def read_past(checkpoint: Checkpoint, state: Mapping[str, Any], config: TrainConfig, train_samples: int) -> HowFar:
    """How far the run was whose checkpoint this is, counted as a run with these settings does."""
    saved = state["progress"]
    done, repeated = done_before(state, config, train_samples)
    before, now = (Numbering.of(each, train_samples) for each in (settings_before(state), config))
    losses = tuple(state["epoch_losses"]) if "epoch_losses" in state else _even_losses(saved)
    if before != now:
        count = done.counted % now.per_epoch
        losses = (sum(losses) / len(losses),) * count if losses else ()
    return HowFar(
        counted=done.counted,
        again=done.again,
        wall_seconds=saved["wall_seconds"],
        train_seconds=state.get("train_seconds", 0.0),
        last_loss=nan_for_none(saved["last_loss"]),
        epoch_losses=losses,
        step_seconds=tuple(step_seconds(checkpoint)),
        tested=now.at(before.before(saved["tested"])),
        scores={int(number): score for number, score in state.get("replicas", {}).items()},
        events=tuple(state.get("events", ())),
        best=Best.from_dict(saved["best"]),
        samples_repeated=saved["repeated"] + repeated,
    )


def _even_losses(saved: Mapping[str, Any]) -> tuple[float, ...]:
    """Of a run without replicas, which has their sum alone."""
    total, count = sum(nan_for_none(row[0]) for row in saved["losses"]), saved["summed"][0]
    return (total / count,) * count if count else ()
