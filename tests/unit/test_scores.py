"""Who did what, added up."""

from collections import Counter

import pytest

from shoal.exchanging import Tally
from shoal.replicas.orders import Step, StepsDone
from shoal.replicas.scores import Scores


def done(*seconds: float, updates: int = 1, dropped: int = 0, staleness: int = 0) -> StepsDone:
    ages = Counter({staleness: updates} if updates else {})
    tally = Tally(steps=len(seconds), updates=updates, dropped=dropped, staleness=ages)
    return StepsDone(tuple(Step(number, 0.5, taken) for number, taken in enumerate(seconds)), True, (7,), tally)


def test_time_in_which_several_train_counts_once_and_time_in_which_nobody_does_not() -> None:
    scores = Scores()
    scores.note(0, done(1.0, 1.0), now=100.0)  # from 98
    scores.note(1, done(2.0), now=100.5)  # from 98.5: half a second more
    assert scores.training_seconds == pytest.approx(2.5)
    scores.note(0, done(1.0), now=110.0)  # after a test of 8.5 seconds
    assert scores.training_seconds == pytest.approx(3.5)


def test_what_was_saved_is_added_to() -> None:
    first = Scores()
    first.note(0, done(1.0, staleness=2), now=5.0)
    first.note(1, done(1.0, 1.0, updates=0, dropped=1), now=5.0)
    scores = Scores(first.saved())
    scores.note(0, done(3.0, staleness=4), now=5.0)
    of = dict(scores)
    assert (of[0].report().steps, of[0].report().train_seconds, of[1].report().dropped) == (2, 4.0, 1)
    found = scores.staleness()
    assert found is not None
    assert (found.mean, found.max, found.histogram) == (3.0, 4, {2: 1, 4: 1})
    assert (scores.steps_here(0), scores.steps_here(1), scores.step_seconds) == (1, 0, [3.0])
    assert scores.total("updates") == 2
