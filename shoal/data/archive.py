"""Read arrays out of an .npz file; every way in which the file can be wrong becomes one message."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError

Arrays = dict[str, NDArray[Any]]

# What numpy, zipfile and zlib raise for a file that is truncated, damaged or of another kind.
DAMAGE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def read_arrays(path: Path, keys: Sequence[str] | None = None, more: Sequence[str] = ()) -> Arrays:
    """The arrays named in `keys` (default: all), and those of `more` that are there, read whole.

    Pickled objects are never loaded.
    """
    remedy = "Copy it again from its source, or write it anew with numpy.savez_compressed."
    try:
        # Opened here: numpy forgets to close a damaged archive that it opened itself.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} is a single array, not an .npz archive.", remedy)
            present = archive.files
            wanted = present if keys is None else keys
            if missing := [key for key in wanted if key not in present]:
                raise DataError(
                    f"{path} has no array {', '.join(missing)}; it holds {', '.join(present) or 'none'}.",
                    "Use the file that belongs to this data set, or name the arrays as it expects.",
                )
            return {key: archive[key] for key in (*wanted, *(key for key in more if key in present))}
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.", "Check the path after npz:.") from error
    except DAMAGE as error:
        raise DataError(f"{path} is truncated, corrupt or no .npz file: {error}.", remedy) from error
