"""The first weights of a run from a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from shoal.config import TrainConfig
from shoal.errors import CheckpointError
from shoal.running import resume, train
from shoal.training.initial import take_weights, told
from shoal.training.job import load_whole
from tests.cli.conftest import tiny as tiny
from tests.training import jobs


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of `jobs.net` with four classes, other than those that a run draws."""
    torch.manual_seed(99)
    path = tmp_path / "weights.safetensors"
    save_model(jobs.net(input=(3, 8, 8), classes=4), str(path))
    return path


def begun(**given: Any) -> nn.Module:
    return load_whole(jobs.settings(**given))[2]


def test_a_run_begins_with_the_weights_of_a_file(weights: Path) -> None:
    model, expected = begun(init=weights), load_file(weights)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert told(model, jobs.settings(init=weights)) == []


def test_a_part_that_fits_is_taken_and_the_rest_is_named(weights: Path) -> None:
    config = jobs.settings(init=weights, init_partial=True, classes=7)
    model, expected, drawn = load_whole(config)[2], load_file(weights), begun(classes=7)
    assert torch.equal(model.get_parameter("a.weight"), expected["a.weight"])
    assert torch.equal(model.get_parameter("head.weight"), drawn.get_parameter("head.weight"))
    (text,) = told(model, config)
    assert "4 of 6 tensors are from" in text
    assert "head.weight has the shape (4, 8) and not (7, 8), head.bias has the shape (4,) and not (7,)" in text


def test_weights_of_another_network_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"head\.weight has the shape \(4, 8\) and not \(7, 8\)") as refused:
        begun(init=weights, classes=7)
    assert "--init-partial" in refused.value.remedy
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has nothing of this network: .*other is not in the network"):
        begun(init=tmp_path / "other.safetensors", init_partial=True)


@pytest.mark.parametrize("content", [None, b"", b"PK not safetensors"], ids=["none", "empty", "other"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="it is a folder, whose file may be"):
        begun(init=tmp_path)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors' cannot be read as safetensors") as refused:
        begun(init=path)
    assert "model.safetensors" in refused.value.remedy


class Tied(nn.Module):
    """Two layers with one weight, of which a file has it once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


def test_tied_weights_are_in_a_file_once(tmp_path: Path) -> None:
    given, model = Tied(), Tied()
    path = tmp_path / "tied.safetensors"
    save_model(given, str(path))
    assert len(load_file(path)) == 3
    take_weights(model, TrainConfig(init=path))
    assert torch.equal(model.b.weight, given.a.weight)
    assert torch.equal(model.b.bias, given.b.bias)


def test_a_run_goes_on_without_the_file_that_it_began_with(tiny: str, tmp_path: Path, weights: Path) -> None:
    data, out = f"npz:{tmp_path / tiny.partition(':')[2]}", tmp_path / "run"
    save_model(jobs.net(input=(1, 8, 8), classes=4), str(weights))
    given = {"model": f"{jobs.__file__}:net", "data": data, "batch": 8, "epochs": 1, "init": weights, "threads": 1}
    train(TrainConfig.parse({**given, "out": out, "init_partial": True}))
    assert "warning" not in {json.loads(line)["event"] for line in (out / "metrics.jsonl").read_text().splitlines()}
    weights.unlink()
    assert resume(out, {"epochs": 2}).epochs == 2
