"""An image file as an array of pixels: PNG, JPEG, TIFF and the like through Pillow, `.npy` through numpy.

Values    bytes stay bytes. 16-bit numbers without a sign become float32 on the scale of bytes (65535 is 255), so that
          nothing of them is lost and files of both kinds can stand in one data set. All others, such as the floats of
          a TIFF or of a `.npy`, become float32 as they are. A colour PNG of 16 bits keeps its upper byte: Pillow
          reads no more of it.
Layout    (C, H, W). A `.npy` is H,W or H,W,C or C,H,W with 1 to 4 channels.
Failure   a file that cannot be read is a `DataError` with its name.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Norm
from shoal.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
THREADS = 4  # decoding releases the interpreter's lock; more threads gain little
MEASURED = 128  # images from which mean and deviation are measured
FEW = range(1, 5)  # extents of a `.npy` that are taken for channels
GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # Pillow's weights of red, green and blue
BITS_PER_SAMPLE = 258  # TIFF's number for it

Item = TypeVar("Item")
Made = TypeVar("Made")


def images_below(folder: Path) -> list[Path]:
    """The images in a folder and its sub-folders, in the order of their names."""
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    return [file for file in found if not file.name.startswith(".")]


def image_shape(file: Path) -> tuple[int, ...]:
    """(channels, height, width) of an image, from its header alone."""
    if file.suffix.lower() == ".npy":
        return channels_first(load_array(file, mapped=True), file).shape
    with _open(file) as image:
        return (1 if _is_grey(image) else 3, image.height, image.width)


def decode(file: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """An image as (C, H, W) bytes or float32 of the given shape: grey or RGB as it says, resized where it differs."""
    if file.suffix.lower() == ".npy":
        return of_array(load_array(file), shape, file)
    with _open(file) as image:
        return of_image(image, shape, file)


def of_array(array: NDArray[Any], shape: tuple[int, ...], file: Path) -> NDArray[Any]:
    """The same of an array in one of the layouts of a `.npy`. `file` is its name in messages."""
    return _fit(real_values(channels_first(array, file), file), shape, file)


def of_image(image: "Image", shape: tuple[int, ...], file: Path) -> NDArray[Any]:
    """The same of an image that is open; `file` is where it was read from, or its name in messages."""
    image_module = pillow()
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    try:
        if _is_wide(image):
            return _fit(real_values(_wide_values(image, file), file), shape, file)
        if channels not in (1, 3):
            raise _other_channels(file, 1 if _is_grey(image) else 3, channels)
        image.draft(mode, (width, height))  # lets a large JPEG be decoded at a fraction of its size
        scaled = image.convert(mode).resize((width, height), image_module.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, EOFError, image_module.DecompressionBombError) as error:
        raise unreadable(file, error) from error
    pixels = np.asarray(scaled, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def decode_mask(file: Path, size: tuple[int, int]) -> NDArray[np.int64]:
    """A mask as (H, W) class numbers: the values of a grey image, a palette's indices, or the integers of a `.npy`.

    Brought to `size` by taking the nearest pixel: classes do not mix.
    """
    mask = read_mask(file)
    rows, columns = (_nearest(have, want) for have, want in zip(mask.shape, size, strict=True))
    return mask if mask.shape == size else mask[np.ix_(rows, columns)]


def read_mask(file: Path) -> NDArray[np.int64]:
    """A mask of class numbers as it is stored."""
    remedy = "Save one whole number per pixel: the class, from 0."
    if file.suffix.lower() == ".npy":
        mask = load_array(file)
    else:
        image_module = pillow()
        try:
            with _open(file) as image:
                if not (_is_wide(image) or image.mode in ("1", "L", "P")):
                    raise DataError(f"the mask {file} has colours ({image.mode}), not class numbers.", remedy)
                mask = np.asarray(image)
        except (OSError, SyntaxError, ValueError, EOFError, image_module.DecompressionBombError) as error:
            raise unreadable(file, error) from error
    if mask.ndim == 3 and 1 in (mask.shape[0], mask.shape[-1]):
        mask = mask[0] if mask.shape[0] == 1 else mask[..., 0]
    if mask.ndim != 2:
        raise DataError(f"the mask {file} has the shape {mask.shape}, not height and width.", remedy)
    if mask.dtype.kind not in "bui":
        raise DataError(f"the mask {file} holds {mask.dtype}, not whole numbers.", remedy)
    if mask.size and mask.min() < 0:
        raise DataError(f"the mask {file} holds the class {mask.min()}, which is negative.", remedy)
    return mask.astype(np.int64)


def in_threads(function: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """`function` of every item, a few at a time."""
    # A pool for each call: starting four threads is cheap beside decoding, and none is ever left over.
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def measure(files: Sequence[Path], shape: tuple[int, ...]) -> Norm:
    """From images spread evenly over `files`. One that cannot be read is left to fail its own batch."""
    step = max(1, -(-len(files) // MEASURED))
    pixels = []
    for file in files[::step]:
        try:
            pixels.append(decode(file, shape))
        except DataError:
            continue
    return Norm.of(np.stack(pixels)) if pixels else Norm((0.0,) * shape[0], (255.0,) * shape[0])


def kind_of_values(files: Sequence[Path]) -> Literal["bytes", "numbers"]:
    """Whether `decode` gives values on the scale of bytes, as the first of `files` that can be read tells."""
    for file in files:
        try:
            return "bytes" if _on_scale_of_bytes(file) else "numbers"
        except DataError:
            continue
    return "bytes"


def _on_scale_of_bytes(file: Path) -> bool:
    if file.suffix.lower() == ".npy":
        dtype = load_array(file, mapped=True).dtype
        return dtype.kind in "bu" and dtype.itemsize <= 2
    with _open(file) as image:
        signed_or_long = image.mode == "I" and image.format not in ("PNG", "PPM")
        return not (image.mode == "F" or signed_or_long or (image.format == "TIFF" and _bits(image) > 16))


def unreadable(file: Path, error: Exception) -> DataError:
    """That a file is no image, a broken one, or one of so many pixels that Pillow does not read it."""
    if isinstance(error, pillow().DecompressionBombError):
        return DataError(
            f"the image {file} is too large to be read whole: {error}.",
            "Read it by windows: --data windows:PATH to train, --size windows to predict.",
        )
    return DataError(f"the image {file} cannot be read: {error}.", "Remove it from the folder, or replace it.")


def pillow() -> Any:
    """The module that reads images; a `DataError` that names it where it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading images needs Pillow, which is not installed.", "Install it: pip install pillow"
        ) from error
    return Image


def tiffs() -> Any:
    """The module that reads what Pillow cannot of a TIFF; a `DataError` that names it where it is missing."""
    try:
        import tifffile
    except ImportError as error:
        raise DataError(
            "reading such a TIFF needs tifffile, which is not installed.",
            "Install it: pip install tifffile zarr",
        ) from error
    return tifffile


def _open(file: Path) -> "Image":
    image_module = pillow()
    try:
        image: Image = image_module.open(file)
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise unreadable(file, error) from error
    return image


def _is_grey(image: "Image") -> bool:
    return image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I")


def _is_wide(image: "Image") -> bool:
    """Whether its numbers have more than 8 bits, and can be had."""
    return image.mode == "F" or image.mode.startswith("I") or (image.format == "TIFF" and _bits(image) > 8)


def _bits(image: "Image") -> int:
    """Of one number of a TIFF."""
    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (1,))
    return max(bits) if isinstance(bits, tuple) else int(bits)


def _wide_values(image: "Image", file: Path) -> NDArray[Any]:
    """(C, H, W) numbers of more than 8 bits, as they are stored."""
    if _is_grey(image):
        values = np.asarray(image)
        if image.mode == "I" and image.format in ("PNG", "PPM"):  # 16 bits, which older Pillows widen
            values = values.astype(np.uint16)
        return values[None]
    colours: NDArray[Any] = tiffs().imread(file, key=0)
    last = colours if colours.shape[-1] in (3, 4) else np.moveaxis(colours, 0, -1)
    return np.moveaxis(last[..., :3], -1, 0)  # without transparency


def load_array(file: Path, *, mapped: bool = False) -> NDArray[Any]:
    """The array of a `.npy`, in memory or left on the disk until it is used."""
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise unreadable(file, error) from error
    return array


def channels_first(array: NDArray[Any], file: Path) -> NDArray[Any]:
    """(C, H, W) of an array in one of the layouts of a `.npy`."""
    if array.ndim == 2:
        return array[None]
    first, last = (array.ndim == 3 and extent in FEW for extent in (array.shape[0], array.shape[-1]))
    if first == last:
        raise DataError(
            f"the array {file} of the shape {array.shape} is not surely an image.",
            "Save it as height,width, or with 1 to 4 channels before or behind them.",
        )
    return array if first else np.moveaxis(array, -1, 0)


def real_values(array: NDArray[Any], file: Path) -> NDArray[Any]:
    """The numbers of an image as bytes or float32: see above."""
    if array.dtype.kind not in "buif":
        raise DataError(f"the image {file} holds {array.dtype}, not real numbers.", "Save it as uint8 or float32.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"the image {file} holds NaN or infinity.", "Replace those values, for example by 0.")
    if array.dtype in (np.uint8, np.bool_):
        return array.astype(np.uint8, copy=False)
    values = array.astype(np.float32)
    return values / 257 if array.dtype.kind == "u" and array.dtype.itemsize == 2 else values


def _fit(pixels: NDArray[Any], shape: tuple[int, ...], file: Path) -> NDArray[Any]:
    """Pixels (C, H, W) with other channels and another size."""
    channels, height, width = shape
    if (len(pixels), channels) == (1, 3):
        pixels = pixels.repeat(3, 0)
    elif (len(pixels), channels) == (3, 1):
        pixels = np.tensordot(GREY, pixels.astype(np.float32), 1)[None]
    elif len(pixels) != channels:
        raise _other_channels(file, len(pixels), channels)
    if pixels.shape[1:] == (height, width):
        return pixels
    image_module = pillow()
    planes = (image_module.fromarray(np.ascontiguousarray(plane)) for plane in pixels)
    return np.stack([np.asarray(plane.resize((width, height), image_module.Resampling.BILINEAR)) for plane in planes])


def _other_channels(file: Path, has: int, wanted: int) -> DataError:
    return DataError(
        f"the image {file} has {has} channels, which cannot become {wanted}.", "Give all images the same channels."
    )


def _nearest(have: int, want: int) -> NDArray[np.int64]:
    """Of `have` pixels, which one each of `want` takes."""
    return np.minimum((np.arange(want) + 0.5) * have / want, have - 1).astype(np.int64)
