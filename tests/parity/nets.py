"""Random small networks from a description that travels to the ranks as plain data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Branches(nn.Module):
    """Two paths side by side, concatenated."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class SqueezeExcite(nn.Module):
    """Channels scaled by a function of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        return x * scale


class Shuffle(nn.Module):
    """Channel shuffle as ShuffleNet writes it."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def block(kind: str, channels: int, out: int, k: int, s: int, d: int) -> tuple[nn.Module, int]:
    """(module, channels that it returns)."""
    same = (k - 1) * d // 2
    match kind:
        case "conv":
            return nn.Sequential(nn.Conv2d(channels, out, k, s, same, d), nn.ReLU()), out
        case "bn":
            return nn.Sequential(
                nn.Conv2d(channels, out, k, s, same, d, bias=False), nn.BatchNorm2d(out), nn.ReLU()
            ), out
        case "depthwise":
            return nn.Conv2d(channels, channels, k, s, same, groups=channels, dilation=d), channels
        case "grouped":
            return nn.Conv2d(channels, 2 * out, k, s, same, d, groups=2), 2 * out
        case "residual":
            return Residual(nn.Conv2d(channels, channels, 3, padding=1)), channels
        case "branches":
            left = nn.Sequential(nn.Conv2d(channels, out, 1, s), nn.ReLU())
            right = nn.Sequential(nn.Conv2d(channels, 3, 3, s, 1), nn.BatchNorm2d(3))
            return Branches(left, right), out + 3
        case "max":
            return nn.MaxPool2d(3, s, 1), channels
        case "avg":
            return nn.AvgPool2d(3, s, 1, count_include_pad=False), channels
        case "squeeze":
            return SqueezeExcite(channels), channels
        case "shuffle":
            return Shuffle(), channels
        case "up":
            return nn.Upsample(scale_factor=2, mode="bilinear" if s == 1 else "nearest"), channels
        case "transpose":
            return nn.ConvTranspose2d(channels, out, k, 2, same), out
        case "norm":
            return nn.GroupNorm(2, channels), channels
    raise AssertionError(kind)


def random_net(blocks: tuple[tuple[str, int, int, int, int], ...], head: str) -> nn.Module:
    """Blocks of (kind, width, kernel, stride, dilation), then a head; channels stay even for shuffles and groups."""
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3, padding=1)]
    channels = 4
    for kind, out, k, s, d in blocks:
        module, channels = block(kind, channels, out, k, s, d)
        layers.append(module)
        if channels % 2:
            layers.append(nn.Conv2d(channels, channels + 1, 1))
            channels += 1
    if head == "mean":
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]
    elif head == "dense":
        layers += [nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(channels * 6, 7), nn.Tanh(), nn.Linear(7, 5)]
    else:
        layers.append(nn.Conv2d(channels, 5, 1))
    return nn.Sequential(*layers)
