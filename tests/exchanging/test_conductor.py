"""The conductor of a run, asked by replicas that this test plays."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.config import TrainConfig
from shoal.errors import PeerError
from shoal.exchanging import Seat
from shoal.linking import LOOPBACK, connect
from shoal.training.conductor import Conductor, Past
from shoal.training.folder import RunFolder
from shoal.training.listener import About, Listener

pytestmark = pytest.mark.timeout(60)


@contextmanager
def conducted(folder: Path, **settings: object) -> Iterator[Conductor]:
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
        held=("none", 0),
        host=LOOPBACK,
        store=(LOOPBACK, 1),
    )
    try:
        yield conductor
    finally:
        conductor.close()


def test_a_run_in_lockstep_gives_up_on_a_frozen_replica_also_where_the_others_only_ask(tmp_path: Path) -> None:
    settings = {"replicas": 2, "exchange": "allreduce", "exchange_options": {"heartbeat": 0.2}, "timeout": 1.0}
    with conducted(tmp_path / "run", **settings) as conductor:
        meeting = conductor.meeting
        seats = [Seat(meeting, rank=0, replica=number, pids=[], heartbeat=0.2) for number in range(2)]
        silent = connect(meeting.address, meeting.token, {"as": "pulse", "replica": 1, "rank": 0}, name="a dead pulse")
        question = {"ask": "next", "done": None, "stop": False}
        orders = []
        deadline = time.monotonic() + 30
        while "stop" not in orders and time.monotonic() < deadline:
            orders.append(seats[0].ask(question).head["order"])
            time.sleep(0.05)
        assert set(orders) == {"batch", "wait", "stop"}  # all batches of the epoch, then for replica 1, which has none
        with pytest.raises(PeerError, match=r"replica 1 gave no sign of life for 1 seconds"):
            conductor.ended()
        assert [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"frozen"' in line]
        silent.close()
        for seat in seats:
            seat.hang_up()
