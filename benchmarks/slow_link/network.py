"""A network of two million parameters that learns 28x28 images in a few hundred steps."""

from torch import Tensor, nn

HIDDEN = 1_300


class WideLeNet(nn.Module):
    """Two convolutions, each followed by pooling, and a wide dense layer: 2,065,958 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, HIDDEN),
            nn.ReLU(inplace=True),
            nn.Linear(HIDDEN, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of ten classes, from images (batch, 1, 28, 28)."""
        scores: Tensor = self.layers(x)
        return scores
