"""Starting weights that several networks share."""

from typing import Literal

from torch import nn


def kaiming_(model: nn.Module, *, mode: Literal["fan_in", "fan_out"], linear_std: float | None = None) -> None:
    """He's normal distribution for every convolution, N(0, `linear_std`) for every dense layer; biases 0.

    Without `linear_std` dense layers keep torch's own start. Batch norm starts at scale 1, shift 0
    already, and transposed convolutions keep torch's start: He's fans are not defined for them.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, std=linear_std)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
