"""Folders of images: layouts, conversion, and failures that name the file."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import data
from shoal.data import BatchOrder, Loader
from shoal.data.pixels import decode, image_shape
from shoal.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def paint(file: Path, *, size: tuple[int, int] = (8, 6), mode: str = "RGB", level: int = 100) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    colour = {"RGB": (level, 10, 20), "RGBA": (level, 10, 20, 30)}.get(mode, level)
    Image.new(mode, size, colour).save(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of ten images each; the level of red tells class and number."""
    for label, name in enumerate(("cat", "dog")):
        for number in range(10):
            paint(tmp_path / name / f"{number}.png", level=100 * label + number)
    return tmp_path


def test_every_fifth_image_of_each_class_is_a_test_image(folder: Path) -> None:
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / ".hidden").mkdir()
    (folder / "dog" / "._0.png").write_bytes(b"left by a file manager")
    splits = data.load(f"folder:{folder}")
    train, test = splits.train, splits.test
    assert (len(train), len(test), train.class_names) == (16, 4, ("cat", "dog"))
    assert (train.shape, train.task, train.prefetch) == ((3, 6, 8), "classify", True)
    x, y = train.batch(data.first_indices(16))
    assert (x.dtype, y.dtype, x.shape) == (torch.float32, torch.int64, (16, 3, 6, 8))
    assert y.tolist() == [0] * 8 + [1] * 8
    assert x[:, 0].mean().abs() < 1e-5
    assert (x[:, 0].std(correction=0) - 1).abs() < 1e-3
    assert x[:, 0, 0, 0].diff().min() > 0  # each label still belongs to its image
    assert data.load(splits.name).train.batch(data.first_indices(3))[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_train_and_test_folders(test_name: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(3):
            paint(tmp_path / "train" / name / "deeper" / f"{number}.jpg")
    paint(tmp_path / test_name / "b" / "0.PNG")
    splits = data.load(f"folder:{tmp_path}")
    assert (len(splits.train), len(splits.test)) == (6, 1)
    assert splits.test.batch(data.first_indices(1))[1].tolist() == [1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        for number in range(5):
            paint(tmp_path / name / f"{number}.png")
    assert data.load(f"folder:{tmp_path}").train.classes == 2


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("RGB", 3), ("RGBA", 3), ("P", 3), ("I;16", 1)])
def test_channels_follow_the_first_image(mode: str, channels: int, folder: Path) -> None:
    paint(folder / "cat" / "0.png", mode=mode, level=1)
    assert data.load(f"folder:{folder}").train.shape == (channels, 6, 8)


def test_images_are_brought_to_a_given_shape(folder: Path) -> None:
    paint(folder / "cat" / "1.png", size=(50, 40), mode="L")
    grey = data.load(f"folder:{folder}", shape=(1, 12, 10)).train
    x, _ = grey.batch(data.first_indices(16))
    assert x.shape == (16, 1, 12, 10)
    for shape in ((2, 12, 10), (12, 10), (3, 0, 1)):
        with pytest.raises(DataError, match="1 channel"):
            data.load(f"folder:{folder}", shape=shape)
    with pytest.raises(DataError, match="has 2 classes, not 5"):
        data.load(f"folder:{folder}", classes=5)


RAMP = np.arange(48).reshape(6, 8)


@pytest.mark.parametrize(
    ("name", "stored", "read"),
    [
        ("0.png", RAMP.astype(np.uint8), RAMP),
        ("0.tif", RAMP.astype(np.uint8), RAMP),
        ("0.png", RAMP.astype(np.uint16) + 30_000, (RAMP + 30_000) / 257),  # the lower byte too
        ("0.tif", RAMP.astype(np.uint16) + 30_000, (RAMP + 30_000) / 257),
        ("0.tif", RAMP.astype(np.float32) - 0.5, RAMP - 0.5),
        ("0.npy", RAMP.astype(np.uint8), RAMP),
        ("0.npy", RAMP.astype(np.uint16) + 30_000, (RAMP + 30_000) / 257),
        ("0.npy", RAMP.astype(np.float64)[..., None] - 0.5, RAMP - 0.5),
    ],
)
def test_no_bit_of_a_value_is_lost(name: str, stored: np.ndarray, read: np.ndarray, folder: Path) -> None:
    (folder / "cat" / "0.png").unlink()
    file = folder / "cat" / name
    if name.endswith(".npy"):
        np.save(file, stored)
    else:
        Image.fromarray(stored).save(file)
    train = data.load(f"folder:{folder}").train
    assert train.shape == (1, 6, 8)
    assert image_shape(file) == (1, 6, 8)
    np.testing.assert_allclose(decode(file, (1, 6, 8))[0], read, rtol=1e-6)
    x, _ = train.batch(data.first_indices(16))
    assert x[0].flatten().diff().min() > 0
    assert decode(file, (3, 12, 10)).shape == (3, 12, 10)


def test_colours_of_sixteen_bits_are_read_whole_from_tiff(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    colours = (np.arange(6 * 8 * 3).reshape(6, 8, 3) + 30_000).astype(np.uint16)
    tifffile.imwrite(tmp_path / "x.tif", colours, photometric="rgb")
    np.testing.assert_allclose(decode(tmp_path / "x.tif", (3, 6, 8)), colours.transpose(2, 0, 1) / 257, rtol=1e-6)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 5, 3)), "not surely an image"),
        (np.zeros((6, 8), complex), "complex128, not real numbers"),
        (np.full((6, 8), np.nan), "NaN or infinity"),
        (np.zeros((4, 6, 8)), "has 4 channels, which cannot become 3"),
    ],
)
def test_arrays_that_are_refused(array: np.ndarray, said: str, folder: Path) -> None:
    np.save(folder / "cat" / "00.npy", array)  # the second of its class: the first one tells the shape
    with pytest.raises(DataError, match=said):
        data.load(f"folder:{folder}").train.batch(data.first_indices(16))


def test_a_corrupt_image_fails_its_batch_by_name(folder: Path) -> None:
    broken = folder / "dog" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    train = data.load(f"folder:{folder}").train
    train.batch(data.first_indices(8))
    with pytest.raises(DataError, match=r"dog/3\.png cannot be read"):
        train.batch(data.first_indices(16))
    broken.write_text("no image at all")
    with pytest.raises(DataError, match=r"dog/3\.png cannot be read"):
        train.batch(data.first_indices(16))
    broken.unlink()
    with pytest.raises(DataError, match=r"dog/3\.png cannot be read"):
        train.batch(data.first_indices(16))


def test_reading_ahead_and_closing_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    train = data.load(f"folder:{folder}").train
    order = BatchOrder(samples=16, batch=4, seed=5)
    batches = Loader(train, order).epoch(0)
    x, y = next(batches)
    again, labels = train.batch(order.indices(0, 0))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    batches.close()
    assert len(list(Loader(train, order).epoch(0))) == 4
    assert threading.active_count() == before


def test_folders_that_are_refused(tmp_path: Path) -> None:
    def load() -> None:
        data.load(f"folder:{tmp_path}")

    with pytest.raises(DataError, match="there is no folder"):
        data.load(f"folder:{tmp_path / 'missing'}")
    with pytest.raises(DataError, match=r"no class folder; at least two.*\nArrange"):
        load()
    paint(tmp_path / "a" / "0.png")
    with pytest.raises(DataError, match="only the class 'a'"):
        load()
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="class folder 'b' holds no image"):
        load()
    paint(tmp_path / "b" / "0.png")
    with pytest.raises(DataError, match="no image to test with"):
        load()


def test_parts_that_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / "train" / name / "0.png")
    with pytest.raises(DataError, match="neither test nor val"):
        data.load(f"folder:{tmp_path}")
    paint(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(DataError, match=r"has the class 'c', which .*train lacks"):
        data.load(f"folder:{tmp_path}")


def test_without_pillow_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install pillow"):
        data.load(f"folder:{folder}")
