"""Fashion-MNIST from its four gzipped idx files, downloaded from its authors' host where it is missing.

MNIST uses the same four file names, so a file is taken only by its checksum.
"""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.catalog import FASHION_MNIST
from shoal.data.dataset import ArrayData, Norm, Splits
from shoal.data.download import Remote, check, fetch
from shoal.data.search import VARIABLE
from shoal.errors import DataError
from shoal.files import cache_folder

HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

TRAIN_X, TRAIN_Y, TEST_X, TEST_Y = FILES = (
    Remote(
        "train-images-idx3-ubyte.gz",
        26421856,
        "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    ),
    Remote(
        "train-labels-idx1-ubyte.gz",
        29491,
        "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    ),
    Remote(
        "t10k-images-idx3-ubyte.gz",
        4422079,
        "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    ),
    Remote(
        "t10k-labels-idx1-ubyte.gz",
        5125,
        "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    ),
)

# Published with the data set for pixels on a scale of 0 to 1; ours are stored on 0 to 255.
NORM = Norm(mean=(0.2860 * 255,), std=(0.3530 * 255,))

CLASS_NAMES = (  # as its authors publish them
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

OFFLINE = (
    f"Put {', '.join(FASHION_MNIST.files)} in a folder {FASHION_MNIST.inside[0]} and set {VARIABLE} to "
    "the folder above it; on Debian: apt install dataset-fashion-mnist; or use --data digits."
)
REPLACE = f"Delete that file, and it is downloaded anew; or set {VARIABLE} to a folder with sound copies."


def load_fashion(base_url: str = HOST) -> Splits:
    """Both splits, from this machine or else from `base_url`. Takes 0.7 s, most of it to unpack."""
    folder = FASHION_MNIST.find()
    if folder is None:
        folder = cache_folder() / FASHION_MNIST.inside[0]
        fetch(FILES, base_url=base_url, folder=folder, remedy=OFFLINE)
    for file in FILES:
        check(folder / file.name, file, REPLACE)
    train = read_images(folder / TRAIN_X.name), read_idx(folder / TRAIN_Y.name, dims=1)
    test = read_images(folder / TEST_X.name), read_idx(folder / TEST_Y.name, dims=1)
    return Splits(
        FASHION_MNIST.name,
        ArrayData(*train, classes=10, norm=NORM, class_names=CLASS_NAMES),
        ArrayData(*test, classes=10, norm=NORM, class_names=CLASS_NAMES),
        str(folder),
    )


def read_images(path: Path) -> NDArray[np.uint8]:
    """An idx file of grey images, as (N, 1, H, W)."""
    return read_idx(path, dims=3)[:, None]


def read_idx(path: Path, *, dims: int) -> NDArray[np.uint8]:
    """An idx file of bytes, gzipped: 0 0 8 dims, then each extent as a big-endian int32, then the values.

    Truncated, corrupt or other files are refused with `DataError`; gzip's own checksum is verified.
    """
    try:
        with gzip.open(path, "rb") as stream:
            magic, extents = stream.read(4), stream.read(4 * dims)
            if magic != bytes((0, 0, 8, dims)) or len(extents) != 4 * dims:
                raise _unusable(path, f"its header {magic.hex()} is not that of bytes in {dims} dimensions")
            # The buffer is allocated here, not by `read`, because torch shares writable memory only.
            values: NDArray[Any] = np.empty(np.frombuffer(extents, ">i4"), dtype=np.uint8)
            got = stream.readinto(values.data.cast("B")) if values.size else 0
            if got != values.size or stream.read(1):  # the read past the end verifies gzip's checksum
                raise _unusable(path, f"it does not hold the {values.size} values that its header announces")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise _unusable(path, str(error)) from error
    return values


def _unusable(path: Path, why: str) -> DataError:
    return DataError(f"{path} is truncated or corrupt: {why}.", REPLACE)
