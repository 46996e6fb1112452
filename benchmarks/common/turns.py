"""Sides that take turns, step by step, so that whatever disturbs the machine disturbs all of them.

A ratio is the median over rounds of side / base within the same round. The null ratio is the base against a second
copy of itself: what remains of noise.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

Step = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Seconds of every round, by side; the slowest rank's."""

    seconds: Mapping[str, list[float]]

    def ratios(self, side: str, base: str) -> list[float]:
        """Round by round."""
        return [a / b for a, b in zip(self.seconds[side], self.seconds[base], strict=True)]

    def row(self, side: str, base: str) -> str:
        """One line of a Markdown table: side, median seconds, median ratio, its quartiles."""
        ratios = self.ratios(side, base)
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = statistics.median(self.seconds[side])
        return f"| {side} | {seconds:.3f} | **{middle:.3f}** | {low:.3f} to {high:.3f} |"

    def table(self, base: str) -> str:
        """A Markdown table of all sides."""
        head = f"| side | median s | / {base} | quartiles |\n|---|---|---|---|"
        return "\n".join([head, *(self.row(side, base) for side in self.seconds)])


def take_turns(sides: Mapping[str, Step], *, rounds: int, warm_up: int = 2) -> Measured:
    """Time one step of every side per round, the order turning from round to round. A collective of all ranks."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            start = time.perf_counter()
            sides[name]()
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            if number >= 0:
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                seconds[name].append(taken.item())
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr)
    return Measured(seconds)
