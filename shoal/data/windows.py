"""Windows of images that are too large for memory, with their masks, to segment: --data windows:PATH.

Layout    PATH/images/* and PATH/masks/* with the same names, as TIFF (tiled, or it is read strip by strip) or OME-Zarr;
          every fifth window is a test window. Or PATH/train/images, PATH/train/masks, PATH/test/images and
          PATH/test/masks (or val): whole images to test with.
Samples   each image is laid out in windows of the sample's shape (--input C,H,W; 512x512 unless given) that lie side by
          side. What is left at its right and lower edge, too small for a window, is not used.
Reading   a window is read when its batch is asked for; of a plan that cuts in space each rank reads its own part of it.
          Where samples are changed at random (--augment) every rank reads the whole window, and changes it alike.
Masks     one class number per pixel. The number of classes must be given: masks are too large to be looked through.
Norm      measured from at most 64 spots of 256x256 that are spread over the training windows.
Failure   a file that cannot be read fails at the start, or the batch that needs its broken part, by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Norm, Splits, Task
from shoal.data.pixels import in_threads, real_values
from shoal.data.rasters import ENDINGS, Raster, open_raster
from shoal.errors import DataError
from shoal.inference import numbered

TEST_NAMES = ("test", "val")
LAYOUT = (
    "Arrange them as PATH/images/*.tif and PATH/masks/*.tif (or .zarr) with the same names, or so in PATH/train and in "
    "PATH/test."
)
SIDE = 512
SPOTS, SPOT = 64, 256

Pair = tuple[Raster, Raster]


@dataclass(frozen=True)
class Place:
    """A window: of which image, and where in it."""

    image: int
    top: int
    left: int


class WindowData:
    """One split: windows that are read when their batch is asked for."""

    prefetch = True
    task: Task = "segment"

    def __init__(
        self,
        pairs: Sequence[Pair],
        places: Sequence[Place],
        *,
        classes: int,
        shape: tuple[int, ...],
        norm: Norm | None = None,
    ) -> None:
        self.pairs, self._places = pairs, places
        self.classes = classes
        self.class_names = numbered(classes)
        self.shape = shape
        self.norm = norm or self._measure()
        first = pairs[0][0].dtype
        on_scale = first.kind in "bu" and first.itemsize <= 2
        self.preparation = self.norm.after("bytes" if on_scale else "numbers", shape)

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`."""
        whole = tuple(slice(0, size) for size in self.shape[1:])
        return self.window(indices, whole, whole)

    def window(self, indices: NDArray[np.int64], x: tuple[slice, ...], y: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """See `Windowed.window`: tiles that lie wholly outside are not read."""
        read = in_threads(lambda index: self._read(self._places[index], x, y), indices.tolist())
        samples, labels = (np.stack(part) for part in zip(*read, strict=True))
        return self.norm.apply_(torch.from_numpy(samples).float()), torch.from_numpy(labels)

    def _read(
        self, place: Place, x: tuple[slice, ...], y: tuple[slice, ...]
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        image, mask = self.pairs[place.image]
        pixels = real_values(image.read(*_moved(x, place)), image.path)
        labels = mask.read(*_moved(y, place))[0]
        if labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
            raise DataError(
                f"the mask {mask.path} holds classes from {labels.min()} to {labels.max()}; there are {self.classes}, "
                "from 0.",
                "Save one class number per pixel (of black and white: 0 and 1), or give their number: --classes.",
            )
        return pixels, labels.astype(np.int64)

    def _measure(self) -> Norm:
        """Each spot has the size of the first; a window may be smaller than a spot."""
        tall, wide = (min(SPOT, size) for size in self.shape[1:])
        step = max(1, -(-len(self._places) // SPOTS))
        spots = []
        for place in self._places[::step]:
            image = self.pairs[place.image][0]
            corner = _moved((slice(0, tall), slice(0, wide)), place)
            spots.append(real_values(image.read(*corner), image.path))
        return Norm.of(np.stack(spots))


def load_windows(path: Path, *, shape: tuple[int, ...] | None = None, classes: int | None = None) -> Splits:
    """Both splits. `shape` is a window's, (channels, height, width); `classes` must be given."""
    if not path.is_dir():
        raise DataError(f"there is no folder {path}.", "Check the path after windows:.")
    if classes is None or classes < 2:
        raise DataError(
            f"how many classes the masks of {path} have is not known: they are too large to be looked through.",
            "Give their number, at least 2: --classes N.",
        )
    if (path / "train").is_dir():
        tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
        if not tests:
            raise DataError(f"{path} has a folder train but neither test nor val.", LAYOUT)
        first, second = _pairs(path / "train"), _pairs(tests[0])
        shape = _shape(shape, [*first, *second])
        train, test = _places(first, shape), _places(second, shape)
    else:
        first = second = _pairs(path)
        shape = _shape(shape, first)
        every = _places(first, shape)
        train, test = [place for i, place in enumerate(every) if i % 5 != 4], every[4::5]
    if not test:
        raise DataError(
            f"{path} leaves no window of {shape[1]}x{shape[2]} to test with.",
            "Give smaller windows (--input C,H,W), more images, or a folder test.",
        )
    training = WindowData(first, train, classes=classes, shape=shape)
    testing = WindowData(second, test, classes=classes, shape=shape, norm=training.norm)
    return Splits(f"windows:{path}", training, testing, str(path))


def _pairs(folder: Path) -> list[Pair]:
    images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
    if not images:
        raise DataError(f"{folder / 'images'} holds no TIFF and no Zarr.", LAYOUT)
    for some, others, what in ((images, masks, "mask"), (masks, images, "image")):
        if alone := sorted(some.keys() - others.keys()):
            raise DataError(f"{some[alone[0]]} has no {what}.", LAYOUT)
    pairs = [(open_raster(images[name]), open_raster(masks[name])) for name in sorted(images)]
    for image, mask in pairs:
        if mask.shape != (1, *image.shape[1:]) or mask.dtype.kind not in "bui":
            raise DataError(
                f"the mask {mask.path} has the shape {mask.shape} of {mask.dtype}, the image {image.shape}.",
                "Save one whole number for each pixel of the image.",
            )
    return pairs


def _by_name(folder: Path) -> dict[str, Path]:
    """Images in a folder, by their names without ending."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        ending = next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), None)
        if ending is None or path.name.startswith("."):
            continue
        name = path.name[: -len(ending)]
        if name in found:
            raise DataError(f"{found[name]} and {path} have one name.", "Keep one of them.")
        found[name] = path
    return found


def _shape(given: tuple[int, ...] | None, pairs: Sequence[Pair]) -> tuple[int, ...]:
    """Of a window of every image."""
    channels = pairs[0][0].shape[0]
    least = [min(image.shape[1 + dim] for image, _ in pairs) for dim in range(2)]
    shape = given or (channels, min(SIDE, least[0]), min(SIDE, least[1]))
    for image, _ in pairs:
        same = len(shape) == 3 and image.shape[0] == shape[0] and min(shape) > 0
        if not same or image.shape[1] < shape[1] or image.shape[2] < shape[2]:
            raise DataError(
                f"the image {image.path} of the shape {image.shape} has no window of the shape {shape}.",
                f"Give --input {channels},H,W with at most {least[0]},{least[1]}; all images need the same channels.",
            )
    return shape


def _places(pairs: Sequence[Pair], shape: tuple[int, ...]) -> list[Place]:
    return [
        Place(number, top, left)
        for number, (image, _) in enumerate(pairs)
        for top in range(0, image.shape[1] - shape[1] + 1, shape[1])
        for left in range(0, image.shape[2] - shape[2] + 1, shape[2])
    ]


def _moved(window: tuple[slice, ...], place: Place) -> tuple[slice, slice]:
    rows, columns = window
    return (
        slice(place.top + rows.start, place.top + rows.stop),
        slice(place.left + columns.start, place.left + columns.stop),
    )
