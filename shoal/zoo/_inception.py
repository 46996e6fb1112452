"""Inception-v3 (Szegedy et al. 2016), without the auxiliary head.

Layers carry the names under which the network's weights are published; of such a file, everything but
`AuxLogits.*` loads.
"""

import torch
from torch import Tensor, nn

from shoal.zoo._sample import check_sample


class ConvUnit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The activated map."""
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


def _row(inputs: int, outputs: int, kernel: int) -> ConvUnit:
    """A 1xk convolution that keeps the map's size."""
    return ConvUnit(inputs, outputs, (1, kernel), padding=(0, kernel // 2))


def _column(inputs: int, outputs: int, kernel: int) -> ConvUnit:
    """A kx1 convolution that keeps the map's size."""
    return ConvUnit(inputs, outputs, (kernel, 1), padding=(kernel // 2, 0))


class MixedA(nn.Module):
    """Figure 5 of the paper: 1x1, 5x5, two 3x3 and pooling, side by side."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = ConvUnit(inputs, 64, 1)
        self.branch5x5_1 = ConvUnit(inputs, 48, 1)
        self.branch5x5_2 = ConvUnit(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = ConvUnit(inputs, 64, 1)
        self.branch3x3dbl_2 = ConvUnit(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = ConvUnit(96, 96, 3, padding=1)
        self.avgpool = nn.AvgPool2d(3, stride=1, padding=1)
        self.branch_pool = ConvUnit(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one after the other."""
        branches = [
            self.branch1x1(x),
            self.branch5x5_2(self.branch5x5_1(x)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            self.branch_pool(self.avgpool(x)),
        ]
        return torch.cat(branches, dim=1)


class MixedB(nn.Module):
    """Halves a 35x35 map."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = ConvUnit(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = ConvUnit(inputs, 64, 1)
        self.branch3x3dbl_2 = ConvUnit(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = ConvUnit(96, 96, 3, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one after the other."""
        branches = [
            self.branch3x3(x),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            self.maxpool(x),
        ]
        return torch.cat(branches, dim=1)


class MixedC(nn.Module):
    """Figure 6 of the paper: 7x7 convolutions split into 1x7 and 7x1."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1x1 = ConvUnit(inputs, 192, 1)
        self.branch7x7_1 = ConvUnit(inputs, width, 1)
        self.branch7x7_2 = _row(width, width, 7)
        self.branch7x7_3 = _column(width, 192, 7)
        self.branch7x7dbl_1 = ConvUnit(inputs, width, 1)
        self.branch7x7dbl_2 = _column(width, width, 7)
        self.branch7x7dbl_3 = _row(width, width, 7)
        self.branch7x7dbl_4 = _column(width, width, 7)
        self.branch7x7dbl_5 = _row(width, 192, 7)
        self.avgpool = nn.AvgPool2d(3, stride=1, padding=1)
        self.branch_pool = ConvUnit(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one after the other."""
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        branches = [
            self.branch1x1(x),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(double)),
            self.branch_pool(self.avgpool(x)),
        ]
        return torch.cat(branches, dim=1)


class MixedD(nn.Module):
    """Halves a 17x17 map."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = ConvUnit(inputs, 192, 1)
        self.branch3x3_2 = ConvUnit(192, 320, 3, stride=2)
        self.branch7x7x3_1 = ConvUnit(inputs, 192, 1)
        self.branch7x7x3_2 = _row(192, 192, 7)
        self.branch7x7x3_3 = _column(192, 192, 7)
        self.branch7x7x3_4 = ConvUnit(192, 192, 3, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one after the other."""
        seven = self.branch7x7x3_2(self.branch7x7x3_1(x))
        branches = [
            self.branch3x3_2(self.branch3x3_1(x)),
            self.branch7x7x3_4(self.branch7x7x3_3(seven)),
            self.maxpool(x),
        ]
        return torch.cat(branches, dim=1)


class MixedE(nn.Module):
    """Figure 7 of the paper: 3x3 convolutions spread into 1x3 beside 3x1."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch1x1 = ConvUnit(inputs, 320, 1)
        self.branch3x3_1 = ConvUnit(inputs, 384, 1)
        self.branch3x3_2a = _row(384, 384, 3)
        self.branch3x3_2b = _column(384, 384, 3)
        self.branch3x3dbl_1 = ConvUnit(inputs, 448, 1)
        self.branch3x3dbl_2 = ConvUnit(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _row(384, 384, 3)
        self.branch3x3dbl_3b = _column(384, 384, 3)
        self.avgpool = nn.AvgPool2d(3, stride=1, padding=1)
        self.branch_pool = ConvUnit(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The branches' channels, one after the other."""
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(self.avgpool(x)),
        ]
        return torch.cat(branches, dim=1)


class InceptionV3(nn.Module):
    """A stem of plain convolutions, eleven mixed blocks, global average pooling and one dense layer."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvUnit(channels, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = ConvUnit(32, 32, 3)
        self.Conv2d_2b_3x3 = ConvUnit(32, 64, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = ConvUnit(64, 80, 1)
        self.Conv2d_4a_3x3 = ConvUnit(80, 192, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = MixedA(192, pooled=32)
        self.Mixed_5c = MixedA(256, pooled=64)
        self.Mixed_5d = MixedA(288, pooled=64)
        self.Mixed_6a = MixedB(288)
        self.Mixed_6b = MixedC(768, width=128)
        self.Mixed_6c = MixedC(768, width=160)
        self.Mixed_6d = MixedC(768, width=160)
        self.Mixed_6e = MixedC(768, width=192)
        self.Mixed_7a = MixedD(768)
        self.Mixed_7b = MixedE(1280)
        self.Mixed_7c = MixedE(2048)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2048, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(self.maxpool1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(self.maxpool2(x))))
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))
        x = self.Mixed_6e(self.Mixed_6d(x))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        scores: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return scores


def inception_v3(*, input: tuple[int, ...] = (3, 299, 299), classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """Inception-v3 without its auxiliary head."""
    check_sample("inception_v3", input, classes, (75, 75))
    return InceptionV3(input[0], classes, dropout)
