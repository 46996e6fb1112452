"""Real runs, recorded: what the trace says of each rank, and that it changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.running import train
from shoal.timeline import Trace
from tests.conftest import RunOnRanks
from tests.tracing import cases

pytestmark = pytest.mark.timeout(300)
STEPS = 4


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without its times."""
    kept = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kept.append({name: value for name, value in values.items() if "sec" not in name and "time" not in name})
    return kept


@pytest.mark.parametrize("plan", ["data", "spatial", "owt"])
def test_a_trace_of_two_ranks(plan: str, on_ranks: RunOnRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    on_ranks(2, cases.train, cases.settings(folder, workers=2, plan=plan, trace=STEPS))
    trace = Trace.load(folder / "trace.json")
    cases.check(trace, 2)
    assert trace.ranks == ("rank 0", "rank 1")
    assert plan in trace.title
    for rank in range(2):
        own = [piece for piece in trace.slices if piece.rank == rank]
        assert [piece.label for piece in own if piece.kind == "step"] == [f"step {n}" for n in range(6, 6 + STEPS)]
        assert cases.layers(trace, "forward", rank) >= cases.LAYERS
        assert cases.layers(trace, "backward", rank) >= cases.LAYERS
        assert {"data", "update", "wait", "sum"} <= {piece.kind for piece in own}
        waits = [piece for piece in own if piece.kind == "wait"]
        assert {piece.peers for piece in waits} == {(1 - rank,)}
    assert cases.covered(trace) >= 0.95
    gradients = [piece for piece in trace.slices if piece.kind == "gradients" and piece.lane == "network"]
    assert all(piece.bytes > 0 and piece.peers for piece in gradients)
    assert bool(gradients)
    if plan == "data":  # layers only add up, which is no message where ranks share memory
        summed = [piece for piece in trace.slices if piece.kind == "sum" and piece.label in cases.LAYERS]
        assert {(piece.rank, *piece.peers) for piece in summed} == {(0, 1), (1, 0)}
    else:
        moved = [message for message in trace.messages if message.label in cases.LAYERS]
        assert {(message.src, message.dst) for message in moved} == {(0, 1), (1, 0)}


def test_recording_changes_nothing(on_ranks: RunOnRanks, tmp_path: Path) -> None:
    folders = tmp_path / "plain", tmp_path / "traced"
    for folder, steps in zip(folders, (None, STEPS), strict=True):
        on_ranks(2, cases.train, cases.settings(folder, workers=2, plan="spatial", trace=steps))
    plain, traced = folders
    assert lines(plain) == lines(traced)
    assert (plain / "model.safetensors").read_bytes() == (traced / "model.safetensors").read_bytes()
    assert not (plain / "trace.json").exists()


def test_recording_one_device_changes_nothing_and_shows_its_layers(tmp_path: Path) -> None:
    folders = tmp_path / "plain", tmp_path / "traced"
    for folder, steps in zip(folders, (None, "3-5"), strict=True):
        cases.train(cases.settings(folder, trace=steps))
    plain, traced = folders
    assert lines(plain) == lines(traced)
    assert (plain / "model.safetensors").read_bytes() == (traced / "model.safetensors").read_bytes()
    trace = Trace.load(traced / "trace.json")
    cases.check(trace, 1)
    assert sorted(step for step in trace.steps()) == [3, 4, 5]
    assert cases.layers(trace, "forward", 0) == {*cases.LAYERS, "relu", "pass"}
    assert cases.layers(trace, "backward", 0) == {*cases.LAYERS, "relu", "pass"}
    assert cases.covered(trace) >= 0.95


def test_steps_that_a_run_does_not_have(tmp_path: Path) -> None:
    """What there is of them is recorded; where there is none the run is refused."""
    cases.train(cases.settings(tmp_path / "some", trace="11-40"))
    assert sorted(Trace.load(tmp_path / "some" / "trace.json").steps()) == [11, 12]
    with pytest.raises(ConfigError, match="'13-40' begins after the last of the 12 steps"):
        cases.train(cases.settings(tmp_path / "none", trace="13-40"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("exchange", ["downpour", "local"])
def test_a_trace_of_replicas(exchange: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"period": 2} if exchange == "local" else {"servers": "processes"}
    settings = {"workers": 2, "replicas": 2, "exchange": exchange, "exchange_options": options}
    train(cases.settings(folder, **settings, epochs=3, trace=3))
    trace = Trace.load(folder / "trace.json")
    cases.check(trace, 2)
    assert trace.ranks == ("replica 0, rank 0", "replica 1, rank 0")
    assert exchange in trace.title
    for replica in range(2):
        own = [piece for piece in trace.slices if piece.rank == replica]
        assert sum(piece.kind == "step" for piece in own) == 3
        assert cases.layers(trace, "forward", replica) >= cases.LAYERS
        assert cases.layers(trace, "backward", replica) >= cases.LAYERS
        pushes = [piece for piece in own if piece.label == "push to shard 0"]
        assert pushes
        assert all(piece.kind == "exchange" and piece.bytes > 0 for piece in pushes)
        assert any(piece.label == "fetch from shard 0" for piece in own)
        assert any(piece.kind == "update" for piece in own) == (exchange == "local")
    assert cases.covered(trace) >= 0.95


def test_a_loop_of_ones_own(on_ranks: RunOnRanks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert on_ranks(2, cases.own_loop, str(path), "data") == [(3, True), (3, False)]
    trace = Trace.load(path)
    cases.check(trace, 2)
    assert trace.title == "mine"
    assert sorted(trace.steps()) == [1, 2, 3]
    for rank in range(2):
        own = [piece for piece in trace.slices if piece.rank == rank]
        assert sum(piece.kind == "step" for piece in own) == 3
        assert cases.layers(trace, "forward", rank) >= cases.LAYERS
        assert cases.layers(trace, "backward", rank) >= cases.LAYERS
        assert sum(piece.label == "SGD" for piece in own) == 3
    assert cases.covered(trace) >= 0.95
