"""Who goes on after a loss, with how many workers, and when nobody can."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from shoal.config import TrainConfig
from shoal.errors import ConfigError, DiedError, Loss, NoPlaceError, PeerError, RunError
from shoal.launching import TimeOverError
from shoal.result import RunResult, WentOn
from shoal.running.going_on import Attempt, _with_the_way_out, go_on_by_itself, largest, on_workers
from shoal.training.listener import Listener
from shoal.training.run_folder import RunFolder

DONE = cast(RunResult, object())


class Heard(Listener):
    def __init__(self) -> None:
        self.changes: list[WentOn] = []
        self.restarts: list[int] = []

    def regrouping(self, change: WentOn) -> None:
        self.changes.append(change)

    def restarting(self, why: str, left: int) -> None:  # noqa: ARG002  (the listener's own signature)
        self.restarts.append(left)


def lost(*ranks: int) -> DiedError:
    error = DiedError("rank 1 was killed by signal SIGKILL.", "")
    error.loss = Loss(ranks, time.time())
    return error


def played(
    config: TrainConfig, *ends: BaseException | RunResult, listener: Listener | None = None
) -> list[tuple[int, float | None]]:
    """On how many workers each attempt was, and how many seconds it had."""
    attempts: list[tuple[int, float | None]] = []
    coming = iter(ends)

    def train(attempt: Attempt) -> RunResult:
        attempts.append((attempt.config.workers, attempt.seconds))
        end = next(coming)
        if isinstance(end, BaseException):
            raise end
        return end

    assert go_on_by_itself(train, config, None, listener or Listener()) is DONE
    return attempts


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., TrainConfig]:
    return lambda **values: TrainConfig(out=tmp_path / "run", **values)


def test_it_shrinks_by_those_that_are_lost_and_grows_to_the_most(settings: Callable[..., TrainConfig]) -> None:
    heard = Heard()
    attempts = played(settings(elastic="2:4:10"), lost(1), lost(0), TimeOverError(), lost(2), DONE, listener=heard)
    assert attempts == [(4, None), (3, 10), (2, 20), (4, None), (3, 40)]
    assert [(change.workers_before, change.workers_after) for change in heard.changes] == [
        (4, 3),
        (3, 2),
        (2, 4),
        (4, 3),
    ]


def test_it_grows_to_what_there_is_room_for_and_begins_on_fewer_where_there_is_none(
    settings: Callable[..., TrainConfig],
) -> None:
    some = TimeOverError()
    some.workers = 3
    no_place = NoPlaceError("Ray gave no place within 2 seconds to 4 workers.", "")
    attempts = played(settings(elastic="2:4:10"), no_place, lost(0), some, no_place, TimeOverError(), DONE)
    assert attempts == [(4, None), (3, 10), (2, 20), (3, 20), (2, 40), (4, None)]
    for limits in ({"elastic": "4:4"}, {"workers": 4}):
        with pytest.raises(NoPlaceError):
            played(settings(**limits), no_place)


def test_what_replicas_were_replaced_for_is_no_restart_any_more(settings: Callable[..., TrainConfig]) -> None:
    config = settings(restarts=3, replicas=2, exchange="downpour")
    folder, given = RunFolder(config.out or Path()), []
    folder.path.mkdir()

    def train(attempt: Attempt) -> RunResult:
        given.append(attempt.restarts)
        if len(given) == 3:
            return DONE
        if len(given) == 1:
            folder.note_replaced(1)
        raise lost()

    assert go_on_by_itself(train, config, None, Listener()) is DONE
    assert given == [3, 1, 0]


def test_where_to_go_on_is_told_when_no_restart_is_left(settings: Callable[..., TrainConfig]) -> None:
    config = settings(restarts=1, workers=2)
    folder = RunFolder(config.out or Path())
    with pytest.raises(DiedError) as caught:
        played(config, lost(1), lost(1))
    assert "There is no checkpoint yet" in caught.value.remedy
    (folder.checkpoints.path / "step-00000004").mkdir(parents=True)
    ready = DiedError("gone.", f"Go on with: {folder.how_to_go_on}")
    for error, told in ((lost(1), "Its newest checkpoint is step-00000004. Go on with:"), (ready, "Go on with:")):
        with pytest.raises(DiedError) as caught:
            raise _with_the_way_out(error, config, 2, folder)
        assert told in caught.value.remedy
        assert caught.value.remedy.count(folder.how_to_go_on) == 1


def test_too_few_are_left(settings: Callable[..., TrainConfig]) -> None:
    with pytest.raises(DiedError, match=r"1 of 4 workers are left, and elastic = '2:4' allows no such number"):
        played(settings(elastic="2:4"), lost(0, 1, 3))


def test_restarts_are_for_what_elastic_is_not(settings: Callable[..., TrainConfig]) -> None:
    heard = Heard()
    config = settings(elastic="2:3", restarts=2)
    attempts = played(config, PeerError("they lost each other.", ""), lost(0, 1), lost(2), DONE, listener=heard)
    assert [workers for workers, _ in attempts] == [3, 3, 3, 2]
    assert heard.restarts == [1, 0]
    with pytest.raises(PeerError):
        played(settings(elastic="2:3"), PeerError("they lost each other.", ""))


def test_an_error_of_a_worker_is_raised(settings: Callable[..., TrainConfig]) -> None:
    with pytest.raises(RunError, match="mine"):
        played(settings(elastic="1:4", restarts=9), RunError("mine.", ""))


def test_only_numbers_that_fit_plan_and_batch(settings: Callable[..., TrainConfig]) -> None:
    replicas = settings(exchange="allreduce", elastic="1:4", batch=8)
    assert (replicas.workers, replicas.replicas) == (4, 4)
    assert largest(replicas, 1, 3) == 2, "three replicas cannot share 8 samples"
    pairs = settings(replicas=2, workers=4, exchange="sync", elastic="2:4", plan="model", batch=8)
    assert largest(pairs, 2, 3) == 2
    assert (on_workers(pairs, 2).replicas, on_workers(pairs, 2).batch) == (1, 8)
    with pytest.raises(ConfigError, match="2x2"):
        played(settings(plan="2x2", elastic="2:4"), DONE)


def test_what_makes_no_sense_is_refused(settings: Callable[..., TrainConfig]) -> None:
    for given in ("4:2", "0:2", "2", "two:four", 3):
        with pytest.raises(ConfigError, match="MIN:MAX"):
            settings(elastic=given)
    with pytest.raises(ConfigError, match="begins on 8 workers"):
        settings(elastic="2:4", workers=8)
    with pytest.raises(ConfigError, match="downpour goes on without a lost replica by itself"):
        settings(elastic="2:4", exchange="downpour")


def test_the_folder_tells_how_long_it_took(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    change = WentOn(
        why="", lost=[1], workers_before=3, workers_after=2, step=7, checkpoint="step-00000007", samples_again=0,
        noticed=time.time() - 2, seconds_to_notice=0.1,
    )  # fmt: skip
    folder.note_step_after_restart()
    assert folder.went_on == []
    folder.note_going_on(change)
    assert folder.went_on == [change]
    for _ in range(2):
        folder.note_step_after_restart()
    (told,) = folder.went_on
    assert told.seconds_to_go_on is not None
    assert 2 <= told.seconds_to_go_on < 60
    folder.note_going_on(change)
    assert folder.went_on == [told, change]
