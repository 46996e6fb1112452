"""Images that are too large to be read whole: windows of a TIFF or an OME-Zarr.

Reading   only the tiles (of a TIFF without tiles, the strips; of a Zarr, the chunks) that a window touches are read and
          decoded. Of an image with levels the largest is taken. `bytes_read` counts what was read of a TIFF, compressed
          as it lies there.
Threads   any number may read at once. A raster goes to other processes as a path; no file stays open between reads.
Failure   a file that is no such image is a `DataError` with its name; so is one with several images, times or depths.
"""

import os
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.pixels import tiffs
from shoal.errors import DataError

ENDINGS = (".ome.zarr", ".zarr", ".ome.tiff", ".ome.tif", ".tiff", ".tif")
CONTIGUOUS = 1  # TIFF's number for samples that lie beside each other

_counting = threading.Lock()


class Raster(Protocol):
    """An image that is read by window."""

    path: Path

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a stored value."""
        ...

    def read(self, rows: slice, columns: slice) -> NDArray[Any]:
        """(channels, rows, columns) as they are stored."""
        ...


def open_raster(path: Path) -> Raster:
    """The image at `path`, by the ending of its name."""
    return ZarrRaster(path) if path.name.lower().endswith(".zarr") else TiffRaster(path)


class TiffRaster:
    """The first image of a TIFF, grey or with its channels beside each other or one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._known: Any = None
        self._page()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Raster.shape`."""
        page = self._page()
        return page.samplesperpixel, page.imagelength, page.imagewidth

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `Raster.dtype`."""
        kind: np.dtype[Any] = self._page().dtype
        return kind

    def read(self, rows: slice, columns: slice) -> NDArray[Any]:
        """See `Raster.read`."""
        page = self._page()
        channels, height, width = self.shape
        tall, wide = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
        down, across = -(-height // tall), -(-width // wide)
        beside = page.planarconfig == CONTIGUOUS
        window = np.zeros((channels, rows.stop - rows.start, columns.stop - columns.start), page.dtype)
        file = os.open(self.path, os.O_RDONLY)
        try:
            for plane in range(1 if beside else channels):
                for row in range(rows.start // tall, -(-rows.stop // tall)):
                    for column in range(columns.start // wide, -(-columns.stop // wide)):
                        segment = self._segment(file, (plane * down + row) * across + column)
                        if segment is None:  # never written: zeros
                            continue
                        into, out = zip(
                            _overlap(rows, row * tall, segment.shape[0]),
                            _overlap(columns, column * wide, segment.shape[1]),
                            strict=True,
                        )
                        target = window if beside else window[plane : plane + 1]
                        target[:, *into] = np.moveaxis(segment[out], -1, 0)
        finally:
            os.close(file)
        return window

    def _segment(self, file: int, number: int) -> NDArray[Any] | None:
        """One tile or strip, (rows, columns, channels)."""
        page = self._page()
        offset, count = page.dataoffsets[number], page.databytecounts[number]
        if not count:
            return None
        stored = os.pread(file, count, offset)
        with _counting:
            self.bytes_read += len(stored)
        try:
            decoded, _, valid = page.decode(stored, number, jpegtables=page.jpegtables)
        except Exception as error:  # of whatever library decodes it
            raise DataError(
                f"{self.path}: tile {number} cannot be decoded: {error}.",
                "If its compression needs it: pip install imagecodecs. Else restore the file.",
            ) from error
        segment: NDArray[Any] = decoded[0, : valid[1], : valid[2]]
        return segment

    def _page(self) -> Any:
        """The image's description, read once in each process."""
        if self._known is None:
            try:
                with tiffs().TiffFile(self.path) as file:
                    series = file.series[0]
                    page = series.levels[0].pages[0].aspage()
                    several = len(series.levels[0].pages) > 1 or page.imagedepth > 1
                    _ = page.dataoffsets, page.databytecounts, page.jpegtables  # read now, while it is open
            except DataError:
                raise
            except Exception as error:  # of whatever library reads it
                raise DataError(f"{self.path} cannot be read as a TIFF: {error}.", "Remove or restore it.") from error
            if several:
                raise DataError(
                    f"{self.path} holds {len(series.levels[0].pages)} images ({series.axes}), not one.",
                    "Save each by itself, with its channels in one image.",
                )
            self._known = page
        return self._known


class ZarrRaster:
    """An OME-Zarr image, or a plain Zarr array of height,width or channels,height,width."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[Any, tuple[Any, ...], bool] | None = None
        self._array()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Raster.shape`."""
        array, before, _ = self._array()
        channels = [int(size) for size, asked in zip(array.shape, before, strict=False) if asked != 0]
        return (channels or [1])[0], int(array.shape[-2]), int(array.shape[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `Raster.dtype`."""
        kind: np.dtype[Any] = np.dtype(self._array()[0].dtype)
        return kind

    def read(self, rows: slice, columns: slice) -> NDArray[Any]:
        """See `Raster.read`."""
        array, before, has_channels = self._array()
        window = np.asarray(array[(*before, rows, columns)])
        return window if has_channels else window[None]

    def _array(self) -> tuple[Any, tuple[Any, ...], bool]:
        """The array, what to ask of the axes before height and width, and whether one of them is of channels."""
        if self._known is None:
            try:
                array, axes = self._find()
            except DataError:
                raise
            except Exception as error:  # of whatever library reads it
                raise DataError(f"{self.path} cannot be read as a Zarr: {error}.", "Remove or restore it.") from error
            if axes[-2:] != ["y", "x"] or len(axes) != array.ndim:
                raise DataError(
                    f"{self.path} has the axes {''.join(axes)} and the shape {array.shape}; y and x must come last.",
                    "Save it as an OME-Zarr with the axes cyx, or as a plain array of two or three dimensions.",
                )
            for axis, size in zip(axes[:-2], array.shape, strict=False):
                if axis != "c" and size > 1:
                    raise DataError(f"{self.path} has {size} images along {axis!r}, not one.", "Save each by itself.")
            before = tuple(slice(None) if axis == "c" else 0 for axis in axes[:-2])
            self._known = array, before, "c" in axes
        return self._known

    def _find(self) -> tuple[Any, list[str]]:
        """The array of the largest level, and its axes."""
        try:
            import zarr
        except ImportError as error:
            raise DataError(
                f"reading {self.path} needs zarr, which is not installed.",
                "Install it: pip install tifffile zarr",
            ) from error
        found: Any = zarr.open(self.path, mode="r")
        if isinstance(found, zarr.Array):
            return found, ["c", "y", "x"][-found.ndim :]
        attributes: Any = found.attrs.get("ome", found.attrs)
        if "multiscales" not in attributes:
            raise DataError(f"{self.path} is a Zarr group, but no OME-Zarr image.", "Give the path of the image in it.")
        image = attributes["multiscales"][0]
        axes = image.get("axes", list("tczyx"))
        names = [axis["name"] if isinstance(axis, dict) else str(axis) for axis in axes]
        return found[image["datasets"][0]["path"]], names


def _overlap(wanted: slice, start: int, size: int) -> tuple[slice, slice]:
    """Where a tile's rows, from `start`, go in the window, and which of them."""
    first, last = max(wanted.start, start), min(wanted.stop, start + size)
    return slice(first - wanted.start, last - wanted.start), slice(first - start, last - start)
