"""Real handwritten digits that come with Shoal: 5,000 of MNIST at 28x28, 500 of each. Nothing to download.

They lie in `digits.npz` beside this file; `digits_source.md` says where they come from and under which licence.
"""

from shoal.data.archive import read_arrays
from shoal.data.catalog import DIGITS_REMEDY, digits_file
from shoal.data.dataset import ArrayData, Splits, every_fifth
from shoal.errors import DataError


def load_digits() -> Splits:
    """Ten classes of grey images; every fifth of each class is a test sample."""
    path = digits_file()
    if path is None:
        raise DataError("data set 'digits' was not found: this installation of Shoal lacks its file.", DIGITS_REMEDY)
    try:
        arrays = read_arrays(path, ["x", "y"])
    except DataError as error:
        raise DataError(error.problem, DIGITS_REMEDY) from error
    x, y = arrays["x"][:, None], arrays["y"]
    test = every_fifth(y)
    train = ArrayData(x[~test], y[~test], classes=10)
    return Splits("digits", train, ArrayData(x[test], y[test], classes=10, norm=train.norm), str(path))
