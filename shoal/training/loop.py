"""Train one network on one worker, from settings to `result.json`.

    prepare (job.py)  ->  [ step ... step, test ]  per epoch  ->  result
                             \\ metrics.jsonl        \\ checkpoint.pt

Same settings, same machine, same thread count: same weights, bit for bit, also when the run was stopped
and resumed at any step in between.
"""

import math
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_model
from torch import Tensor
from torch.nn import functional as F

from shoal.config import TrainConfig, read_recipe
from shoal.data import Position
from shoal.errors import CheckpointError, DivergedError, StoppedError
from shoal.files import write_atomically, write_text_atomically
from shoal.machine import peak_resident_bytes
from shoal.plan import data_parallel
from shoal.result import BytesPerStep, RunResult, versions
from shoal.training import checkpoint
from shoal.training.checkpoint import Progress
from shoal.training.evaluate import Evaluation, evaluate
from shoal.training.folder import RunFolder
from shoal.training.interrupt import StopSignal
from shoal.training.job import Job, prepare
from shoal.training.learning_rate import rate_at
from shoal.training.metrics import MetricsFile


class Listener:
    """Hears what a run does; override what you want to hear. Called often: be quick."""

    def started(self, job: Job, progress: Progress, folder: RunFolder) -> None:
        """Everything is checked; the first step comes next."""

    def stepped(self, progress: Progress) -> None:
        """One optimizer step is done."""

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """A line was written to `metrics.jsonl`."""

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        """`result.json` is written."""

    def ended(self) -> None:
        """Nothing more will be heard, whether the run finished, failed or was interrupted."""


def train(config: TrainConfig, listener: Listener | None = None) -> RunResult:
    """Run a new training as `config` says and write its folder.

    Raises `InputError` before anything is trained, `DivergedError` when the loss is no number, and
    `StoppedError` after Ctrl-C or SIGTERM, when all files are whole and a checkpoint is left.
    """
    job = prepare(config)
    folder = RunFolder.create(job.config)
    write_text_atomically(folder.config, job.config.to_yaml())
    data_parallel(job.config.workers).save(folder.plan)
    return _Run(job, folder, Progress.start(job.device), listener or Listener()).complete()


def resume(path: Path, changes: Mapping[str, Any], listener: Listener | None = None) -> RunResult:
    """Go on with the run in `path`, bit for bit as if it had never stopped.

    `changes` are settings given anew; those that the state so far depends on are refused. A finished run
    can go on only with more epochs.
    """
    folder = RunFolder.open(path)
    config = TrainConfig.parse({**read_recipe(folder.config), **changes, "out": path}, source="--resume: ")
    job = prepare(config)
    progress = checkpoint.restore(folder.checkpoint, job)
    if progress.position.epoch >= config.epochs and folder.result.exists():
        raise CheckpointError(
            f"--resume {str(path)!r}: that run has finished its {progress.position.epoch} epochs.",
            f"Ask for more with --epochs {progress.position.epoch + 5}, or start another run.",
        )
    write_text_atomically(folder.config, job.config.to_yaml())
    return _Run(job, folder, progress, listener or Listener()).complete()


def train_step(job: Job, x: Tensor, y: Tensor, *, rate: float) -> Tensor:
    """One step of SGD on one batch; returns its loss, detached and still on the device."""
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    job.optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(job.model(x.to(job.device)), y.to(job.device))
    torch.autograd.backward(loss)
    job.optimizer.step()
    return loss.detach()


class _Run:
    """A job on its way through its folder. Made once, completed once."""

    def __init__(self, job: Job, folder: RunFolder, progress: Progress, listener: Listener) -> None:
        self.job = job
        self.folder = folder
        self.progress = progress
        self.listener = listener
        self._begun = time.perf_counter() - progress.wall_seconds

    def complete(self) -> RunResult:
        """Train and test what is left of the run, write its result and tell the listener."""
        try:
            result = self._train_and_test()
            self.listener.finished(result, self.folder)
        finally:
            self.listener.ended()
        return result

    def _train_and_test(self) -> RunResult:
        job, progress = self.job, self.progress
        with (
            StopSignal() as stop,
            MetricsFile(self.folder.metrics, length=progress.metrics_length) as metrics,
        ):
            self.listener.started(job, progress, self.folder)
            tested: Evaluation | None = None
            while progress.position.epoch < job.config.epochs:
                self._train_epoch(metrics, stop)
                tested = self._test(metrics, stop) if self._test_is_due() else None
                self._end_epoch(metrics)
            result = self._result(tested or self._evaluate(metrics, stop))
            write_atomically(self.folder.weights, lambda draft: save_model(job.model, str(draft)))
            write_text_atomically(self.folder.result, result.to_json())
        return result

    def _train_epoch(self, metrics: MetricsFile, stop: StopSignal) -> None:
        """From the position to the end of its epoch. The loop that has to be as fast as a bare one."""
        job, progress, config = self.job, self.progress, self.job.config
        epoch, start = progress.position.epoch, progress.position.step
        steps_per_epoch = job.loader.order.steps_per_epoch
        warmup_steps = round(config.warmup * steps_per_epoch)
        before = time.perf_counter()
        with closing(job.loader.epoch(epoch, start=start)) as batches:
            for step, (x, y) in enumerate(batches, start=start):
                rate = rate_at(
                    progress.steps,
                    peak=config.lr,
                    schedule=config.schedule,
                    warmup_steps=warmup_steps,
                    total_steps=job.total_steps,
                )
                progress.losses += train_step(job, x, y, rate=rate)
                progress.steps += 1
                progress.position = Position(epoch, step + 1)
                now = time.perf_counter()
                progress.step_seconds.append(now - before)
                before = now
                self.listener.stepped(progress)
                if (step + 1) % config.log_every == 0 or step + 1 == steps_per_epoch:
                    self._log_steps(metrics, rate)
                if stop:
                    self._interrupt(metrics)

    def _log_steps(self, metrics: MetricsFile, rate: float) -> None:
        """One line for the steps since the last line."""
        progress, config = self.progress, self.job.config
        step = progress.position.step
        count = step % config.log_every or min(config.log_every, step)
        seconds = sum(progress.step_seconds[-count:])
        loss = progress.losses[1].item() / count
        progress.losses[1] = 0
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} in epoch {progress.position.epoch + 1}, by step {progress.steps}.",
                f"Lower the rate (--lr, now {config.lr}), add --warmup, or look for bad values in the data.",
            )
        self._write(
            metrics,
            event="steps",
            epoch=progress.position.epoch + 1,
            step=progress.steps,
            loss=loss,
            lr=rate,
            samples_per_sec=count * config.batch / seconds,
            step_time_ms=1000 * seconds / count,
        )

    def _test_is_due(self) -> bool:
        done = self.progress.position.epoch + 1
        return done % self.job.config.eval_every == 0 or done == self.job.config.epochs

    def _test(self, metrics: MetricsFile, stop: StopSignal) -> Evaluation:
        tested = self._evaluate(metrics, stop)
        self._write(
            metrics,
            event="test",
            epoch=self.progress.position.epoch + 1,
            step=self.progress.steps,
            test_loss=tested.loss,
            test_accuracy=tested.accuracy,
            **({} if tested.iou is None else {"test_iou": tested.iou}),
        )
        return tested

    def _evaluate(self, metrics: MetricsFile, stop: StopSignal) -> Evaluation:
        job = self.job
        tested = evaluate(
            job.model, job.splits.test, batch=job.config.batch, device=job.device, stop=lambda: bool(stop)
        )
        return tested or self._interrupt(metrics)

    def _end_epoch(self, metrics: MetricsFile) -> None:
        progress = self.progress
        progress.last_loss = progress.losses[0].item() / progress.position.step
        progress.losses.zero_()
        progress.position = Position(progress.position.epoch + 1, 0)
        last = progress.position.epoch == self.job.config.epochs
        if last or progress.position.epoch % self.job.config.checkpoint_every == 0:
            self._save(metrics)

    def _interrupt(self, metrics: MetricsFile) -> NoReturn:
        self._save(metrics)
        position, config = self.progress.position, self.job.config
        raise StoppedError(
            f"stopped in epoch {position.epoch + 1} of {config.epochs}, after step {position.step} of "
            f"{self.job.loader.order.steps_per_epoch}. All files are whole.",
            f"Go on with: shoal train --resume {self.folder.path}",
        )

    def _save(self, metrics: MetricsFile) -> None:
        self.progress.metrics_length = metrics.length
        self.progress.wall_seconds = time.perf_counter() - self._begun
        checkpoint.save(self.folder.checkpoint, self.job, self.progress)

    def _write(self, metrics: MetricsFile, **values: object) -> None:
        metrics.write(**values)
        self.listener.logged(values)

    def _result(self, tested: Evaluation) -> RunResult:
        config, progress = self.job.config, self.progress
        return RunResult(
            model=config.model,
            data=config.data,
            plan="data",
            exchange="none",
            workers=config.workers,
            replicas=1,
            seed=config.seed,
            epochs=config.epochs,
            steps=progress.steps,
            samples=progress.steps * config.batch,
            final_loss=progress.last_loss,
            test_loss=tested.loss,
            test_accuracy=tested.accuracy,
            test_iou=tested.iou,
            step_seconds_median=statistics.median(progress.step_seconds),
            samples_per_second=progress.steps * config.batch / sum(progress.step_seconds),
            bytes_per_step=BytesPerStep(predicted=0, counted=0),  # one rank: there is nobody to send to
            peak_memory_bytes=[_peak_memory(self.job.device)],
            staleness=None,
            wall_seconds=time.perf_counter() - self._begun,
            parameters=sum(p.numel() for p in self.job.model.parameters()),
            batch=config.batch,
            threads=torch.get_num_threads(),
            device=str(self.job.device),
            origin=self.job.splits.origin,
            versions=versions(),
        )


def _peak_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return peak_resident_bytes()
    return torch.accelerator.max_memory_allocated(device)
