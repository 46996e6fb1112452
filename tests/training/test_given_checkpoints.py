"""A checkpoint that somebody gave you, whole by its checksums, that says nonsense: refused by name, never used."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
from shoal.errors import CheckpointError, OutputError
from shoal.training.run_folder import RunFolder
from tests.cli.conftest import shoal_here

__all__ = ["shoal_here"]

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, by SGD with momentum."""
    out = tmp_path_factory.mktemp("given") / "run"
    shoal.train(
        model="lenet5", data="synthetic:64", input=(1, 28, 28), classes=4, epochs=1, batch=32, threads=1, device="cpu",
        out=out,
    )  # fmt: skip
    return out


@pytest.fixture
def given(made: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """A copy of the run whose one checkpoint is changed and has the checksums of what is there now."""

    def run(change: Change) -> Path:
        folder = tmp_path / "run"
        shutil.copytree(made, folder)
        (checkpoint,) = RunFolder(folder).checkpoints.all()
        change(checkpoint.path)
        manifest = json.loads((checkpoint.path / "manifest.json").read_text())
        for name in manifest["files"]:
            content = (checkpoint.path / name).read_bytes()
            manifest["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
        assert checkpoint.damage() is None
        return folder

    return run


def in_file(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of a file of texts and numbers."""

    def run(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content))

    return run


def first_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of one tensor of a file."""

    def run(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / name)
        first = next(iter(tensors))
        save_file({**tensors, first: change(tensors[first])}, checkpoint / name)

    return run


def nested_places(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    save_file(load_file(path), path, metadata={"shoal.places": "[" * 200_000})


NONSENSE: dict[str, Change] = {
    "no settings": in_file("state.json", dict.clear),
    "no progress": in_file("state.json", lambda state: state.pop("progress")),
    "steps in words": in_file("state.json", lambda state: state["progress"].update(steps="two")),
    "no losses": in_file("state.json", lambda state: state["progress"].update(losses=None)),
    "no random state": in_file("rank-0.json", dict.clear),
    "half a random state": in_file("rank-0.json", lambda own: own["random"].update(cpu="AAAA")),
    "numbers of no parameter": in_file("rank-0.json", lambda own: own.update(optimizer_numbers={"none": {"step": 1}})),
    "places nested without end": nested_places,
    "short momentum": first_tensor("optimizer.safetensors", lambda tensor: tensor.flatten()[:1].clone()),
    "long momentum": first_tensor("optimizer.safetensors", lambda tensor: tensor.flatten().repeat(3)),
    "momentum of one whole number": first_tensor("optimizer.safetensors", lambda _: torch.tensor(1)),
    "weights of whole numbers": first_tensor("model.safetensors", lambda tensor: tensor.to(torch.int8)),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_refused_by_the_name_of_the_checkpoint(nonsense: str, given: Callable[[Change], Path]) -> None:
    """A momentum of another length made torch write beyond it: `corrupted size vs. prev_size`."""
    folder = given(NONSENSE[nonsense])
    before = (folder / "result.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"step-00000002|model\.safetensors"):
        shoal.resume(folder, {"epochs": 2})
    assert (folder / "result.json").read_bytes() == before


def test_the_unchanged_copy_goes_on(given: Callable[[Change], Path]) -> None:
    """So that what is refused above is refused for what was changed."""
    assert shoal.resume(given(lambda _: None), {"epochs": 2}).steps == 4


def test_a_length_beyond_the_metrics_costs_no_memory(given: Callable[[Change], Path]) -> None:
    folder = given(in_file("state.json", lambda state: state["progress"].update(metrics_length=10**15)))
    assert shoal.resume(folder, {"epochs": 2}).steps == 4
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("lines about the first 2 steps are missing" in line.get("text", "") for line in lines)


def test_half_a_line_of_restarts_is_left_out(given: Callable[[Change], Path]) -> None:
    folder = given(lambda _: None)
    run = RunFolder(folder)
    run.restarts_file.write_text('{"replaced": 1, "noticed": 5.0}\n{"why": "x", "los')
    assert shoal.resume(folder, {"epochs": 2}).restarts == 0
    run.note_replaced(2)
    assert run.replaced == 2


def test_half_a_result_is_named(given: Callable[[Change], Path], shoal_here: Callable[..., Any]) -> None:
    folder = given(lambda _: None)
    (folder / "result.json").write_text('{"schema": "shoal.res')
    ended = shoal_here("train", "--out", str(folder), "--resume", "auto")
    assert ended.returncode == OutputError.exit_code == 2
    assert "result.json' cannot be read" in ended.stderr
    assert "Remove that file" in ended.stderr
    assert "Traceback" not in ended.stderr
