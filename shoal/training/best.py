"""The best test of a run so far, and whether the run still gets better. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shoal.result import BestTest
from shoal.training.evaluate import Evaluation


@dataclass(frozen=True)
class Best:
    """The best test, by accuracy, or by intersection over union in segmentation; of equals the first."""

    test: BestTest | None = None
    since: int = 0
    """Tests after it."""

    @property
    def score(self) -> float | None:
        """What a better test is above; None before the first."""
        if self.test is None:
            return None
        return self.test.test_accuracy if self.test.test_iou is None else self.test.test_iou

    def after(self, tested: Evaluation, *, epoch: int, step: int) -> "Best":
        """With one test more, of the weights of `step`, in epoch `epoch` (from 1)."""
        if not tested.better_than(self.score):
            return Best(self.test, self.since + 1)
        found = BestTest(
            epoch=epoch, step=step, test_loss=tested.loss, test_accuracy=tested.accuracy, test_iou=tested.iou
        )
        return Best(found)

    def stops(self, patience: int | None) -> bool:
        """Whether a run that waits for so many tests for a better one has waited long enough."""
        return patience is not None and self.since >= patience

    def told(self) -> str:
        """What to tell people when the run stops for it."""
        assert self.test is not None
        return (
            f"stopped early: none of the last {self.since} tests was better than that of epoch {self.test.epoch}, "
            "whose weights are in best.safetensors."
        )

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"test": None if self.test is None else self.test.model_dump(), "since": self.since}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        test = saved["test"]
        return cls(None if test is None else BestTest.model_validate(test), saved["since"])
