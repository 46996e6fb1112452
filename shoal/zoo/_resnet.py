"""ResNet-18 and ResNet-50 (He et al. 2016), with the stride of a bottleneck in its 3x3 convolution."""

from torch import Tensor, nn

from shoal.zoo._init import kaiming_
from shoal.zoo._sample import check_sample


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """The projection that fits a block's input to its output, or None where they fit already."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
        nn.BatchNorm2d(outputs),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's map, narrower by its stride."""
        main = self.relu1(self.bn1(self.conv1(x)))
        main = self.bn2(self.conv2(main))
        out: Tensor = self.relu2(main + (x if self.downsample is None else self.downsample(x)))
        return out


class Bottleneck(nn.Module):
    """A 1x1 convolution down, a 3x3, a 1x1 up to four times the width, and a shortcut around them."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)
        self.relu3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's map, narrower by its stride."""
        main = self.relu1(self.bn1(self.conv1(x)))
        main = self.relu2(self.bn2(self.conv2(main)))
        main = self.bn3(self.conv3(main))
        out: Tensor = self.relu3(main + (x if self.downsample is None else self.downsample(x)))
        return out


Block = type[BasicBlock] | type[Bottleneck]


def _stage(block: Block, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """`blocks` blocks of one width; the first one carries the stride."""
    rest = (block(block.expansion * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling and one dense layer."""

    def __init__(self, block: Block, blocks: tuple[int, int, int, int], channels: int, classes: int) -> None:
        super().__init__()
        grow = block.expansion
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * grow, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * grow, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * grow, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * grow, classes)
        kaiming_(self, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class, from images (batch, channels, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


# Every layer is padded, so any height and width leaves at least one pixel.
_SMALLEST = (1, 1)


def resnet18(*, input: tuple[int, ...] = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """ResNet-18: two basic blocks in each stage."""
    check_sample("resnet18", input, classes, _SMALLEST)
    return ResNet(BasicBlock, (2, 2, 2, 2), input[0], classes)


def resnet50(*, input: tuple[int, ...] = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """ResNet-50: 3, 4, 6 and 3 bottleneck blocks."""
    check_sample("resnet50", input, classes, _SMALLEST)
    return ResNet(Bottleneck, (3, 4, 6, 3), input[0], classes)
