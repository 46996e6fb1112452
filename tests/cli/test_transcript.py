"""docs/predict.md, from the first line to the last: every command and every block of code on it, in its order."""

import csv
import json
import re
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal import load
from tests.cli.conftest import Shoal

DOCS = Path(__file__).parent.parent.parent / "docs"
CLASSES = {"cat": (200, 60, 60), "dog": (60, 60, 200)}


def paint(path: Path, colour: tuple[int, ...], draws: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = draws.normal(colour, 30.0, size=(40, 36, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def blocks(page: str) -> list[str]:
    """Python on a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """What is typed on a page, as lists of arguments of `shoal`."""
    return [line.split()[1:] for line in (DOCS / page).read_text().splitlines() if line.startswith("    shoal ")]


@pytest.mark.timeout(300)
def test_from_a_folder_of_images_to_a_network_in_use(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = np.random.default_rng(0)
    for name, colour in CLASSES.items():
        for number in range(40):
            paint(tmp_path / "photos" / name / f"{number}.png", colour, draws)
    truth = ["cat" if number % 3 else "dog" for number in range(10)]
    for number, name in enumerate(truth):
        paint(tmp_path / "new" / f"{number}.png", CLASSES[name], draws)
    network, in_python = blocks("predict.md")
    (without_shoal,) = blocks("run_folder.md")
    (tmp_path / "mynet.py").write_text(network)
    monkeypatch.syspath_prepend(tmp_path)

    printed: dict[str, str] = {}
    tested: list[str] = []
    spaces: list[dict[str, Any]] = [{}, {}]
    for command in commands("predict.md"):
        if "--resume" in command:  # the code on the page comes before it
            with chdir(tmp_path):
                for code, space in zip((in_python, without_shoal), spaces, strict=True):
                    exec(code, space)
            before = (tmp_path / "runs/mine/model.safetensors").read_bytes()
        run = shoal(*command)
        assert run.returncode == 0, f"{command}: {run.stderr}"
        printed[" ".join(command)] = run.stdout
        if command[0] == "evaluate":
            tested.append(run.stdout)

    # Predictions: the same in the table, as CSV, as JSON, through shoal.load and in plain PyTorch.
    as_json = json.loads(printed["predict runs/mine new --json"])["predictions"]
    assert [row["class"] for row in as_json] == truth
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == truth
    expected = torch.tensor([[row["scores"][name] for name in ("cat", "dog")] for row in as_json])
    assert torch.allclose(torch.tensor([float(row["score"]) for row in rows]), expected.max(1).values, atol=1e-6)
    loaded, plain = spaces
    assert loaded["model"].classes == ("cat", "dog")
    assert torch.allclose(loaded["scores"], expected, atol=1e-6)
    assert [prediction.name for prediction in loaded["predictions"]] == truth
    assert torch.allclose(plain["scores"], expected[0], atol=1e-6)
    assert "new/3.png" in printed["predict runs/mine new"]

    # It went on, and is tested with the result's own numbers, under another plan and on data given by name too.
    result = json.loads((tmp_path / "runs/mine/result.json").read_text())
    assert (result["epochs"], result["workers"]) == (6, 2)
    assert (tmp_path / "runs/mine/model.safetensors").read_bytes() != before
    assert len(tested) == 3
    for text in tested:
        assert f"accuracy       {result['test_accuracy']:.4f}" in text
        assert f"cross entropy  {result['test_loss']:.4f}" in text
    assert "2 workers, plan spatial" in tested[1]

    # Elsewhere: the exported program needs no code of anybody's.
    program, x = torch.export.load(tmp_path / "mine.pt2").module(), loaded["x"]
    with chdir(tmp_path):
        now, again = load("runs/mine")(x), load("mine.safetensors", model="mynet.py:Net")(x)
    assert torch.equal(again, now)
    assert torch.allclose(program(x), now, atol=1e-5)
    monkeypatch.delitem(sys.modules, "mynet")
