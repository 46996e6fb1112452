"""Replicas killed and frozen at random moments; the long form is `python -m benchmarks.faults.bench`."""

import random
import sys
from pathlib import Path

import pytest

from benchmarks.faults.bench import MODES, Score, strike
from benchmarks.faults.files import what_is_not_whole
from shoal.exchanges import EXCHANGES
from shoal.training.checkpoints.folder import CheckpointFolder, Draft
from tests.cli.commands import begin_printing

COMPRESSED_AND_GROUPS = {mode for mode in MODES if mode.split()[-1] in ("int8", "sign", "groups")}


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.thorough) if mode in COMPRESSED_AND_GROUPS else mode for mode in MODES],
)
def test_a_run_goes_on_or_says_who_was_lost(mode: str) -> None:
    seed = random.randrange(10**6)  # other moments in every run
    # On a machine that others keep busy all replicas may never be there at once by a heartbeat of half a second.
    for heartbeat in (0.5, 5.0):
        score, draw = Score(), random.Random(seed)
        saving = draw.random() < 0.5
        strike(mode, 1, 1, draw, score, saving=saving, heartbeat=heartbeat, begin=begin_printing)
        if not (score.unbegun and ": frozen " in score.wrong[0]):
            break
    assert not score.wrong, f"seed {seed}: {score.row(mode)}"
    assert (score.kills, score.stops) == (1, 1), "the faults did not fire"


def test_every_exchange_is_struck() -> None:
    assert {mode.exchange for mode in MODES.values()} == set(EXCHANGES)


def test_files_that_are_not_whole_are_found(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "steps"}\n')
    draft = Draft(CheckpointFolder(tmp_path / "checkpoints"), "save", 1)
    draft.write_bytes("replica-0.safetensors", b"own")
    draft.write_json("state.json", {})
    name = draft.commit(7).path.name
    assert what_is_not_whole(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"event": "steps"}\n{"eve')
    (tmp_path / "checkpoints" / name / "replica-0.safetensors").write_bytes(b"")
    (tmp_path / ".plan.json.7.tmp").write_text("{")
    found = what_is_not_whole(tmp_path)
    assert [line.partition(":")[0] for line in found] == [
        "half a file is left",
        "metrics.jsonl is not whole",
        "step-00000007 is not whole",
    ]
    assert "replica-0.safetensors" in found[-1]
