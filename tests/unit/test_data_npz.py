"""A user's own arrays: which layouts are read, and which files are refused with what advice."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal import data
from shoal.data import Splits
from shoal.errors import DataError

N = 20


def pixels(*shape: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


LABELS = np.arange(N) % 3


def saved(folder: Path, **arrays: NDArray[Any]) -> str:
    np.savez_compressed(folder / "set.npz", allow_pickle=False, **arrays)
    return f"npz:{folder / 'set.npz'}"


def load(folder: Path, x: NDArray[Any], y: NDArray[Any] = LABELS, **options: Any) -> Splits:
    return data.load(saved(folder, x=x, y=y), **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ">f4", np.int16, np.bool_])
@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        ((6, 8), (1, 6, 8)),
        ((6, 8, 3), (3, 6, 8)),
        ((6, 8, 1), (1, 6, 8)),
        ((3, 6, 8), (3, 6, 8)),
        ((13, 6, 8), (13, 6, 8)),
        ((2, 5, 6, 8), (2, 5, 6, 8)),
    ],
)
def test_layouts(stored: tuple[int, ...], shape: tuple[int, ...], dtype: Any, tmp_path: Path) -> None:
    x = pixels(N, *stored, dtype=dtype)
    splits = load(tmp_path, x)
    assert (splits.train.shape, splits.train.classes, splits.train.task) == (shape, 3, "classify")
    assert (len(splits.train), len(splits.test)) == (16, 4)
    batch, y = splits.train.batch(data.first_indices(16))
    assert batch.dtype == torch.float32
    dims = (0, *range(2, batch.dim()))
    assert batch.mean(dims).abs().max() < 1e-4
    assert (batch.std(dims, correction=0) - 1).abs().max() < 1e-3 or dtype is np.bool_
    assert y.tolist() == LABELS[np.arange(N) % 5 != 4].tolist()


def test_channels_last_are_moved_not_reshaped(tmp_path: Path) -> None:
    x = np.zeros((N, 6, 8, 3), np.float32)
    x[:, 2, 5, 1] = 1
    batch, _ = load(tmp_path, x).train.batch(data.first_indices(1))
    assert batch[0, 1].argmax() == 2 * 8 + 5
    assert batch[0, 0].max() == 0  # a constant channel becomes zero, not NaN


def test_segmentation(tmp_path: Path) -> None:
    y = pixels(N, 6, 8) % 4
    splits = load(tmp_path, pixels(N, 6, 8, 3), y)
    assert (splits.train.task, splits.train.classes) == ("segment", 4)
    _, labels = splits.test.batch(np.array([1], dtype=np.int64))
    assert labels.tolist() == y[9:10].tolist()
    volumes = load(tmp_path, pixels(N, 1, 5, 6, 8), pixels(N, 5, 6, 8) % 2)
    assert volumes.train.task == "segment"


def test_parts(tmp_path: Path) -> None:
    x = pixels(N, 6, 8)
    test = np.arange(N) < 3
    assert len(data.load(saved(tmp_path, x=x, y=LABELS, test=test)).test) == 3
    split = np.array([0] * 12 + [1] * 5 + [2] * 3)
    splits = data.load(saved(tmp_path, x=x, y=LABELS, split=split))
    assert (len(splits.train), len(splits.test)) == (12, 3)
    assert len(data.load(saved(tmp_path, x=x, y=LABELS, split=split.clip(0, 1))).test) == 8
    pairs = data.load(saved(tmp_path, x_train=x, y_train=LABELS, x_test=x[:2], y_test=LABELS[:2]))
    assert (len(pairs.train), len(pairs.test)) == (20, 2)


def test_labels_of_other_kinds(tmp_path: Path) -> None:
    x = pixels(N, 6, 8)
    for y in (LABELS.astype(np.float64), LABELS[:, None], LABELS.astype(np.uint16), LABELS * 1000):
        assert load(tmp_path, x, y).train.classes == y.max() + 1
    assert load(tmp_path, x, classes=5).train.classes == 5


def test_a_given_shape_settles_the_layout_and_resizes(tmp_path: Path) -> None:
    x = pixels(N, 3, 8, 4)
    assert load(tmp_path, x, shape=(3, 8, 4)).train.shape == (3, 8, 4)
    assert load(tmp_path, x, shape=(4, 3, 8)).train.shape == (4, 3, 8)
    assert load(tmp_path, pixels(N, 6, 8), shape=(3, 12, 12)).train.shape == (3, 12, 12)


def test_classes_may_have_names_and_values_that_are_no_bytes(tmp_path: Path) -> None:
    named = saved(tmp_path, x=pixels(N, 6, 8, dtype=np.float32), y=LABELS, class_names=np.array(["a", "b", "c"]))
    part = data.load(named, shape=(3, 12, 16)).test
    assert (part.class_names, part.preparation.values, part.preparation.shape) == (tuple("abc"), "numbers", (1, 6, 8))
    for names in (["a", "b"], ["a", "b", "a"], [1, 2, 3]):
        with pytest.raises(DataError, match="class_names"):
            data.load(saved(tmp_path, x=pixels(N, 6, 8), y=LABELS, class_names=np.array(names)))


def test_the_name_loads_the_same_again(tmp_path: Path) -> None:
    splits = load(tmp_path, pixels(N, 6, 8))
    assert data.load(splits.name).origin == splits.origin


NAN = np.full((N, 6, 8), np.nan)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": pixels(N, 3, 8, 4), "y": LABELS}, "first or last.\n.*--input 3,8,4 or --input 4,3,8"),
        ({"x": pixels(N, 5, 6, 7, 2), "y": LABELS}, "first or last"),
        ({"x": pixels(N, 48), "y": LABELS}, "neither images nor volumes.\nSave x as N,H,W"),
        ({"x": pixels(N, 6, 8), "y": LABELS[:-1]}, "differ in length: x 20, y 19"),
        ({"x": pixels(N, 6, 8), "y": LABELS, "test": LABELS[:3]}, "test 3"),
        ({"x": pixels(N, 6, 8), "y": LABELS - 1}, "label -1, which is negative"),
        ({"x": pixels(N, 6, 8), "y": LABELS + 0.5}, "not whole numbers"),
        ({"x": pixels(N, 6, 8), "y": LABELS * np.nan}, "not whole numbers"),
        ({"x": pixels(N, 6, 8), "y": LABELS.astype(str)}, "not whole numbers.\nNumber the classes"),
        ({"x": pixels(N, 6, 8), "y": np.eye(3)[LABELS]}, r"\(16, 3\) fit neither.*\n.*argmax"),
        ({"x": pixels(N, 6, 8), "y": pixels(N, 5, 8)}, "fit neither"),
        ({"x": pixels(N, 6, 8), "y": LABELS * 0}, "nothing to learn"),
        ({"x": pixels(N, 6, 8), "y": (LABELS > 0) * 255}, r"0 and 255 only.\n.*y > 0"),
        ({"x": pixels(N, 6, 8).astype(complex), "y": LABELS}, "complex128, not real"),
        ({"x": NAN, "y": LABELS}, "NaN or infinity"),
        ({"x": pixels(N, 6, 8), "labels": LABELS}, r"holds x, labels: neither x and y nor x_train"),
        ({"x": pixels(N, 6, 8), "y": LABELS, "split": LABELS + 1}, "`split` has values other than"),
        ({"x": pixels(N, 6, 8), "y": LABELS, "test": np.ones(N)}, "no training sample"),
        ({"x": pixels(3, 6, 8), "y": LABELS[:3]}, "no test sample"),
        ({"x": np.array(5), "y": np.array(1)}, "x is a single number"),
        (
            {
                "x_train": pixels(4, 6, 8),
                "y_train": LABELS[:4],
                "x_test": pixels(4, 8, 8),
                "y_test": LABELS[:4],
            },
            r"\(1, 6, 8\) and test samples \(1, 8, 8\)",
        ),
    ],
)
def test_arrays_that_are_refused(arrays: dict[str, NDArray[Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        data.load(saved(tmp_path, **arrays))


def test_a_label_above_the_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label 2, but 2 classes allow 0 to 1.\nGive at least 3"):
        load(tmp_path, pixels(N, 6, 8), classes=2)


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    with pytest.raises(DataError, match=r"there is no file .*set\.npz"):
        data.load(f"npz:{file}")
    whole = Path(saved(tmp_path, x=pixels(N, 6, 8), y=LABELS)[4:]).read_bytes()
    changed = bytearray(whole)
    changed[200] ^= 255
    for content in (b"", b"hello", whole[:100], whole[: len(whole) // 2], whole[:-10], bytes(changed)):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"set\.npz is truncated, corrupt or no \.npz file"):
            data.load(f"npz:{file}")
    with pytest.raises(DataError, match="truncated, corrupt or no"):
        data.load(f"npz:{tmp_path}")
    np.save(tmp_path / "one.npy", LABELS)
    with pytest.raises(DataError, match="single array"):
        data.load(f"npz:{tmp_path / 'one.npy'}")
    np.savez(file, x=np.array([{}, {}], dtype=object), y=LABELS[:2])
    with pytest.raises(DataError, match="pickle"):
        data.load(f"npz:{file}")
