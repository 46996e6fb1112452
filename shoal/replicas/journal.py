"""What a run of replicas did so far, for lines of metrics, checkpoints and the result. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from shoal.config import TrainConfig
from shoal.data import Position
from shoal.exchanges import ExchangeOptions
from shoal.exchanging.membership.coordinator import What
from shoal.replicas.effects import HowFar
from shoal.replicas.orders import StepsDone
from shoal.replicas.scores import Scores
from shoal.result import BytesPerStep, ExchangeReport, Staleness
from shoal.training.evaluate import Evaluation
from shoal.training.learning_rate import rate_at
from shoal.training.learns import how_to_step_less, stopped_learning
from shoal.training.listener import About
from shoal.training.metrics import line_of_steps, line_of_test
from shoal.training.numbering import Done, Numbering
from shoal.training.outcome import Measured


def event_name(what: What | Literal["replaced"]) -> str:
    """What `metrics.jsonl` calls something that happened to a replica or a server."""
    return what.replace(" ", "_")


HAPPENINGS = frozenset(map(event_name, get_args(What)))
"""Events in `metrics.jsonl` that happened to a replica or a server."""
TROUBLES = HAPPENINGS - {event_name("joined")}
"""Of those, what a run that nothing disturbs does not have before its end."""
REPLACED: Literal["replaced"] = "replaced"
"""In the place of a lost replica another was started."""
EVENTS = HAPPENINGS | {"steps", "test", "warning", "ended", REPLACED}
"""All events that `metrics.jsonl` tells of."""

MOST_LISTED = 32
"""Up to so many replicas a line of metrics lists each; of more it gives least, median and most: lines are many, and at
1,000 replicas each would have 48 KB. `result.json` has all of them."""


class _Moment(NamedTuple):
    """How far the run was when a line of metrics was written."""

    counted: int
    samples: int
    now: float


class Journal:
    """Of one run, whose earlier parts did what `past` says. `now` is in seconds of a clock that only goes forward."""

    def __init__(self, config: TrainConfig, options: ExchangeOptions, about: About, past: HowFar, now: float) -> None:
        self._config, self._options, self._about, self._past = config, options, about, past
        self._rates = config.rates()
        self.total = config.epochs * about.steps_per_epoch
        """Batches of the whole run."""
        self.scores = Scores(past.scores)
        self._made, self._begun = now, now - past.wall_seconds
        self.started = False
        """Whether a step was begun in this part of the run."""
        self._numbering = Numbering.of(config, about.train_samples)
        self._samples = self._samples_of(past.counted, past.again)
        """Of the batches that are counted."""
        self._losses: list[float] = []
        self._epoch_losses = list(past.epoch_losses)
        self._stopped_learning: str | None = None
        self._last_loss = past.last_loss
        self._logged = past.counted
        self._moments = (self._moment(past.counted, now),) * 2
        """The last line of an earlier moment, and the last line."""
        self._events = list(past.events)

    def _samples_of(self, counted: int, again: Sequence[int]) -> int:
        """Samples of the batches that are counted, where these below the largest are not."""
        return self._numbering.of_done(Done(counted + len(again), tuple(again)))

    def _moment(self, counted: int, now: float) -> "_Moment":
        return _Moment(counted, self._samples, now)

    @property
    def _warmup_steps(self) -> int:
        return round(self._config.warmup * self._about.steps_per_epoch)

    def rate(self, number: int) -> float:
        """The learning rate for a batch."""
        return rate_at(
            number,
            peak=self._rates.lr,
            schedule=self._config.schedule,
            warmup_steps=self._warmup_steps,
            total_steps=self.total,
        )

    def begin_step(self, now: float) -> None:
        """The clock runs from the first step, as it does without replicas."""
        if not self.started:
            self.started = True
            self._moments = (self._moment(self._logged, now),) * 2
            self._begun = now - self._past.wall_seconds

    def seconds(self, now: float) -> float:
        """Since the first step, over all parts of the run."""
        return now - self._begun if self.started else self._past.wall_seconds

    # Lines of metrics

    def note(self, replica: int, done: StepsDone, now: float) -> None:
        """Add what a replica reports, except the losses."""
        self.scores.note(replica, done, now)

    def add_loss(self, loss: float) -> None:
        """Add the loss of a batch that is part of the common weights."""
        self._losses.append(loss)
        self._epoch_losses.append(loss)

    def add_samples(self, numbers: Iterable[int]) -> None:
        """These batches are counted."""
        self._samples += sum(map(self._numbering.of_batch, numbers))

    def counted(self, counted: int, active: Sequence[int], now: float) -> dict[str, Any] | None:
        """One batch more is counted; a line about the steps since the last line, if one is due."""
        every, ends = self._config.log_every, counted % self._about.steps_per_epoch == 0
        line = self._line(counted, active, now) if ends or counted // every > self._logged // every else None
        if ends:
            before, self._last_loss = self._last_loss, statistics.fmean(self._epoch_losses)
            self._epoch_losses = []
            self._stopped_learning = stopped_learning(
                self._last_loss,
                self._about,
                before=before,
                epoch=counted // self._about.steps_per_epoch,
                steps=counted - self._warmup_steps,
                remedy=how_to_step_less(self._config),
            )
        return line

    def take_warning(self) -> str | None:
        """That the run has stopped learning, once, after the epoch that shows it."""
        told, self._stopped_learning = self._stopped_learning, None
        return told

    def _line(self, counted: int, active: Sequence[int], now: float) -> dict[str, Any]:
        scores, staleness = self.scores, self._staleness()
        updates = {number: score.tally.updates for number, score in scores}
        waits = {number: round(score.tally.wait_seconds, 3) for number, score in scores}
        earlier, last = self._moments
        self._moments = (last if now > last.now else earlier, self._moment(counted, now))
        # A replica reports several steps at a time: lines of one moment have the speed since an earlier one.
        then, _ = self._moments
        line = {
            **line_of_steps(
                epoch=min(self._config.epochs, counted // self._about.steps_per_epoch + 1),
                step=counted,
                loss=statistics.fmean(self._losses) if self._losses else None,
                lr=self.rate(min(counted, self.total - 1)),
                steps=counted - then.counted,
                seconds=now - then.now,
                samples=self._samples,
                of_these_steps=self._samples - then.samples,
            ),
            "replicas": len(active),
            "active": list(active) if len(active) <= MOST_LISTED else None,
            "dropped": scores.total("dropped"),
            "staleness_mean": None if staleness is None else staleness.mean,
            "staleness_histogram": None if staleness is None else _coarse(staleness.histogram),
            "updates": _few(updates),
            "wait_seconds": _few(waits),
            "sent_bytes": scores.total("sent_bytes"),
            "received_bytes": scores.total("received_bytes"),
            "spread": scores.spread(),
        }
        self._losses, self._logged = [], counted
        return line

    def test_line(self, replica: int, tested: Evaluation, epoch: int, settled: HowFar, now: float) -> dict[str, Any]:
        """A replica tested the weights that it took when the run was as far as `settled`."""
        line = line_of_test(
            tested,
            epoch=epoch,
            step=settled.counted,
            samples=self._samples_of(settled.counted, settled.again),
            train_seconds=settled.train_seconds,
            wall_seconds=self.seconds(now),
        )
        return {**line, "replica": replica}

    def event_line(self, what: What | Literal["replaced"], who: int, counted: int, now: float) -> dict[str, Any]:
        """Something happened to a replica or a server."""
        since = now - self._made + self._past.wall_seconds
        self._events.append({"what": what, "who": who, "when": round(since, 3)})
        whose = "server" if what.startswith("server ") else "replica"
        seconds = self.seconds(now) if self.started else 0.0
        return {"event": event_name(what), whose: who, "step": counted, "wall_seconds": seconds}

    # For checkpoint and result

    def how_far(self, counted: int, again: Sequence[int], now: float) -> HowFar:
        """For weights that are taken now."""
        return HowFar(
            counted=counted,
            again=tuple(again),
            position=Position(*divmod(counted, self._about.steps_per_epoch)),
            wall_seconds=self.seconds(now),
            train_seconds=self._past.train_seconds + self.scores.training_seconds,
            last_loss=self._last_loss,
            epoch_losses=tuple(self._epoch_losses),
            samples_repeated=self._past.samples_repeated,
            step_seconds=(*self._past.step_seconds, *self.scores.step_seconds),
            scores=self.scores.saved(),
            events=tuple(self._events),
        )

    def _staleness(self) -> Staleness | None:
        return None if self._options.averages_every_step else self.scores.staleness()

    def measured(self, counted: int, repeated: Sequence[int], held: str, now: float) -> Measured:
        """At the end; `repeated`: batches that were trained on twice; `held`: where the common weights were."""
        options, scores, past = self._options, self.scores, self._past
        moved = scores.total("sent_bytes") + (scores.total("received_bytes") if options.counts_received else 0)
        predicted = options.bytes_per_step(
            4 * self._about.parameters, self._config.replicas, in_memory=held == "direct"
        )
        return Measured(
            epochs=self._config.epochs,
            steps=counted,
            samples=self._samples,
            left_out=counted // self._numbering.per_epoch * (self._about.train_samples - self._numbering.samples),
            repeated=past.samples_repeated,
            final_loss=self._last_loss,
            step_seconds_median=scores.median_seconds(past.step_seconds),
            samples_per_second=(self._samples - self._samples_of(past.counted, past.again))
            / max(scores.training_seconds, 1e-9),
            bytes_per_step=BytesPerStep(predicted=predicted, counted=round(moved / max(1, scores.total("steps")))),
            peak_memory_bytes=tuple(peak for _, score in scores for peak in score.peak_bytes),
            wall_seconds=self.seconds(now),
            staleness=self._staleness(),
            exchanged=ExchangeReport(
                options=options.model_dump(mode="json"),
                servers=held,
                replicas={number: score.report() for number, score in scores},
                repeated=len(repeated),
                spread=scores.spread(),
                events=[dict(event) for event in self._events],
            ),
        )


def _few(each: Mapping[int, float]) -> Mapping[Any, float]:
    """By replica; of many replicas the least, the median and the most."""
    if len(each) <= MOST_LISTED:
        return each
    return {"least": min(each.values()), "median": statistics.median(each.values()), "most": max(each.values())}


def _coarse(histogram: Mapping[int, int]) -> Mapping[int, int]:
    """A histogram; where it has many bars, one for each power of two, named by the smallest value that it counts.

    >>> _coarse(dict.fromkeys(range(64), 1))
    {0: 1, 1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 32}
    """
    if len(histogram) <= MOST_LISTED:
        return histogram
    bars: Counter[int] = Counter()
    for age, count in histogram.items():
        bars[1 << age.bit_length() - 1 if age else 0] += count
    return dict(sorted(bars.items()))
