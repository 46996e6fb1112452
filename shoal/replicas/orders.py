"""What a replica and the conductor say to each other: a question with a report in it, and an order as its answer.

    NextBatches ──▶ Train | MakeTest | HandIn | Wait | Leave | Stop
    Settling, HasTested, HandedIn, PlanChosen, Traced, Leaving ──▶ Noted
    AskTime ──▶ Time

Every message checks its fields when it is made, so also when it is read from the network: what arrives wrong is a
`MessageError` and never gets further. Tensors (what is to be saved) travel beside a message, not in it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from shoal.errors import MessageError
from shoal.exchanging import Tally
from shoal.training.evaluate import Evaluation

MOST_BATCHES = 64
"""That one order may have."""

# Reports


@dataclass(frozen=True)
class Step:
    """A batch that a replica trained on."""

    number: int
    loss: float
    """May be infinite or not a number: the conductor ends the run for it."""
    seconds: float

    def __post_init__(self) -> None:
        _whole(self, "number")
        _number(self, "loss", finite=False)
        _number(self, "seconds")


@dataclass(frozen=True)
class StepsDone:
    """What became of a replica's steps since its last report; all of them were pushed together."""

    steps: tuple[Step, ...]
    applied: bool
    """Whether they are part of the common weights; if not, their batches are handed out again."""
    peaks: tuple[int, ...]
    """The largest memory so far of each rank of the replica, in bytes."""
    tally: Tally

    def __post_init__(self) -> None:
        if not (type(self.steps) is tuple and all(type(step) is Step for step in self.steps)):
            raise _wrong(self, "steps")
        _flag(self, "applied")
        if not (type(self.peaks) is tuple and all(type(peak) is int and peak >= 0 for peak in self.peaks)):
            raise _wrong(self, "peaks")
        if type(self.tally) is not Tally or not _counts_only(self.tally):
            raise _wrong(self, "tally")


# Questions


@dataclass(frozen=True)
class NextBatches:
    """A replica wants something to do."""

    word: ClassVar = "next"
    done: StepsDone | None = None
    stop: bool = False
    """Whether one of its processes was asked to end (SIGTERM, Ctrl-C)."""
    wants: int = 1
    """Most batches that it takes at once. It reports on them together, so that many small steps cost few messages."""

    def __post_init__(self) -> None:
        _report(self)
        _flag(self, "stop")
        _whole(self, "wants")
        if not 1 <= self.wants <= MOST_BATCHES:
            raise _wrong(self, "wants")


@dataclass(frozen=True)
class Settling:
    """A replica is about to take the common weights that it will test or save."""

    word: ClassVar = "settling"
    done: StepsDone | None = None

    def __post_init__(self) -> None:
        _report(self)


@dataclass(frozen=True)
class HasTested:
    """A replica tested the common weights, or saved them, or both; what is to be saved comes beside this."""

    word: ClassVar = "tested"
    after: int
    """Steps: as the order said."""
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        _whole(self, "after")
        if self.evaluation is not None:
            if type(self.evaluation) is not Evaluation:
                raise _wrong(self, "evaluation")
            for name in ("loss", "accuracy") + (("iou",) if self.evaluation.iou is not None else ()):
                _number(self.evaluation, name, finite=False)
            for counts in (self.evaluation.samples, self.evaluation.right, *(self.evaluation.confusion or ())):
                if not (type(counts) is tuple and all(type(count) is int and count >= 0 for count in counts)):
                    raise _wrong(self, "evaluation")


@dataclass(frozen=True)
class HandedIn:
    """A replica's own state comes beside this: weights that are not the common ones, and what belongs to them."""

    word: ClassVar = "own"
    moment: int
    """As the order said."""

    def __post_init__(self) -> None:
        _whole(self, "moment")


@dataclass(frozen=True)
class PlanChosen:
    """How a replica's layers are cut over its ranks, as the text of a plan's file."""

    word: ClassVar = "plan"
    plan: str

    def __post_init__(self) -> None:
        if type(self.plan) is not str:
            raise _wrong(self, "plan")


@dataclass(frozen=True)
class AskTime:
    """A replica wants to know what the conductor's clock shows, to put its own notes on it."""

    word: ClassVar = "what time"


@dataclass(frozen=True)
class Traced:
    """What a replica's ranks did in the steps that are recorded comes beside this, as the text of a trace's file."""

    word: ClassVar = "traced"
    missing: str | None = None
    """What people should know of it."""

    def __post_init__(self) -> None:
        if self.missing is not None and type(self.missing) is not str:
            raise _wrong(self, "missing")


@dataclass(frozen=True)
class Leaving:
    """A replica goes, as it was told to; this is the last of its work."""

    word: ClassVar = "leaving"
    done: StepsDone | None = None

    def __post_init__(self) -> None:
        _report(self)


# Orders


@dataclass(frozen=True)
class Batch:
    """Batch `number` of the run: step `step` of epoch `epoch`, at this learning rate."""

    number: int
    epoch: int
    step: int
    rate: float

    def __post_init__(self) -> None:
        _whole(self, "number")
        _whole(self, "epoch")
        _whole(self, "step")
        _number(self, "rate")


@dataclass(frozen=True)
class Train:
    """Train on these batches, one after the other."""

    word: ClassVar = "train"
    batches: tuple[Batch, ...]

    def __post_init__(self) -> None:
        if not (type(self.batches) is tuple and self.batches and all(type(batch) is Batch for batch in self.batches)):
            raise _wrong(self, "batches")


@dataclass(frozen=True)
class MakeTest:
    """Take the common weights; test them, send them to be saved, or both."""

    word: ClassVar = "test"
    after: int
    """Steps that are done; 0 where the weights are saved because the run is asked to stop."""
    evaluate: bool
    save: bool
    last: bool
    """Whether the run ends with it."""
    to_beat: float | None = None
    """The score of the best test so far: weights with a better one are sent too."""

    def wants_weights(self, tested: Evaluation | None) -> bool:
        """Whether the weights alone are sent beside what else is to be saved: they are the last ones, or the best."""
        return self.last or (tested is not None and tested.better_than(self.to_beat))

    def __post_init__(self) -> None:
        if self.to_beat is not None:
            _number(self, "to_beat")
        _whole(self, "after")
        for name in ("evaluate", "save", "last"):
            _flag(self, name)


@dataclass(frozen=True)
class HandIn:
    """Send your own state, for a checkpoint of this moment."""

    word: ClassVar = "hand in"
    moment: int
    """Batches that are counted."""

    def __post_init__(self) -> None:
        _whole(self, "moment")


@dataclass(frozen=True)
class Wait:
    """There is nothing to do now: push what is not pushed yet, and ask again."""

    word: ClassVar = "wait"


@dataclass(frozen=True)
class Leave:
    """Push and report what is not reported yet, then go: the others go on."""

    word: ClassVar = "leave"


@dataclass(frozen=True)
class Stop:
    """The run is over."""

    word: ClassVar = "stop"


@dataclass(frozen=True)
class Noted:
    """The report was received; there is nothing to do."""

    word: ClassVar = "noted"


@dataclass(frozen=True)
class Time:
    """What the conductor's clock shows."""

    word: ClassVar = "time"
    nanoseconds: int
    clock: str
    """Which clock that is: processes of one host read the same."""

    def __post_init__(self) -> None:
        _whole(self, "nanoseconds")
        if type(self.clock) is not str:
            raise _wrong(self, "clock")


Question = NextBatches | Settling | HasTested | HandedIn | PlanChosen | AskTime | Traced | Leaving
Order = Train | MakeTest | HandIn | Wait | Leave | Stop | Noted | Time
QUESTIONS: Mapping[str, type[Question]] = {
    kind.word: kind for kind in (NextBatches, Settling, HasTested, HandedIn, PlanChosen, AskTime, Traced, Leaving)
}
ORDERS: Mapping[str, type[Order]] = {
    kind.word: kind for kind in (Train, MakeTest, HandIn, Wait, Leave, Stop, Noted, Time)
}


# As they are sent


def question_head(question: Question) -> dict[str, Any]:
    """A question as it is sent."""
    return {"ask": question.word, **_plain(question)}


def order_head(order: Order) -> dict[str, Any]:
    """An order as it is sent."""
    return {"order": order.word, **_plain(order)}


def read_question(head: Mapping[str, Any]) -> Question:
    """What `question_head` gave; a `MessageError` for anything else."""
    return _read_as(QUESTIONS, "ask", head)


def read_order(head: Mapping[str, Any]) -> Order:
    """What `order_head` gave; a `MessageError` for anything else."""
    return _read_as(ORDERS, "order", head)


Message = TypeVar("Message")


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON can hold it."""
    return {field.name: _plain_value(getattr(message, field.name)) for field in fields(message)}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(part) for part in value]
    if isinstance(value, Tally):
        return value.to_dict()
    return _plain(value) if isinstance(value, Batch | Step | StepsDone | Evaluation) else value


def _read_as(kinds: Mapping[str, type[Message]], key: str, head: Mapping[str, Any]) -> Message:
    word = head.get(key)
    if not isinstance(word, str) or word not in kinds:
        raise _malformed(f"{key} = {word!r}")
    return _read(kinds[word], {name: value for name, value in head.items() if name != key})


def _read(kind: type[Message], values: object) -> Message:
    """A message of this kind, from the plain values of its fields: all of them, and no others."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, Mapping) or values.keys() != names:
        raise _malformed(f"{kind.__name__} with {values!r:.100}")
    read = {name: READERS[name](value) if name in READERS else value for name, value in values.items()}
    return kind(**read)


def _read_tally(values: object) -> Tally:
    try:
        if isinstance(values, dict):
            return Tally.from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    raise _malformed(f"a tally of {values!r:.100}")


def _read_list(values: object) -> list[Any]:
    if not isinstance(values, list):
        raise _malformed(f"{values!r:.100} in the place of a list")
    return values


READERS: Mapping[str, Callable[[object], Any]] = {
    "done": lambda values: None if values is None else _read(StepsDone, values),
    "batches": lambda values: tuple(_read(Batch, batch) for batch in _read_list(values)),
    "steps": lambda values: tuple(_read(Step, step) for step in _read_list(values)),
    "peaks": lambda values: tuple(_read_list(values)),
    "tally": _read_tally,
    "samples": lambda values: tuple(_read_list(values)),
    "right": lambda values: tuple(_read_list(values)),
    "confusion": lambda values: None if values is None else tuple(tuple(_read_list(row)) for row in _read_list(values)),
    "evaluation": lambda values: None if values is None else _read(Evaluation, values),
}
"""Fields that are more than one number, flag or text."""


# Checks


def _report(message: Any) -> None:
    if message.done is not None and type(message.done) is not StepsDone:
        raise _wrong(message, "done")


def _whole(message: Any, name: str) -> None:
    value = getattr(message, name)
    if type(value) is not int or value < 0:
        raise _wrong(message, name)


def _number(message: Any, name: str, *, finite: bool = True) -> None:
    value = getattr(message, name)
    if type(value) not in (int, float) or (finite and not (math.isfinite(value) and value >= 0)):
        raise _wrong(message, name)


def _counts_only(tally: Tally) -> bool:
    """Whether every field of a tally is of the kind that a new one has there, and nothing is negative."""
    return all(_is_like(getattr(tally, name), empty) for name, empty in vars(Tally()).items())


def _is_like(value: object, empty: object) -> bool:
    match empty:
        case int():
            return type(value) is int and value >= 0
        case float():
            return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]
        case Counter():
            parts = value.items() if isinstance(value, Counter) else [(None, None)]
            return all(type(part) is int and part >= 0 for pair in parts for part in pair)
    return value is None or type(value) in (int, float)


def _flag(message: Any, name: str) -> None:
    if type(getattr(message, name)) is not bool:
        raise _wrong(message, name)


def _wrong(message: Any, name: str) -> MessageError:
    return _malformed(f"{type(message).__name__} with {name} = {getattr(message, name)!r:.100}")


def _malformed(what: str) -> MessageError:
    return MessageError(
        f"a message between a replica and the conductor was not understood: {what}.",
        "All processes of a run need the same version of shoal.",
    )
