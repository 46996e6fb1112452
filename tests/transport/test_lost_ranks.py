"""A rank that raises, dies or freezes in the middle of a step: the others say so in our words, and none is left."""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.errors import RunError
from shoal.launching import ranks, run
from tests.transport import jobs

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(300),  # processes start, and a busy machine starts them slowly
]
FREEZE_SECONDS = 8.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the ranks leave their pids; afterwards none of them may live."""
    yield tmp_path
    pids = [int(path.read_text()) for path in tmp_path.glob("rank*")]
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def lose(folder: Path, fault: str, seed: int, workers: int) -> tuple[RunError, list[tuple[str, str]]]:
    """What `run` raises, and (class, traceback) of what the ranks raised that were not at fault."""
    draw = random.Random(f"{fault}{seed}{workers}")
    plan, at = draw.choice(["data", "model", "spatial"]), draw.randrange(1, 60)
    with pytest.raises(RunError) as caught:
        run(
            jobs.train_until,
            str(folder),
            fault,
            at,
            plan,
            workers=workers,
            threads=1,
            timeout=FREEZE_SECONDS if fault == "freeze" else 60,
        )
    assert (folder / "fired").exists()
    said = {path.name: path.read_text() for path in folder.glob("said*")}
    if fault == "raise":
        assert said.pop(f"said{workers - 1}").startswith("ValueError")
    return caught.value, [(text.partition("\n")[0], text) for _, text in sorted(said.items())]


def in_our_words(said: list[tuple[str, str]]) -> None:
    for _, text in said:
        assert "pair.cc" not in text, text
        assert "unbound_buffer" not in text, text
        assert "onnection reset" not in text, text
        assert "GLHF" not in text, text
        assert "waited for '" in text, text


ANOTHER_SEED = pytest.param(1, marks=pytest.mark.thorough)


@pytest.mark.parametrize("seed", [0, ANOTHER_SEED])
@pytest.mark.parametrize(
    ("fault", "kinds", "words", "cause"),
    [
        ("raise", {"PeerError"}, "rank 0 lost its connection to rank 1 while it", "rank 1 failed"),
        ("kill", {"PeerError"}, "rank 0 lost its connection to rank 1 while it", "rank 1 was killed by signal SIGKILL"),
        ("freeze", {"SilentError"}, "rank 1 did not answer within 8 seconds", "rank 1 did not answer within 8 seconds"),
    ],
)
def test_one_of_two(
    folder: Path, fault: str, kinds: set[str], words: str, cause: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SEARCH_SECONDS", 1.0)
    error, said = lose(folder, fault, seed, workers=2)
    assert cause in error.problem
    assert {kind for kind, _ in said} == kinds
    assert words in said[0][1]
    in_our_words(said)


@pytest.mark.parametrize("seed", [0, ANOTHER_SEED])
@pytest.mark.parametrize("fault", ["raise", "kill", "freeze"])
def test_one_of_three(folder: Path, fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever notices first goes too, and may be whom the third one loses: the cause is found all the same."""
    monkeypatch.setattr(ranks, "SEARCH_SECONDS", 1.0)
    error, said = lose(folder, fault, seed, workers=3)
    assert error.problem.startswith("rank 2 ")
    assert said
    assert {kind for kind, _ in said} <= {"PeerError", "SilentError"}
    assert fault != "freeze" or "SilentError" in {kind for kind, _ in said}
    in_our_words(said)


def test_a_world_that_begins_again_has_new_connections(tmp_path: Path) -> None:
    for sums in run(jobs.begin_again, str(tmp_path), workers=2, threads=1, timeout=60):
        assert sums[0] == sums[1] == sums[2]
