"""The process that starts a run of replicas also conducts it: who trains on what, what is written, when it ends.

    replica ──"next"──▶ Conductor ──▶ batch | test | wait | stop
    replica ──"tested"──▶ metrics.jsonl, checkpoint.pt; at the end result.json, model.safetensors

It computes nothing itself, so that no replica is needed for the run to go on. Its state changes under one lock, the
coordinator's.
"""

import io
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.config import TrainConfig
from shoal.data import Position
from shoal.errors import DivergedError, PeerError, RunError, ShoalError, StoppedError
from shoal.exchanges import Dasgd, ExchangeOptions, Served
from shoal.exchanging import Event, Meeting, MeetingPlace, Member
from shoal.files import write_atomically, write_text_atomically
from shoal.linking import Frame
from shoal.result import BytesPerStep, ExchangeReport, RunResult, Staleness, versions
from shoal.training.budget import Budget, LockstepBudget, SharedBudget
from shoal.training.checkpoint import SCHEMA
from shoal.training.folder import RunFolder
from shoal.training.learning_rate import rate_at
from shoal.training.listener import About, Listener
from shoal.training.metrics import MetricsFile
from shoal.training.scores import Scores


@dataclass
class Past:
    """What an earlier part of a resumed run did."""

    counted: int = 0
    again: tuple[int, ...] = ()
    metrics_length: int = 0
    wall_seconds: float = 0.0
    last_loss: float = float("nan")
    step_seconds: tuple[float, ...] = ()
    tested: int = 0
    scores: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What `Scores.saved` gave."""
    events: tuple[dict[str, Any], ...] = ()


class Conductor:
    """Conducts one run, whose replicas ask it at `meeting`."""

    def __init__(
        self,
        config: TrainConfig,
        options: ExchangeOptions,
        about: About,
        folder: RunFolder,
        listener: Listener,
        past: Past,
        *,
        held: tuple[str, int],
        host: str,
        store: tuple[str, int],
    ) -> None:
        self._config, self._options, self._about = config, options, about
        self._folder, self._listener, self._past = folder, listener, past
        self._steps_per_epoch = about.steps_per_epoch
        self._total = config.epochs * about.steps_per_epoch
        self._budget: Budget = self._make_budget()
        self._scores = Scores(past.scores)
        self._begun = time.perf_counter() - past.wall_seconds
        self._wall = time.time()
        self._losses: list[float] = []
        self._epoch_losses: list[float] = []
        self._last_loss = past.last_loss
        self._logged = past.counted
        self._logged_at = time.perf_counter()
        self._started = False
        self._tested = min(past.tested, config.epochs - 1)
        """Epochs that need no test any more."""
        self._testing: tuple[int, int] | None = None
        """The replica that tests now, and after how many epochs."""
        self._settled: dict[int, dict[str, Any]] = {}
        """How far the run was when a replica took the weights that it tests."""
        self._stopping = False
        self._stop_at = 0
        """In lockstep: the batch that all replicas reach before they stop."""
        self._saved_stop = False
        self._stop_saver: int | None = None
        self.error: ShoalError | None = None
        self.result: RunResult | None = None
        self._metrics = MetricsFile(folder.metrics, length=past.metrics_length)
        self._history: list[Event] = []
        self._frozen: dict[int, float] = {}
        """Replicas that give no sign of life, and since when they have been taken for frozen."""
        self._place = MeetingPlace(
            options,
            config.replicas,
            held,
            host=host,
            store=store,
            timeout=config.timeout,
            answer=self._answer,
            on_event=self._on_event,
            on_error=self._on_error,
        )
        self._coordinator = self._place.coordinator
        self._changed = self._coordinator.changed

    def _make_budget(self) -> Budget:
        if self._options.lockstep:
            return LockstepBudget(self._total, self._config.replicas, start=self._past.counted)
        warm = self._options.warm_start if isinstance(self._options, Served) else 0
        start = self._past.counted + len(self._past.again)
        return SharedBudget(self._total, warm=warm, start=start, again=self._past.again)

    # What the process that started the run asks and tells

    @property
    def over(self) -> bool:
        """Whether replicas need not go on: the result is there, the run failed, or it was stopped in good order."""
        return self.result is not None or self.error is not None or self._saved_stop

    def stop(self) -> None:
        """The user asked for it: let one replica save, then all leave."""
        with self._changed:
            if not self._stopping:
                self._stopping = True
                self._stop_at = max(self._budget.handed(replica) for replica in range(self._config.replicas))

    @property
    def meeting(self) -> Meeting:
        """Where replicas find this run."""
        return self._place.meeting

    def start_servers(self) -> None:
        """If the weights are in processes of their own."""
        self._place.start_servers(on_end=self._server_ended)

    def _server_ended(self, number: int) -> None:
        with self._changed:
            self._lose_server(number)

    def lost(self, replica: int, what: str) -> None:
        """A replica's processes ended; its links say so too, but not why."""
        with self._changed:
            self._write(event="ended", replica=replica, why=what)
            self._coordinator.drop(replica)

    def close(self) -> None:
        """End the meeting place, with all its processes, and the metrics."""
        self._place.close()
        self._metrics.close()

    def warn(self, text: str) -> None:
        """Something that the user should know before it happens."""
        with self._changed:
            self._write(event="warning", text=text)

    def wait_for_all(self, seconds: float) -> None:
        """Until every replica has left or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coordinator.active(), timeout=seconds)

    def ended(self) -> RunResult:
        """The result; or why there is none."""
        if self.result is not None:
            return self.result
        if self.error is not None:
            raise self.error
        if self._saved_stop:
            raise self._stopped()
        raise RunError("all replicas left before the run was over.", "Look at their messages above.")

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"stopped after {self._budget.counted} of {self._total} batches. All files are whole.",
            f"Go on with: shoal train --resume {self._folder.path}",
        )

    # What replicas ask

    def _answer(self, member: Member, frame: Frame) -> tuple[Mapping[str, Any], list[Any]]:
        replica, done = member.replica, frame.head.get("done")
        with self._changed:
            if done is not None:
                self._note(replica, done)
            match frame.head["ask"]:
                case "next":
                    if frame.head["stop"] and replica >= self._config.replicas:  # somebody lent it and wants it back
                        return {"order": "stop"}, []
                    if frame.head["stop"]:
                        self.stop()
                    return self._order(replica), []
                case "settling":
                    self._settled[replica] = self._how_far()
                    return {}, []
                case "plan":
                    write_text_atomically(self._folder.plan, frame.head["plan"])
                    return {}, []
        if frame.head["ask"] == "tested":  # outside: files are written while others ask
            self._note_test(replica, frame)
            return {}, []
        raise RunError(f"replica {member.replica} asked {frame.head['ask']!r}.", "This is a bug: please report it.")

    def _order(self, replica: int) -> dict[str, Any]:
        if not self._options.survives:
            self._give_up_on_frozen()
        if self.over:
            return {"order": "stop"}
        if self._stopping:
            return self._order_to_stop(replica)
        due = self._test_due()
        if due is not None and self._testing is None and self._may_test(replica):
            self._testing = replica, due
            self._coordinator.rest(replica, resting=True)
            last = due == self._config.epochs
            save = last or due % self._config.checkpoint_every == 0
            evaluate = last or due % self._config.eval_every == 0
            return {"order": "test", "after": due, "save": save, "last": last, "evaluate": evaluate}
        if due is not None and (self._in_step or due == self._config.epochs):
            return {"order": "wait"}
        if self._in_step and self._at_barrier(replica):
            return {"order": "wait"}
        return self._order_batch(replica)

    def _order_batch(self, replica: int) -> dict[str, Any]:
        number = self._budget.take(replica)
        self._coordinator.rest(replica, resting=number is None)
        if number is None:
            return {"order": "wait"}
        if not self._started:  # the clock runs from the first step, as it does without replicas
            self._started = True
            self._logged_at = time.perf_counter()
            self._begun = self._logged_at - self._past.wall_seconds
        epoch, step = divmod(number, self._steps_per_epoch)
        return {"order": "batch", "number": number, "epoch": epoch, "step": step, "rate": self._rate(number)}

    @property
    def _in_step(self) -> bool:
        """Whether the end of an epoch is the same moment for all: then tests come exactly there."""
        return self._options.lockstep or self._config.replicas == 1

    def _at_barrier(self, replica: int) -> bool:
        """Whether a replica has all batches of an epoch that is not finished."""
        handed = self._budget.handed(replica)
        return handed > 0 and handed % self._steps_per_epoch == 0 and self._budget.counted < handed

    def _order_to_stop(self, replica: int) -> dict[str, Any]:
        """Replicas in lockstep come to the same batch first; then one saves, and all leave."""
        if self._options.lockstep and self._budget.handed(replica) < self._stop_at:
            return self._order_batch(replica)
        self._coordinator.rest(replica, resting=True)
        if self._options.lockstep and self._budget.counted < self._stop_at:
            return {"order": "wait"}
        if not self._budget.counted:
            self._saved_stop = True  # nothing was done yet
            return {"order": "stop"}
        if self._testing is None and self._stop_saver is None and self._may_test(replica):
            self._stop_saver = replica
            return {"order": "test", "after": 0, "save": True, "last": False, "evaluate": False}
        return {"order": "wait"}

    def _may_test(self, replica: int) -> bool:
        """Running statistics of batch norm are the tester's own: it must have about as many as any other."""
        steps = {number: self._trained(number) for number in self._coordinator.active()}
        return 2 * steps.get(replica, 0) >= max(steps.values(), default=0)

    def _trained(self, replica: int) -> int:
        """Steps behind a replica's statistics; all but late ones begin with those of the checkpoint."""
        before = self._past.counted if replica < self._config.replicas else 0
        return before + self._scores.steps_here(replica)

    def _rate(self, number: int) -> float:
        config = self._config
        return rate_at(
            number,
            peak=config.lr,
            schedule=config.schedule,
            warmup_steps=round(config.warmup * self._steps_per_epoch),
            total_steps=self._total,
        )

    def _test_due(self) -> int | None:
        """Epochs after which a test is due now."""
        finished = min(self._budget.counted // self._steps_per_epoch, self._config.epochs)
        for epochs in range(self._tested + 1, finished + 1):
            if (
                epochs % self._config.eval_every == 0
                or epochs == self._config.epochs
                or epochs % self._config.checkpoint_every == 0
            ):
                return epochs
        return None

    # What replicas tell

    def _note(self, replica: int, done: Mapping[str, Any]) -> None:
        self._scores.note(replica, done, time.perf_counter())
        for step in done["steps"]:
            self._note_step(replica, step, applied=done["applied"])

    def _note_step(self, replica: int, step: Mapping[str, Any], *, applied: bool) -> None:
        number, loss = step["number"], step["loss"]
        if not math.isfinite(loss):
            self._diverge(f"the loss of replica {replica} became {loss} by batch {number} of {self._total}.")
            return
        before = self._budget.counted
        self._budget.done(replica, number, applied=applied)
        if applied:
            self._losses.append(loss)
            self._epoch_losses.append(loss)
        counted = self._budget.counted
        if counted == before:
            return
        self._listener.stepped(counted, counted // self._steps_per_epoch)
        if (
            counted // self._config.log_every > self._logged // self._config.log_every
            or counted % self._steps_per_epoch == 0
        ):
            self._log()
        if counted % self._steps_per_epoch == 0:
            self._last_loss = statistics.fmean(self._epoch_losses)
            self._epoch_losses = []

    def _diverge(self, problem: str) -> None:
        remedy = f"Lower the rate (--lr, now {self._config.lr}) or --momentum, add --warmup, or warm_start."
        self._fail(DivergedError(problem, remedy))

    def _log(self) -> None:
        counted, now = self._budget.counted, time.perf_counter()
        seconds, steps = now - self._logged_at, counted - self._logged
        staleness = self._staleness()
        self._write(
            event="steps",
            epoch=min(self._config.epochs, counted // self._steps_per_epoch + 1),
            step=counted,
            loss=statistics.fmean(self._losses) if self._losses else None,
            lr=self._rate(min(counted, self._total - 1)),
            samples_per_sec=steps * self._samples_per_batch / seconds,
            step_time_ms=1000 * seconds / max(steps, 1),
            active=self._coordinator.active(),
            dropped=self._scores.total("dropped"),
            staleness_mean=None if staleness is None else staleness.mean,
            staleness_histogram=None if staleness is None else staleness.histogram,
            updates={number: score.tally.updates for number, score in self._scores},
            wait_seconds={number: round(score.tally.wait_seconds, 3) for number, score in self._scores},
            sent_bytes=self._scores.total("sent_bytes"),
            received_bytes=self._scores.total("received_bytes"),
            spread=self._scores.spread(),
        )
        self._losses, self._logged, self._logged_at = [], counted, now

    @property
    def _samples_per_batch(self) -> int:
        return self._config.batch if self._options.lockstep else self._config.replica_batch

    def _note_test(self, replica: int, frame: Frame) -> None:
        """A replica tested or saved, or both. Files are written without holding up the others."""
        found, after = frame.head["found"], frame.head["after"]
        with self._changed:
            stopping = after == 0 and self._stop_saver == replica
            if not stopping and self._testing != (replica, after):  # it was thought gone, and another does it
                return
            settled = self._settled[replica]
        if found is not None and not math.isfinite(found["loss"]):
            self._diverge(f"the loss of the common weights became {found['loss']} after {settled['steps']} batches.")
            return
        if found is not None:
            with self._changed:
                self._write(
                    event="test",
                    epoch=after,
                    step=settled["steps"],
                    replica=replica,
                    test_loss=found["loss"],
                    test_accuracy=found["accuracy"],
                    wall_seconds=time.perf_counter() - self._begun,
                    **({} if found["iou"] is None else {"test_iou": found["iou"]}),
                )
                settled["metrics_length"] = self._metrics.length
        if frame.buffers:
            self._save(frame.buffers[0], {**settled, "tested": max(self._tested, after)})
        if after == self._config.epochs:
            weights = frame.buffers[1]
            write_atomically(self._folder.weights, lambda draft: draft.write_bytes(weights.numpy().tobytes()))
            with self._changed:
                result = self._result(found, frame.head["parameters"])
            write_text_atomically(self._folder.result, result.to_json())
            self.result = result
        with self._changed:
            self._saved_stop = self._saved_stop or stopping
            if not stopping:
                self._testing = None
                self._tested = max(self._tested, after)

    def _how_far(self) -> dict[str, Any]:
        """What a checkpoint says of the run, for weights that are taken now."""
        counted = self._budget.counted
        seconds = [*self._past.step_seconds, *self._scores.step_seconds]
        return {
            "position": Position(*divmod(counted, self._steps_per_epoch)).to_dict(),
            "steps": counted,
            "again": self._budget.left(),
            "last_loss": self._last_loss,
            "step_seconds": torch.tensor(seconds, dtype=torch.float64),
            "wall_seconds": time.perf_counter() - self._begun,
            "metrics_length": self._metrics.length,
            "replicas": self._scores.saved(),
            "events": self._events(),
        }

    def _save(self, state: torch.Tensor, settled: Mapping[str, Any]) -> None:
        content = {
            **torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True),
            "schema": SCHEMA,
            "config": self._config.model_dump(mode="json"),
            "losses": torch.zeros(1, 2, dtype=torch.float64),
            "sent_bytes": 0,
            "sent_steps": 0,
            **settled,
        }
        write_atomically(self._folder.checkpoint, lambda draft: torch.save(content, draft))

    # What happens to replicas and servers

    def _on_event(self, event: Event) -> None:
        self._history.append(event)
        seconds = time.perf_counter() - self._begun if self._started else 0.0
        who = {"server" if event.of_server else "replica": event.who}
        self._write(event=event.what.replace(" ", "_"), **who, step=self._budget.counted, wall_seconds=seconds)
        if event.what == "frozen":
            self._frozen[event.who] = time.monotonic()
        elif not event.of_server:
            self._frozen.pop(event.who, None)
        if event.what in ("lost", "frozen", "left"):
            self._budget.lose(event.who)
            if self._testing is not None and self._testing[0] == event.who:
                self._testing = None
            if self._stop_saver == event.who and not self._saved_stop:
                self._stop_saver = None
        told: str = event.what
        if self._place.kind == "threads" and event.who < self._place.servers and told in ("lost", "frozen", "back"):
            told = f"server {told}"  # it holds a part of the weights, and nobody goes on without that
        if told == "server lost":
            self._lose_server(event.who)
        self._listener.happened(told, event.who)

    def _give_up_on_frozen(self) -> None:
        """End a run that cannot go on without a frozen replica; others may wait for it here, not in a collective."""
        for replica, since in self._frozen.items():
            if time.monotonic() - since + self._options.heartbeat > self._config.timeout:
                self._fail(
                    PeerError(
                        f"replica {replica} gave no sign of life for {self._config.timeout:g} seconds.",
                        f"{self._go_on()} If it may be silent for longer, give a longer time-out (--timeout).",
                    )
                )

    def _go_on(self) -> str:
        if not self._folder.checkpoint.exists():
            return "There is no checkpoint yet: start it again."
        return f"Go on from the last checkpoint with: shoal train --resume {self._folder.path}"

    def _lose_server(self, number: int) -> None:
        if not self.over:
            self._fail(
                RunError(
                    f"server {number} was lost, and with it a part of the weights.",
                    self._go_on(),
                )
            )

    def _on_error(self, error: Exception) -> None:
        """Our own mistake, in a thread of the coordinator's."""
        with self._changed:
            found = RunError(
                f"the conductor failed: {type(error).__name__}: {error}.", "This is a bug: please report it."
            )
            found.__cause__ = error
            self._fail(found)

    def _fail(self, error: ShoalError) -> None:
        if self.error is None:
            self.error = error

    def _write(self, **values: object) -> None:
        self._metrics.write(**values)
        self._listener.logged(values)

    # The end

    def _staleness(self) -> Staleness | None:
        return None if self._options.lockstep else self._scores.staleness()

    def _events(self) -> list[dict[str, Any]]:
        """Who came, left, froze and was lost, in seconds of the whole run."""
        start = self._wall - self._past.wall_seconds
        here = [{"what": e.what, "who": e.who, "when": round(e.when - start, 3)} for e in self._history]
        return [*self._past.events, *here]

    def _result(self, found: Mapping[str, Any], parameters: int) -> RunResult:
        config = self._config
        per_batch, scores = self._samples_per_batch, self._scores
        counted_here = self._budget.counted - self._past.counted
        # In lockstep what one sends others receive; servers are no replicas, so with them both ways count.
        moved = scores.total("sent_bytes") + (0 if self._options.lockstep else scores.total("received_bytes"))
        return RunResult(
            model=config.model,
            data=self._about.data,
            plan=self._about.plan,
            exchange=self._options.name,
            workers=config.workers,
            replicas=config.replicas,
            seed=config.seed,
            epochs=config.epochs,
            steps=self._budget.counted,
            samples=self._budget.counted * per_batch,
            final_loss=self._last_loss,
            test_loss=found["loss"],
            test_accuracy=found["accuracy"],
            test_iou=found["iou"],
            step_seconds_median=scores.median_seconds(self._past.step_seconds),
            samples_per_second=counted_here * per_batch / max(scores.training_seconds, 1e-9),
            bytes_per_step=BytesPerStep(
                predicted=self._predicted_bytes(parameters), counted=round(moved / max(1, scores.total("steps")))
            ),
            peak_memory_bytes=[peak for _, score in scores for peak in score.peak_bytes],
            staleness=self._staleness(),
            exchanged=ExchangeReport(
                options=self._options.model_dump(mode="json"),
                servers=self._place.kind,
                replicas={number: score.report() for number, score in scores},
                repeated=self._budget.repeated,
                spread=scores.spread(),
                events=self._events(),
            ),
            wall_seconds=time.perf_counter() - self._begun,
            parameters=parameters,
            batch=config.batch,
            threads=config.threads or 0,
            device=self._about.device,
            origin=self._about.origin,
            versions=versions(),
        )

    def _predicted_bytes(self, parameters: int) -> int | None:
        """Float32 weights that cross between a replica and others per step.

        None where that depends on the values, or on who is late.
        """
        options, size = self._options, 4 * parameters
        if isinstance(options, Served):
            if self._place.kind == "direct":
                return 0
            if isinstance(options, Dasgd) and options.sparse != "none":
                return None
            return round(size / options.push_every + size / options.fetch_every)
        if options.lockstep:
            return round(2 * (self._config.replicas - 1) / self._config.replicas * size)
        return None if options.parts_of_batch(self._config.replicas) < self._config.replicas else 2 * size
