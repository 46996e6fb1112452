"""The conductor's decisions, without processes: whatever replicas do, no batch is lost and none counts twice.

Replicas are played here by generators that ask as `worker.py` does; hypothesis decides who comes next, who dies, hangs,
freezes, wakes, joins, is asked to stop, and whose pushes are dropped.
"""

import random
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.config import TrainConfig
from shoal.errors import DivergedError, LostError, MessageError, PeerError, StoppedError
from shoal.exchanging import Tally
from shoal.exchanging.membership.coordinator import What
from shoal.exchanging.membership.tickets import Tickets
from shoal.replicas.conductor import Conductor, Whereabouts
from shoal.replicas.effects import (
    Effect,
    EndServers,
    HowFar,
    Log,
    Rest,
    Stepped,
    Suspect,
    WriteBest,
    WriteCheckpoint,
    WriteOwn,
    WriteResult,
)
from shoal.replicas.orders import (
    HandedIn,
    HandIn,
    HasTested,
    Leave,
    Leaving,
    MakeTest,
    NextBatches,
    Order,
    Question,
    Settling,
    Step,
    StepsDone,
    Stop,
    Train,
    Wait,
)
from shoal.replicas.worker import _together
from shoal.training.evaluate import Evaluation
from shoal.training.numbering import Numbering
from tests.replicas.runs import about_a_run

STEPS_PER_EPOCH = 5
HEARTBEAT = 1.0
TIMEOUT = 20.0
STEP_SECONDS = 0.01


def together(first: StepsDone | None, then: StepsDone | None) -> StepsDone | None:
    """As `worker.py` reports what it pushed since its last question."""
    return first if then is None else _together(first, then)


class Played:
    """One replica, as the coordinator and the processes see it."""

    def __init__(self, life: Iterator[None]) -> None:
        self.life = life
        self.silent: set[str] = set()
        """Why it is taken for frozen: its pulse, its progress."""
        self.stopped = False
        """Whether it does nothing now: frozen by SIGSTOP, or hanging."""
        self.asked_to_stop = False
        self.waits_for_files = False
        self.wanted_version = 0
        """It waits for others until servers have this version."""


class Run:
    """A conductor, and the world around it."""

    def __init__(
        self,
        past: HowFar | None = None,
        drops: Iterator[bool] | None = None,
        wants: int = 1,
        lacking: int = 0,
        **chosen: Any,
    ) -> None:
        """`lacking`: samples that the last batch of an epoch has less than the others."""
        self.config = TrainConfig.parse(
            {
                "data": "digits",
                "batch": 12,
                "timeout": TIMEOUT,
                "log_every": 2,
                "last_batch": "keep",
                **chosen,
                "exchange_options": {"heartbeat": HEARTBEAT, **chosen.get("exchange_options", {})},
            }
        )
        options = self.config.exchange_settings()
        assert options is not None
        self.options = options
        about = about_a_run(self.config, options, STEPS_PER_EPOCH, lacking=lacking)
        self.numbering = Numbering.of(self.config, about.train_samples)
        assert self.numbering.per_epoch == STEPS_PER_EPOCH
        self.samples: list[tuple[int, int]] = []
        """Of the lines about steps: steps, and how many samples they were."""
        self.conductor = Conductor(self.config, options, about, Whereabouts("run"), past)
        self.push_every = getattr(options, "push_every", 3 if options.name == "local" else 1)
        self.drops = drops or iter(())
        self.wants = wants if options.asks_ahead and drops is None else 1
        self.now = 0.0
        self.there: dict[int, Played] = {}
        self.came = 0
        self.applied: Counter[int] = Counter()
        """Batches that replicas pushed and servers took."""
        self.reported = 0
        """Of those, the ones that the conductor was told of."""
        self.stepped: list[int] = []
        self.tests: list[tuple[int, int]] = []
        """Steps and epochs of the weights that were tested."""
        self.results: list[WriteResult] = []
        self.saved: list[HowFar] = []
        self.best: list[tuple[int, int]] = []
        """Of the tests, those whose weights were kept as the best."""
        self.own_states: set[tuple[int, int]] = set()
        """On the disk."""
        self.own_states_wait: list[WriteOwn] = []
        self.files_wait = False
        self.servers_ended = False
        wanted = options.gradients_per_update(self.config.replicas)
        self.tickets = Tickets(wanted, self.config.replicas) if wanted and not options.same_batch else None
        self.resting: set[int] = set()
        self.fair_since: float | None = None
        """When it began that everybody who can has its turn again and again."""
        for _ in range(self.config.replicas):
            self.join()

    @property
    def total(self) -> int:
        return self.config.epochs * STEPS_PER_EPOCH

    # The coordinator

    def carry_out(self, effects: list[Effect], replica: int | None = None) -> None:
        for effect in effects:
            match effect:
                case Stepped():
                    self.stepped.append(effect.steps)
                case EndServers():
                    self.servers_ended = True
                case Log() if effect.values["event"] == "test":
                    self.tests.append((effect.values["step"], effect.values["epoch"]))
                case Log() if effect.values["event"] == "steps":
                    self.samples.append((effect.values["step"], effect.values["samples"]))
                case WriteCheckpoint():
                    assert replica is not None
                    self.saved.append(effect.how_far)
                    self.check_own(effect)
                    self.files_wait = True
                    self.there[replica].waits_for_files = True
                case WriteBest():
                    assert replica is not None
                    self.best.append(self.tests[-1])
                    self.files_wait = True
                    self.there[replica].waits_for_files = True
                case WriteOwn():
                    self.own_states_wait.append(effect)
                    self.there[effect.replica].waits_for_files = True
                case WriteResult():
                    self.results.append(effect)
                case Rest():
                    (self.resting.add if effect.resting else self.resting.discard)(effect.replica)
                    self.tell_members()
                case Suspect():
                    if effect.hangs and self.fair_since is not None and self.now > self.fair_since + 2 * HEARTBEAT:
                        assert self.there[effect.replica].stopped, "one is suspected that does what it is told"
                    self.silence(effect.replica, "progress", silent=effect.hangs)

    def check_own(self, effect: WriteCheckpoint) -> None:
        """A checkpoint names what was written, of one moment, and of the replica that made it at least."""
        assert self.own_states >= set(effect.own.items())
        assert len(set(effect.own.values())) <= 1
        assert (effect.replica in effect.own) == self.options.hands_in

    def tell_members(self) -> None:
        """As the coordinator: who takes part, and who has nothing to do."""
        if self.tickets is not None:
            active = {number for number, played in self.there.items() if not played.silent}
            self.tickets.members(active, self.resting)

    def tell(self, what: What, who: int) -> None:
        self.tell_members()
        self.carry_out(self.conductor.happened(what, who, self.now))

    def silence(self, replica: int, why: str, *, silent: bool) -> None:
        if (played := self.there.get(replica)) is None:
            return
        before = bool(played.silent)
        played.silent = played.silent | {why} if silent else played.silent - {why}
        if bool(played.silent) != before:
            self.tell("frozen" if silent else "back", replica)

    def ask(self, replica: int, question: Question, parts: int = 0) -> Order:
        self.now += STEP_SECONDS
        if isinstance(question, NextBatches | Settling | Leaving) and question.done is not None:
            self.reported += len(question.done.steps) * question.done.applied
        decision = self.conductor.answer(replica, question, self.now, parts=parts)
        self.carry_out(decision.effects, replica)
        return decision.order

    # What may happen

    def join(self) -> None:
        number = self.came
        self.came += 1
        self.there[number] = Played(self.life(number))
        self.tell("joined", number)

    def advance(self, number: int) -> None:
        played = self.there[number]
        if played.stopped or played.waits_for_files:
            return
        if next(played.life, "gone") == "gone":
            del self.there[number]
            self.tell("left", number)

    def kill(self, number: int) -> None:
        del self.there[number]
        self.tell("lost", number)

    def freeze(self, number: int) -> None:
        self.there[number].stopped = True
        self.silence(number, "pulse", silent=True)

    def hang(self, number: int) -> None:
        self.there[number].stopped = True

    def wake(self, number: int) -> None:
        self.there[number].stopped = False
        self.silence(number, "pulse", silent=False)

    def write(self) -> None:
        """One of the files that are being written is whole."""
        if self.own_states_wait:
            effect = self.own_states_wait.pop()
            self.own_states.add((effect.replica, effect.moment))
            self.conductor.own_written(effect.replica, effect.moment)
            if effect.replica in self.there:
                self.there[effect.replica].waits_for_files = False
        elif self.files_wait:
            self.files_wait = False
            for played in self.there.values():
                played.waits_for_files = False
            self.carry_out(self.conductor.written())

    def let_pass(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += HEARTBEAT / 4
            version = 0 if self.tickets is None else self.tickets.version
            waiting = {number for number, played in self.there.items() if played.wanted_version > version}
            self.carry_out(self.conductor.tick(self.now, {}, waiting))

    def life(self, number: int) -> Iterator[None]:
        """A replica as `worker.py` has it."""
        steps: list[Step] = []
        done: StepsDone | None = None
        ahead: Order | None = None
        version = 0 if self.tickets is None else self.tickets.version

        def in_round() -> Generator[None, None, bool]:
            """Whether what is pushed counts; waits for those with whose pushes it makes an update."""
            nonlocal version
            assert self.tickets is not None
            played = self.there[number]
            counts = not played.silent and self.tickets.ask(number, version)
            wanted = version + 1 if counts else self.tickets.version
            played.wanted_version = wanted
            while self.tickets.version < wanted:
                yield
            version = wanted
            return counts

        def pushed() -> Generator[None, None, StepsDone | None]:
            nonlocal steps
            if not steps:
                return None
            applied = not next(self.drops, False) if self.tickets is None else (yield from in_round())
            if applied:
                self.applied.update(step.number for step in steps)
            done, steps = StepsDone(tuple(steps), applied, (1,), Tally(steps=len(steps), updates=1)), []
            return done

        def next_batch() -> Order:
            nonlocal done
            question = NextBatches(done, stop=self.there[number].asked_to_stop, wants=self.wants)
            done = None
            return self.ask(number, question)

        yield
        while True:
            order, ahead = ahead or next_batch(), None
            yield
            match order:
                case Train():
                    assert len(order.batches) <= self.wants
                    for batch in order.batches:
                        assert 0 <= batch.number < self.total
                        if self.options.asks_ahead and batch is order.batches[-1]:
                            ahead = next_batch()
                            yield
                        steps.append(Step(batch.number, 0.5, STEP_SECONDS))
                        if len(steps) >= self.push_every:
                            done = together(done, (yield from pushed()))
                        if self.fair_since is None:  # later its turns have a clock, and several steps are a moment
                            yield
                case HandIn():
                    if not self.options.keeps_own:
                        done = together(done, (yield from pushed()))
                    self.ask(number, HandedIn(order.moment), parts=1)
                    yield
                case MakeTest():
                    if not self.options.keeps_own:
                        done = together(done, (yield from pushed()))
                    self.ask(number, Settling(done))
                    done = None
                    yield
                    evaluation = Evaluation(0.5, 0.5, None) if order.evaluate else None
                    parts = order.save + order.wants_weights(evaluation)
                    self.ask(number, HasTested(order.after, evaluation), parts=parts)
                    yield
                case Wait():
                    done = together(done, (yield from pushed()))
                case Leave():
                    done = together(done, (yield from pushed()))
                    self.ask(number, Leaving(done))
                    return
                case Stop():
                    return

    # The end

    def finish(self, *, asleep: bool = False) -> None:
        """Everybody comes to its turn, after it woke; or only those do that are awake, if there are any."""
        if not asleep or all(played.stopped for played in self.there.values()):
            for number in self.there:
                self.wake(number)
        self.fair_since = self.now
        for _ in range(100 * self.total + 1000):
            if not self.there:
                break
            if self.conductor.over and not self.files_wait:
                break
            for number in list(self.there):
                self.advance(number)
            self.write()
            self.let_pass(HEARTBEAT / 4)
        assert self.conductor.over or not self.there, "it does not end"

    def check(self) -> None:
        """However it ended."""
        first = self.stepped[0] if self.stepped else 0
        assert self.stepped == list(range(first, first + len(self.stepped)))  # each counts once
        if not self.options.same_batch:
            assert self.reported == len(self.stepped) + self.repeated
        short = self.numbering.size - self.numbering.of_batch(STEPS_PER_EPOCH - 1)
        for steps, samples in self.samples:  # of which nobody knows here how many were smaller ones
            assert steps * self.numbering.size - self.config.epochs * short <= samples <= steps * self.numbering.size
        self.check_tests(self.tests)

    def check_tests(self, tests: list[tuple[int, int]]) -> None:
        """An end of an epoch is tested once. A test between may be so late that it comes to the same weights."""
        assert tests == sorted(tests)
        assert self.config.eval_steps or len(tests) == len(set(tests))

    @property
    def repeated(self) -> int:
        return len(self.conductor._budget.repeated)

    def check_finished(self) -> None:
        self.check()
        assert self.conductor.counted == self.total
        (result,) = self.results
        assert result.measured.samples == self.config.epochs * self.numbering.samples  # each sample of every epoch
        assert result.measured.left_out == 0
        every = self.config.eval_every
        due = {epoch for epoch in range(1, self.config.epochs + 1) if epoch % every == 0 or epoch == self.config.epochs}
        tested = {epoch for _, epoch in self.tests}
        assert tested >= due if self.config.eval_steps else tested == due


Kind = Literal["advance", "kill", "freeze", "hang", "wake", "join", "preempt", "stop", "write", "pass"]
SHARED: list[dict[str, Any]] = [
    {"exchange": "downpour"},
    {"exchange": "downpour", "exchange_options": {"n_push": 3}},
    {"exchange": "downpour", "exchange_options": {"warm_start": 7}},
    {"exchange": "downpour", "exchange_options": {"n_push": 3, "compress": "int8"}},
    {"exchange": "backup", "exchange_options": {"backups": 0}},
    {"exchange": "easgd"},
    {"exchange": "local"},
]


def moves_of(seed: int, length: int, *kinds: Kind) -> Iterator[tuple[Kind, int]]:
    """Mostly somebody's turn, and now and then something else."""
    draws = random.Random(seed)
    turns: list[Kind] = ["advance"] * 8
    turns += ["write"] * 2
    for _ in range(length):
        yield draws.choice([*turns * len(kinds), *kinds]), draws.randrange(6)


def play(run: Run, moves: Iterator[tuple[Kind, int]]) -> None:
    for kind, which in moves:
        if run.conductor.over:
            return
        numbers = sorted(run.there)
        number = numbers[which % len(numbers)] if numbers else None
        match kind:
            case "join":
                if run.came < 6:
                    run.join()
            case "stop":
                run.carry_out(run.conductor.stop())
            case "write":
                run.write()
            case "pass":
                run.let_pass(2 * HEARTBEAT)
            case "preempt" if number is not None:
                run.there[number].asked_to_stop = True
            case "kill" | "freeze" | "hang" | "wake" | "advance" if number is not None:
                getattr(run, kind)(number)
            case _:
                pass


machine = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
chosen = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 3),
        "epochs": st.integers(1, 8),
        "eval_every": st.integers(1, 2),
        "checkpoint_every": st.integers(1, 3) | st.sampled_from(["3steps", "7steps", "0.1min"]),
        "eval_steps": st.none() | st.integers(1, 9),
        "lacking": st.integers(0, 3),
    }
)
drops = st.none() | st.lists(st.booleans(), max_size=30).map(iter)


@machine
@given(
    exchange=st.sampled_from(SHARED),
    chosen=chosen,
    drops=drops,
    wants=st.integers(1, 7),
    seed=st.integers(0, 1 << 32),
    length=st.integers(0, 500),
    asleep=st.booleans(),
)
def test_every_batch_counts_once_whoever_dies_joins_freezes_hangs_or_is_preempted(
    exchange: dict[str, Any],
    chosen: dict[str, Any],
    drops: Iterator[bool] | None,
    wants: int,
    seed: int,
    length: int,
    asleep: bool,
) -> None:
    run = Run(drops=drops, wants=wants, **exchange, **chosen)
    often: list[Kind] = ["kill", "freeze", "hang", "wake", "join", "pass"]
    play(run, moves_of(seed, length, *often * 3, "preempt"))
    if not run.there and not run.conductor.over:
        run.join()  # somebody brings a replica for the run that all others left
    run.finish(asleep=asleep)
    if run.conductor.error is not None:  # nobody gave a sign of life for too long
        assert isinstance(run.conductor.error, PeerError)
        run.check()
        return
    if isinstance(run.conductor.why_no_result(), StoppedError):  # the last replica was asked to stop
        run.check()
        return
    if not run.there and not run.conductor.over:  # one was told to leave, and then those were lost that were to go on
        run.check()
        return
    assert not [number for number in range(run.total) if not run.applied[number]]  # none is lost
    run.check_finished()


@machine
@given(
    name=st.sampled_from(["sync", "allreduce"]),
    seed=st.integers(0, 1 << 32),
    length=st.integers(0, 200),
    every=st.integers(1, 3),
    wants=st.integers(1, 7),
    lacking=st.integers(0, 11),
)
def test_a_run_in_step_ends_and_names_the_one_that_is_lost(
    name: str, seed: int, length: int, every: int, wants: int, lacking: int
) -> None:
    run = Run(exchange=name, replicas=3, epochs=4, eval_every=every, wants=wants, lacking=lacking)
    often: list[Kind] = ["advance"] * 60
    play(run, moves_of(seed, length, "kill", "wake", "write", *often))
    lost = set(range(3)) - set(run.there)
    if not lost and not run.conductor.over:
        run.kill(1)
        lost = {1}
    run.finish()
    error = run.conductor.error
    if error is None:  # those that were lost had done their part
        run.check_finished()
        return
    assert isinstance(error, LostError)
    assert any(f"replica {replica} was lost, and {name} cannot go on without it" in str(error) for replica in lost)
    assert run.servers_ended
    run.check()


@machine
@given(
    exchange=st.sampled_from([*SHARED, {"exchange": "allreduce"}]),
    chosen=chosen,
    seed=st.integers(0, 1 << 32),
    length=st.integers(0, 100),
)
def test_what_a_stopped_run_saved_is_what_the_next_part_needs(
    exchange: dict[str, Any], chosen: dict[str, Any], seed: int, length: int
) -> None:
    """Also in lockstep, where nobody may be lost."""
    parts: list[Run] = []
    past = None
    for part in (2, 1, 0):
        run = Run(past, **exchange, **chosen)
        parts.append(run)
        play(run, moves_of(seed + part, part * length, "stop", "pass"))
        run.finish()
        run.check()
        if run.results:
            break
        past = run.saved[-1] if run.saved else past
    last = parts[-1]
    assert last.results
    assert last.conductor.counted == last.total
    # What a part wrote that was stopped before its first batch is cut off when the next one begins.
    tests = [test for run in parts if run.saved for test in run.tests]
    last.check_tests(tests)
    every = last.config.eval_steps
    if last.options.same_batch and every is not None:  # nobody trains while one tests
        ends = range(STEPS_PER_EPOCH * last.config.eval_every, last.total, STEPS_PER_EPOCH * last.config.eval_every)
        assert [step for step, _ in tests] == sorted({*ends, *range(every, last.total, every), last.total})
    done: Counter[int] = sum((run.applied for run in parts), Counter())
    assert all(done[number] for number in range(last.total))


def test_a_replica_that_hangs_is_told_as_frozen_and_its_batch_goes_to_another() -> None:
    run = Run(exchange="downpour", replicas=2, epochs=40)
    for _ in range(7):
        run.advance(0)
        run.advance(1)
    run.hang(1)
    for _ in range(6):
        run.let_pass(HEARTBEAT / 2)
        for _ in range(20):
            run.advance(0)
            run.write()
    assert run.there[1].silent == {"progress"}
    assert run.conductor.active == [0]
    run.there.pop(1)  # never seen again
    run.finish()
    run.check_finished()


def test_one_that_was_wrongly_suspected_takes_part_from_its_next_question_on() -> None:
    run = Run(exchange="downpour", replicas=1, epochs=40)
    for _ in range(7):
        run.advance(0)
    run.let_pass(2 * HEARTBEAT)
    assert run.conductor.active == []
    logged: list[Mapping[str, Any]] = []
    carry_out = run.carry_out

    def note(effects: list[Effect], replica: int | None = None) -> None:
        logged.extend(effect.values for effect in effects if isinstance(effect, Log))
        carry_out(effects, replica)

    run.carry_out = note  # type: ignore[method-assign]
    for _ in range(12):
        run.advance(0)
    assert run.conductor.active == [0]
    assert [values["event"] for values in logged].count("back") == 1
    assert all(values["active"] == [0] for values in logged if values["event"] == "steps")


def test_several_batches_are_handed_out_at_once_but_not_beyond_a_test_nor_all_of_the_last_ones() -> None:
    in_step = Run(exchange="allreduce", replicas=2, epochs=8)
    order = in_step.ask(0, NextBatches(wants=64))
    assert isinstance(order, Train)
    assert [batch.number for batch in order.batches] == list(range(STEPS_PER_EPOCH))
    asynchronous = Run(exchange="downpour", replicas=2, epochs=8)
    orders: list[list[int]] = []
    while isinstance(order := asynchronous.ask(len(orders) % 2, NextBatches(wants=3)), Train):
        orders.append([batch.number for batch in order.batches])
    assert [number for numbers in orders for number in numbers] == list(range(asynchronous.total))
    assert orders[:3] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert all(numbers[0] // STEPS_PER_EPOCH == numbers[-1] // STEPS_PER_EPOCH for numbers in orders)
    assert [len(numbers) for numbers in orders[-2:]] == [1, 1]


def test_one_batch_at_a_time_while_a_test_is_due() -> None:
    run = Run(exchange="downpour", replicas=2, epochs=8)
    first, second = run.ask(0, NextBatches(wants=5)), run.ask(1, NextBatches(wants=5))
    assert isinstance(first, Train)
    assert isinstance(second, Train)
    done = StepsDone(tuple(Step(batch.number, 0.5, 0.01) for batch in first.batches), True, (1,), Tally(steps=5))
    assert isinstance(run.ask(0, NextBatches(done, wants=5)), MakeTest)
    order = run.ask(1, NextBatches(wants=5))
    assert isinstance(order, Train)
    assert len(order.batches) == 1


def test_slow_steps_are_not_taken_for_a_hang() -> None:
    run = Run(exchange="downpour", replicas=2, epochs=2)
    slow = StepsDone((Step(0, 0.5, 2.0),), True, (1,), Tally(steps=1))
    for number in (0, 1):
        run.ask(number, NextBatches())
        run.ask(number, NextBatches(slow if number == 0 else None))
    run.let_pass(2.0 * 9)
    assert run.conductor.active == [0, 1]  # ten times its slowest step, or the time-out while none is known
    run.let_pass(4.0)
    assert 0 not in run.conductor.active or 1 not in run.conductor.active


def test_while_a_server_is_frozen_nobody_else_is_suspected() -> None:
    run = Run(exchange="downpour", replicas=2)
    for number in (0, 1):
        run.ask(number, NextBatches())
        run.ask(number, NextBatches(StepsDone((Step(number, 0.5, 0.01),), True, (1,), Tally(steps=1))))
    run.tell("server frozen", 0)
    run.let_pass(10 * HEARTBEAT)
    assert run.conductor.active == [0, 1]
    run.tell("server back", 0)
    run.let_pass(HEARTBEAT / 2)
    assert run.conductor.active == [0, 1]


def test_a_run_whose_replicas_are_all_silent_ends_after_the_time_out() -> None:
    run = Run(exchange="downpour", replicas=2)
    run.freeze(0)
    run.freeze(1)
    run.let_pass(TIMEOUT + 1)
    assert isinstance(run.conductor.error, PeerError)
    assert "gave no sign of life for 20 seconds" in str(run.conductor.error)


@pytest.mark.parametrize("name", ["allreduce", "sync"])
@pytest.mark.parametrize("first", ["frozen", "gave up"])
def test_who_waited_in_vain_for_a_frozen_replica_is_not_the_lost_one(name: str, first: str) -> None:
    """Also where it gave up before the other was known to be frozen."""
    run = Run(exchange=name, replicas=2)
    for _ in range(2):
        run.join()
    for happens in ("frozen", "gave up") if first == "frozen" else ("gave up", "frozen"):
        assert run.conductor.error is None
        if happens == "frozen":
            run.freeze(1)
        else:
            run.tell("gave up", 0)
    assert run.conductor.given_up == {1}
    assert isinstance(run.conductor.error, PeerError)
    assert not isinstance(run.conductor.error, LostError)
    assert "replica 1 gives no sign of life" in str(run.conductor.error)
    assert run.servers_ended


def test_who_gave_up_because_another_died_is_not_told_as_lost() -> None:
    run = Run(exchange="allreduce", replicas=3)
    for _ in range(3):
        run.join()
    run.tell("gave up", 0)
    run.kill(1)
    run.tell("gave up", 2)
    assert "replica 1 was lost" in str(run.conductor.error)
    assert run.conductor.given_up == set()


def test_one_that_is_asked_to_stop_leaves_alone_and_the_last_one_stops_the_run() -> None:
    run = Run(exchange="downpour", replicas=2, epochs=3)
    for _ in range(5):
        run.advance(0)
        run.advance(1)
    run.there[1].asked_to_stop = True
    for _ in range(10):
        if 1 in run.there:
            run.advance(1)
    assert 1 not in run.there
    assert not run.conductor.over
    run.there[0].asked_to_stop = True
    run.finish()
    assert isinstance(run.conductor.why_no_result(), StoppedError)
    assert run.saved[-1].counted == run.conductor.counted > 0
    assert run.repeated == 0  # what it had begun it finished and reported


def test_in_lockstep_one_that_is_asked_to_stop_stops_all_at_the_same_batch() -> None:
    run = Run(exchange="allreduce", replicas=2, epochs=3)
    for _ in range(6):
        run.advance(0)
    run.there[0].asked_to_stop = True
    run.finish()
    assert isinstance(run.conductor.why_no_result(), StoppedError)
    assert run.saved[-1].again == ()
    assert run.saved[-1].counted == run.conductor.counted


@pytest.mark.parametrize("exchange", ["allreduce", "downpour", "local"])
@pytest.mark.parametrize("checkpoint_every", [1, 10])
def test_a_run_whose_tests_get_no_better_ends_early_with_a_result(exchange: str, checkpoint_every: int) -> None:
    """All tests here have the same score: the first is the best, and the third is the second after it."""
    run = Run(exchange=exchange, replicas=2, epochs=9, patience=2, checkpoint_every=checkpoint_every)
    run.finish()
    (result,) = run.results
    assert result.measured.stopped_early
    assert result.measured.epochs < 9
    assert result.measured.steps == run.conductor.counted >= 3 * STEPS_PER_EPOCH
    assert run.best == [run.tests[0]]
    best = result.measured.best
    assert best is not None
    assert (best.step, best.epoch) == run.tests[0]
    assert run.saved[-1].best.test == best
    assert run.saved[-1].best.since >= 2


def test_what_no_replica_would_say_is_refused_and_changes_nothing() -> None:
    run = Run(exchange="downpour", replicas=1, epochs=1)
    beyond = StepsDone((Step(run.total, 0.5, 0.1),), True, (1,), Tally(steps=1))
    with pytest.raises(MessageError, match="beyond the 5"):
        run.conductor.answer(0, NextBatches(beyond), 1.0)
    for number in range(5):
        assert isinstance(run.ask(0, NextBatches()), Train)
        done = StepsDone((Step(number, 0.5, 0.1),), True, (1,), Tally(steps=1))
        order = run.ask(0, NextBatches(done)) if number == 4 else run.ask(0, Leaving(done))
    assert isinstance(order, MakeTest)
    run.ask(0, Settling())
    with pytest.raises(MessageError, match="did not send what it was told"):
        run.conductor.answer(0, HasTested(order.after), 1.0)
    assert not run.conductor.over


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    run = Run(exchange="downpour", replicas=2)
    run.ask(0, NextBatches())
    done = StepsDone((Step(0, float("nan"), 0.1),), True, (1,), Tally(steps=1))
    assert isinstance(run.ask(0, NextBatches(done)), Stop)
    assert isinstance(run.conductor.error, DivergedError)


def test_a_step_waits_for_the_replica_that_tests() -> None:
    """With no backups every round has the gradients of all replicas: one that tests is not taken out."""
    run = Run(exchange="backup", replicas=2, exchange_options={"backups": 0})
    done: dict[int, StepsDone | None] = {0: None, 1: None}
    for now in range(1, 20):
        for replica in (0, 1):
            order, effects = run.conductor.answer(replica, NextBatches(done[replica]), float(now))
            if isinstance(order, MakeTest):
                assert not [effect for effect in effects if isinstance(effect, Rest) and effect.resting]
                return
            trains = isinstance(order, Train)
            steps = (Step(order.batches[0].number, 0.5, STEP_SECONDS),) if isinstance(order, Train) else ()
            done[replica] = StepsDone(steps, True, (1,), Tally(steps=1, updates=1)) if trains else None
    raise AssertionError("nobody tested")
