"""Sums of ranks of one host through shared memory: what they add up to, and who is missed when."""

import random
import sys
from pathlib import Path

import pytest

from shoal.errors import RunError
from shoal.launching import ranks, run
from tests.conftest import RunOnRanks
from tests.transport import host_cases
from tests.transport.test_lost_ranks import FREEZE_SECONDS, folder, in_our_words

__all__ = ["folder"]
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="Linux only"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_sums_in_any_order_of_waiting(on_ranks: RunOnRanks, world: int, seed: int) -> None:
    (right,) = set(on_ranks(world, host_cases.many_sums, seed))
    assert right >= 25


@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_have_the_same_bits_every_time(on_ranks: RunOnRanks, world: int, how: str) -> None:
    first, again = on_ranks(world, host_cases.noise, how), on_ranks(world, host_cases.noise, how)
    assert first == again == [first[0]] * world


@pytest.mark.parametrize(
    ("trouble", "answers"),
    [
        ("none", ["a group"] * 3),
        ("off", ["another rank has it turned off", "SHOAL_SUMS=gloo", "another rank has it turned off"]),
        ("hosts", ["several hosts"] * 3),
    ],
)
def test_all_ranks_join_or_none_and_say_why(on_ranks: RunOnRanks, trouble: str, answers: list[str]) -> None:
    assert on_ranks(3, host_cases.joined, trouble) == answers


def test_no_room_for_the_memory(on_ranks: RunOnRanks) -> None:
    first, *others = on_ranks(3, host_cases.joined, "full")
    assert first == "no memory could be shared ([Errno 28] No space left on device)"
    assert all(
        "no memory could be shared" in other or other == "another rank could not share memory" for other in others
    )
    assert on_ranks(3, host_cases.joined, "none") == ["a group"] * 3


MOMENTS = [(fault, workers, seed) for fault in ("kill", "freeze") for workers in (2, 3) for seed in range(3)]
"""A freeze takes its time-out to be noticed: at one moment each, and at the others with --thorough."""


@pytest.mark.parametrize(
    ("fault", "workers", "seed"),
    [
        pytest.param(*moment, marks=[pytest.mark.thorough] if moment[0] == "freeze" and moment[2] else [])
        for moment in MOMENTS
    ],
)
def test_a_rank_lost_at_any_moment_of_a_sum(
    folder: Path,
    fault: str,
    workers: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "SEARCH_SECONDS", 1.0)
    at = random.Random(f"{fault}{workers}{seed}").randrange(1, 200)
    timeout = FREEZE_SECONDS if fault == "freeze" else 60
    with pytest.raises(RunError) as caught:
        run(host_cases.sum_until, str(folder), fault, at, workers=workers, threads=1, timeout=timeout)
    assert (folder / "fired").exists()
    said = [path.read_text() for path in sorted(folder.glob("said*"))]
    assert said
    kinds = {text.partition("\n")[0] for text in said}
    assert kinds <= {"PeerError", "SilentError"}
    assert ("SilentError" in kinds) == (fault == "freeze")
    assert caught.value.problem.startswith(f"rank {workers - 1} ")
    in_our_words([("", text) for text in said])
