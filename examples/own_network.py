"""Train a network of your own with Shoal and hear how it goes.

python examples/own_network.py
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import nn

import shoal


def small_net(input: tuple[int, ...], classes: int) -> nn.Module:
    """Any factory works: it is asked for the data's shape and classes if it has such parameters."""
    return nn.Sequential(
        nn.Conv2d(input[0], 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


class Tell(shoal.Listener):
    """Called back by the run."""

    def logged(self, metrics: Mapping[str, Any]) -> None:
        if metrics["event"] == "test":
            print(f"epoch {metrics['epoch']}: test accuracy {metrics['test_accuracy']:.3f}")


if __name__ == "__main__":
    config = shoal.TrainConfig(
        model=f"{Path(__file__).stem}:small_net", data="digits", epochs=3, lr=0.1, out=Path(mkdtemp()) / "run"
    )
    result = shoal.train(config, Tell())
    print(f"{result.samples_per_second:.0f} images/s, results in {config.out}")
