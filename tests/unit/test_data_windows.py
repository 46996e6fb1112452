"""Windows of large images: what is read is what lies in them, and no tile beside them is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import data
from shoal.data.rasters import TiffRaster, ZarrRaster, open_raster
from shoal.data.windows import WindowData, load_windows
from shoal.errors import DataError

tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")

RAMP = np.arange(100 * 130, dtype=np.uint16).reshape(100, 130)
COLOURS = np.stack([RAMP, RAMP + 20_000, RAMP + 40_000])


def save(path: Path, image: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, image, **options)
    return path


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (RAMP, {"tile": (32, 48)}),
        (RAMP, {"tile": (32, 48), "compression": "zlib", "predictor": True}),
        (RAMP, {"rowsperstrip": 7}),
        (RAMP.astype(np.float32), {"tile": (16, 16), "byteorder": ">"}),
        (COLOURS.transpose(1, 2, 0), {"tile": (32, 48), "photometric": "rgb"}),
        (COLOURS, {"tile": (32, 48), "photometric": "rgb", "planarconfig": "separate"}),
    ],
)
def test_a_window_of_a_tiff_is_what_lies_there(image: np.ndarray, options: dict[str, Any], tmp_path: Path) -> None:
    raster = TiffRaster(save(tmp_path / "x.tif", image, **options))
    whole = COLOURS if image.ndim == 3 else image[None]
    assert raster.shape == whole.shape
    for rows, columns in ((slice(0, 100), slice(0, 130)), (slice(33, 97), slice(5, 130)), (slice(40, 41), slice(3, 4))):
        np.testing.assert_array_equal(raster.read(rows, columns), whole[:, rows, columns])


def test_only_tiles_that_a_window_touches_are_read(tmp_path: Path) -> None:
    raster = TiffRaster(save(tmp_path / "x.tif", RAMP, tile=(32, 48)))
    assert raster.bytes_read == 0
    raster.read(slice(32, 64), slice(48, 96))
    assert raster.bytes_read == 32 * 48 * 2
    raster.read(slice(31, 33), slice(0, 1))
    assert raster.bytes_read == 3 * 32 * 48 * 2


def test_levels_and_empty_tiles(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "x.ome.tif") as file:
        file.write(RAMP, tile=(32, 48), subifds=1)
        file.write(RAMP[::2, ::2], tile=(32, 48), subfiletype=1)
    raster = open_raster(tmp_path / "x.ome.tif")
    assert raster.shape == (1, 100, 130)
    np.testing.assert_array_equal(raster.read(slice(5, 60), slice(90, 130))[0], RAMP[5:60, 90:130])


@pytest.mark.parametrize("version", [2, 3])
def test_a_window_of_an_ome_zarr_is_what_lies_there(version: int, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "x.ome.zarr", mode="w", zarr_format=version)
    for level, image in (("0", COLOURS), ("1", COLOURS[:, ::2, ::2])):
        group.create_array(level, data=image[None, :, None], chunks=(1, 1, 1, 32, 48))
    levels = {"axes": [{"name": name} for name in "tczyx"], "datasets": [{"path": "0"}, {"path": "1"}]}
    group.attrs.update({"multiscales": [levels]} if version == 2 else {"ome": {"multiscales": [levels]}})
    raster = ZarrRaster(tmp_path / "x.ome.zarr")
    assert (raster.shape, raster.dtype) == ((3, 100, 130), np.dtype(np.uint16))
    np.testing.assert_array_equal(raster.read(slice(33, 97), slice(5, 90)), COLOURS[:, 33:97, 5:90])
    for chunk in [path for path in (tmp_path / "x.ome.zarr" / "0").rglob("*") if path.is_file()]:
        if not chunk.name.startswith((".", "zarr")) and "2/2" not in chunk.as_posix() and ".2.2" not in chunk.name:
            chunk.write_bytes(b"broken")  # all but those of the third row and column
    np.testing.assert_array_equal(raster.read(slice(64, 96), slice(96, 130)), COLOURS[:, 64:96, 96:130])
    with pytest.raises(Exception, match=r".+"):
        raster.read(slice(63, 64), slice(96, 97))


def slide(folder: Path, name: str = "a", size: tuple[int, int] = (100, 130)) -> None:
    """Bright where the class is 1."""
    mask = (np.arange(size[0] * size[1]).reshape(size) // 11) % 2
    save(folder / "images" / f"{name}.tif", (mask * 150 + 20).astype(np.uint8), tile=(16, 16))
    save(folder / "masks" / f"{name}.ome.tif", mask.astype(np.uint8), tile=(16, 32))


def test_windows_lie_side_by_side(tmp_path: Path) -> None:
    slide(tmp_path)
    splits = data.load(f"windows:{tmp_path}", shape=(1, 32, 40), classes=2)
    assert (len(splits.train), len(splits.test)) == (8, 1)
    assert (splits.train.task, splits.train.shape, splits.train.classes) == ("segment", (1, 32, 40), 2)
    x, y = splits.train.batch(data.first_indices(8))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert ((x[:, 0] > 0) == (y == 1)).all()
    assert isinstance(splits.train, WindowData)
    part, labels = splits.train.window(np.array([3]), (slice(4, 9), slice(0, 7)), (slice(1, 2), slice(3, 4)))
    assert torch.equal(part, x[3:4, :, 4:9, :7])
    assert torch.equal(labels, y[3:4, 1:2, 3:4])


def test_whole_images_may_be_the_test(tmp_path: Path) -> None:
    slide(tmp_path / "train")
    slide(tmp_path / "test", "b", (40, 40))
    slide(tmp_path / "test", "c", (40, 40))
    splits = load_windows(tmp_path, classes=2)
    assert splits.train.shape == (1, 40, 40)  # as the smallest image allows
    assert (len(splits.train), len(splits.test)) == (6, 2)


def test_windows_that_are_refused(tmp_path: Path) -> None:
    def load(**options: Any) -> Any:
        return load_windows(tmp_path, **{"classes": 2, **options})

    with pytest.raises(DataError, match=r"holds no TIFF and no Zarr"):
        load()
    slide(tmp_path)
    with pytest.raises(DataError, match=r"how many classes .*\n.*--classes N"):
        load(classes=None)
    with pytest.raises(DataError, match=r"has no window of the shape \(1, 200, 8\)\.\n.*at most 100,130"):
        load(shape=(1, 200, 8))
    with pytest.raises(DataError, match=r"has no window of the shape \(3, 8, 8\)"):
        load(shape=(3, 8, 8))
    with pytest.raises(DataError, match="leaves no window of 100x130 to test with"):
        load()
    mask = tmp_path / "masks" / "a.ome.tif"
    save(mask, np.full((100, 130), 255, np.uint8))
    with pytest.raises(DataError, match=r"holds classes from 255 to 255; there are 2, from 0\.\n.*0 and 1"):
        load(shape=(1, 32, 32)).train.batch(data.first_indices(1))
    save(mask, np.zeros((100, 129), np.uint8))
    with pytest.raises(DataError, match=r"has the shape \(1, 100, 129\) of uint8, the image \(1, 100, 130\)"):
        load()
    save(mask, np.zeros((2, 100, 130), np.uint8))
    with pytest.raises(DataError, match=r"holds 2 images \(.*\), not one"):
        load()
    mask.write_text("no image")
    with pytest.raises(DataError, match=r"a\.ome\.tif cannot be read as a TIFF"):
        load()
    mask.unlink()
    with pytest.raises(DataError, match=r"images/a\.tif has no mask"):
        load()
