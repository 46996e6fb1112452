"""Make a synthetic slide: a tiled TIFF of bright discs on noise, and its mask, written tile by tile.

    python -m benchmarks.large_image.slide FOLDER [--side 20000]

Costs memory for one tile, whatever the side. The discs, one in every cell of 64x64 pixels, are a pure function of the
seed and the place, so that every tile can be made by itself.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

TILE = 256
CELL = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", type=int, default=20_000)
    args = parser.parse_args()
    make(args.folder, args.side)


def make(folder: Path, side: int) -> None:
    """FOLDER/images/slide.tif and FOLDER/masks/slide.tif, of side x side bytes each."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(
            folder / part / "slide.tif",
            _tiles(side, mask=part == "masks"),
            shape=(side, side),
            dtype=np.uint8,
            tile=(TILE, TILE),
            photometric="minisblack",
        )


def _tiles(side: int, *, mask: bool) -> Iterator[NDArray[np.uint8]]:
    count = -(-side // TILE)
    for row in range(count):
        for column in range(count):
            inside = _discs(row, column)
            if mask:
                yield inside.astype(np.uint8)
            else:
                noise = np.random.default_rng([row, column]).normal(0, 20, (TILE, TILE))
                yield np.clip(70 + 90 * inside + noise, 0, 255).astype(np.uint8)


def _discs(row: int, column: int) -> NDArray[np.bool_]:
    """Where a tile's discs are: each lies wholly in its cell, and cells in their tile."""
    cells = TILE // CELL
    drawn = np.random.default_rng([row, column, 1]).uniform(size=(cells, cells, 3))
    radius = 8 + 16 * drawn[..., 2]
    centre = radius[..., None] + drawn[..., :2] * (CELL - 2 * radius[..., None])
    at = np.arange(CELL)
    down = (at[:, None] - centre[..., 0, None, None]) ** 2
    across = (at[None, :] - centre[..., 1, None, None]) ** 2
    inside = down + across < radius[..., None, None] ** 2
    joined: NDArray[np.bool_] = inside.transpose(0, 2, 1, 3).reshape(TILE, TILE)
    return joined


if __name__ == "__main__":
    main()
