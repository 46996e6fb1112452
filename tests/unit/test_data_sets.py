"""The named data sets: sizes, labels, normalisation, and the ways they can be missing or damaged."""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import data
from shoal.data import DataSet, Splits, catalog, search
from shoal.data.fashion import read_idx
from shoal.errors import DataError
from shoal.files import cache_folder


def need(name: str) -> None:
    if name != "digits" and data.where(name)[0].found is None:
        pytest.skip(f"{name} is in none of the searched folders; set SHOAL_DATA to have it tested")


def all_of(part: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    return part.batch(data.first_indices(len(part)))


@pytest.mark.parametrize(
    ("name", "train", "test", "shape", "classes"),
    [
        ("fashion-mnist", 60000, 10000, (1, 28, 28), 10),
        ("pets32", 5878, 1457, (3, 32, 32), 37),
        ("audiomnist", 5400, 1800, (1, 40, 96), 10),
        ("digits", 4000, 1000, (1, 28, 28), 10),
    ],
)
def test_sets_to_classify(name: str, train: int, test: int, shape: tuple[int, ...], classes: int) -> None:
    need(name)
    splits = data.load(name)
    assert splits.name == name
    assert Path(splits.origin).exists()
    for part, samples in ((splits.train, train), (splits.test, test)):
        assert (len(part), part.shape, part.classes, part.task) == (samples, shape, classes, "classify")
        assert not part.prefetch
        assert len(set(part.class_names)) == classes
        assert (part.preparation.values, part.preparation.shape) == ("bytes", shape)
        x, y = part.batch(np.arange(0, samples, 7, dtype=np.int64))
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.shape == (len(y), *shape)
        assert set(y.tolist()) == set(range(classes))
        assert x.mean((0, 2, 3)).abs().max() < 0.15
        assert (x.std((0, 2, 3)) - 1).abs().max() < 0.15


def test_nuclei_are_segmented() -> None:
    need("nuclei")
    splits = data.load("nuclei")
    assert (len(splits.train), len(splits.test)) == (12, 4)
    part = splits.train
    assert (part.shape, part.classes, part.task) == ((1, 1024, 1024), 2, "segment")
    x, y = part.batch(np.array([3, 0], dtype=np.int64))
    assert (x.shape, y.shape, y.dtype) == ((2, 1, 1024, 1024), (2, 1024, 1024), torch.int64)
    assert set(y.flatten().tolist()) == {0, 1}
    assert 0 < y.float().mean() < 0.1
    x, _ = all_of(part)
    assert abs(float(x.mean())) < 1e-3
    assert abs(float(x.std()) - 1) < 1e-3


def test_classes_have_the_names_that_people_use() -> None:
    assert data.load("digits").test.class_names == tuple("0123456789")
    for name, last in (("fashion-mnist", "Ankle boot"), ("pets32", "yorkshire_terrier"), ("nuclei", "nucleus")):
        if data.where(name)[0].found is not None:
            assert data.load(name).test.class_names[-1] == last


def test_digits_are_split_evenly_and_always_alike() -> None:
    first, second = data.load("digits"), data.load("digits")
    x, y = all_of(first.test)
    assert torch.bincount(y).tolist() == [100] * 10
    assert torch.equal(x, all_of(second.test)[0])


def test_a_batch_is_the_callers_own() -> None:
    part = data.load("digits").train
    indices = np.array([5, 5, 1], dtype=np.int64)
    x, _ = part.batch(indices)
    kept = x.clone()
    x.zero_()
    assert torch.equal(part.batch(indices)[0], kept)


def test_digits_are_the_file_whose_source_is_stated() -> None:
    stated = catalog.DIGITS_FILE.with_name("digits_source.md").read_text(encoding="utf-8")
    assert hashlib.sha256(catalog.DIGITS_FILE.read_bytes()).hexdigest() in stated
    assert "creativecommons.org/licenses/by-sa/3.0" in stated


def test_an_installation_without_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "DIGITS_FILE", tmp_path / "digits.npz")
    assert data.where("digits")[0].found is None
    with pytest.raises(DataError, match=r"lacks its file\.\nInstall Shoal again"):
        data.load("digits")


def test_damaged_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "digits.npz"
    damaged.write_bytes(catalog.DIGITS_FILE.read_bytes()[:-30])
    monkeypatch.setattr(catalog, "DIGITS_FILE", damaged)
    with pytest.raises(DataError, match=r"digits\.npz is truncated(.|\n)*Install Shoal again"):
        data.load("digits")


def test_default_is_what_this_machine_has(nowhere: Path) -> None:
    assert data.default_name() == "digits"
    assert data.load("default").name == "digits"
    for name in catalog.FASHION_MNIST.files:
        (nowhere / name).write_bytes(b"")
    assert data.default_name() == "fashion-mnist"


@pytest.mark.usefixtures("nowhere")
def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "moved"))
    assert data.search_folders()[-1] == tmp_path / "moved"


def test_search_order_and_layouts(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", os.pathsep.join([str(tmp_path / "missing"), str(nowhere)]))
    assert data.search_folders()[:2] == (tmp_path / "missing", nowhere)
    found = []
    for folder in (
        cache_folder(),
        search.DEBIAN,
        data.search_folders()[2],
        nowhere / "pets32",
        tmp_path / "missing",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pets32.npz").write_bytes(b"")
        found.append(data.where("pets32")[0].found)
        assert found[-1] == str(folder)
    assert len(set(found)) == 5


@pytest.mark.usefixtures("nowhere")
def test_where_lists_every_set_with_its_remedy() -> None:
    places = {place.name: place for place in data.where()}
    assert list(places) == ["fashion-mnist", "pets32", "audiomnist", "nuclei", "digits"]
    assert all(place.remedy and place.about for place in places.values())
    assert places["pets32"].found is None
    assert places["digits"].found is not None
    with pytest.raises(DataError, match="Did you mean 'pets32'"):
        data.where("pets23")


@pytest.mark.parametrize("name", ["pets32", "audiomnist", "nuclei"])
def test_a_missing_set_names_folders_and_remedy(name: str, nowhere: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load(name)
    assert str(nowhere) in caught.value.problem
    assert "no such folder" in caught.value.problem
    assert "SHOAL_DATA" in caught.value.remedy
    assert ".npz" in caught.value.remedy


def test_damaged_npz_sets(nowhere: Path) -> None:
    file = nowhere / "pets32.npz"
    x = np.zeros((4, 32, 32, 3), np.uint8)
    np.savez_compressed(file, x=x)
    with pytest.raises(DataError, match=r"pets32\.npz has no array breed, test; it holds x\."):
        data.load("pets32")
    np.savez_compressed(file, x=x[:, :16], breed=np.zeros(4), test=np.zeros(4))
    with pytest.raises(DataError, match=r"'x' has the shape \(4, 16, 32, 3\), not \(4, 32, 32, 3\)"):
        data.load("pets32")
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match="truncated"):
        data.load("pets32")


def test_damaged_fashion_mnist(nowhere: Path) -> None:
    for name in catalog.FASHION_MNIST.files:
        (nowhere / name).write_bytes(gzip.compress(b"not it"))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz has \d+ bytes where 26421856") as caught:
        data.load("fashion-mnist")
    assert "Delete that file" in caught.value.remedy


def test_a_changed_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("fashion-mnist")
    source = Path(data.load("fashion-mnist").origin)
    for name in catalog.FASHION_MNIST.files:
        shutil.copyfile(source / name, tmp_path / name)
    damaged = tmp_path / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(damaged.read_bytes())
    content[2000] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is corrupt or another file: its sha256"):
        data.load("fashion-mnist")


IDX = bytes((0, 0, 8, 1, 0, 0, 0, 3)) + b"abc"
packed = partial(gzip.compress, mtime=0)
"""Without the time of day: tests are named by what they are given, in every process alike."""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip at all",
        packed(IDX)[:-9],
        packed(IDX)[:-8] + bytes(8),
        packed(IDX[:-1]),
        packed(IDX + b"d"),
        packed(IDX[:6]),
        packed(bytes((0, 0, 8, 3)) + IDX[4:]),
        packed(bytes((0, 0, 8, 1, 255, 0, 0, 3)) + b"abc"),
    ],
)
def test_idx_files_that_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "labels.gz"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"labels\.gz is truncated or corrupt: .+\.\nDelete that file"):
        read_idx(file, dims=1)


def test_idx_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "labels.gz"
    file.write_bytes(gzip.compress(IDX))
    assert read_idx(file, dims=1).tobytes() == b"abc"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fashion-mnits", "Did you mean 'fashion-mnist'"),
        (
            "nonsense",
            r"Known: default, fashion-mnist, .*folder:PATH, pairs:PATH, windows:PATH, npz:PATH, synthetic:SAMPLES\.",
        ),
        ("", "no data set is named ''"),
        ("digits:5", "takes no argument"),
        ("folder:", "Write folder:PATH"),
        ("npz", "Write npz:PATH"),
        ("my/file.npz", "write npz:my/file.npz"),
    ],
)
def test_specs_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        data.load(spec)


def test_a_bare_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"write folder:{tmp_path}"):
        data.load(str(tmp_path))


def test_another_shape_resizes() -> None:
    own = data.load("digits", shape=(1, 28, 28), classes=10)
    large = data.load("digits", shape=(3, 56, 40))
    indices = np.array([7, 3000, 12], dtype=np.int64)
    x, y = large.train.batch(indices)
    assert large.train.shape == (3, 56, 40)
    assert x.shape == (3, 3, 56, 40)
    assert torch.equal(x[:, 0], x[:, 2])
    assert torch.equal(y, own.train.batch(indices)[1])
    same, _ = data.load("digits", shape=(3, 28, 28)).test.batch(indices[::2])
    assert torch.equal(same[:, :1], own.test.batch(indices[::2])[0])
    small, _ = data.load("digits", shape=(1, 7, 7)).train.batch(indices)
    block = own.train.batch(indices)[0]
    assert abs(float(small.mean() - block.mean())) < 0.1  # anti-aliased: no stroke falls between the samples


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 28, 28), "1 channels cannot become 4"), ((28, 28), "only images"), ((1, 0, 5), "at least 1")],
)
def test_shapes_that_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=rf"{message}(.|\n)*1,28,28"):
        data.load("digits", shape=shape)


def test_segmentation_is_not_resized() -> None:
    need("nuclei")
    with pytest.raises(DataError, match="labels belong to single pixels"):
        data.load("nuclei", shape=(1, 512, 512))


def test_another_number_of_classes_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 10 classes, not 7\.\n.*give 10"):
        data.load("digits", classes=7)


def test_the_doctor_needs_no_torch() -> None:
    program = "import sys; from shoal import data; data.names(), data.forms(), data.where(), data.default_name()"
    check = "; sys.exit([m for m in ('torch', 'numpy') if m in sys.modules] or 0)"
    subprocess.run([sys.executable, "-c", program + check], check=True)
    failed = subprocess.run([sys.executable, "-c", program + "; data.load" + check], check=False, capture_output=True)
    assert b"torch" in failed.stderr  # the check itself can fail


def test_every_public_name_exists() -> None:
    assert all(getattr(data, name) is not None for name in data.__all__)
    assert len(set(data.__all__)) == len(data.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = getattr(data, "nothing")  # noqa: B009  (mypy knows better than to let us write it plainly)


def test_synthetic() -> None:
    splits = data.load("synthetic")
    assert (len(splits.train), len(splits.test)) == (2048, 512)
    assert (splits.train.shape, splits.train.classes) == ((3, 32, 32), 10)
    assert "benchmarks only" in splits.origin
    indices = np.array([5, 2000, 5], dtype=np.int64)
    x, y = splits.train.batch(indices)
    again, labels = data.load("synthetic").train.batch(indices)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert torch.equal(x[0], x[2])
    assert not torch.equal(data.load("synthetic", seed=1).train.batch(indices)[0], x)


def test_synthetic_can_be_learned() -> None:
    splits = data.load("synthetic", shape=(1, 16, 16), classes=10)
    x, y = all_of(splits.train)
    means = torch.stack([x[y == c].mean(0) for c in range(10)]).flatten(1)
    x, y = all_of(splits.test)
    guess = torch.cdist(x.flatten(1), means).argmin(1)
    assert (guess == y).float().mean() > 0.9


def test_synthetic_takes_any_shape_without_its_memory() -> None:
    splits = data.load("synthetic:1000000", shape=(3, 512, 512), classes=1_000_000)
    assert len(splits.train) == 1_000_000
    x, y = splits.train.batch(np.array([999_999, 0], dtype=np.int64))
    assert x.shape == (2, 3, 512, 512)
    assert int(y.max()) > 1000
    volumes = data.load("synthetic:8", shape=(2, 4, 6, 8), classes=2)
    assert all_of(volumes.test)[0].shape == (2, 2, 4, 6, 8)


def test_synthetic_segmentation() -> None:
    splits: Splits = data.load("synthetic:64,segment", shape=(1, 16, 24), classes=4)
    _, y = all_of(splits.train)
    assert splits.train.task == "segment"
    assert (y.shape, y.dtype) == ((64, 16, 24), torch.int64)
    assert set(y.flatten().tolist()) == {0, 1, 2, 3}
    assert data.load(splits.name, shape=(1, 16, 24)).train.task == "segment"


@pytest.mark.parametrize(
    ("spec", "shape", "classes"),
    [
        ("synthetic:x", None, None),
        ("synthetic:0", None, None),
        ("synthetic", (3,), None),
        ("synthetic", None, 1),
    ],
)
def test_synthetic_refusals(spec: str, shape: tuple[int, ...] | None, classes: int | None) -> None:
    with pytest.raises(DataError):
        data.load(spec, shape=shape, classes=classes)
