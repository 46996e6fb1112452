"""Images and masks: how they are paired, what masks mean, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from shoal import data
from shoal.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def save(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npy":
        np.save(file, values)
    else:
        Image.fromarray(values).save(file)


def pair(folder: Path, name: str, *, level: int, mask: str = ".png", high: int = 1) -> None:
    """Bright where the mask is not 0."""
    where = np.arange(48).reshape(6, 8) >= level
    save(folder / "images" / f"{name}.png", np.where(where, 200, 20).astype(np.uint8))
    save(folder / "masks" / f"{name}{mask}", (where * high).astype(np.uint8))


@pytest.mark.parametrize(("mask", "high"), [(".png", 1), (".png", 255), (".npy", 1), (".tif", 255)])
def test_pairs_are_found_by_name(mask: str, high: int, tmp_path: Path) -> None:
    for number in range(10):
        pair(tmp_path, f"deep/{number}", level=5 + number, mask=mask, high=high)
    splits = data.load(f"pairs:{tmp_path}")
    assert (len(splits.train), len(splits.test)) == (8, 2)
    assert (splits.train.task, splits.train.classes, splits.train.shape) == ("segment", 2, (1, 6, 8))
    x, y = splits.test.batch(data.first_indices(2))
    assert [int((truth == 0).sum()) for truth in y] == [9, 14]
    assert ((x[:, 0] > 0) == (y == 1)).all()


def test_both_are_brought_to_a_given_shape(tmp_path: Path) -> None:
    for part in ("train", "val"):
        pair(tmp_path / part, "a", level=24)
    pair(tmp_path / "train", "b", level=24)
    save(tmp_path / "train" / "images" / "b.png", np.full((12, 12), 9, np.uint8))
    with pytest.raises(DataError, match=r"b\.png is 12x12, the first one 6x8"):
        data.load(f"pairs:{tmp_path}")
    x, y = data.load(f"pairs:{tmp_path}", shape=(3, 12, 4)).train.batch(data.first_indices(2))
    assert x.shape == (2, 3, 12, 4)
    assert y[0].tolist() == [[0] * 4] * 6 + [[1] * 4] * 6


def test_more_classes_than_were_found_may_be_given(tmp_path: Path) -> None:
    for number in range(5):
        pair(tmp_path, str(number), level=20, high=2)
    assert data.load(f"pairs:{tmp_path}").train.classes == 3
    assert data.load(f"pairs:{tmp_path}", classes=7).train.classes == 7
    with pytest.raises(DataError, match="hold the class 2, but 2 classes allow 0 to 1"):
        data.load(f"pairs:{tmp_path}", classes=2)


def test_pairs_that_are_refused(tmp_path: Path) -> None:
    def load() -> None:
        data.load(f"pairs:{tmp_path}")

    with pytest.raises(DataError, match=r"images holds no image.*\nArrange"):
        load()
    for number in range(5):
        pair(tmp_path, str(number), level=100)
    with pytest.raises(DataError, match="every mask is 0"):
        load()
    pair(tmp_path, "3", level=9)
    save(tmp_path / "masks" / "6.png", np.zeros((6, 8), np.uint8))
    with pytest.raises(DataError, match=r"the mask .*6\.png has no image"):
        load()
    (tmp_path / "masks" / "6.png").rename(tmp_path / "images" / "6.png")
    with pytest.raises(DataError, match=r"the image .*6\.png has no mask .*masks/6\.\*"):
        load()
    (tmp_path / "images" / "6.png").unlink()
    save(tmp_path / "masks" / "2.png", np.zeros((6, 8, 3), np.uint8))
    with pytest.raises(DataError, match=r"2\.png has colours \(RGB\), not class numbers"):
        load()
    (tmp_path / "masks" / "2.png").write_text("broken")
    with pytest.raises(DataError, match=r"masks/2\.png cannot be read"):
        data.load(f"pairs:{tmp_path}").train.batch(data.first_indices(3))
