"""A folder of images with one sub-folder for each class: --data folder:PATH.

Layout    PATH/train/CLASS/* and PATH/test/CLASS/* (or val), or PATH/CLASS/* with every fifth image of each
          class as test. Classes are numbered in the order of their names.
Reading   images are listed at the start and decoded batch by batch, in a few threads, converted to grey or
          RGB and resized. `pixels.py` says which files are read and what becomes of their values.
Failure   an image that cannot be read fails the batch that holds it, by name.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Norm, Splits, Task, every_fifth
from shoal.data.pixels import decode, image_shape, images_below, in_threads, kind_of_values, measure, pillow
from shoal.errors import DataError

TEST_NAMES = ("test", "val")
LAYOUT = "Arrange the images as PATH/CLASS/*.png, or as PATH/train/CLASS/*.png and PATH/test/CLASS/*.png."

Listing = tuple[list[Path], NDArray[np.int64]]


class FolderData:
    """One split: files decoded when their batch is asked for."""

    prefetch = True
    task: Task = "classify"

    def __init__(
        self, listing: Listing, *, class_names: Sequence[str], shape: tuple[int, ...], norm: Norm | None = None
    ) -> None:
        self._files, labels = listing
        self._labels = torch.from_numpy(labels)
        self.class_names = tuple(class_names)
        self.classes = len(self.class_names)
        self.shape = shape
        self.norm = norm or measure(self._files, shape)
        self.preparation = self.norm.after(kind_of_values(self._files), shape)

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`. `DataError` names the image that cannot be read."""
        pixels = in_threads(lambda file: decode(file, self.shape), [self._files[i] for i in indices])
        x = torch.from_numpy(np.stack(pixels)).float()
        return self.norm.apply_(x), self._labels[torch.from_numpy(indices)]


def load_folder(path: Path, *, shape: tuple[int, ...] | None = None) -> Splits:
    """Both splits. `shape` is (1 or 3, height, width), by default the first image's."""
    pillow()
    if not path.is_dir():
        raise DataError(f"there is no folder {path}.", "Check the path after folder:.")
    names, train, test = _list(path)
    if shape is None:
        shape = image_shape(train[0][0])
    elif len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise DataError(
            f"images cannot be brought to the shape {shape}.",
            "Give channels,height,width with 1 channel (grey) or 3 (RGB), for example 3,224,224.",
        )
    first = FolderData(train, class_names=names, shape=shape)
    second = FolderData(test, class_names=names, shape=shape, norm=first.norm)
    return Splits(f"folder:{path}", first, second, str(path))


def _list(path: Path) -> tuple[list[str], Listing, Listing]:
    """Class names, then the files and labels of both parts."""
    # A class may itself be called "train": it is a part only if it holds folders.
    if _subfolders(path / "train"):
        tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
        if not tests:
            raise DataError(f"{path} has a folder train but neither test nor val.", LAYOUT)
        names = _class_names(path / "train")
        if unknown := [folder.name for folder in _subfolders(tests[0]) if folder.name not in names]:
            raise DataError(f"{tests[0]} has the class {unknown[0]!r}, which {path / 'train'} lacks.", LAYOUT)
        train, test = _files(path / "train", names), _files(tests[0], names)
    else:
        names = _class_names(path)
        files, labels = _files(path, names)
        mask = every_fifth(labels)
        train = [file for file, out in zip(files, mask, strict=True) if not out], labels[~mask]
        test = [file for file, out in zip(files, mask, strict=True) if out], labels[mask]
    present = set(train[1].tolist())
    if empty := [name for label, name in enumerate(names) if label not in present]:
        raise DataError(f"{path}: the class folder {empty[0]!r} holds no image.", f"Add images or remove it. {LAYOUT}")
    if not test[0]:
        raise DataError(f"{path} leaves no image to test with.", "Give a class at least five images, or a folder test.")
    return names, train, test


def _class_names(folder: Path) -> list[str]:
    names = [sub.name for sub in _subfolders(folder)]
    if len(names) < 2:
        present = f"only the class {names[0]!r}" if names else "no class folder"
        raise DataError(f"{folder} has {present}; at least two classes are needed.", LAYOUT)
    return names


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def _files(folder: Path, names: Sequence[str]) -> Listing:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        images = images_below(folder / name)
        files += images
        labels += [label] * len(images)
    return files, np.array(labels, dtype=np.int64)
