"""The conductor of a run, asked by replicas that this test plays."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.config import TrainConfig
from shoal.errors import PeerError, RunError
from shoal.exchanging import Seat
from shoal.linking import LOOPBACK, connect
from shoal.training.conductor import Conductor, Past
from shoal.training.folder import RunFolder
from shoal.training.listener import About, Listener

pytestmark = pytest.mark.timeout(60)


@contextmanager
def conducted(folder: Path, held: tuple[str, int] = ("none", 0), **settings: Any) -> Iterator[Conductor]:
    config = TrainConfig.parse({"data": "digits", "out": folder, **settings})
    options = config.exchange_settings()
    assert options is not None
    about = About(
        model="net",
        parameters=1,
        data="digits",
        train_samples=80,
        test_samples=8,
        origin="here",
        epochs=config.epochs,
        steps_per_epoch=10,
        batch=config.batch,
        workers=config.workers,
        plan=config.plan,
        replicas=config.replicas,
        exchange=options.name,
        device="cpu",
        threads=1,
        timeout=config.timeout,
        survives=options.survives,
        done=0,
    )
    conductor = Conductor(
        config,
        options,
        about,
        RunFolder.create(config),
        Listener(),
        Past(),
        held=held,
        host=LOOPBACK,
        store=(LOOPBACK, 1),
    )
    try:
        yield conductor
    finally:
        conductor.close()


def test_a_run_in_lockstep_gives_up_on_a_frozen_replica_also_where_the_others_only_ask(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "replicas": 2,
        "exchange": "allreduce",
        "exchange_options": {"heartbeat": 0.2},
        "timeout": 3.0,
    }
    with conducted(tmp_path / "run", **settings) as conductor, ExitStack() as closing:
        meeting = conductor.meeting
        seats = [Seat(meeting, rank=0, replica=number, pids=[], heartbeat=0.2) for number in range(2)]
        for seat in seats:
            closing.callback(seat.hang_up)
        orders = []

        def ask() -> str:
            orders.append(seats[0].ask({"ask": "next", "done": None, "stop": False}).head["order"])
            return str(orders[-1])

        while ask() == "batch":  # all of the epoch; the last of them needs replica 1, which has none
            pass
        silent = connect(meeting.address, meeting.token, {"as": "pulse", "replica": 1, "rank": 0}, name="a dead pulse")
        closing.callback(silent.close)
        deadline = time.monotonic() + 30
        while ask() == "wait" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert orders == ["batch"] * 10 + ["wait"] * (len(orders) - 11) + ["stop"]
        with pytest.raises(PeerError, match=r"replica 1 gave no sign of life for 3 seconds") as caught:
            conductor.ended()
        assert caught.value.remedy.startswith("There is no checkpoint yet")
        assert [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"frozen"' in line]


def test_the_loss_of_a_replica_whose_threads_hold_weights_ends_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "replicas": 2,
        "exchange": "downpour",
        "exchange_options": {"servers": "threads", "shards": 1},
    }
    with conducted(tmp_path / "run", held=("threads", 1), **settings) as conductor:
        seats = [Seat(conductor.meeting, rank=0, replica=number, pids=[], heartbeat=5.0) for number in range(2)]
        seats[1].hang_up()
        wait_until(lambda: "lost" in happened(tmp_path / "run"))
        assert not conductor.over  # it held nothing
        seats[0].hang_up()
        wait_until(lambda: conductor.over)
        with pytest.raises(RunError, match=r"server 0 was lost"):
            conductor.ended()


def happened(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()
