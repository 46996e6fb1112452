"""How far a run is, and its form in a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from shoal.data import Position
from shoal.training.best import Best


@dataclass
class Progress:
    """How far a run is. The order of samples is a function of the position, so no loader has a state."""

    position: Position
    """The next batch to train on; at the end of an epoch, its test is still to come."""
    steps: int
    """Optimizer steps done."""
    losses: torch.Tensor
    """Sums of the steps' losses, of this epoch and since the last line of metrics; float64, on the device.

    On several ranks, what this rank adds to those sums: they are put together only where they are needed.
    """
    last_loss: float
    """Mean loss of the last whole epoch."""
    step_seconds: list[float]
    wall_seconds: float
    metrics_length: int
    """Bytes of metrics.jsonl that belong to the steps done."""
    summed: list[int] = field(default_factory=lambda: [0, 0])
    """Steps whose losses are in each of the sums."""
    sent_bytes: int = 0
    """What all ranks sent in `sent_steps` steps under the present plan, up to where this process took over."""
    sent_steps: int = 0
    tested: int = 0
    """Steps up to which no test is due any more."""
    best: Best = field(default_factory=Best)
    repeated: int = 0
    """Samples that were trained on twice, because the run went on with batches of another size."""

    @classmethod
    def start(cls, device: torch.device) -> Self:
        """Before the first step."""
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return cls(Position(0, 0), 0, zeros, math.nan, [], 0.0, 0)

    def to_dict(self, losses: Sequence[Sequence[float]]) -> dict[str, Any]:
        """For a checkpoint, with the `losses` of every rank; but for `step_seconds`, which may be many."""
        return {
            "position": self.position.to_dict(),
            "steps": self.steps,
            "losses": [[none_for_nan(loss) for loss in row] for row in losses],
            "summed": list(self.summed),
            "last_loss": none_for_nan(self.last_loss),
            "wall_seconds": self.wall_seconds,
            "metrics_length": self.metrics_length,
            "sent_bytes": self.sent_bytes,
            "sent_steps": self.sent_steps,
            "tested": self.tested,
            "best": self.best.to_dict(),
            "repeated": self.repeated,
        }

    @classmethod
    def from_dict(
        cls, saved: Mapping[str, Any], step_seconds: Sequence[float], *, rank: int, ranks: int, device: torch.device
    ) -> Self:
        """What `to_dict` gave: each rank its own row of losses, so that sums go on bit for bit.

        With other ranks than before, rank 0 takes all.
        """
        table = torch.tensor([[nan_for_none(loss) for loss in row] for row in saved["losses"]], dtype=torch.float64)
        if len(table) == ranks:
            losses = table[rank].clone()
        else:
            losses = table.sum(0) if rank == 0 else torch.zeros(2, dtype=torch.float64)
        return cls(
            position=Position.from_dict(saved["position"]),
            losses=losses.to(device),
            last_loss=nan_for_none(saved["last_loss"]),
            step_seconds=list(step_seconds),
            best=Best.from_dict(saved["best"]),
            **{name: saved[name] for name in ("steps", "wall_seconds", "metrics_length", "summed", "tested")},
            **{name: saved[name] for name in ("sent_bytes", "sent_steps", "repeated")},
        )


def none_for_nan(number: float) -> float | None:
    """JSON has no number for it."""
    return number if math.isfinite(number) else None


def nan_for_none(number: float | None) -> float:
    """What `none_for_nan` gave."""
    return math.nan if number is None else number
