"""LeNet-5 (LeCun et al. 1998), with ReLU and max pooling as it is trained today."""

from torch import Tensor, nn

from shoal.zoo._sample import check_sample


class LeNet(nn.Module):
    """Two convolutions, each followed by pooling, then three dense layers."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        pad1 = (_first_padding(height), _first_padding(width))
        pad2 = (_second_padding(height), _second_padding(width))
        rows, columns = _extent(height), _extent(width)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=pad1)
        self.relu1 = nn.ReLU(inplace=True)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=pad2)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool2 = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.relu3 = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(120, 84)
        self.relu4 = nn.ReLU(inplace=True)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        x = self.relu3(self.fc1(x.flatten(1)))
        scores: Tensor = self.fc3(self.relu4(self.fc2(x)))
        return scores


def _first_padding(size: int) -> int:
    """The published network reads 32x32; smaller images, such as 28x28 digits, get its border of 2."""
    return 0 if size >= 32 else 2


def _second_padding(size: int) -> int:
    """Published without a border; images below 20 would then leave less than 3 rows to the dense layers."""
    return 0 if size >= 20 else 2


def _extent(size: int) -> int:
    """Rows, or columns, that reach the first dense layer.

    >>> [_extent(size) for size in (8, 28, 32)]
    [2, 5, 5]
    """
    pooled = (size + 2 * _first_padding(size) - 4) // 2
    return (pooled + 2 * _second_padding(size) - 4) // 2


def lenet5(*, input: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """LeNet-5 for samples of shape `input`; its first dense layer grows with them."""
    check_sample("lenet5", input, classes, (4, 4))
    channels, height, width = input
    return LeNet(channels, height, width, classes)
