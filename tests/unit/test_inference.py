"""What a trained network needs to be used: read back as written, refused where it cannot be right."""

import json
from typing import Any

import pytest

from shoal.errors import CheckpointError
from shoal.inference import Inference, Preparation

KNOWN = Inference(
    task="classify",
    model="lenet5",
    model_options={"hidden": 8},
    input=(1, 8, 8),
    classes=("cat", "dög"),
    preparation=Preparation(values="bytes", shape=(1, 8, 8), mean=(120.0,), std=(60.0,)),
    data="folder:pets",
    seed=3,
    batch=16,
    versions={"torch": "2.13.0"},
)


def test_reads_back_equal() -> None:
    assert Inference.from_json(KNOWN.to_json(), source="inference.json") == KNOWN
    assert json.loads(KNOWN.to_json())["schema"] == "shoal.inference/1"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "shoal.inference/2"}, "has the schema 'shoal.inference/2'"),
        ({"task": "guess"}, "is damaged: task"),
        ({"classes": []}, "is damaged: classes"),
        ({"colour": "red"}, "is damaged: colour"),
        ({"preparation": {"values": "bytes", "shape": [3, 8, 8], "mean": [1], "std": [1]}}, "1 means"),
        ({"preparation": {"values": "bytes", "shape": [1, 8, 8], "mean": [1], "std": [0]}}, r"preparation\.std"),
    ],
)
def test_what_cannot_be_right_is_refused(change: dict[str, Any], told: str) -> None:
    text = json.dumps(json.loads(KNOWN.to_json()) | change)
    with pytest.raises(CheckpointError, match=f"run/inference.json.*{told}"):
        Inference.from_json(text, source="run/inference.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_such_file_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="run/inference"):
        Inference.from_json(text, source="run/inference.json")
