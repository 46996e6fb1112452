"""What runs on ranks: a short training run, and a loop of one's own."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.config import TrainConfig
from shoal.timeline import Slice, Trace
from shoal.training.listener import Listener
from shoal.training.rank import train_on_rank


class Net(nn.Module):
    """Layers that are cut in every way, a batch norm that sums between ranks, and a chain."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.a(x)))
        result: Tensor = self.head(self.flatten(self.pool(self.relu(self.b(x)))))
        return result


LAYERS = {"a", "norm", "b", "pool", "flatten", "head"}


def net(*, input: tuple[int, ...], classes: int) -> nn.Module:
    """The factory that `--model` names."""
    return Net(input[0], classes)


def settings(out: Path, **more: Any) -> TrainConfig:
    """Twelve steps of an epoch, some ten milliseconds each; the data lie beside the folder."""
    data = out.parent / "images.npz"
    if not data.exists():
        draws = np.random.default_rng(0)
        np.savez(data, x=draws.integers(0, 256, (240, 48, 48), dtype=np.uint8), y=np.arange(240) % 4)
    common = {"model": f"{Path(__file__)}:net", "data": f"npz:{data}", "batch": 16, "epochs": 1, "log_every": 4}
    return TrainConfig(**{**common, "threads": 1, "device": "cpu", "out": out, **more})


def train(config: TrainConfig) -> float:
    """The same on each of the present ranks; the loss."""
    return train_on_rank(config, None, Listener()).final_loss


def own_loop(path: str, plan: str) -> tuple[int, bool]:
    """Three steps of a loop of one's own, recorded; (optimizer steps, whether this rank has the trace)."""
    torch.manual_seed(0)
    model = shoal.parallelize(Net(3, 4), (8, 3, 16, 16), plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()

    step()
    with shoal.trace("mine") as recorded:
        for _ in range(3):
            step()
    step()
    if recorded.trace is not None:
        recorded.trace.save(path)
    return 3, recorded.trace is not None


def check(trace: Trace, ranks: int) -> None:
    """What holds of every trace of a run."""
    assert len(trace.ranks) == ranks
    assert {piece.rank for piece in trace.slices} == set(range(ranks))
    for rank in range(ranks):
        for lane in ("steps", "compute"):
            nest([piece for piece in trace.slices if (piece.rank, piece.lane) == (rank, lane)])
    for piece in trace.slices:
        assert piece.start <= piece.end
        assert piece.rank not in piece.peers
    for message in trace.messages:
        assert message.src != message.dst
        assert message.sent <= message.received


def nest(slices: list[Slice]) -> None:
    """Slices of one lane of one rank never cross."""
    around: list[Slice] = []
    for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end)):
        while around and around[-1].end <= piece.start:
            around.pop()
        assert not around or piece.end <= around[-1].end, f"{piece} crosses {around[-1]}"
        around.append(piece)


def layers(trace: Trace, kind: str, rank: int) -> set[str]:
    """The layers that a rank went through in this direction."""
    labels = [piece.label.partition(":")[0] for piece in trace.slices if (piece.kind, piece.rank) == (kind, rank)]
    return {name for label in labels for name in label.split(", ")}


def covered(trace: Trace) -> float:
    """The part of a step's measured time that slices tell of: of the best step of each rank, the least.

    The best, since the system may put a process aside between two slices, in any step, for as long as it likes.
    """
    best: dict[int, float] = {}
    for step in (piece for piece in trace.slices if piece.kind == "step"):
        until, total = step.start, 0.0
        own = (p for p in trace.slices if (p.rank, p.step, p.lane) == (step.rank, step.step, "compute"))
        for piece in sorted(own, key=lambda piece: (piece.start, -piece.end)):
            start, end = max(piece.start, until), min(piece.end, step.end)
            if end > start:
                total, until = total + end - start, end
        best[step.rank] = max(best.get(step.rank, 0.0), total / step.seconds)
    return min(best.values())
