"""Replicas killed and frozen at random moments; the long form is `python -m benchmarks.faults.bench`."""

import random
import sys

import pytest

from benchmarks.faults.bench import MODES, Score, strike


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_or_says_who_was_lost(mode: str) -> None:
    seed = random.randrange(10**6)  # other moments in every run
    score = Score()
    strike(mode, 1, 2, random.Random(seed), score)
    assert not score.wrong, f"seed {seed}: {score.row(mode)}"
    assert (score.kills, score.stops) == (1, 2), "the faults did not fire"
