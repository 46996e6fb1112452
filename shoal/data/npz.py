"""A user's own arrays: --data npz:PATH.

Arrays    `x` and `y`, or `x_train`, `y_train`, `x_test`, `y_test`.
Parts     `test`: non-zero marks a test sample; or `split`: 0 train, 1 validation (unused), 2 test, where
          without any 2 the samples marked 1 are the test; else every fifth sample is a test sample.
Layout    of `x`, uint8 or any real numbers, by its dimensions:
            3   N,H,W      one channel
            4   N,H,W,C    where the last extent is 1 to 4 and the second is not
                N,C,H,W    where the last extent is above 4
                refused    where both are 1 to 4, unless the sample's shape is given and only one fits
            5   N,C,D,H,W  refused where it looks like channels last, unless the sample's shape is given
Names     `class_names`: a text for each class; classes are numbered without it.
Labels    integers from 0. (N,) or (N,1) to classify; N and the spatial extents of `x` to segment.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.archive import Arrays, read_arrays
from shoal.data.dataset import ArrayData, Splits
from shoal.errors import DataError
from shoal.inference import numbered

FEW = range(1, 5)  # extents that are taken for channels
PAIRS = ("x_train", "y_train", "x_test", "y_test")

Pair = tuple[NDArray[Any], NDArray[Any]]


def load_npz(path: Path, *, shape: tuple[int, ...] | None = None, classes: int | None = None) -> Splits:
    """Both splits, in memory.

    `shape` settles an ambiguous layout; `classes` is by default the largest label + 1.
    """
    arrays = read_arrays(path)
    parts = _parts(arrays, path)
    (x, y), (x_test, y_test) = (_checked(*part, path, shape) for part in parts)
    if x.shape[1:] != x_test.shape[1:] or y.ndim != y_test.ndim:
        raise DataError(
            f"{path}: training samples have the shape {x.shape[1:]} and test samples {x_test.shape[1:]}.",
            "Save both with the same shape and the same kind of labels.",
        )
    count = _classes((y, y_test), path, classes)
    named = class_names(arrays, path, count)
    train = ArrayData(x, y, classes=count, class_names=named)
    test = ArrayData(x_test, y_test, classes=count, norm=train.norm, class_names=named)
    return Splits(f"npz:{path}", train, test, str(path))


def class_names(arrays: Arrays, path: Path, classes: int, key: str = "class_names") -> tuple[str, ...]:
    """The names in the array `key`, one for each class and no two alike; numbers where there is no such array."""
    if key not in arrays:
        return numbered(classes)
    names = arrays[key]
    remedy = f"Save {key} as a list of texts, one for each class, or leave it out."
    if names.dtype.kind != "U" or names.shape != (classes,):
        raise DataError(f"{path}: {key} holds {names.dtype} of the shape {names.shape}, not {classes} texts.", remedy)
    found = tuple(map(str, names))
    if twice := [name for name in found if found.count(name) > 1]:
        raise DataError(f"{path}: {key} has {twice[0]!r} more than once.", remedy)
    return found


def _parts(arrays: Arrays, path: Path) -> tuple[Pair, Pair]:
    if all(key in arrays for key in PAIRS):
        pairs = (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])
    elif "x" in arrays and "y" in arrays:
        x, y = arrays["x"], arrays["y"]
        _same_length({key: arrays[key] for key in ("x", "y", "test", "split") if key in arrays}, path)
        train, test = _masks(arrays, path)
        pairs = (x[train], y[train]), (x[test], y[test])
    else:
        raise DataError(
            f"{path} holds {', '.join(arrays) or 'no array'}: neither x and y nor {', '.join(PAIRS)}.",
            "Save it with numpy.savez_compressed(path, x=..., y=...).",
        )
    for name, (x, y) in zip(("training", "test"), pairs, strict=True):
        _same_length({"x": x, "y": y}, path)
        if not len(x):
            raise DataError(
                f"{path} has no {name} sample.", "Mark some samples 0 and some 2 in `split`, or leave it out."
            )
    return pairs


def _same_length(arrays: Arrays, path: Path) -> None:
    if single := [key for key, array in arrays.items() if not array.ndim]:
        raise DataError(f"{path}: {single[0]} is a single number.", "Save one entry for each sample.")
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise DataError(f"{path}: the arrays differ in length: {text}.", "Save one entry for each sample.")


def _masks(arrays: Arrays, path: Path) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which samples train, and which test."""
    if "test" in arrays:
        test = arrays["test"].reshape(len(arrays["x"]), -1)[:, 0] != 0
        return ~test, test
    if "split" not in arrays:
        test = np.arange(len(arrays["x"])) % 5 == 4
        return ~test, test
    split = arrays["split"]
    if split.ndim != 1 or not np.isin(split, (0, 1, 2)).all():
        raise DataError(
            f"{path}: `split` has values other than 0, 1 and 2.",
            "Use 0 for training, 1 for validation and 2 for test samples.",
        )
    return split == 0, split == (2 if (split == 2).any() else 1)


def _checked(x: NDArray[Any], y: NDArray[Any], path: Path, shape: tuple[int, ...] | None) -> Pair:
    """Samples with channels first, and labels as integers of a shape that fits them."""
    if x.dtype.kind not in "buif":
        raise DataError(f"{path}: x holds {x.dtype}, not real numbers.", "Save x as uint8 or float32.")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise DataError(f"{path}: x holds NaN or infinity.", "Replace those values before saving, for example by 0.")
    x = _channels_first(x, path, shape)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 and y.shape[1:] != x.shape[2:]:
        raise DataError(
            f"{path}: labels of the shape {y.shape} fit neither {len(x)} samples nor pixels {x.shape[2:]}.",
            "Save y with one integer for each sample (for one-hot rows: y.argmax(1)) or for each pixel.",
        )
    return x, _integers(y, path)


def _channels_first(x: NDArray[Any], path: Path, shape: tuple[int, ...] | None) -> NDArray[Any]:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim not in (4, 5):
        raise DataError(
            f"{path}: x has the shape {x.shape}, which is neither images nor volumes.",
            "Save x as N,H,W or N,C,H,W or N,H,W,C or N,C,D,H,W.",
        )
    last = np.moveaxis(x, -1, 1)
    fits = [layout for layout in (x, last) if layout.shape[1:] == shape]
    if len(fits) == 1:
        return fits[0]
    few_first, few_last = x.shape[1] in FEW, x.shape[-1] in FEW
    if few_last and (few_first or x.ndim == 5):
        raise DataError(
            f"{path}: in x of the shape {x.shape} the channels may come first or last.",
            f"Give the sample's shape, --input {_commas(x.shape[1:])} or --input {_commas(last.shape[1:])}; "
            "or save x with the channels first.",
        )
    return last if few_last else x


def _commas(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _integers(y: NDArray[Any], path: Path) -> NDArray[Any]:
    remedy = "Number the classes 0, 1, 2, ... and save those numbers as y."
    if y.dtype.kind not in "buif" or (y.dtype.kind == "f" and not (np.mod(y, 1) == 0).all()):
        raise DataError(f"{path}: y holds labels of type {y.dtype} that are not whole numbers.", remedy)
    if y.size and (lowest := y.min()) < 0:
        raise DataError(f"{path}: y holds the label {lowest:g}, which is negative.", remedy)
    return y.astype(np.uint8 if y.size and y.max() < 256 else np.int64, copy=False)


def _classes(labels: tuple[NDArray[Any], ...], path: Path, classes: int | None) -> int:
    highest = max(int(y.max()) for y in labels)
    if classes is not None:
        if highest >= classes:
            raise DataError(
                f"{path}: y holds the label {highest}, but {classes} classes allow 0 to {classes - 1}.",
                f"Give at least {highest + 1} classes, or correct the labels.",
            )
        return classes
    if highest == 0:
        raise DataError(f"{path}: every label is 0, so there is nothing to learn.", "Save two classes or more.")
    if highest == 255 and all(np.isin(y, (0, 255)).all() for y in labels):
        # A black-and-white mask saved as an image: 254 empty classes are surely not meant.
        raise DataError(f"{path}: the labels are 0 and 255 only.", "Save y as 0 and 1 (y > 0), or give 256 classes.")
    return highest + 1
