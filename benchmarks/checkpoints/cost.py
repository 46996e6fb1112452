"""What saving costs a run: how long training stands still, and how much slower it is over all.

    python -m benchmarks.checkpoints.cost
    python -m benchmarks.checkpoints.cost --every 100 --only ResNet

One worker trains a network for some steps, in turns without checkpoints and with one every few steps. Of the first
checkpoint, which makes the memory for the copies, `first` is the time that the loop spends in `Saver.save`; `stall` is
the longest of the others: the copy, and waiting for the checkpoint before where that is still being written. `costs` is
how much longer the steps between the second checkpoint and the end take, for each checkpoint (medians over the turns),
and `slower` this cost as a part of the steps from one checkpoint to the next. `writer` is processor time of the thread
that writes.
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
    """A network, and for how many checkpoints it is trained after the first."""

    name: str
    settings: dict[str, Any]
    saves: int


CASES = (
    Case("ResNet-18, 3x32x32", {"model": "resnet18", "input": (3, 32, 32), "batch": 32}, saves=6),
    Case(
        "1 GiB of state",
        {"model": f"{Path(__file__)}:wide", "model_options": {"gib": 1.0}, "input": (3, 16, 16), "batch": 64},
        saves=2,
    ),
)


@dataclass
class Turn:
    """One run: seconds from just after the first checkpoint to the end of the last one's period."""

    seconds: float
    step: float
    stalls: list[float]
    writing: list[float]
    state_bytes: int


class Clock(shoal.Listener):
    """Looks at the time after every step."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}

    def stepped(self, steps: int, epoch: int) -> None:
        """Note the time."""
        del epoch
        self.after[steps] = time.perf_counter()


def run(case: Case, every: int, *, saving: bool) -> Turn:
    """Train once; with checkpoints, or with the one at the end alone, which is not counted."""
    stalls: list[float] = []
    writing: list[float] = []
    save, write = Saver.save, Saver._write

    def timed(self: Saver, progress: Progress) -> None:
        begun = time.perf_counter()
        save(self, progress)
        stalls.append(time.perf_counter() - begun)

    def timed_write(self: Saver, *what: Any) -> None:
        begun = time.thread_time()
        write(self, *what)
        writing.append(time.thread_time() - begun)

    clock = Clock()
    steps = every * (case.saves + 2) - 1  # the last period lasts until the last checkpoint is written beside it
    samples = steps * case.settings["batch"]
    period = Period(every, "steps") if saving else Period(1, "epochs")
    Saver.save, Saver._write = timed, timed_write  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-saving-") as folder:
            out = Path(folder) / "run"
            config = shoal.TrainConfig(
                data=f"synthetic:{samples}", epochs=1, checkpoint_every=period, out=out, log_every=1000, **case.settings
            )
            result = shoal.train(config, clock)
            newest = sorted((out / "checkpoints").iterdir())[-1]
            size = sum(path.stat().st_size for path in newest.iterdir())
    finally:
        Saver.save, Saver._write = save, write  # type: ignore[method-assign]
    seconds = clock.after[steps] - clock.after[2 * every - 1]
    return Turn(seconds, result.step_seconds_median, stalls[:-1], writing[:-1], size)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="the cost of saving")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--only", default="", help="networks whose name has this")
    options = parser.parse_args()
    print(f"shoal {shoal.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    heads = ("checkpoint", "every", "step", "first", "stall", "writer", "costs", "slower")
    print(f"{'network':<20}", *(f"{head:>10}" for head in heads))
    for case in (case for case in CASES if options.only in case.name):
        turns = [
            tuple(run(case, options.every, saving=saving) for saving in (False, True)) for _ in range(options.turns)
        ]
        without, with_them = (statistics.median(turn[kind].seconds for turn in turns) for kind in (0, 1))
        step = statistics.median(turn[0].step for turn in turns)
        costs = (with_them - without) / case.saves
        cells = (
            show_bytes(turns[0][1].state_bytes),
            f"{options.every} steps",
            show_seconds(step),
            show_seconds(max(turn.stalls[0] for _, turn in turns)),
            show_seconds(max(stall for _, turn in turns for stall in turn.stalls[1:])),
            show_seconds(statistics.median(spent for _, turn in turns for spent in turn.writing[1:])),
            show_seconds(max(costs, 0)),
            f"{costs / (options.every * step):.1%}",
        )
        print(f"{case.name:<20}", *(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
