"""AlexNet in the one-tower form of Krizhevsky 2014, whose "one weird trick" is the plan `owt`."""

from torch import Tensor, nn

from shoal.zoo._sample import check_sample


class AlexNet(nn.Module):
    """Five convolutions, then three dense layers that hold 96% of the parameters."""

    def __init__(self, channels: int, classes: int, dropout: float, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        # 6x6 is what 224x224 leaves: no change there, and the same dense layers elsewhere.
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        scores: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return scores


def alexnet(
    *, input: tuple[int, ...] = (3, 224, 224), classes: int = 1000, dropout: float = 0.5, hidden: int = 4096
) -> nn.Module:
    """AlexNet; its parameters are the same in number at every height and width."""
    check_sample("alexnet", input, classes, (63, 63))
    return AlexNet(input[0], classes, dropout, hidden)
