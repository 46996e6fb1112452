"""What a run tells its listener, as events that TensorBoard shows."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.training.listener import About, Listener
from shoal.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NAMES = {
    "steps": {
        "loss": "train/loss",
        "lr": "train/lr",
        "samples_per_sec": "speed/samples_per_second",
        "step_time_ms": "speed/step_milliseconds",
        "spread": "replicas/spread",
        "staleness_mean": "replicas/staleness",
        "replicas": "replicas/active",
    },
    "test": {"test_loss": "test/loss", "test_accuracy": "test/accuracy", "test_iou": "test/iou"},
}
"""By event of `metrics.jsonl`: what its numbers are called in TensorBoard."""


def check_installed() -> None:
    """A `ConfigError` where the package is missing."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard = true needs the package tensorboard, which is not installed.",
            "pip install 'shoal-train[tensorboard]', or leave --tensorboard out: metrics.jsonl has the same numbers.",
        )


class TensorBoardEvents(Listener):
    """Writes `OUT/tensorboard` while a run goes on; of one that goes on, steps that are done anew replace the old."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def started(self, about: About, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only where it was asked for

        self._writer = SummaryWriter(str(folder.events), purge_step=about.done or None)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for name, tag in NAMES.get(metrics["event"], {}).items():
            if metrics.get(name) is not None:
                self._writer.add_scalar(tag, metrics[name], metrics["step"])
        if metrics["event"] == "warning":
            self._writer.add_text("notes", metrics["text"])

    def ended(self) -> None:
        if self._writer is not None:
            self._writer.close()
