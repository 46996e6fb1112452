"""Train a network that is prepared, to `result.json`; the same loop on one rank and on each of many.

    [ step ... step, test ]  per epoch  ->  result
        \\ metrics.jsonl       \\ checkpoints/

Same settings, same machine, same thread count: same weights, bit for bit, also when the run was stopped
and resumed at any step in between. Of many ranks, rank 0 writes all files and tells the listener; all take the
same decisions.
"""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from shoal.data import Position
from shoal.errors import DivergedError, StoppedError
from shoal.files import write_atomically, write_text_atomically
from shoal.launching import tell_stage
from shoal.result import BytesPerStep, RunResult
from shoal.tracing.recording import Recording
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.saving import Saver
from shoal.training.evaluate import Evaluation, evaluate
from shoal.training.interrupt import StopSignal
from shoal.training.job import Job
from shoal.training.last_words import LastWords
from shoal.training.learning_rate import rate_at
from shoal.training.learns import how_to_step_less, stopped_learning
from shoal.training.listener import About, Listener
from shoal.training.metrics import MetricsFile, line_of_steps, line_of_test, lines_are_missing
from shoal.training.network import SAVE, STOP
from shoal.training.out_of_memory import out_of_memory, peak_bytes
from shoal.training.outcome import Measured, describe, inference_of, result_of
from shoal.training.run_folder import RunFolder
from shoal.training.step import autocast, train_step
from shoal.training.weights import save_weights

TRAINING = "have begun to train"
"""What a rank has done when it can be asked to stop in good order."""


class Run:
    """A job on its way through its folder. Made once, completed once; on several ranks, by all of them."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        progress: Progress,
        listener: Listener,
        saver: Saver,
        told: Sequence[str] = (),
    ) -> None:
        """`told`: what people should know of how it goes on."""
        self.job = job
        self.folder = folder
        self.progress = progress
        self.listener = listener
        self._saver, self._told = saver, told
        self._begun = time.perf_counter() - progress.wall_seconds
        self._first_step = progress.steps
        self._saved_at = time.monotonic()
        self._goes_on = job.network.rank == 0 and job.config.goes_on_by_itself and folder.restarts > 0
        """Whether it is yet to be noted that the run goes on after a loss."""
        self._last_words = LastWords(job, folder) if job.config.goes_on_by_itself and job.network.ranks > 1 else None
        steps = job.config.traced_steps(progress.steps, job.total_steps)
        self._recording = Recording(job.network.transport, steps, job.network.plain) if steps else None

    def complete(self) -> RunResult:
        """Train and test what is left of the run, write its result and tell the listener.

        Where another rank is lost, and somebody goes on without it: before this one ends it saves what it has, if it
        has all of it and is asked to.
        """
        try:
            return self._complete()
        except Exception as error:
            if self._last_words is not None:
                self.progress.wall_seconds = time.perf_counter() - self._begun
                self._last_words.after(error, self.progress)
            raise

    def _complete(self) -> RunResult:
        try:
            result = self._train_and_test()
            self.listener.finished(result, self.folder)
        except (RuntimeError, MemoryError) as error:
            told = out_of_memory(error, self.job.config)
            if told is None:
                raise
            raise told from error
        finally:
            self._saver.close()
            self.listener.ended()
        return result

    def _train_and_test(self) -> RunResult:
        job, progress = self.job, self.progress
        with StopSignal() as stop, self._open_metrics() as metrics:
            tell_stage(TRAINING)
            self.listener.started(self._about(), self.folder)
            told = [*job.config.decided(), *job.told] if progress.steps == 0 else [*self._told]
            if metrics.lacks_lines:
                told.append(lines_are_missing(progress.steps))
            for text in told:
                self._write(metrics, event="warning", text=text)
            tested: Evaluation | None = None
            while progress.position.epoch < job.config.epochs:
                self._train_epoch(metrics, stop)
                tested = self._test(metrics, stop) if self._test_is_due() else None
                self._end_epoch(metrics)
                if self._stops_early:
                    self._write(metrics, event="warning", text=progress.best.told())
                    break
            if self._recording is not None:  # the run had fewer steps than were to be recorded
                self._end_recording(metrics)
            result = self._result(tested or self._evaluate(metrics, stop))
            if self._keeps_files:
                self.folder.check_there()
            self._save_weights(self.folder.weights)
            self._saver.finish()
            job.network.gather([])  # a result is there when all that belongs to it is
            if self._keeps_files:
                with self.folder.writing(self.folder.result):
                    write_text_atomically(self.folder.result, result.to_json())
        return result

    def _save_weights(self, path: Path) -> None:
        """Write the weights that are tested, as they are now."""
        with self.job.tested():
            whole = self.job.network.whole()
            if whole is not None:
                inference = inference_of(self.job.config, self.job.splits)
                with self.folder.writing(path):
                    write_atomically(path, lambda draft: save_weights(whole, draft, inference))

    def _open_metrics(self) -> MetricsFile:
        path = self.folder.metrics if self._keeps_files else None
        with self.folder.writing(self.folder.metrics):
            return MetricsFile(path, length=self.progress.metrics_length)

    def _about(self) -> About:
        job = self.job
        return describe(
            job.config,
            job.splits,
            parameters=job.network.parameters,
            steps_per_epoch=job.steps_per_epoch,
            plan=job.network.plan,
            device=str(job.device),
            done=self.progress.steps,
            own_loss=job.own.loss is not None,
        )

    @property
    def _keeps_files(self) -> bool:
        return self.job.network.rank == 0

    @property
    def _warmup_steps(self) -> int:
        return round(self.job.config.warmup * self.job.steps_per_epoch)

    def _train_epoch(self, metrics: MetricsFile, stop: StopSignal) -> None:
        """From the position to the end of its epoch. The loop that has to be as fast as a bare one."""
        job, progress, config = self.job, self.progress, self.job.config
        epoch, start = progress.position.epoch, progress.position.step
        steps_per_epoch, accumulate = job.steps_per_epoch, config.accumulate
        self._test_between(metrics, stop)
        warmup_steps, before = self._warmup_steps, time.perf_counter()
        with closing(job.loader.epoch(epoch, start=start * accumulate)) as batches:
            for step in range(start, steps_per_epoch):
                rate = rate_at(
                    progress.steps,
                    peak=config.lr,
                    schedule=config.schedule,
                    warmup_steps=warmup_steps,
                    total_steps=job.total_steps,
                )
                diary = None if self._recording is None else self._recording.begin_step(progress.steps + 1)
                reading = time.perf_counter_ns()
                taken = list(islice(batches, accumulate))
                if diary is not None:
                    diary.note("data", "batch", reading)
                progress.losses += train_step(job, taken, rate=rate, sizes=job.sizes(step))
                progress.summed = [count + 1 for count in progress.summed]
                progress.steps += 1
                progress.position = Position(epoch, step + 1)
                if self._last_words is not None:
                    self._last_words.step_done()
                now = time.perf_counter()
                progress.step_seconds.append(now - before)
                if diary is not None:
                    diary.note_step(int(before * 1e9), int(now * 1e9))
                before = now
                if progress.steps == self._first_step + 1:
                    self._saver.prepare()
                if self._goes_on:
                    self._goes_on = False
                    self.folder.note_step_after_restart()
                self.listener.stepped(progress.steps, epoch)
                if (step + 1) % config.log_every == 0 or step + 1 == steps_per_epoch:
                    self._log_steps(metrics, rate)
                wishes = job.network.agreed(self._wishes(stop))
                if wishes & STOP:
                    self._interrupt(metrics)
                if self._save_is_due(wishes):
                    self._save(metrics)
                self._saver.check()
                if self._recording is not None and self._recording.ends_with(progress.steps):
                    self._end_recording(metrics)
                    before = time.perf_counter()
                if self._test_between(metrics, stop):
                    before = time.perf_counter()

    def _end_recording(self, metrics: MetricsFile) -> None:
        """Write what was recorded."""
        assert self._recording is not None
        config = self.job.config
        workers = f"{config.workers} worker{'s' if config.workers > 1 else ''}"
        recorded = self._recording.end(f"{config.model}, plan {self.job.network.plan.name}, {workers}")
        self._recording = None
        if recorded is not None and self._keeps_files:
            trace, missing = recorded
            with self.folder.writing(self.folder.trace):
                trace.from_zero().save(self.folder.trace)
            priced = self.job.network.price
            if priced is not None and priced.trace is not None:
                with self.folder.writing(self.folder.predicted_trace):
                    priced.trace.save(self.folder.predicted_trace)
            if missing is not None:
                self._write(metrics, event="warning", text=missing)

    def _log_steps(self, metrics: MetricsFile, rate: float) -> None:
        """One line for the steps since the last line."""
        progress, config = self.progress, self.job.config
        count = progress.summed[1]
        seconds = sum(progress.step_seconds[-count:])
        of_epoch, since_last = map(sum, zip(*self.job.network.gather(progress.losses.tolist()), strict=True))
        loss = since_last / count
        progress.losses[1], progress.summed[1] = 0, 0
        if self._last_words is not None:
            self._last_words.know(of_epoch, progress.summed[0])
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} in epoch {progress.position.epoch + 1}, by step {progress.steps}.",
                f"{how_to_step_less(config)} Or look for bad values in the data.",
            )
        samples = self.job.numbering.before(progress.steps)
        line = line_of_steps(
            epoch=progress.position.epoch + 1,
            step=progress.steps,
            loss=loss,
            lr=rate,
            steps=count,
            seconds=seconds,
            samples=samples,
            of_these_steps=samples - self.job.numbering.before(progress.steps - count),
        )
        self._write(metrics, **line)

    def _over_ranks(self, value: Tensor) -> float:
        return sum(number for (number,) in self.job.network.gather([value.item()]))

    def _test_is_due(self) -> bool:
        """At the end of an epoch."""
        done = self.progress.position.epoch + 1
        return done % self.job.config.eval_every == 0 or done == self.job.config.epochs or self._steps_ask_for_test()

    def _steps_ask_for_test(self) -> bool:
        every, steps = self.job.config.eval_steps, self.progress.steps
        return every is not None and steps % every == 0 and steps > self.progress.tested

    def _test_between(self, metrics: MetricsFile, stop: StopSignal) -> bool:
        """Test inside an epoch, if it is time for it, or a stop had cut it short; returns whether it was."""
        inside = 0 < self.progress.position.step < self.job.steps_per_epoch
        due = inside and self._steps_ask_for_test()
        if due:
            self._test(metrics, stop)
        return due

    def _test(self, metrics: MetricsFile, stop: StopSignal) -> Evaluation:
        tested = self._evaluate(metrics, stop)
        self.progress.tested = self.progress.steps
        self._keep_best(tested)
        line = line_of_test(
            tested,
            epoch=self.progress.position.epoch + 1,
            step=self.progress.steps,
            samples=self.job.numbering.before(self.progress.steps),
            train_seconds=sum(self.progress.step_seconds),
            wall_seconds=time.perf_counter() - self._begun,
        )
        self._write(metrics, **line)
        return tested

    def _keep_best(self, tested: Evaluation) -> None:
        progress = self.progress
        progress.best = progress.best.after(tested, epoch=progress.position.epoch + 1, step=progress.steps)
        if progress.best.since == 0:
            self._save_weights(self.folder.best)

    @property
    def _stops_early(self) -> bool:
        """Whether the tests get no better, at the end of an epoch that is not the last."""
        progress, config = self.progress, self.job.config
        return progress.best.stops(config.patience) and progress.position.epoch < config.epochs

    def _evaluate(self, metrics: MetricsFile, stop: StopSignal) -> Evaluation:
        job, diary = self.job, self.job.network.transport.diary
        begun = time.perf_counter_ns()
        with job.tested():
            tested = evaluate(
                job.network,
                job.splits.test,
                batch=job.config.batch,
                device=job.device,
                criterion=job.own.loss_on(job.device),
                stop=lambda: bool(job.network.agreed(STOP if stop else 0) & STOP),
            )
        if diary is not None:
            diary.note("test", "all of the test set" if tested else "a part of the test set", begun)
        return tested or self._interrupt(metrics)

    def _end_epoch(self, metrics: MetricsFile) -> None:
        progress = self.progress
        before = progress.last_loss
        progress.last_loss = self._over_ranks(progress.losses[0]) / progress.summed[0]
        progress.losses.zero_()
        progress.summed = [0, 0]
        if self._last_words is not None:
            self._last_words.know(0.0, 0)
        progress.position = Position(progress.position.epoch + 1, 0)
        told = stopped_learning(
            progress.last_loss,
            self._about(),
            before=before,
            epoch=progress.position.epoch,
            steps=progress.steps - self._warmup_steps,
            remedy=how_to_step_less(self.job.config),
        )
        if told is not None:
            self._write(metrics, event="warning", text=told)
        last = progress.position.epoch == self.job.config.epochs or self._stops_early
        epochs = self.job.config.checkpoint_every.every("epochs")
        if last or (epochs is not None and progress.position.epoch % epochs == 0):
            self._save(metrics)

    def _wishes(self, stop: StopSignal) -> int:
        """What this rank wishes; of the time from one checkpoint to the next, rank 0's clock decides."""
        every = self.job.config.checkpoint_every
        late = every.unit == "minutes" and time.monotonic() - self._saved_at >= 60 * every.count
        return (STOP if stop else 0) | (SAVE if late and self._keeps_files else 0)

    def _save_is_due(self, wishes: int) -> bool:
        """After a step: by the number of steps, or because it was wished."""
        steps = self.job.config.checkpoint_every.every("steps")
        return bool(wishes & SAVE) or (steps is not None and self.progress.steps % steps == 0)

    def _interrupt(self, metrics: MetricsFile) -> NoReturn:
        if self._recording is not None:
            self._end_recording(metrics)
        self._save(metrics)
        self._saver.finish()
        if self._keeps_files:
            self.folder.check_there()
        self.job.network.gather([])  # whoever started the ranks may end them all when the first has left
        position, config = self.progress.position, self.job.config
        raise StoppedError(
            f"stopped in epoch {position.epoch + 1} of {config.epochs}, after step {position.step} of "
            f"{self.job.steps_per_epoch}. All files are whole.",
            f"Go on with: {self.folder.how_to_go_on}",
        )

    def _save(self, metrics: MetricsFile) -> None:
        if self._keeps_files:
            self.folder.check_there()
        self.progress.metrics_length = metrics.length
        self.progress.wall_seconds = time.perf_counter() - self._begun
        sent, steps = self._sent()
        self._saver.save(replace(self.progress, sent_bytes=sent, sent_steps=steps))
        self._saved_at = time.monotonic()

    def _sent(self) -> tuple[int, int]:
        """What all ranks sent in training steps under this plan, and in how many steps."""
        here = sum(int(number) for (number,) in self.job.network.gather([self.job.network.bytes_sent()]))
        progress = self.progress
        return progress.sent_bytes + here, progress.sent_steps + progress.steps - self._first_step

    def _write(self, metrics: MetricsFile, **values: object) -> None:
        if self._keeps_files:
            self.folder.check_there()
            with self.folder.writing(self.folder.metrics):
                metrics.write(**values)
            self.listener.logged(values)

    def _result(self, tested: Evaluation) -> RunResult:
        """What the run did, as all ranks know it."""
        config, progress, network = self.job.config, self.progress, self.job.network
        sent, steps = self._sent()
        with autocast(self.job):  # what is sent is in its precision
            own = [network.bytes_per_step(config.accumulate), peak_bytes(self.job.device)]
        predicted, peaks = zip(*(map(int, row) for row in network.gather(own)), strict=True)
        samples = self.job.numbering.before(progress.steps)
        uneven = samples != progress.steps * config.samples_per_step  # of which the prediction is not
        measured = Measured(
            epochs=progress.position.epoch,
            best=progress.best.test,
            stopped_early=self._stops_early,
            steps=progress.steps,
            samples=samples,
            left_out=progress.steps
            // self.job.steps_per_epoch
            * (len(self.job.splits.train) - self.job.numbering.samples),
            repeated=progress.repeated,
            went_on=tuple(self.folder.went_on),
            final_loss=progress.last_loss,
            step_seconds_median=statistics.median(progress.step_seconds),
            samples_per_second=samples / sum(progress.step_seconds),
            bytes_per_step=BytesPerStep(
                predicted=None if uneven else sum(predicted), counted=round(sent / steps) if steps else 0
            )
            if network.counts_bytes
            else BytesPerStep(predicted=None, counted=None),
            peak_memory_bytes=peaks,
            wall_seconds=time.perf_counter() - self._begun,
            step_seconds_predicted=None if network.price is None else network.price.seconds,
        )
        return result_of(config, self._about(), tested, measured)
