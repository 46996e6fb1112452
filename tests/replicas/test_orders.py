"""Messages between replicas and the conductor: they arrive as they were sent, or are refused by name."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import MessageError
from shoal.exchanging import Tally
from shoal.replicas.orders import (
    AskTime,
    Batch,
    HasTested,
    Leave,
    Leaving,
    MakeTest,
    NextBatches,
    Noted,
    Order,
    PlanChosen,
    Question,
    Settling,
    Step,
    StepsDone,
    Stop,
    Time,
    Traced,
    Train,
    Wait,
    order_head,
    question_head,
    read_order,
    read_question,
)
from shoal.training.evaluate import Evaluation

DONE = StepsDone(
    (Step(3, 0.5, 0.1), Step(4, 0.25, 0.2)), True, (7, 8), Tally(steps=2, updates=1, staleness=Counter({3: 1}))
)
QUESTIONS: list[Question] = [
    NextBatches(),
    NextBatches(DONE, stop=True),
    NextBatches(DONE, wants=7),
    Settling(DONE),
    HasTested(2),
    HasTested(2, Evaluation(0.5, 0.75, None)),
    HasTested(2, Evaluation(0.5, 0.75, 0.5)),
    PlanChosen("{}"),
    AskTime(),
    Traced(),
    Traced("the trace is full."),
    Leaving(DONE),
]
ORDERS: list[Order] = [
    Train((Batch(12, 1, 2, 0.1),)),
    Train((Batch(12, 1, 2, 0.1), Batch(13, 1, 3, 0.1))),
    MakeTest(1, True, False, False),
    Wait(),
    Leave(),
    Stop(),
    Noted(),
    Time(12, "a host"),
]


def travelled(head: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(head))
    return read


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
def test_a_question_arrives_as_it_was_sent(question: Question) -> None:
    assert read_question(travelled(question_head(question))) == question


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert read_order(travelled(order_head(order))) == order


def test_a_loss_that_is_not_a_number_arrives() -> None:
    step = StepsDone((Step(0, math.nan, 0.0),), True, (), Tally())
    question = read_question(travelled(question_head(NextBatches(step))))
    assert isinstance(question, NextBatches)
    assert question.done is not None
    assert math.isnan(question.done.steps[0].loss)


def changed(head: dict[str, Any], *path: Any, to: object) -> dict[str, Any]:
    copy = travelled(head)
    place: Any = copy
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return copy


SENT = question_head(NextBatches(DONE))
WRONG = [
    {},
    {"ask": 3},
    {"ask": "anything"},
    {"ask": "next"},
    {**SENT, "more": 1},
    changed(SENT, "stop", to="yes"),
    changed(SENT, "wants", to=0),
    changed(SENT, "wants", to=10**9),
    changed(SENT, "wants", to=True),
    changed(SENT, "done", to=[1]),
    changed(SENT, "done", "steps", to={}),
    changed(SENT, "done", "steps", 0, "number", to=-1),
    changed(SENT, "done", "steps", 0, "number", to=True),
    changed(SENT, "done", "steps", 0, "loss", to="0.5"),
    changed(SENT, "done", "steps", 0, "seconds", to=math.inf),
    changed(SENT, "done", "applied", to=1),
    changed(SENT, "done", "peaks", to=[1.5]),
    changed(SENT, "done", "tally", to=None),
    changed(SENT, "done", "tally", "steps", to=-2),
    changed(SENT, "done", "tally", "steps", to="2"),
    changed(SENT, "done", "tally", "wait_seconds", to=math.nan),
    changed(SENT, "done", "tally", "unknown", to=1),
    changed(SENT, "done", "tally", "staleness", to=[1, 2]),
    {"ask": "tested", "after": 1, "evaluation": {"loss": 1.0}},
    {"ask": "tested", "after": 1, "evaluation": {"loss": "low", "accuracy": 1.0, "iou": None}},
    {"ask": "plan", "plan": 3},
    {"ask": "traced", "missing": 3},
]


@pytest.mark.parametrize("head", WRONG, ids=str)
def test_what_is_malformed_is_refused_by_name(head: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="was not understood"):
        read_question(head)


MADE_WRONG: list[Callable[[], Question | Order]] = [
    lambda: NextBatches(done="x"),  # type: ignore[arg-type]
    lambda: Settling(done=3),  # type: ignore[arg-type]
    lambda: Leaving(done=[DONE]),  # type: ignore[arg-type]
    lambda: NextBatches(replace(DONE, steps=[Step(0, 0.5, 0.1)])),  # type: ignore[arg-type]
    lambda: NextBatches(replace(DONE, steps=(1,))),  # type: ignore[arg-type]
    lambda: NextBatches(replace(DONE, peaks=[1])),  # type: ignore[arg-type]
    lambda: NextBatches(replace(DONE, tally={})),  # type: ignore[arg-type]
    lambda: HasTested(1, evaluation={"loss": 1.0}),  # type: ignore[arg-type]
    lambda: Train(()),
    lambda: Train([Batch(0, 0, 0, 0.1)]),  # type: ignore[arg-type]
    lambda: Train((3,)),  # type: ignore[arg-type]
    lambda: HasTested(1, evaluation=Evaluation("low", 1.0, None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", MADE_WRONG, ids=range(len(MADE_WRONG)))
def test_nor_can_it_be_made(make: Callable[[], Question | Order]) -> None:
    with pytest.raises(MessageError, match="was not understood"):
        make()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PATHS = [
    ["ask"],
    ["stop"],
    ["wants"],
    ["done"],
    *(["done", name] for name in ("steps", "applied", "peaks", "tally")),
    *(["done", "steps", 0, name] for name in ("number", "loss", "seconds")),
    *(["done", "tally", name] for name in question_head(NextBatches(DONE))["done"]["tally"]),
]


@given(path=st.sampled_from(PATHS), value=JSON)
def test_whatever_arrives_is_a_message_or_a_named_error(path: list[Any], value: object) -> None:
    head = question_head(NextBatches(DONE))
    place: Any = head
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    try:
        question = read_question(head)
    except MessageError:
        return
    question_head(question)
