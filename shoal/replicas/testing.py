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
    """`tested`: epochs that were tested in earlier parts of the run."""

    __test__ = False  # for pytest

    def __init__(self, config: TrainConfig, steps_per_epoch: int, tested: int) -> None:
        self._config, self._steps_per_epoch = config, steps_per_epoch
        self.tested = min(tested, config.epochs - 1)
        """Epochs that need no test any more."""
        self.under_way: UnderWay | None = None

    def due(self, counted: int) -> MakeTest | None:
        """What is to be done now that so many batches are counted."""
        config = self._config
        finished = min(counted // self._steps_per_epoch, config.epochs)
        every = config.eval_every, config.checkpoint_every
        epochs = min(config.epochs, *((self.tested // period + 1) * period for period in every))
        if not self.tested < epochs <= finished:
            return None
        last = epochs == config.epochs
        evaluate, save = (last or epochs % period == 0 for period in every)
        return MakeTest(epochs, evaluate=evaluate, save=save, last=last)

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

    def close(self) -> MakeTest:
        """The test is done, and its files are written; returns what it was."""
        assert self.under_way is not None
        order, self.under_way = self.under_way.order, None
        self.tested = max(self.tested, order.after)
        return order
