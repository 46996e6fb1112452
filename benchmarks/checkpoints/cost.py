"""What saving costs a run: how long training stands still, and how much slower it is over all.

    python -m benchmarks.checkpoints.cost

One worker trains a network for some steps, in turns without checkpoints and with one every few steps. `stall` is the
time that the loop spends in `Saver.save`: the copy, and waiting for the checkpoint before where that is still being
written. `slower` compares the medians of the wall time from the first step to the last over the turns.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.saving import Saver
from shoal.units import Period, show_bytes, show_seconds


def wide(input: tuple[int, ...], classes: int, gib: float) -> nn.Module:
    """A network whose weights and momentum are so many GiB, with a step of some tenths of a second."""
    features = 4096
    layers = max(1, round(gib * 2**30 / 8 / features**2))
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(features, features), nn.ReLU())]
    pixels = input[0] * input[1] * input[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, features), *hidden, nn.Linear(features, classes))


@dataclass(frozen=True)
class Case:
    """A network, and how often it is saved."""

    name: str
    settings: dict[str, Any]
    every: int
    steps: int


CASES = (
    Case("ResNet-18, 3x32x32", {"model": "resnet18", "input": (3, 32, 32), "batch": 32}, every=10, steps=40),
    Case(
        "1 GiB of state",
        {"model": f"{Path(__file__)}:wide", "model_options": {"gib": 1.0}, "input": (3, 16, 16), "batch": 64},
        every=10,
        steps=20,
    ),
)


@dataclass
class Turn:
    """One run."""

    seconds: float
    step: float
    stalls: list[float]
    state_bytes: int


def run(case: Case, *, saving: bool) -> Turn:
    """Train once; with checkpoints, or with the one at the end alone, which is not counted."""
    stalls: list[float] = []
    save = Saver.save

    def timed(self: Saver, progress: Progress) -> None:
        begun = time.perf_counter()
        save(self, progress)
        stalls.append(time.perf_counter() - begun)

    class Clock(shoal.Listener):
        first = last = 0.0

        def stepped(self, steps: int, epoch: int) -> None:
            del epoch
            self.last = time.perf_counter()
            if steps == 1:  # the first one is slower: it makes the optimizer's memory
                self.first = self.last

    clock = Clock()
    samples = case.steps * case.settings["batch"]
    every = Period(case.every, "steps") if saving else Period(1, "epochs")
    Saver.save = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-saving-") as folder:
            out = Path(folder) / "run"
            config = shoal.TrainConfig(
                data=f"synthetic:{samples}", epochs=1, checkpoint_every=every, out=out, log_every=1000, **case.settings
            )
            result = shoal.train(config, clock)
            newest = sorted((out / "checkpoints").iterdir())[-1]
            size = sum(path.stat().st_size for path in newest.iterdir())
    finally:
        Saver.save = save  # type: ignore[method-assign]
    return Turn(clock.last - clock.first, result.step_seconds_median, stalls[:-1], size)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="the cost of saving")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"shoal {shoal.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'network':<20} {'checkpoint':>11} {'every':>9} {'step':>9} {'stall':>9} {'slower':>7}")
    for case in CASES:
        turns = [(run(case, saving=False), run(case, saving=True)) for _ in range(options.turns)]
        without, with_them = (statistics.median(turn[kind].seconds for turn in turns) for kind in (0, 1))
        stalls = [stall for _, turn in turns for stall in turn.stalls]
        step = statistics.median(turn[0].step for turn in turns)
        slower = with_them / without - 1
        print(
            f"{case.name:<20} {show_bytes(turns[0][1].state_bytes):>11} {f'{case.every} steps':>9} "
            f"{show_seconds(step):>9} {show_seconds(max(stalls)):>9} {slower:>7.1%}"
        )


if __name__ == "__main__":
    main()
