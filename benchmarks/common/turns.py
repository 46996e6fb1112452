"""Sides that take turns, step by step, so that whatever disturbs the machine disturbs all of them.

A ratio is the median over rounds of side / base within the same round. The null ratio is the base against a second
copy of itself: what remains of noise.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from shoal.comparing import turns
from shoal.transport import Transport

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
    return Measured(turns.take_turns(sides, Transport(), rounds=rounds, warm_up=warm_up, progress=_show))


def _show(done: int, turns: int, _: str) -> None:
    if dist.get_rank() == 0 and sys.stderr.isatty():
        print(f"\rturn {done} of {turns}", end="", file=sys.stderr)
