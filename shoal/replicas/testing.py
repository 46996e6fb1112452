"""Which test or checkpoint is due, and the one that is under way: at most one at a time. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.config import TrainConfig
from shoal.replicas.effects import HowFar
from shoal.replicas.orders import HasTested, MakeTest

STOPPING = MakeTest(0, evaluate=False, save=True, last=False)
"""Save the weights because the run is asked to stop."""


@dataclass
class UnderWay:
    """What a replica tests or saves."""

    replica: int
    order: MakeTest
    settled: HowFar | None = None
    """How far the run was when the replica took the weights."""
    handed_in: bool = False
    """Whether the replica has done its part, and files are being written."""


@dataclass
class OwnStates:
    """Which replicas have handed in their own state for one checkpoint, before one of them takes the common weights."""

    moment: int
    """Batches that were counted when it became due."""
    arriving: set[int] = field(default_factory=set)
    """Those whose files are being written."""
    handed_in: set[int] = field(default_factory=set)
    """Those whose files are whole on the disk."""

    def complete(self, active: Iterable[int]) -> bool:
        """Whether all that take part have."""
        return self.handed_in >= set(active)


class TestsDue:
    """`tested`: steps up to which earlier parts of the run tested. They saved up to `saved`, where they went on from.

    `now`: when this part of the run began, in seconds of the clock that `remind` hears.
    """

    __test__ = False  # for pytest

    def __init__(
        self, config: TrainConfig, steps_per_epoch: int, tested: int, saved: int = 0, *, now: float = 0.0
    ) -> None:
        self._config, self._steps_per_epoch = config, steps_per_epoch
        self._total = config.epochs * steps_per_epoch
        self.tested = min(tested, self._total - 1)
        """Steps up to which nothing is due any more."""
        self.under_way: UnderWay | None = None
        self._saved, self._saved_at = saved, now
        self._save_at: int | None = None
        """Where the clock asks for a checkpoint: steps that all replicas in step reach."""

    def due(self, counted: int) -> MakeTest | None:
        """What is to be done now that so many batches are counted.

        What is due at the end of an epoch is done before anything later. Of tests between, the last that was passed is
        made: others may train faster than one of them tests. So with checkpoints between.
        """
        config, counted = self._config, min(counted, self._total)
        tested_epochs = self.tested // self._steps_per_epoch
        every = config.eval_every, config.checkpoint_every.every("epochs") or config.epochs
        epochs = min(config.epochs, *((tested_epochs // period + 1) * period for period in every))
        end = epochs * self._steps_per_epoch
        test, save = self._last_between(min(counted, end)), self._save_between(min(counted, end))
        if counted < end:
            after = max((steps for steps in (test, save) if steps is not None), default=None)
            if after is None:
                return None
            return MakeTest(after, evaluate=test is not None, save=save is not None, last=False)
        last = epochs == config.epochs
        ends_test, ends_save = (last or epochs % period == 0 for period in every)
        return MakeTest(end, evaluate=ends_test or test is not None, save=ends_save or save is not None, last=last)

    def _last_between(self, counted: int) -> int | None:
        """The last multiple of `eval_steps` up to here, if it is not tested."""
        every = self._config.eval_steps
        passed = 0 if every is None else counted // every * every
        return passed if passed > self.tested else None

    def _save_between(self, counted: int) -> int | None:
        """The last number of steps up to here after which a checkpoint is due that is not made."""
        every = self._config.checkpoint_every.every("steps")
        passed = 0 if every is None else counted // every * every
        if self._save_at is not None and self._save_at <= counted:
            passed = max(passed, self._save_at)
        return passed if passed > self._saved else None

    def remind(self, now: float, steps: int) -> None:
        """Time passed. Where the clock asks for a checkpoint, it is due when so many `steps` are counted."""
        every = self._config.checkpoint_every
        late = every.unit == "minutes" and now - self._saved_at >= 60 * every.count
        if late and self._save_at is None and steps > self._saved:
            self._save_at, self._saved_at = steps, now

    def is_due_at(self, step: int) -> bool:
        """Whether something may be due after this step, so that replicas in step wait for each other there."""
        periods = self._steps_per_epoch, self._config.eval_steps, self._config.checkpoint_every.every("steps")
        return step > 0 and (step == self._save_at or any(every is not None and step % every == 0 for every in periods))

    def begin(self, replica: int, order: MakeTest) -> MakeTest:
        """A replica does it."""
        self.under_way = UnderWay(replica, order)
        return order

    def settle(self, replica: int, how_far: HowFar) -> bool:
        """A replica takes the weights; returns whether it is the one that tests."""
        if self.under_way is None or self.under_way.replica != replica:
            return False
        self.under_way.settled = how_far
        return True

    def of(self, replica: int, tested: HasTested) -> UnderWay | None:
        """The test that was asked for; None where a replica that was thought gone comes with an old one."""
        test = self.under_way
        if test is None or test.settled is None or test.handed_in:
            return None
        return test if (test.replica, test.order.after) == (replica, tested.after) else None

    def lose(self, replica: int) -> None:
        """A replica is gone: another is to do what it had not handed in."""
        if self.under_way is not None and self.under_way.replica == replica and not self.under_way.handed_in:
            self.under_way = None

    def tested_by(self, test: UnderWay) -> int:
        """Steps up to which nothing is due once this is done: what it passed on its way, but no end of an epoch."""
        order, settled = test.order, test.settled
        if not order.evaluate or settled is None:
            return max(self.tested, order.after)
        next_end = (order.after // self._steps_per_epoch + 1) * self._steps_per_epoch
        return max(self.tested, order.after, min(settled.counted, next_end - 1))

    def close(self) -> MakeTest:
        """The test is done, and its files are written; returns what it was."""
        assert self.under_way is not None
        test, self.under_way = self.under_way, None
        self.tested = self.tested_by(test)
        if test.order.save:
            self._saved = max(self._saved, test.order.after)
            if self._save_at is not None and self._save_at <= test.order.after:
                self._save_at = None
        return test.order
