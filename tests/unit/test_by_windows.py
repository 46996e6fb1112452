"""Masks of images that are too large to be read whole: window by window, of TIFF, OME-Zarr and other files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from shoal.data.rasters import TiffRaster
from shoal.errors import DataError
from shoal.inference import Inference, Preparation
from shoal.using.trained import Trained

WINDOW = (1, 8, 12)
PIXELS: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (21, 33)).astype(np.uint8)


class BrighterThanMean(nn.Module):
    """Class 1 where a pixel is brighter than the mean of all that the network sees: a window's, not the image's."""

    seen: list[tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        mean = x.mean((1, 2, 3), keepdim=True)
        return torch.cat([mean - x, x - mean], dim=1)


def trained(**changes: Any) -> Trained:
    values: dict[str, Any] = {
        "task": "segment",
        "model": None,
        "model_options": {},
        "input": WINDOW,
        "classes": ("ground", "cell"),
        "preparation": Preparation(values="bytes", shape=WINDOW, mean=(100.0,), std=(50.0,)),
        "data": "windows:slides",
        "seed": 0,
        "batch": 1,
        "versions": {},
    }
    return Trained(BrighterThanMean(), Inference(**{**values, **changes}))


def by_hand(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Window after window; the last ones end with the image."""
    mask = np.zeros(image.shape, dtype=np.int64)
    for top in (0, 8, 13):
        for left in (0, 12, 21):
            window = image[top : top + 8, left : left + 12].astype(np.float64)
            mask[top : top + 8, left : left + 12] = window > window.mean()
    return mask


def written(path: Path) -> Path:
    if path.suffix == ".tif":
        pytest.importorskip("tifffile").imwrite(path, PIXELS, tile=(16, 16))
    elif path.suffix == ".zarr":
        array = pytest.importorskip("zarr").create_array(path, shape=PIXELS.shape, chunks=(8, 8), dtype="uint8")
        array[:] = PIXELS
    else:
        Image.fromarray(PIXELS).save(path)
    return path


@pytest.mark.parametrize("name", ["slide.tif", "slide.ome.zarr", "slide.png"])
def test_every_pixel_has_its_windows_class(name: str, tmp_path: Path) -> None:
    model = trained()
    (found,) = model.predict([written(tmp_path / name)], size="windows", batch=4)
    assert found.mask is not None
    assert np.array_equal(found.mask.numpy(), by_hand(PIXELS))
    assert found.mask.dtype == torch.uint8
    assert float(found.scores[1]) == pytest.approx(by_hand(PIXELS).mean())
    assert isinstance(model.module, BrighterThanMean)
    assert model.module.seen == [(4, *WINDOW), (4, *WINDOW), (1, *WINDOW)]


def test_a_window_is_read_when_it_is_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = written(tmp_path / "slide.tif"), []
    original = TiffRaster.read

    def noted(self: TiffRaster, rows: slice, columns: slice) -> NDArray[Any]:
        read.append((rows.stop - rows.start, columns.stop - columns.start))
        return original(self, rows, columns)

    monkeypatch.setattr(TiffRaster, "read", noted)
    trained().predict([path], size="windows")
    assert read == [WINDOW[1:]] * 9


@pytest.mark.parametrize(
    ("pixels", "changes", "words"),
    [
        (PIXELS[:7], {}, "7x33, smaller than a window as in training, 8x12"),
        (PIXELS, {"task": "classify"}, "for networks that give each pixel of an image a class"),
    ],
)
def test_what_has_no_windows_is_refused(
    pixels: NDArray[np.uint8], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=words):
        trained(**changes).predict([tmp_path / "a.png"], size="windows")


def test_other_channels_and_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "colours.tif", np.stack([PIXELS] * 3, -1), tile=(16, 16), photometric="rgb")
    with pytest.raises(DataError, match="has 3 channels, but the network was trained on 1"):
        trained().predict([tmp_path / "colours.tif"], size="windows")
    with pytest.raises(DataError, match="there is no file"):
        trained().predict([tmp_path / "nothing.tif"], size="windows")


def test_without_windows_the_way_to_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slide.zarr").mkdir()
    with pytest.raises(DataError, match="--size windows"):
        trained().predict([tmp_path / "slide.zarr"])
    with pytest.raises(DataError, match="--size windows"):
        trained().predict([written(tmp_path / "slide.png")])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"too large to be read whole(.|\n)*--size windows"):
        trained().predict([tmp_path / "slide.png"], size="own")
