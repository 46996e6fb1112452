"""Which of several failures is the cause, and what a rank's error amounts to."""

import pickle

import pytest

from shoal.errors import ConfigError, DiedError, DivergedError, PeerError, StoppedError
from shoal.launching.failure import Failure, explain

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "raised"),
        (RuntimeError("mat1 and mat2 cannot be multiplied"), "raised"),
        (RuntimeError("my data base: connection closed"), "raised"),  # the user's own network
        (RuntimeError("timed out in my own code"), "raised"),
        (RuntimeError(f"{GLOO}pair.cc:538] Connection closed by peer [127.0.0.1]:4711"), "gone"),
        (RuntimeError(f"{GLOO}pair.cc:538] Read error [127.0.0.1]:4711: Connection reset by peer"), "gone"),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"), "silent"),
        (RuntimeError("[enforce fail at gloo] only float tensors"), "raised"),
        (PeerError("rank 1 passed too much.", "See its message."), "gone"),
        (DivergedError("nan.", "Lower it."), "raised"),
        (StoppedError("stopped.", "Go on."), "stopped"),
    ],
)
def test_kinds(error: Exception, kind: str) -> None:
    failure = Failure.of(error, 3)
    assert failure.kind == kind
    assert pickle.loads(pickle.dumps(failure)) == failure or failure.error is not None


def test_an_error_raised_because_of_a_lost_peer_is_no_cause() -> None:
    error = ValueError("while saving")
    error.__cause__ = RuntimeError(f"{GLOO}pair.cc:538] Connection closed by peer")
    assert Failure.of(error, 0).kind == "gone"


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error = RuntimeError("the disk is full")
    error.__cause__ = error
    assert Failure.of(error, 0).kind == "raised"


def failure(rank: int, error: Exception, when: float) -> Failure:
    failure = Failure.of(error, rank)
    return Failure(rank, failure.kind, when, failure.what, failure.error, failure.notes, failure.trace)


LOST = RuntimeError(f"{GLOO}pair.cc:538] Connection closed by peer")
SILENT = RuntimeError(f"{GLOO}pair.cc:538] Timed out waiting 5000ms for recv operation to complete")


def test_the_earliest_cause_wins_over_whoever_lost_it() -> None:
    failures = [failure(0, LOST, 1.0), failure(2, ValueError("second"), 3.0), failure(1, ValueError("first"), 2.0)]
    assert "rank 1 failed: ValueError: first" in explain(failures, [], [3], 5).problem


def test_what_all_ranks_found_alike_is_told_without_a_rank() -> None:
    error = ConfigError("lr is wrong.", "Lower it.")
    assert explain([failure(0, error, 1), failure(1, error, 1)], [], [], 5).problem == "lr is wrong."
    assert explain([failure(1, error, 1)], [], [0], 5).problem == "rank 1: lr is wrong."


@pytest.mark.parametrize(
    ("failures", "ended", "running", "words"),
    [
        ([failure(0, SILENT, 1)], [], [1], "rank 1 did not answer within 5 seconds; rank 0 waited"),
        ([failure(0, SILENT, 1), failure(1, SILENT, 2)], [], [], "ranks 0 and 1 waited for each other"),
        ([failure(0, LOST, 1)], [1, 2], [], "rank 0 waited for ranks 1 and 2, which had already finished"),
        ([failure(0, LOST, 1), failure(1, LOST, 2)], [], [], "ranks 0 and 1 lost their connections"),
    ],
)
def test_nobody_is_at_fault(failures: list[Failure], ended: list[int], running: list[int], words: str) -> None:
    told = explain(failures, ended, running, 5)
    assert type(told) is DiedError
    assert words in told.problem


def test_a_note_tells_the_layer() -> None:
    error = ValueError("no")
    error.add_note("in layer 'conv1' on rank 1")
    assert explain([failure(1, error, 1)], [], [0], 5).problem.startswith("rank 1 failed, in layer 'conv1'")
