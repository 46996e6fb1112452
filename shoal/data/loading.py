"""From what the user wrote after --data to a data set."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.data.catalog import AUDIOMNIST, FASHION_MNIST, NUCLEI, PETS32, default_name, forms, names
from shoal.data.dataset import Splits
from shoal.data.digits import load_digits
from shoal.data.fashion import load_fashion
from shoal.data.image_folder import load_folder
from shoal.data.npz import load_npz
from shoal.data.pairs import load_pairs
from shoal.data.prepared import load_audiomnist, load_nuclei, load_pets32
from shoal.data.resized import Resized
from shoal.data.synthetic import load_synthetic
from shoal.data.windows import load_windows
from shoal.errors import DataError, suggestion

FIXED: dict[str, Callable[[], Splits]] = {
    FASHION_MNIST.name: load_fashion,
    PETS32.name: load_pets32,
    AUDIOMNIST.name: load_audiomnist,
    NUCLEI.name: load_nuclei,
    "digits": load_digits,
}


def load(spec: str, *, shape: tuple[int, ...] | None = None, classes: int | None = None, seed: int = 0) -> Splits:
    """The training and test part of a data set.

    `spec` is one of `names()` or a form of `forms()`. Images to classify are resized to `shape` where it
    differs from their own; `classes` must be the data's own number, and only synthetic samples take any.
    `seed` matters to synthetic samples alone. Every failure is a `DataError` that says what to do.
    """
    name, colon, argument = spec.partition(":")
    if name == "synthetic":
        return load_synthetic(argument, shape=shape or (3, 32, 32), classes=classes or 10, seed=seed)
    if name in ("folder", "npz", "pairs", "windows"):
        path = _path(spec, argument)
        if name == "npz":
            return fit_splits(load_npz(path, shape=shape, classes=classes), shape, classes)
        if name == "pairs":
            return load_pairs(path, shape=shape, classes=classes)
        if name == "windows":
            return load_windows(path, shape=shape, classes=classes)
        return fit_splits(load_folder(path, shape=shape), shape, classes)
    if name == "python":
        raise DataError(
            f"the data {argument} was given as an object from Python, which has no name here.",
            f"Use it from Python, where that object is, or give the data by name: {', '.join((*names(), *forms()))}.",
        )
    known = default_name() if name == "default" else name
    if known not in FIXED:
        raise _unknown(spec)
    if colon:
        raise DataError(f"data set {name!r} takes no argument, but {spec!r} gives one.", f"Write --data {name}.")
    return fit_splits(FIXED[known](), shape, classes)


def _path(spec: str, argument: str) -> Path:
    if not argument:
        raise DataError(f"{spec!r} names no path.", f"Write {spec.partition(':')[0]}:PATH.")
    return Path(argument).expanduser()


def fit_splits(splits: Splits, shape: tuple[int, ...] | None, classes: int | None) -> Splits:
    """The same with images of this shape, which must have so many classes; `DataError` where that cannot be."""
    own = splits.train.classes
    if classes is not None and classes != own:
        raise DataError(
            f"data set {splits.name!r} has {own} classes, not {classes}.",
            f"Leave the number of classes out, or give {own}.",
        )
    if shape is None or shape == splits.train.shape:
        return splits
    return replace(splits, train=Resized(splits.train, shape), test=Resized(splits.test, shape))


def _unknown(spec: str) -> DataError:
    problem = f"no data set is named {spec!r}."
    if spec.endswith(".npz"):
        return DataError(problem, f"To read the arrays of a file, write npz:{spec}.")
    if Path(spec).is_dir():
        return DataError(problem, f"To read the images of a folder, write folder:{spec}.")
    return DataError(problem, suggestion(spec, (*names(), *forms())))
