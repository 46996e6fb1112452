"""A small acoustic network over log-mel spectrograms, for spoken words.

Frequency and time are the two axes of a picture. The first pooling is along frequency only, so
that a formant may shift between speakers while time stays fine, as was usual for acoustic networks of 2013
and 2014 (Sainath et al.; Chan and Lane, whose layers we could not read); later ones shorten both axes. There is no
batch norm, which came later. The sizes are our own.
"""

from torch import Tensor, nn

from shoal.zoo._init import kaiming_
from shoal.zoo._sample import check_at_least_one, check_sample


class Acoustic(nn.Module):
    """Three convolutions over frequency x time, each followed by pooling, then two dense layers."""

    def __init__(self, channels: int, bands: int, frames: int, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        wide = 2 * width
        self.features = nn.Sequential(
            # Frames lie 10 ms apart and overlap: every other one is enough, at half the work.
            nn.Conv2d(channels, width, (9, 5), stride=(1, 2), padding=(4, 2)),
            nn.ReLU(inplace=True),
            nn.MaxPool2d((3, 1)),
            nn.Conv2d(width, wide, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        rows, columns = bands // 12, (frames + 1) // 8
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(wide * rows * columns, 128),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(128, classes),
        )
        kaiming_(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from spectrograms (batch, channels, bands, frames)."""
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


def acoustic(
    *, input: tuple[int, ...] = (1, 40, 96), classes: int = 10, width: int = 24, dropout: float = 0.3
) -> nn.Module:
    """The acoustic network for samples of `input` = (channels, mel bands, frames).

    Its first dense layer grows with the bands and the frames.
    """
    check_at_least_one("acoustic", width=width)
    check_sample("acoustic", input, classes, (12, 7))
    channels, bands, frames = input
    return Acoustic(channels, bands, frames, classes, width, dropout)
