"""Images and their masks, to segment: --data pairs:PATH.

Layout    PATH/images/* and PATH/masks/* with the same names (their endings may differ), of which every fifth pair is a
          test pair; or PATH/train/images, PATH/train/masks, PATH/test/images and PATH/test/masks (or val).
Masks     one class number per pixel, from 0: grey values, a palette's indices, or a `.npy` of integers. Masks that hold
          0 and 255 alone, as black-and-white pictures do, are read as 0 and 1.
Reading   pairs are listed at the start, when every mask is read once to count the classes, and decoded batch by batch,
          in a few threads. All have the size of the first image, unless a shape is given: then images are resized,
          bilinear, and masks, to the nearest pixel.
Failure   a pair that cannot be read fails the batch that holds it, by name.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Norm, Splits, Task
from shoal.data.pixels import (
    decode,
    decode_mask,
    image_shape,
    images_below,
    in_threads,
    kind_of_values,
    measure,
    pillow,
    read_mask,
)
from shoal.errors import DataError
from shoal.inference import numbered

TEST_NAMES = ("test", "val")
LAYOUT = "Arrange them as PATH/images/* and PATH/masks/* with the same names, or so in PATH/train and in PATH/test."
WHITE = 255

Pairs = list[tuple[Path, Path]]


class PairData:
    """One split: files decoded when their batch is asked for. `white`: masks are 0 and 255, for 0 and 1."""

    prefetch = True
    task: Task = "segment"

    def __init__(
        self, pairs: Pairs, *, classes: int, shape: tuple[int, ...], white: bool, norm: Norm | None = None
    ) -> None:
        self._pairs = pairs
        self._white = white
        self.classes = classes
        self.class_names = numbered(classes)
        self.shape = shape
        images = [image for image, _ in pairs]
        self.norm = norm or measure(images, shape)
        self.preparation = self.norm.after(kind_of_values(images), shape)

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`. `DataError` names the file that cannot be read, or whose mask has another class."""
        chosen = [self._pairs[i] for i in indices]
        pixels = in_threads(lambda file: decode(file, self.shape), [image for image, _ in chosen])
        masks = in_threads(self._mask, [mask for _, mask in chosen])
        return self.norm.apply_(torch.from_numpy(np.stack(pixels)).float()), torch.from_numpy(np.stack(masks))

    def _mask(self, file: Path) -> NDArray[np.int64]:
        height, width = self.shape[1:]
        mask = decode_mask(file, (height, width))
        if self._white:
            mask = mask // WHITE
        if mask.max() >= self.classes:
            raise DataError(f"the mask {file} holds the class {mask.max()}; there are {self.classes}.", LAYOUT)
        return mask


def load_pairs(path: Path, *, shape: tuple[int, ...] | None = None, classes: int | None = None) -> Splits:
    """Both splits. `shape` is by default the first image's; `classes` the largest class number + 1."""
    pillow()
    if not path.is_dir():
        raise DataError(f"there is no folder {path}.", "Check the path after pairs:.")
    train, test = split_pairs(path)
    if shape is None:
        shape = image_shape(train[0][0])
        _check_sizes([*train, *test], shape)
    elif len(shape) != 3 or min(shape) < 1:
        raise DataError(
            f"images cannot be brought to the shape {shape}.", "Give channels,height,width, for example 3,256,256."
        )
    count, white = _classes([mask for _, mask in (*train, *test)], classes)
    first = PairData(train, classes=count, shape=shape, white=white)
    second = PairData(test, classes=count, shape=shape, white=white, norm=first.norm)
    return Splits(f"pairs:{path}", first, second, str(path))


def split_pairs(path: Path) -> tuple[Pairs, Pairs]:
    """The pairs of images and masks to train and to test with."""
    if (path / "train").is_dir():
        tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
        if not tests:
            raise DataError(f"{path} has a folder train but neither test nor val.", LAYOUT)
        train, test = _pairs(path / "train"), _pairs(tests[0])
    else:
        every = _pairs(path)
        train, test = [pair for i, pair in enumerate(every) if i % 5 != 4], every[4::5]
    if not test:
        raise DataError(f"{path} leaves no pair to test with.", "Give at least five pairs, or a folder test.")
    return train, test


def _pairs(folder: Path) -> Pairs:
    images, masks = (images_below(folder / name) for name in ("images", "masks"))
    if not images:
        raise DataError(f"{folder / 'images'} holds no image.", LAYOUT)
    by_name: dict[Path, Path] = {}
    for mask in masks:
        name = mask.relative_to(folder / "masks").with_suffix("")
        if name in by_name:
            raise DataError(f"{by_name[name]} and {mask} are masks of one name.", "Keep one of them.")
        by_name[name] = mask
    names = [image.relative_to(folder / "images").with_suffix("") for image in images]
    for image, name in zip(images, names, strict=True):
        if name not in by_name:
            raise DataError(f"the image {image} has no mask {folder / 'masks' / name}.*.", LAYOUT)
    if without := by_name.keys() - set(names):
        raise DataError(f"the mask {by_name[min(without)]} has no image.", LAYOUT)
    return [(image, by_name[name]) for image, name in zip(images, names, strict=True)]


def _check_sizes(pairs: Pairs, shape: tuple[int, ...]) -> None:
    for image, _ in pairs:
        if (other := image_shape(image)[1:]) != shape[1:]:
            raise DataError(
                f"the image {image} is {other[0]}x{other[1]}, the first one {shape[1]}x{shape[2]}.",
                f"Give the size that all are brought to: --input {','.join(map(str, shape))}.",
            )


def _classes(masks: list[Path], given: int | None) -> tuple[int, bool]:
    """The number of classes, and whether masks are 0 and 255 alone."""

    def values(file: Path) -> set[int]:
        try:
            return set(np.unique(read_mask(file)).tolist())
        except DataError as error:
            if "cannot be read" in error.problem:  # it fails its own batch
                return set()
            raise

    found: set[int] = set().union(*in_threads(values, masks))
    white = WHITE in found and found <= {0, WHITE}
    highest = 1 if white else max(found, default=0)
    if given is not None:
        if highest >= given:
            raise DataError(
                f"the masks hold the class {highest}, but {given} classes allow 0 to {given - 1}.",
                f"Give at least {highest + 1} classes, or correct the masks.",
            )
        return given, white
    if highest == 0:
        raise DataError("every mask is 0 everywhere, so there is nothing to learn.", "Save two classes or more.")
    return highest + 1, white
