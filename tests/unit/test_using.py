"""A trained network in use: samples are prepared as in training, files refused by name, nothing else changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal import data
from shoal.data import ArrayData, DataSet
from shoal.data.as_trained import as_trained
from shoal.errors import CheckpointError, ConfigError, DataError, ModelError
from shoal.inference import Inference, Preparation
from shoal.training.weights import save_weights
from shoal.using.transform import Transform

DRAWS = np.random.default_rng(0)


def known(part: DataSet, **changes: Any) -> Inference:
    """What a run on this data would have written."""
    values: dict[str, Any] = {
        "task": part.task,
        "model": "lenet5",
        "model_options": {},
        "input": part.shape,
        "classes": part.class_names,
        "preparation": part.preparation,
        "data": "digits",
        "seed": 0,
        "batch": 4,
        "versions": {},
    }
    return Inference(**{**values, **changes})


def pixels(*shape: int) -> NDArray[np.uint8]:
    return DRAWS.integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run: LeNet on grey 8x8, with random weights."""
    part = ArrayData(pixels(10, 1, 8, 8), np.arange(10) % 2, classes=2, class_names=("cat", "dog"))
    model = shoal.zoo.lenet5(input=(1, 8, 8), classes=2)
    folder = tmp_path / "run"
    folder.mkdir()
    save_weights(model, folder / "model.safetensors", known(part))
    return folder


@pytest.mark.parametrize("shape", [None, (3, 12, 10), (1, 4, 4)])
def test_an_array_is_prepared_as_its_data_set_did(shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    x = pixels(10, 8, 8)
    np.savez(tmp_path / "set.npz", x=x, y=np.arange(10) % 2)
    part = data.load(f"npz:{tmp_path / 'set.npz'}", shape=shape).test
    expected, _ = part.batch(data.first_indices(2))
    transform = Transform(known(part))
    kept = x.copy()
    for sample, wanted in zip((x[4], x[9]), expected, strict=True):
        np.save(tmp_path / "sample.npy", sample)
        Image.fromarray(sample).save(tmp_path / "sample.png")
        for given in (sample, torch.from_numpy(sample), tmp_path / "sample.npy", str(tmp_path / "sample.png")):
            assert torch.equal(transform(given), wanted)
        with Image.open(tmp_path / "sample.png") as image:
            assert torch.equal(transform(image), wanted)
    assert np.array_equal(x, kept)


def test_a_photograph_is_prepared_as_in_its_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(pixels(20, 30, 3)).save(tmp_path / name / f"{number}.jpg")
    part = data.load(f"folder:{tmp_path}", shape=(3, 12, 10)).test
    expected, _ = part.batch(data.first_indices(2))
    transform = Transform(known(part))
    assert torch.equal(torch.stack([transform(tmp_path / name / "4.jpg") for name in "ab"]), expected)


def test_floats_are_taken_as_they_are_and_left_untouched() -> None:
    x = DRAWS.normal(5.0, 2.0, size=(10, 13, 4, 4)).astype(np.float32)
    part = ArrayData(x, np.arange(10) % 2, classes=2)
    sample, kept = x[3].copy(), x[3].copy()
    assert torch.equal(Transform(known(part))(sample), part.batch(np.array([3]))[0][0])
    assert np.array_equal(sample, kept)
    with pytest.raises(DataError, match="holds bytes, but the network was trained on other numbers"):
        Transform(known(part))(sample.astype(np.uint8))


def test_values_that_cannot_be_those_of_training_are_refused(tmp_path: Path) -> None:
    transform = Transform(known(ArrayData(pixels(10, 1, 8, 8), np.arange(10) % 2, classes=2)))
    transform(np.zeros((8, 8), dtype=np.float32))  # black on any scale
    with pytest.raises(DataError, match=r"holds numbers from 0 to 1, but .* 0 to 255"):
        transform(np.full((8, 8), 0.5))
    with pytest.raises(DataError, match="NaN or infinity"):
        transform(np.full((8, 8), np.nan))
    with pytest.raises(DataError, match=r"there is no file .*gone\.png"):
        transform(tmp_path / "gone.png")
    with pytest.raises(DataError, match="a sample of the type int cannot be read"):
        transform(3)
    own = Transform(
        known(ArrayData(pixels(10, 1, 8, 8), np.arange(10) % 2, classes=2), preparation=Preparation.own((2, 8, 8)))
    )
    with pytest.raises(DataError, match="code of your own"):
        own(pixels(9, 9))
    assert torch.equal(own(np.full((2, 8, 8), 0.25)), torch.full((2, 8, 8), 0.25))


def test_an_image_to_segment_keeps_its_size_only_where_that_is_asked_for() -> None:
    part = ArrayData(pixels(5, 1, 8, 8), pixels(5, 8, 8) % 2, classes=2)
    transform = Transform(known(part))
    assert transform(pixels(8, 8)).shape == (1, 8, 8)
    with pytest.raises(DataError, match=r"is 6x10, but the network was trained on 8x8"):
        transform(pixels(6, 10))
    assert transform(pixels(6, 10), size="own").shape == (1, 6, 10)
    assert transform(pixels(6, 10), size="training").shape == (1, 8, 8)


def test_loaded_is_a_plain_module_and_leaves_the_random_state(run: Path) -> None:
    before = torch.get_rng_state()
    model = shoal.load(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model.module, nn.Module)
    assert not model.module.training
    assert model.classes == ("cat", "dog")
    samples = [pixels(8, 8) for _ in range(5)]
    found = model.predict(samples, batch=2)
    with torch.no_grad():
        scores = model(torch.stack([model.transform(sample) for sample in samples])).softmax(1)
    for prediction, row in zip(found, scores, strict=True):
        assert torch.allclose(prediction.scores, row, atol=1e-6)
        assert (prediction.name, prediction.score) == prediction.top(1)[0]
        assert sum(score for _, score in prediction.top(9)) == pytest.approx(1.0)
    assert torch.equal(
        shoal.load(run / "model.safetensors")(scores.new_ones(1, 1, 8, 8)), model(scores.new_ones(1, 1, 8, 8))
    )
    other = shoal.zoo.lenet5(input=(1, 8, 8), classes=2)
    assert shoal.load(run, model=other).module is other


def test_what_cannot_be_loaded_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run 'nowhere'"):
        shoal.load("nowhere")
    with pytest.raises(CheckpointError, match="no run lies in"):
        shoal.load(tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is not finished(.|\n)*shoal train --resume"):
        shoal.load(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match="was not written by a run"):
        shoal.load(tmp_path / "foreign.safetensors")
    (tmp_path / "text.safetensors").write_text("nothing of the kind")
    with pytest.raises(CheckpointError, match="is no weights file"):
        shoal.load(tmp_path / "text.safetensors")
    with pytest.raises(ModelError, match=r"do not fit the network: (.|\n)*size mismatch"):
        shoal.load(run, model=shoal.zoo.lenet5(input=(1, 8, 8), classes=3))
    with pytest.raises(ModelError, match="do not fit the network: the file lacks"):
        shoal.load(run, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="device 'nothing' cannot be used"):
        shoal.load(run, device="nothing")


@pytest.mark.parametrize("name", ["subprocess:run", None])
def test_a_weights_file_does_not_decide_which_code_runs(name: str | None, tmp_path: Path) -> None:
    part = ArrayData(pixels(10, 1, 8, 8), np.arange(10) % 2, classes=2)
    options = {"args": ["touch", str(tmp_path / "run-by-a-stranger")]}
    module, file = shoal.zoo.lenet5(input=(1, 8, 8), classes=2), tmp_path / "theirs.safetensors"
    save_weights(module, file, known(part, model=name, model_options=options))
    with pytest.raises(ModelError, match="does not decide which code runs" if name else "as an object"):
        shoal.load(file)
    (tmp_path / "inference.json").write_text(known(part).to_json())  # of another run
    with pytest.raises(ModelError):
        shoal.load(file)
    assert not (tmp_path / "run-by-a-stranger").exists()
    assert shoal.load(file, model=module).module is module


def test_a_weights_file_in_its_runs_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    part = ArrayData(pixels(10, 1, 8, 8), np.arange(10) % 2, classes=2)
    said = known(part, model="shoal.zoo:lenet5")
    save_weights(shoal.zoo.lenet5(input=(1, 8, 8), classes=2), tmp_path / "best.safetensors", said)
    (tmp_path / "inference.json").write_text(said.to_json())
    assert shoal.load(tmp_path / "best.safetensors").inference == said


def test_other_data_are_brought_to_what_the_network_was_trained_on() -> None:
    x, y = pixels(10, 1, 8, 8), np.arange(10) % 2
    trained = ArrayData(x, y, classes=2, class_names=("cat", "dog"))
    other = ArrayData(x[:4] // 2, np.array([0, 1, 1, 0]), classes=2, class_names=("dog", "cat"))
    seen = as_trained(other, "other", class_names=trained.class_names, preparation=trained.preparation)
    found, labels = seen.batch(data.first_indices(4))
    expected = ArrayData(x[:4] // 2, y[:4], classes=2, norm=trained.norm).batch(data.first_indices(4))[0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert labels.tolist() == [1, 0, 0, 1]
    assert as_trained(trained, "same", class_names=("cat", "dog"), preparation=trained.preparation) is trained
    with pytest.raises(DataError, match="has the class 'cat', which the network does not know"):
        as_trained(trained, "other", class_names=("dog", "owl"), preparation=trained.preparation)
    floats = ArrayData(x / 255.0, y, classes=2, class_names=("cat", "dog"))
    with pytest.raises(DataError, match="holds numbers other than bytes"):
        as_trained(floats, "other", class_names=("cat", "dog"), preparation=trained.preparation)
