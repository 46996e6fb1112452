"""A step that needs more memory than there is ends in one message with a way out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import OutOfMemoryError


class Greedy(nn.Module):
    """Asks for 128 TiB in every training step."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.line = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            torch.empty(1 << 45)
        scores: Tensor = self.line(x.flatten(1)[:, :64])
        return scores


def build(classes: int, **_: Any) -> nn.Module:
    return Greedy(classes)


def test_out_of_memory(tmp_path: Path) -> None:
    config = shoal.TrainConfig(model=f"{__name__}:build", data="digits", epochs=1, out=tmp_path / "run")
    with pytest.raises(OutOfMemoryError, match="needs more memory") as caught:
        shoal.train(config)
    assert "--plan spatial" in caught.value.remedy
    assert caught.value.exit_code == 1
