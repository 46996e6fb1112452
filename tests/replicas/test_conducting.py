"""A run that is conducted, asked by replicas that this test plays."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.config import TrainConfig
from shoal.diary import now
from shoal.errors import PeerError, RunError
from shoal.exchanges import Holding
from shoal.exchanging import Seat, Tally
from shoal.replicas.bundle import packed
from shoal.replicas.conducting import Conducting
from shoal.replicas.conductor import Conductor, Whereabouts
from shoal.replicas.effects import Log, WriteOwn
from shoal.replicas.orders import (
    AskTime,
    HandedIn,
    NextBatches,
    PlanChosen,
    Step,
    StepsDone,
    Time,
    Traced,
    question_head,
    read_order,
)
from shoal.replicas.recorder import Recorder
from shoal.timeline import Slice, Trace
from shoal.tracing.clocks import own_clock
from shoal.training.listener import Listener
from shoal.training.metrics import MetricsFile
from shoal.training.run_folder import RunFolder
from shoal.transport.links import JSON, LOOPBACK, LinkLost, connect
from tests.replicas.runs import about_a_run

pytestmark = pytest.mark.timeout(60)
NOWHERE = Holding("none")


@contextmanager
def conducted(folder: Path, held: Holding = NOWHERE, **settings: Any) -> Iterator[Conducting]:
    config = TrainConfig.parse({"data": "digits", "out": folder, **settings})
    options = config.exchange_settings()
    assert options is not None
    about = about_a_run(config, options)
    here = RunFolder.create(config)
    holding = ExitStack()
    holding.enter_context(here.held(resumed=False))
    recorder = Recorder(here, config, about)
    conducting = Conducting(
        config,
        options,
        about,
        recorder,
        Listener(),
        None,
        held=held,
        host=LOOPBACK,
        store="file:///nowhere",
        folder=str(folder),
    )
    try:
        yield conducting
    finally:
        conducting.close()
        recorder.close()
        holding.close()


def test_a_run_in_lockstep_gives_up_on_a_frozen_replica_also_where_the_others_only_ask(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "replicas": 2,
        "exchange": "allreduce",
        "exchange_options": {"heartbeat": 0.2},
        "timeout": 3.0,
    }
    with conducted(tmp_path / "run", **settings) as conducting, ExitStack() as closing:
        meeting = conducting.meeting
        seats = [Seat(meeting, rank=0, replica=number, pids=[], heartbeat=0.2) for number in range(2)]
        for seat in seats:
            closing.callback(seat.hang_up)
        orders = []

        def ask() -> str:
            orders.append(seats[0].ask(question_head(NextBatches())).head["order"])
            return str(orders[-1])

        while ask() == "train":  # all of the epoch; the last of them needs replica 1, which has none
            pass
        silent = connect(meeting.address, meeting.token, {"as": "pulse", "replica": 1, "rank": 0}, name="a dead pulse")
        closing.callback(silent.close)
        deadline = time.monotonic() + 30
        while ask() == "wait" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert orders == ["train"] * 10 + ["wait"] * (len(orders) - 11) + ["stop"]
        with pytest.raises(PeerError, match=r"replica 1 gave no sign of life for 3 seconds") as caught:
            conducting.ended()
        assert caught.value.remedy.startswith("There is no checkpoint yet")
        assert [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"frozen"' in line]


def test_the_loss_of_a_replica_whose_threads_hold_weights_ends_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "replicas": 2,
        "exchange": "downpour",
        "exchange_options": {"servers": "threads", "shards": 1},
    }
    with conducted(tmp_path / "run", held=Holding("threads", 1), **settings) as conducting:
        seats = [Seat(conducting.meeting, rank=0, replica=number, pids=[], heartbeat=5.0) for number in range(2)]
        seats[1].hang_up()
        wait_until(lambda: "lost" in happened(tmp_path / "run"))
        assert not conducting.over  # it held nothing
        seats[0].hang_up()
        wait_until(lambda: conducting.over)
        with pytest.raises(RunError, match=r"server 0 was lost"):
            conducting.ended()


IN_THREADS: dict[str, Any] = {
    "replicas": 2,
    "exchange": "downpour",
    "exchange_options": {"servers": "threads", "heartbeat": 0.2},
}


def test_a_replica_whose_threads_are_awaited_and_that_does_not_come_is_named(tmp_path: Path) -> None:
    with conducted(tmp_path / "run", held=Holding("threads", 2), timeout=1.0, **IN_THREADS) as conducting:
        first = Seat(conducting.meeting, rank=0, replica=0, pids=[], heartbeat=0.2)
        first.send({"ask": "servers"})
        wait_until(lambda: conducting.over)
        first.hang_up()
        with pytest.raises(PeerError, match=r"server 0 did not come in 1 seconds; of 2, 2 are missing") as caught:
            conducting.ended()
        assert "bug" not in caught.value.remedy


def test_a_replica_whose_threads_are_awaited_and_that_ends_before_it_came_ends_the_run(tmp_path: Path) -> None:
    with conducted(tmp_path / "run", held=Holding("threads", 2), timeout=1000.0, **IN_THREADS) as conducting:
        first = Seat(conducting.meeting, rank=0, replica=0, pids=[], heartbeat=0.2)
        first.send({"ask": "servers"})
        conducting.lost(1, "rank 1 was killed")
        assert conducting.over
        first.hang_up()
        with pytest.raises(RunError, match=r"server 1 was lost"):
            conducting.ended()


def test_a_replica_whose_message_has_no_meaning_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replicas": 2, "exchange": "downpour"}
    with conducted(tmp_path / "run", **settings) as conducting, ExitStack() as closing:
        seats = [Seat(conducting.meeting, rank=0, replica=number, pids=[], heartbeat=5.0) for number in range(2)]
        for seat in seats:
            closing.callback(seat.hang_up)
        with pytest.raises(PeerError):
            seats[1].ask({"ask": "next", "done": {"steps": "many"}, "stop": False})
        wait_until(lambda: "lost" in happened(tmp_path / "run"))
        assert seats[0].ask(question_head(NextBatches())).head["order"] == "train"
        assert not conducting.over
    (why,) = (line["why"] for line in lines_of(tmp_path / "run") if line["event"] == "ended")
    assert "was not understood" in why


ASYNCHRONOUS: dict[str, Any] = {"replicas": 2, "exchange": "downpour", "exchange_options": {"heartbeat": 0.2}}
IN_STEP: dict[str, Any] = {"replicas": 2, "exchange": "allreduce", "exchange_options": {"heartbeat": 0.2}}


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """From the first line about `event` on no line of metrics can be written."""
    write = MetricsFile.write
    full = False

    def written(self: MetricsFile, **values: Any) -> None:
        nonlocal full
        full = full or values["event"] == event
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, **values)

    monkeypatch.setattr(MetricsFile, "write", written)


def is_over_with_a_full_disk(conducting: Conducting, file: Path) -> None:
    wait_until(lambda: conducting.over)
    with pytest.raises(RunError) as caught:
        conducting.ended()
    assert caught.value.problem == f"{str(file)!r} cannot be written: No space left on device."
    assert caught.value.remedy.startswith("Free space there")
    assert "bug" not in str(caught.value)


class Two:
    """Two replicas that a test plays, and what may happen to the second."""

    def __init__(self, conducting: Conducting, closing: ExitStack) -> None:
        self.meeting, self._closing = conducting.meeting, closing
        self.seats = [Seat(self.meeting, rank=0, replica=number, pids=[], heartbeat=0.2) for number in range(2)]
        for seat in self.seats:
            closing.callback(seat.hang_up)

    def joined(self) -> None:
        """It has."""

    def frozen(self) -> None:
        hello: dict[str, JSON] = {"as": "pulse", "replica": 1, "rank": 0}
        self._closing.callback(connect(self.meeting.address, self.meeting.token, hello, name="a silent pulse").close)

    def lost(self) -> None:
        self.seats[1].hang_up()

    def left(self) -> None:
        self.seats[1].leave()

    def steps(self) -> None:
        """Of both, until they are told to stop."""
        self.train_until("stop")

    def train_until(self, last: str) -> int:
        """Of both, until one is given another order; its moment, if it has one."""
        done: list[StepsDone | None] = [None, None]
        while True:
            for number, seat in enumerate(self.seats):
                order = seat.ask(question_head(NextBatches(done[number]))).head
                if order["order"] == last:
                    return int(order.get("moment", 0))
                steps = (Step(order["batches"][0]["number"], 1.0, 0.01),)
                done[number] = StepsDone(steps, True, (1,), Tally(steps=1, updates=1))


@pytest.mark.parametrize("settings", [ASYNCHRONOUS, IN_STEP], ids=["asynchronous", "in step"])
@pytest.mark.parametrize("event", ["joined", "frozen", "lost", "left", "steps"])
def test_a_full_disk_ends_the_run_at_any_moment_and_everybody_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], event: str
) -> None:
    folder = tmp_path / "run"
    with conducted(folder, log_every=1, timeout=1000.0, **settings) as conducting, ExitStack() as closing:
        fill_the_disk(monkeypatch, event)
        two = Two(conducting, closing)
        getattr(two, event)()
        is_over_with_a_full_disk(conducting, folder / "metrics.jsonl")
        assert two.seats[0].ask(question_head(NextBatches())).head["order"] == "stop"
        conducting.lost(0, "rank 0 was killed")  # which would be another line
        conducting.warn("that the disk is full")
        conducting.stop()


def test_a_file_that_a_full_disk_does_not_take_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, write: Callable[[Path], object]) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shoal.files.write_atomically", full)
    folder = tmp_path / "run"
    with conducted(folder, **ASYNCHRONOUS) as conducting, ExitStack() as closing:
        seat = Seat(conducting.meeting, rank=0, replica=0, pids=[], heartbeat=0.2)
        closing.callback(seat.hang_up)
        assert seat.ask(question_head(PlanChosen("{}"))).head["order"] == "noted"
        is_over_with_a_full_disk(conducting, folder / "plan.json")
        assert seat.ask(question_head(NextBatches())).head["order"] == "stop"


def test_traces_of_replicas_become_one_file(tmp_path: Path) -> None:
    """One that cannot be read is told of, and ends nothing."""
    folder, slices = tmp_path / "run", (Slice("step", 0, "step 6", 70.0, 71.0, "steps", 6),)
    text = json.dumps(Trace("mine", "measured", ("a rank",), slices).to_chrome()).encode()
    with conducted(folder, **ASYNCHRONOUS, trace=3) as conducting, ExitStack() as closing:
        seats = [Seat(conducting.meeting, rank=0, replica=n, pids=[], heartbeat=0.2) for n in range(2)]
        for seat in seats:
            closing.callback(seat.hang_up)
        time_there = read_order(seats[0].ask(question_head(AskTime())).head)
        assert isinstance(time_there, Time)
        assert time_there.clock == own_clock()
        assert 0 <= now() - time_there.nanoseconds < 60e9
        assert seats[1].ask(question_head(Traced("half of it")), [text]).head["order"] == "noted"
        assert Trace.load(folder / "trace.json").ranks == ("a rank",)
        assert seats[0].ask(question_head(Traced()), [b"{}"]).head["order"] == "noted"
        assert seats[0].ask(question_head(Traced()), [text]).head["order"] == "noted"
        assert conducting.error is None
    both = Trace.load(folder / "trace.json")
    assert both.ranks == ("a rank", "a rank")
    assert [(piece.rank, piece.start, piece.end) for piece in both.slices] == [(0, 0.0, 1.0), (1, 0.0, 1.0)]
    told = (folder / "metrics.jsonl").read_text()
    assert "replica 1: half of it" in told
    assert "the trace of replica 0 cannot be read" in told


def test_a_trace_that_nobody_asked_for_is_nonsense(tmp_path: Path) -> None:
    with conducted(tmp_path / "run", **ASYNCHRONOUS) as conducting, ExitStack() as closing:
        seat = Seat(conducting.meeting, rank=0, replica=0, pids=[], heartbeat=0.2)
        closing.callback(seat.hang_up)
        seat.send(question_head(Traced()), [b"{}"])
        with pytest.raises(LinkLost):
            seat.hear()
    assert not (tmp_path / "run" / "trace.json").exists()


def test_a_checkpoint_waits_for_the_files_of_every_replica(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replica 1's own state is still being written while replica 0 asks whether it may save."""
    settings: dict[str, Any] = {"replicas": 2, "exchange": "easgd", "exchange_options": {"heartbeat": 5.0}}
    begun, goes_on = threading.Event(), threading.Event()
    write = Recorder.write

    def slowly(self: Recorder, effect: Any, buffers: Any) -> None:
        if isinstance(effect, WriteOwn) and effect.replica == 1:
            begun.set()
            assert goes_on.wait(30)
        write(self, effect, buffers)

    monkeypatch.setattr(Recorder, "write", slowly)
    with conducted(tmp_path / "run", **settings) as conducting, ExitStack() as closing:
        closing.callback(goes_on.set)
        two = Two(conducting, closing)
        moment = two.train_until("hand in")
        seats = two.seats
        files = [packed({f"replica-{number}.safetensors": str(number).encode()}) for number in (0, 1)]
        assert seats[0].ask(question_head(HandedIn(moment)), files[:1]).head["order"] == "noted"
        assert seats[1].ask(question_head(NextBatches())).head["order"] == "hand in"
        seats[1].send(question_head(HandedIn(moment)), files[1:])
        assert begun.wait(30)
        assert seats[0].ask(question_head(NextBatches())).head["order"] != "test"
        goes_on.set()
        assert seats[1].hear().head["order"] == "noted"
        (written,) = (tmp_path / "run" / "checkpoints").glob(f".moment-{moment}.*.tmp/replica-1.safetensors")
        assert written.read_bytes() == b"1"
        assert seats[0].ask(question_head(NextBatches())).head["order"] == "test"


def test_an_error_of_a_listener_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def happened(*_: object) -> None:
        raise ZeroDivisionError("of a listener")

    monkeypatch.setattr(Listener, "happened", happened)
    with conducted(tmp_path / "run", **ASYNCHRONOUS) as conducting, ExitStack() as closing:
        seat = Seat(conducting.meeting, rank=0, replica=0, pids=[], heartbeat=0.2)
        closing.callback(seat.hang_up)
        wait_until(lambda: conducting.over)
        with pytest.raises(RunError, match=r"ZeroDivisionError: of a listener"):
            conducting.ended()
        assert seat.ask(question_head(NextBatches())).head["order"] == "stop"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def happened(folder: Path) -> list[str]:
    return [line["event"] for line in lines_of(folder)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_line_has_the_losses_of_its_own_batch_whoever_is_heard_first() -> None:
    config = TrainConfig(replicas=2, exchange="allreduce", batch=8, log_every=1)
    options = config.exchange_settings()
    assert options is not None
    conductor = Conductor(config, options, about_a_run(config, options), Whereabouts("run"))
    for replica in (0, 1):
        conductor.happened("joined", replica, 0.0)
    lines = []
    for replica, number, loss in [(0, 0, 1.0), (0, 1, 10.0), (1, 0, 3.0), (1, 1, 30.0)]:
        conductor.answer(replica, NextBatches(None), 0.0)
        done = StepsDone((Step(number, loss, 0.1),), True, (1,), Tally())
        effects = conductor.answer(replica, NextBatches(done), 1.0).effects
        lines += [effect.values for effect in effects if isinstance(effect, Log) and effect.values["event"] == "steps"]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 20.0)]
