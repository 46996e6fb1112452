"""The named data sets that are kept as one .npz file each: pets32, audiomnist and nuclei."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.archive import Arrays, read_arrays
from shoal.data.catalog import AUDIOMNIST, NUCLEI, PETS32, Known
from shoal.data.dataset import ArrayData, Norm, Splits
from shoal.data.npz import class_names
from shoal.errors import DataError
from shoal.inference import numbered

# Published with the prepared set, on a scale of 0 to 255.
PETS32_NORM = Norm(mean=(123.7, 114.3, 101.0), std=(64.8, 63.5, 65.3))


def load_pets32() -> Splits:
    """37 breeds, RGB 32x32; every fifth photograph of each breed is a test sample."""
    arrays, origin = _read(PETS32, {"x": (32, 32, 3), "breed": (), "test": ()}, ("breed_names",))
    names = class_names(arrays, Path(origin), 37, "breed_names")
    x = arrays["x"].transpose(0, 3, 1, 2)
    test = arrays["test"] != 0
    return _split(PETS32, origin, x, arrays["breed"], ~test, test, names, norm=PETS32_NORM)


def load_audiomnist() -> Splits:
    """Ten spoken digits, log-mel 40x96; no speaker is in two parts. The validation part is left unused."""
    arrays, origin = _read(AUDIOMNIST, {"x": (40, 96), "y": (), "split": ()})
    part = arrays["split"]
    return _split(AUDIOMNIST, origin, arrays["x"][:, None], arrays["y"], part == 0, part == 2, numbered(10))


def load_nuclei() -> Splits:
    """Grey 1024x1024; class 1 is a pixel of any nucleus, class 0 the background."""
    arrays, origin = _read(NUCLEI, {"x": (1024, 1024), "instances": (1024, 1024), "test": ()})
    mask = (arrays["instances"] > 0).astype(np.uint8)
    test = arrays["test"] != 0
    return _split(NUCLEI, origin, arrays["x"][:, None], mask, ~test, test, ("background", "nucleus"))


def _read(known: Known, shapes: dict[str, tuple[int, ...]], more: tuple[str, ...] = ()) -> tuple[Arrays, str]:
    """Read the arrays and check each one's shape per sample; and those of `more` that are there."""
    path = known.locate() / known.files[0]
    arrays = read_arrays(path, list(shapes), more)
    count = len(arrays["x"])
    for key, shape in shapes.items():
        if arrays[key].shape != (count, *shape):
            raise DataError(
                f"{path} is not the {known.name} Shoal knows: {key!r} has the shape {arrays[key].shape}, "
                f"not {(count, *shape)}.",
                f"{known.remedy} Or read your own file with --data npz:PATH.",
            )
    return arrays, str(path)


def _split(
    known: Known,
    origin: str,
    x: NDArray[Any],
    y: NDArray[Any],
    train: NDArray[np.bool_],
    test: NDArray[np.bool_],
    names: tuple[str, ...],
    *,
    norm: Norm | None = None,
) -> Splits:
    first = ArrayData(x[train], y[train], classes=len(names), norm=norm, class_names=names)
    second = ArrayData(x[test], y[test], classes=len(names), norm=first.norm, class_names=names)
    return Splits(known.name, first, second, origin)
