"""`--tensorboard`: the numbers of metrics.jsonl, read back by TensorBoard's own reader."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from shoal import TrainConfig, train
from shoal.errors import ConfigError
from shoal.training import tensorboard


def test_events_are_the_lines_of_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    out = tmp_path / "run"
    train(TrainConfig(data="digits", epochs=1, batch=256, log_every=2, out=out, tensorboard=True, threads=1))
    reader = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(out / "tensorboard")
    )
    reader.Reload()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for event, names in tensorboard.NAMES.items():
        told = [line for line in lines if line["event"] == event]
        assert told
        for name, tag in names.items():
            expected = [(line["step"], line[name]) for line in told if line.get(name) is not None]
            written = reader.Scalars(tag) if expected else []
            assert [scalar.step for scalar in written] == [step for step, _ in expected]
            assert [scalar.value for scalar in written] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_that_the_package_is_missing_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="tensorboard"):
        train(TrainConfig(data="digits", out=tmp_path / "run", tensorboard=True))
    assert not (tmp_path / "run").exists()
