"""VGG-16 (Simonyan and Zisserman 2015, configuration D)."""

from torch import Tensor, nn

from shoal.zoo._init import kaiming_
from shoal.zoo._sample import check_sample

_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Width and number of 3x3 convolutions of each block; every block ends in pooling by 2."""


class VGG(nn.Module):
    """Blocks of 3x3 convolutions, then three dense layers."""

    def __init__(self, channels: int, classes: int, dropout: float, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, convolutions in _BLOCKS:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # 7x7 is what 224x224 leaves: no change there, and the same dense layers elsewhere.
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        kaiming_(self, mode="fan_out", linear_std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        scores: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return scores


def vgg16(
    *, input: tuple[int, ...] = (3, 224, 224), classes: int = 1000, dropout: float = 0.5, hidden: int = 4096
) -> nn.Module:
    """VGG-16; its parameters are the same in number at every height and width."""
    check_sample("vgg16", input, classes, (32, 32))
    return VGG(input[0], classes, dropout, hidden)
