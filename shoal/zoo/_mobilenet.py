"""MobileNetV2 (Sandler et al. 2018)."""

from torch import Tensor, nn

from shoal.zoo._init import kaiming_
from shoal.zoo._sample import check_sample

_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, width, number of blocks, and stride of the first block: table 2 of the paper."""


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1 without activation."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * inputs
        layers: list[nn.Module] = [] if expansion == 1 else [_conv(inputs, wide, 1)]
        layers += [
            _conv(wide, wide, 3, stride=stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """The block's map, narrower by its stride."""
        out: Tensor = self.conv(x)
        return x + out if self.has_shortcut else out


class MobileNetV2(nn.Module):
    """A stem, 17 inverted residuals, a 1x1 convolution, global average pooling and one dense layer."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(channels, 32, 3, stride=2)]
        inputs = 32
        for expansion, width, blocks, first_stride in _STAGES:
            for index in range(blocks):
                stride = first_stride if index == 0 else 1
                layers.append(InvertedResidual(inputs, width, stride=stride, expansion=expansion))
                inputs = width
        layers.append(_conv(inputs, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))
        kaiming_(self, mode="fan_out", linear_std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        scores: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return scores


def mobilenet_v2(*, input: tuple[int, ...] = (3, 224, 224), classes: int = 1000, dropout: float = 0.2) -> nn.Module:
    """MobileNetV2 of width 1; every layer is padded, so it takes any height and width."""
    check_sample("mobilenet_v2", input, classes, (1, 1))
    return MobileNetV2(input[0], classes, dropout)
