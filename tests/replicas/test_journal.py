"""Lines of metrics: everything of a few replicas, and little of very many."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

from shoal.config import TrainConfig
from shoal.exchanging import Tally
from shoal.exchanging.membership.coordinator import What
from shoal.replicas.effects import HowFar
from shoal.replicas.journal import EVENTS, HAPPENINGS, TROUBLES, Journal
from shoal.replicas.orders import Step, StepsDone
from tests.replicas.runs import about_a_run


def line_of(replicas: int) -> dict[str, Any]:
    """The line of an epoch in which every replica made one step, number k with a staleness of k."""
    sizes = {"replicas": replicas, "workers": replicas, "batch": replicas}
    config = TrainConfig.parse({**sizes, "exchange": "downpour", "data": "digits"})
    options = config.exchange_settings()
    assert options is not None
    journal = Journal(config, options, about_a_run(config, options, replicas), HowFar(), 0.0)
    for number in range(replicas):
        tally = Tally(steps=1, updates=1 + number, wait_seconds=number / 7, staleness=Counter({number: 1}))
        journal.note(number, StepsDone((Step(number, 0.5, 0.1),), True, (7,), tally), 1.0)
        journal.add_loss(0.5)
    line = journal.counted(replicas, range(replicas), 1.0)
    assert line is not None
    return line


def test_whatever_happens_to_replicas_and_servers_has_a_name_that_others_look_for() -> None:
    config = TrainConfig.parse({"replicas": 2, "exchange": "downpour", "data": "digits"})
    options = config.exchange_settings()
    assert options is not None
    journal = Journal(config, options, about_a_run(config, options), HowFar(), 0.0)
    named = {what: journal.event_line(what, 0, 0, 0.0)["event"] for what in get_args(What)}
    assert named["server lost"] == "server_lost"
    assert set(named.values()) == HAPPENINGS
    assert HAPPENINGS - {"joined"} == TROUBLES
    assert HAPPENINGS < EVENTS


def test_a_line_of_a_few_replicas_tells_of_each() -> None:
    line = line_of(3)
    assert (line["replicas"], line["active"], line["updates"]) == (3, [0, 1, 2], {0: 1, 1: 2, 2: 3})
    assert line["wait_seconds"] == {0: 0.0, 1: 0.143, 2: 0.286}
    assert line["staleness_histogram"] == {0: 1, 1: 1, 2: 1}


def test_a_line_of_a_thousand_replicas_is_short_and_tells_how_they_are_spread() -> None:
    line = line_of(1000)
    assert len(json.dumps(line)) < 1000
    assert (line["replicas"], line["active"]) == (1000, None)
    assert line["updates"] == {"least": 1, "median": 500.5, "most": 1000}
    assert sum(line["staleness_histogram"].values()) == 1000


def test_lines_about_steps_that_were_reported_at_once_have_the_speed_since_an_earlier_moment() -> None:
    config = TrainConfig.parse({"replicas": 2, "exchange": "downpour", "data": "digits", "log_every": 5})
    options = config.exchange_settings()
    assert options is not None
    journal = Journal(config, options, about_a_run(config, options, 100), HowFar(), 0.0)
    journal.begin_step(1.0)
    lines = [journal.counted(counted, [0, 1], 2.0 + counted // 20) for counted in (5, 10, 20, 25)]
    assert [round(line["step_time_ms"]) for line in lines if line] == [200, 100, 100, 67]


def test_an_epoch_at_the_loss_of_guessing_is_told_of_once() -> None:
    config = TrainConfig.parse({"replicas": 2, "exchange": "downpour", "data": "digits", "epochs": 5})
    options = config.exchange_settings()
    assert options is not None
    journal = Journal(config, options, about_a_run(config, options, 2), HowFar(), 0.0)
    told = []
    for counted, loss in enumerate([2.31, 2.31, 1.0, 1.0, 2.31, 2.31, 2.31, 2.31, 2.31, 2.31], start=1):
        journal.add_loss(loss)
        journal.counted(counted, [0, 1], 1.0)
        told.append(journal.take_warning())
    # Not in the first epoch, which is short; when it is back at guessing; and at the end.
    assert [number for number, text in enumerate(told, start=1) if text] == [6, 10]
    assert "epoch 3, 2.31, is that of guessing among 10 classes" in str(told[5])


def test_nobody_knows_what_guessing_gives_with_a_loss_of_the_users_own() -> None:
    config = TrainConfig.parse({"replicas": 2, "exchange": "downpour", "data": "digits", "epochs": 1})
    options = config.exchange_settings()
    assert options is not None
    for own_loss in (False, True):
        about = replace(about_a_run(config, options, 1), own_loss=own_loss)
        journal = Journal(config, options, about, HowFar(), 0.0)
        journal.add_loss(2.31)
        journal.counted(1, [0, 1], 1.0)
        assert (journal.take_warning() is None) == own_loss


def test_a_long_first_epoch_at_the_loss_of_guessing_is_told_of_too() -> None:
    config = TrainConfig.parse({"replicas": 2, "exchange": "downpour", "data": "digits", "epochs": 2})
    options = config.exchange_settings()
    assert options is not None
    about = replace(about_a_run(config, options, 2), steps_per_epoch=300)
    journal = Journal(config, options, about, HowFar(), 0.0)
    for counted in range(1, 301):
        journal.add_loss(2.31)
        journal.counted(counted, [0, 1], 1.0)
    told = str(journal.take_warning())
    assert "epoch 1, 2.31, is that of guessing" in told
    assert "Lower --lr (given 0.05; downpour steps at 0.025) or --momentum, or add --warmup or warm_start." in told
