"""A raw sample as the network reads it: exactly what its data set did in training.

Input     the path of an image or a `.npy`, a PIL image, an array or a tensor, of raw values: nothing scaled, nothing
          normalised. Arrays are H,W or H,W,C or C,H,W with 1 to 4 channels, or of the raw samples' own shape.
Output    (C, H, W) float32 on the CPU: brought to the raw samples' size and channels, normalised, brought to the size
          of the network's input. The sample itself is left as it is.
Refused   values that cannot be those of training: bytes where it had other numbers, 0 to 1 where it had bytes.
Size      images to classify are resized, as in training. An image to segment must have the size of those in training,
          or `size` must say what is meant.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Norm
from shoal.data.pixels import channels_first, decode, image_shape, load_array, of_array, of_image
from shoal.data.resized import resized
from shoal.errors import DataError
from shoal.inference import Inference, Preparation

Size = Literal["training", "own"]
Sample = Any
"""A path (str or PathLike), a PIL image, a numpy array or a tensor."""


@dataclass(frozen=True)
class Transform:
    """`transform(sample)` gives one sample as the network reads it, without the batch's dimension.

    Whatever is wrong with a sample is a `DataError` that names it.
    """

    inference: Inference

    def __call__(self, sample: Sample, *, size: Size | None = None) -> Tensor:
        """See the head of this file. `size`, where an image to segment has another than in training: "training" resizes
        it, "own" leaves it.
        """
        x = self._normalised(self._raw(sample, size))
        return x if self.inference.task == "segment" else resized_to(x[None], self.inference.input)[0]

    def prepared(self, raw: NDArray[Any], name: str) -> Tensor:
        """Raw values (C, H, W) of a part of an image as the network reads them; `name` is for messages."""
        return self._normalised(self._checked(raw, name))

    def _normalised(self, raw: NDArray[Any]) -> Tensor:
        known = self.inference.preparation
        return Norm(known.mean, known.std).apply_(torch.from_numpy(np.array(raw, dtype=np.float32))[None])[0]

    def own_size(self, sample: Sample) -> tuple[int, ...]:
        """Height and width of an image as it is."""
        return _own_size(_opened(sample), name_of(sample))

    def _raw(self, sample: Sample, size: Size | None) -> NDArray[Any]:
        """(C, *spatial) raw values, as the data set stored them."""
        name = name_of(sample)
        known = self.inference.preparation
        source = _opened(sample)
        if isinstance(source, np.ndarray):
            whole = _of_shape(source, known)
            if whole is not None:
                return self._checked(whole, name)
        if known.values == "own":
            raise DataError(
                f"{name} cannot be prepared: in training, code of your own made samples of the shape {known.shape}.",
                "Give tensors or .npy files of that shape, as your data set gives them.",
            )
        if len(known.shape) != 3:
            raise DataError(
                f"{name} is no sample of the shape {known.shape}.", "Give an array or a .npy file of that shape."
            )
        shape = self._shape(source, name, size)
        if isinstance(source, Path):
            return self._checked(decode(source, shape), name)
        if isinstance(source, np.ndarray):
            return self._checked(of_array(source, shape, Path(name)), name)
        return self._checked(of_image(source.copy(), shape, Path(name)), name)  # a copy: reading changes a JPEG

    def _shape(self, source: Any, name: str, size: Size | None) -> tuple[int, ...]:
        """What the raw sample is brought to."""
        known = self.inference.preparation.shape
        if self.inference.task == "classify" or size == "training":
            return known
        own = _own_size(source, name)
        if size is None and own != known[1:]:
            raise DataError(
                f"{name} is {own[0]}x{own[1]}, but the network was trained on {known[1]}x{known[2]}.",
                "Choose --size own to leave it as it is, --size windows to go through it by windows as in training, or "
                '--size training to have it resized (size="own" in Python).',
            )
        return (known[0], *own)

    def _checked(self, raw: NDArray[Any], name: str) -> NDArray[Any]:
        known = self.inference.preparation
        if raw.dtype.kind == "f" and not np.isfinite(raw).all():
            raise DataError(f"{name} holds NaN or infinity.", "Replace those values, for example by 0.")
        if known.values == "numbers" and raw.dtype == np.uint8:
            raise DataError(
                f"{name} holds bytes, but the network was trained on other numbers (mean {known.mean[0]:.4g}).",
                "Give values as in training, as floats: a .npy file, an array or a float TIFF.",
            )
        small = raw.dtype.kind == "f" and raw.size and raw.min() >= 0 and raw.max() <= 1 and (raw % 1).any()
        if known.values == "bytes" and small and max(known.mean) > 1:
            raise DataError(
                f"{name} holds numbers from 0 to 1, but the network was trained on 0 to 255.",
                "Give raw values, not scaled and not normalised: multiply by 255.",
            )
        return raw


def resized_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A batch as it is, or images brought to another size or from grey to RGB, as `--input` does in training."""
    return x if tuple(x.shape[1:]) == shape else resized(x, shape)


def name_of(sample: Sample) -> str:
    """What to call a sample in messages and tables."""
    if isinstance(sample, str | PathLike):
        return str(Path(sample))
    return str(getattr(sample, "filename", "") or f"the {type(sample).__name__}")


def _opened(sample: Sample) -> Any:
    """A path, an array or a PIL image; the array of a `.npy` is read."""
    if isinstance(sample, str | PathLike):
        path = Path(sample)
        if path.name.lower().endswith(".zarr") and path.is_dir():
            raise DataError(f"{path} is a Zarr, which is read by windows alone.", "Give --size windows, to segment it.")
        if not path.is_file():
            raise DataError(f"there is no file {path}.", "Check its name.")
        return load_array(path) if path.suffix.lower() == ".npy" else path
    if isinstance(sample, Tensor):
        return sample.detach().cpu().numpy()
    if isinstance(sample, np.ndarray) or hasattr(sample, "convert"):
        return sample
    raise DataError(
        f"a sample of the type {type(sample).__name__} cannot be read.",
        "Give a path, a PIL image, a numpy array or a tensor.",
    )


def _of_shape(array: NDArray[Any], known: Preparation) -> NDArray[Any] | None:
    """The array, if it has the shape of a raw sample; one channel may be left out."""
    shape = known.shape
    fits = array.shape == shape or (shape[0] == 1 and array.shape == shape[1:])
    if not fits or array.dtype.kind not in "buif":
        return None
    array = array.reshape(shape)
    if known.values == "bytes" and array.dtype == np.uint16:  # as `pixels.py` reads 16 bits
        return array.astype(np.float32) / 257
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def _own_size(source: Any, name: str) -> tuple[int, ...]:
    if isinstance(source, Path):
        return image_shape(source)[1:]
    if isinstance(source, np.ndarray):
        return channels_first(source, Path(name)).shape[1:]
    return (source.height, source.width)
