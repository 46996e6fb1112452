"""`shoal predict`, `evaluate` and `export`: what each prints and writes, and what they refuse."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import shoal as library
from shoal.inference import METADATA
from tests.cli.conftest import Shoal

pytestmark = pytest.mark.timeout(300)
SQUARES = ("--model", "unet", "--model-options", "width=4,depth=2", "--data", "pairs:squares", "--batch", "4")


def draw_squares(folder: Path, count: int, size: int = 16) -> None:
    """Grey images of one bright square each, and their masks, 0 and 255."""
    draws = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        mask = np.zeros((size, size), dtype=np.uint8)
        top, left = draws.integers(0, size - 6, 2)
        mask[top : top + 6, left : left + 6] = 255
        noisy = np.clip(draws.normal(60.0 + 0.5 * mask, 10.0), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def test_a_network_that_segments(shoal: Shoal, shoal_here: Shoal, tmp_path: Path) -> None:
    draw_squares(tmp_path / "squares", 30)
    run = shoal("train", *SQUARES, "--epochs", "6", "--lr", "0.1", "--out", "run")
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())

    tested = json.loads(shoal_here("evaluate", "run", "--json").stdout)
    assert (tested["accuracy"], tested["iou"]) == (result["test_accuracy"], result["test_iou"])
    assert tested["loss"] == pytest.approx(result["test_loss"], abs=1e-9)
    assert sum(score["samples"] for score in tested["per_class"].values()) == 6 * 16 * 16
    right = sum(score["samples"] * score["accuracy"] for score in tested["per_class"].values())
    assert right / (6 * 16 * 16) == pytest.approx(tested["accuracy"])

    (tmp_path / "squares/images/broken.png").write_bytes(b"nothing")
    Image.fromarray(np.zeros((8, 24), dtype=np.uint8)).save(tmp_path / "wide.png")
    done = shoal_here("predict", "run", "squares/images", "wide.png", "--out", "masks")
    assert done.returncode == 1
    assert "broken.png cannot be read" in done.stderr
    assert "wide.png is 8x24, but the network was trained on 16x16" in done.stderr
    assert "2 of 32 files could not be predicted" in done.stderr
    model = library.load(tmp_path / "run")
    for number in (0, 7):
        with Image.open(tmp_path / f"masks/{number}.png") as image:
            written = np.asarray(image)
        (expected,) = model.predict([tmp_path / f"squares/images/{number}.png"])
        assert expected.mask is not None
        assert np.array_equal(written, expected.mask.numpy())
    assert shoal_here("predict", "run", "wide.png", "--size", "training", "--out", "wide").returncode == 0
    with Image.open(tmp_path / "wide/wide.png") as image:
        assert image.size == (24, 8)
    assert shoal_here("predict", "run", "wide.png", "--size", "own").returncode == 0
    Image.fromarray(np.zeros((20, 40), dtype=np.uint8)).save(tmp_path / "large.png")
    assert shoal_here("predict", "run", "large.png", "--size", "windows", "--out", "large").returncode == 0
    with Image.open(tmp_path / "large/large.png") as image:
        assert image.size == (40, 20)
    over = shoal_here("predict", "run", "wide.png", "--out", ".", "--size", "own")
    assert over.returncode == 2
    assert "would be written over an image" in over.stderr


@pytest.fixture
def run(shoal: Shoal, tiny: str, tmp_path: Path) -> Path:
    """A finished run of LeNet on `tiny`, and a sample of it as a file."""
    done = shoal("train", "--data", tiny, "--epochs", "2", "--batch", "16", "--out", "run")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "tiny.npz") as arrays:
        np.save(tmp_path / "sample.npy", arrays["x"][3])
    return tmp_path / "run"


def test_what_is_written_and_what_is_refused(run: Path, shoal_here: Shoal, tmp_path: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    tested = json.loads(shoal_here("evaluate", "run", "--json").stdout)
    assert (tested["accuracy"], tested["loss"]) == (result["test_accuracy"], result["test_loss"])
    smaller = json.loads(shoal_here("evaluate", "run/model.safetensors", "--batch", "3", "--json").stdout)
    assert smaller["accuracy"] == result["test_accuracy"]
    assert smaller["loss"] == pytest.approx(result["test_loss"], rel=1e-5)

    deep = tmp_path / "_".join(["long"] * 12)
    deep.mkdir()
    (tmp_path / "sample.npy").rename(deep / "sample.npy")
    (found,) = json.loads(shoal_here("predict", "run", deep.name, "--json").stdout)["predictions"]
    for columns in ("40", "60", "200"):
        shown = shoal_here("predict", "run", deep.name, "--top", "2", COLUMNS=columns).stdout
        assert max(map(len, shown.splitlines())) <= max(60, int(columns))
        assert f"{found['score']:.4f}" in shown
        assert (deep.name in shown) == (columns == "200")

    x = torch.ones(3, 1, 8, 8)
    expected = library.load(run)(x)
    assert shoal_here("export", "run", "kept.safetensors").returncode == 0
    ours, theirs = load_file(run / "model.safetensors"), load_file(tmp_path / "kept.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(library.load(tmp_path / "kept.safetensors")(x), expected)
    assert shoal_here("export", "run", "program", "--format", "torch-export").returncode == 0
    more = {"inference.json": ""}
    program = torch.export.load(tmp_path / "program", extra_files=more).module()
    assert torch.allclose(program(x), expected, atol=1e-5)
    assert more["inference.json"] == (run / "inference.json").read_text()

    for arguments, told in {
        ("export", "run", "kept.safetensors"): "'kept.safetensors' is there already.",
        ("export", "run", "kept.bin"): "the ending of 'kept.bin' tells no format.",
        ("export", "run", "nowhere/x.safetensors"): "cannot be written: No such file or directory.",
        ("predict", "run", "sample.npy", "--out", "masks"): "this network gives one class for a whole image.",
        ("predict", "run", "--csv", "a.png", "sample.npy"): "--csv 'a.png' would be written over an image.",
        ("predict", "nowhere", "sample.npy"): "there is no run 'nowhere'.",
        ("evaluate", "run", "--plan", "diagonal", "--workers", "2"): "there is no plan 'diagonal'.",
        ("evaluate", "run", "--data", "npz:nowhere.npz"): "there is no file nowhere.npz.",
        ("evaluate", "run", "--data", "synthetic:8,segment"): "is to segment, but the network was trained to classify.",
    }.items():
        refused = shoal_here(*arguments)
        assert refused.returncode == 2, arguments
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.thorough
def test_a_plan_may_be_searched_for_a_test(run: Path, shoal: Shoal) -> None:
    tested = json.loads(shoal("evaluate", "run", "--workers", "2", "--plan", "auto", "--json").stdout)
    result = json.loads((run / "result.json").read_text())
    assert tested["loss"] == pytest.approx(result["test_loss"], rel=1e-5)


def test_onnx(run: Path, shoal_here: Shoal, tmp_path: Path) -> None:
    if find_spec("onnxscript") is None:
        done = shoal_here("export", "run", "network.onnx")
        assert done.returncode == 2
        assert "pip install onnx onnxscript" in done.stderr
        pytest.skip("onnx and onnxscript are not installed: only the refusal was tested")
    import onnx
    from onnx.reference import ReferenceEvaluator

    assert shoal_here("export", "run", "network.onnx").returncode == 0
    network = onnx.load(tmp_path / "network.onnx")
    assert {entry.key for entry in network.metadata_props} == {METADATA}
    x = torch.ones(3, 1, 8, 8)
    (scores,) = ReferenceEvaluator(network).run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(scores), library.load(run)(x), atol=1e-5)
