"""What a run finds out about its network: the best test, an early end, and how each class went."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.config import TrainConfig
from shoal.data import first_indices
from shoal.errors import CheckpointError
from shoal.result import RunResult
from shoal.running import resume, train
from shoal.training.best import Best
from shoal.training.evaluate import Evaluation, evaluate
from shoal.training.job import prepare
from shoal.transport import Transport
from tests.cli.conftest import tiny as tiny
from tests.training import jobs

NET = f"{jobs.__file__}:net"


@pytest.fixture
def data(tiny: str, tmp_path: Path) -> str:
    kind, _, name = tiny.partition(":")
    return f"{kind}:{tmp_path / name}"


def settings(data: str, out: Path, **more: object) -> TrainConfig:
    return TrainConfig.parse({"model": NET, "data": data, "batch": 8, "threads": 1, "out": out, **more})


def test_the_best_test_is_the_first_of_the_highest_score() -> None:
    best = Best()
    for epoch, accuracy in enumerate((0.5, 0.7, 0.7, 0.6), start=1):
        best = best.after(Evaluation(1.0, accuracy, None), epoch=epoch, step=10 * epoch)
    assert best.test is not None
    assert (best.test.epoch, best.test.step, best.test.test_accuracy, best.since) == (2, 20, 0.7, 2)
    assert [best.stops(patience) for patience in (None, 2, 3)] == [False, True, False]
    assert Best.from_dict(best.to_dict()) == best
    of_pixels = (
        Best().after(Evaluation(1.0, 0.9, 0.2), epoch=1, step=1).after(Evaluation(1.0, 0.8, 0.3), epoch=2, step=2)
    )
    assert of_pixels.test is not None
    assert of_pixels.test.epoch == 2


def test_a_run_that_gets_no_better_stops_and_keeps_its_best_weights(data: str, tmp_path: Path) -> None:
    """At this rate nothing is learned, so that the first test is the best."""
    out = tmp_path / "run"
    result = train(settings(data, out, epochs=9, patience=2, lr=1e-12))
    assert (result.epochs, result.stopped_early, result.steps) == (3, True, 30)
    assert result.best is not None
    assert (result.best.epoch, result.best.step) == (1, 10)
    assert result == RunResult.model_validate_json((out / "result.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "none of the last 2 tests was better than that of epoch 1" in lines[-1]["text"]
    best = load_file(out / "best.safetensors")
    assert best.keys() == load_file(out / "model.safetensors").keys()
    with pytest.raises(CheckpointError, match="stopped early, after 3 epochs, with patience = 2"):
        resume(out, {})
    longer = resume(out, {"patience": 4})
    assert (longer.epochs, longer.stopped_early, longer.best) == (5, True, result.best)
    for name, tensor in load_file(out / "best.safetensors").items():
        assert torch.equal(tensor, best[name])


def test_a_run_that_gets_better_ends_as_it_was_told(data: str, tmp_path: Path) -> None:
    result = train(settings(data, tmp_path / "run", epochs=4, patience=4, lr=0.2, momentum=0.5))
    assert (result.epochs, result.stopped_early) == (4, False)
    assert result.best is not None
    assert result.best.test_accuracy >= result.test_accuracy
    assert list(result.per_class) == ["0", "1", "2", "3"]
    assert [score.samples for score in result.per_class.values()] == [5, 5, 5, 5]
    assert result.confusion is not None
    assert [sum(row) for row in result.confusion] == [5, 5, 5, 5]
    right = [row[number] for number, row in enumerate(result.confusion)]
    assert [score.accuracy for score in result.per_class.values()] == [count / 5 for count in right]
    assert sum(right) / 20 == result.test_accuracy


@pytest.mark.parametrize("classes", [4, 101])
def test_classes_are_counted_and_the_matrix_only_where_it_is_small(classes: int) -> None:
    job = prepare(jobs.settings(classes=classes), Transport(alone=True))
    tested = evaluate(job.network, job.splits.test, batch=100, device=job.device)
    assert tested is not None
    x, y = job.splits.test.batch(first_indices(len(job.splits.test)))
    answers = job.network.module(x).argmax(1)
    assert tested.samples == tuple(torch.bincount(y, minlength=classes).tolist())
    assert tested.right == tuple(torch.bincount(y[answers == y], minlength=classes).tolist())
    assert (tested.confusion is None) == (classes > 100)
    if tested.confusion is not None:
        expected = torch.zeros(classes, classes, dtype=torch.int64)
        for label, answer in zip(y.tolist(), answers.tolist(), strict=True):
            expected[label, answer] += 1
        assert tested.confusion == tuple(map(tuple, expected.tolist()))
