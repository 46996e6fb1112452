"""U-Net (Ronneberger et al. 2015) in two and three dimensions, with padding and batch norm.

Padded convolutions keep every map's size, so the output has one score per class and input pixel.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.zoo._init import kaiming_
from shoal.zoo._sample import check_at_least_one, check_sample, shape_text


def _double(dims: int, inputs: int, outputs: int) -> nn.Sequential:
    """Two times 3x3 convolution, batch norm, ReLU."""
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(
        conv(inputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
        conv(outputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A contracting path, an expanding path, and at each level a skip from one to the other.

    Level `i` is `width * 2**i` wide; `decoder.0` is the lowest level of the expanding path.
    """

    def __init__(self, dims: int, channels: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        conv, pool, transposed = (
            (nn.Conv2d, nn.MaxPool2d, nn.ConvTranspose2d)
            if dims == 2
            else (nn.Conv3d, nn.MaxPool3d, nn.ConvTranspose3d)
        )
        widths = [width * 2**level for level in range(depth + 1)]
        steps = list(pairwise(widths))
        entries = pairwise([channels, *widths[:-1]])
        self.encoder = nn.ModuleList(_double(dims, inputs, outputs) for inputs, outputs in entries)
        self.pool = nn.ModuleList(pool(2) for _ in steps)
        self.bottleneck = _double(dims, widths[-2], widths[-1])
        self.up = nn.ModuleList(transposed(below, above, 2, stride=2) for above, below in reversed(steps))
        self.decoder = nn.ModuleList(_double(dims, below, above) for above, below in reversed(steps))
        self.head = conv(width, classes, 1)
        kaiming_(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class at each pixel, from images (batch, channels, [depth,] height, width)."""
        skips: list[Tensor] = []
        for encode, pool in zip(self.encoder, self.pool, strict=True):
            skips.append(encode(x))
            x = pool(skips[-1])
        x = self.bottleneck(x)
        for up, decode, skip in zip(self.up, self.decoder, reversed(skips), strict=True):
            x = decode(torch.cat([skip, up(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores


def unet(*, input: tuple[int, ...] = (1, 1024, 1024), classes: int = 2, width: int = 32, depth: int = 4) -> nn.Module:
    """U-Net for images (channels, height, width) or volumes (channels, depth, height, width).

    Every level halves the map, so each spatial extent must be a multiple of `2**depth`.
    """
    check_at_least_one("unet", width=width, depth=depth)
    unit = 2**depth
    check_sample("unet", input, classes, (unit, unit), (unit, unit, unit))
    channels, *extents = input
    if any(size % unit for size in extents):
        below = (channels, *(size // unit * unit for size in extents))
        above = (channels, *(-(-size // unit) * unit for size in extents))
        raise ModelError(
            f"unet of depth {depth} cannot take the input shape {shape_text(input)}: "
            f"{shape_text(tuple(extents), 'x')} does not divide by {unit}.",
            f"Crop to {shape_text(below)}, pad to {shape_text(above)}, or give a smaller depth.",
        )
    return UNet(len(extents), channels, classes, width, depth)
