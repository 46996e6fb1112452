"""Who trains on what, who tests, what is to be written, when the run ends: a state machine that does nothing itself.

    replica's question, event, time ──▶ Conductor ──▶ an order for the replica, and effects for others to carry out

No clock, file, thread or link is in here: whatever happens comes in as an argument, `now` in seconds of any clock that
only goes forward. It computes no step, so that no replica is needed for the run to go on.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.config import TrainConfig
from shoal.errors import (
    DiedError,
    DivergedError,
    LostError,
    MessageError,
    PeerError,
    RunError,
    ShoalError,
    StoppedError,
)
from shoal.exchanges import ExchangeOptions
from shoal.exchanging.membership.coordinator import What
from shoal.replicas.budget import Budget, LockstepBudget, SharedBudget
from shoal.replicas.effects import (
    Effect,
    EndServers,
    HowFar,
    Log,
    Mark,
    Rest,
    Stepped,
    Suspect,
    Told,
    WriteBest,
    WriteCheckpoint,
    WriteOwn,
    WritePlan,
    WriteResult,
    WriteTrace,
)
from shoal.replicas.journal import REPLACED, Journal
from shoal.replicas.orders import (
    AskTime,
    Batch,
    HandedIn,
    HandIn,
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
    Traced,
    Train,
    Wait,
)
from shoal.replicas.testing import STOPPING, OwnStates, TestsDue, UnderWay
from shoal.replicas.watch import Watch
from shoal.training.evaluate import Evaluation
from shoal.training.learns import how_to_step_less
from shoal.training.listener import About


class Decision(NamedTuple):
    """The answer to a question, and what else is to be done about it."""

    order: Order
    effects: list[Effect]


@dataclass(frozen=True)
class Whereabouts:
    """Where the run is, as far as decisions and messages depend on it."""

    folder: str
    """The run's folder, for messages."""
    weights: str = "none"
    """Where the common weights are held: none, direct, processes or threads."""
    servers: int = 0
    own: int | None = None
    """The replica in the conductor's own process, if any: a request to stop that process is one to stop the run."""


class Conductor:
    """Decides for one run. `past`: what earlier parts of it did, if it was resumed."""

    def __init__(
        self,
        config: TrainConfig,
        options: ExchangeOptions,
        about: About,
        whereabouts: Whereabouts,
        past: HowFar | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        self._config, self._options, self._about, self._whereabouts = config, options, about, whereabouts
        self._past = past or HowFar()
        self._journal = Journal(config, options, about, self._past, now)
        self._total = self._journal.total
        self._budget = self._make_budget()
        self._tests = TestsDue(config, about.steps_per_epoch, self._past.tested, self._past.counted, now=now)
        self._watch = Watch(heartbeat=options.heartbeat, timeout=config.timeout, waits=not options.survives)
        self._leaving: set[int] = set()
        self._shares: dict[int, list[float]] = {}
        """Losses of replicas' shares of batches that are not counted yet."""
        self._own: OwnStates | None = None
        """What replicas hand in for the checkpoint that is due, where they have something of their own."""
        self._stop_at: int | None = None
        """Set when the run is asked to stop; with shares of one batch, the batch that all replicas reach before."""
        self._stopped = self._finished = False
        self._best = self._past.best
        self._ends_early = False
        """Whether the run stops in good order with a result, because its tests get no better."""
        self._can_resume = past is not None
        self._effects: list[Effect] = []
        self.error: ShoalError | None = None
        """Why the run failed, if it did."""
        self.given_up: set[int] = set()
        """Frozen replicas that the run ends without: nobody waits for them any longer."""
        self._in_vain: int | None = None
        """A replica that ended because another did not answer, where all need each other."""

    def _make_budget(self) -> Budget:
        past = self._past
        if self._options.same_batch:
            return LockstepBudget(self._total, self._config.replicas, start=past.counted)
        start = past.counted + len(past.again)
        return SharedBudget(self._total, warm=self._options.lone_batches, start=start, again=past.again)

    # How the run stands

    @property
    def over(self) -> bool:
        """Whether replicas need not go on: the result is there, the run failed, or it was stopped in good order."""
        return self._finished or self.error is not None or self._stopped

    @property
    def counted(self) -> int:
        """Batches that were trained on and counted."""
        return self._budget.counted

    @property
    def active(self) -> list[int]:
        """Replicas that take part now."""
        return sorted(self._watch.active)

    @property
    def goes_on(self) -> bool:
        """Whether some replica trains, or may again: one that is frozen may wake."""
        return not self.over and bool(self._watch.active or self._watch.frozen_for(0.0))

    def why_no_result(self) -> ShoalError:
        """What to raise when all replicas are gone and there is no result."""
        if self.error is not None:
            return self.error
        if self._stopped:
            return StoppedError(
                f"stopped after {self.counted} of {self._total} batches. All files are whole.",
                f"Go on with: shoal train --resume {self._whereabouts.folder}"
                if self._can_resume
                else "There is no checkpoint yet: start it again.",
            )
        return RunError("all replicas left before the run was over.", "Look at their messages above.")

    # What replicas ask

    def answer(self, replica: int, question: Question, now: float, *, parts: int = 0) -> Decision:
        """What a replica is to do. `parts`: how many buffers came with the question.

        A `MessageError`, with nothing changed, for a question that no replica of ours would ask.
        """
        self._check(replica, question, parts)
        if self._watch.hear(replica, now):
            self._effects.append(Suspect(replica, hangs=False))
        if isinstance(question, NextBatches | Settling | Leaving) and question.done is not None:
            self._note(replica, question.done, now)
        order: Order = Noted()
        match question:
            case NextBatches():
                order = self._next(replica, now, question)
            case Settling():
                self._settle(replica, now)
            case HasTested():
                if (test := self._tests.of(replica, question)) is not None:
                    self._end_test(test, question.evaluation, now)
            case HandedIn():
                self._note_own(replica, question)
            case PlanChosen():
                self._effects.append(WritePlan(question.plan))
            case Traced():
                self._effects.append(WriteTrace(replica))
                if question.missing is not None:
                    self._effects += self.warn(f"replica {replica}: {question.missing}")
            case Leaving() | AskTime():
                pass
        return Decision(order, self._take_effects())

    def _check(self, replica: int, question: Question, parts: int) -> None:
        done = question.done if isinstance(question, NextBatches | Settling | Leaving) else None
        if done is not None and any(step.number >= self._total for step in done.steps):
            raise self._nonsense(replica, f"reports a batch beyond the {self._total} of this run")
        test = self._tests.of(replica, question) if isinstance(question, HasTested) else None
        if isinstance(question, HasTested) and test is not None:
            order, tested = test.order, question.evaluation
            if parts != order.save + order.wants_weights(tested) or (tested is None) == order.evaluate:
                raise self._nonsense(replica, "did not send what it was told to test and save")
        if isinstance(question, HandedIn) and (parts != 1 or not self._options.hands_in):
            raise self._nonsense(replica, "did not send its own state alone")
        if isinstance(question, Traced) and (parts != 1 or self._config.trace is None):
            raise self._nonsense(replica, "sent a trace that nobody asked for, or none")

    def _nonsense(self, replica: int, what: str) -> MessageError:
        return MessageError(f"replica {replica} {what}.", "This is a bug: please report it.")

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _next(self, replica: int, now: float, question: NextBatches) -> Order:
        if self._options.same_batch and replica >= self._config.replicas:
            return Stop()  # every batch is shared by those that the run began with
        if question.stop and not self.over and self._stop_at is None:
            if self._may_leave(replica):
                return self._leave(replica)
            self._ask_to_stop()
        if replica in self._leaving:
            return Leave()
        if not self._options.survives:
            self._give_up_on_frozen(now)
        if self.over:
            return Stop()
        if self._stop_at is not None:
            return self._order_to_stop(replica, now)
        due = self._tests.due(self.counted)
        if due is not None and self._wants_own(replica, due):
            return self._ask_for_own()
        if due is not None and self._may_test(replica, due):
            return self._begin_test(replica, due)
        if due is not None and (self._in_step or due.last):
            return self._wait(replica)
        if self._in_step and self._at_barrier(replica):
            return self._wait(replica)
        # One at a time while a test is due or under way: what is done meanwhile is in the weights that are tested.
        wants = question.wants if due is None and self._tests.under_way is None else 1
        return self._order_batches(replica, now, wants)

    def _wait(self, replica: int) -> Order:
        """It gets nothing now. An update waits for one that has yet to push as much as for one that still trains."""
        self._effects.append(Rest(replica, resting=not self._budget.holds(replica)))
        return Wait()

    def _may_leave(self, replica: int) -> bool:
        """Whether the others can go on without a replica that was asked to stop; if not, the run stops."""
        holds_weights = self._whereabouts.weights == "threads" and replica < self._whereabouts.servers
        others = self._watch.active - {replica} - self._leaving
        return self._options.survives and replica != self._whereabouts.own and not holds_weights and bool(others)

    def _leave(self, replica: int) -> Order:
        self._leaving.add(replica)
        self._effects.append(Rest(replica, resting=True))
        return Leave()

    def _begin_test(self, replica: int, order: MakeTest) -> Order:
        """Where a step waits for certain replicas, it waits for the one that tests."""
        return self._tests.begin(replica, replace(order, to_beat=self._best.score) if order.evaluate else order)

    def _order_batches(self, replica: int, now: float, wants: int = 1) -> Order:
        batches: list[Batch] = []
        for _ in range(self._at_once(replica, wants)):
            number = self._budget.take(replica)
            if number is None:
                break
            epoch, step = divmod(number, self._about.steps_per_epoch)
            batches.append(Batch(number, epoch, step, self._journal.rate(number)))
            if self._tests.is_due_at(self._budget.handed(replica)):
                break
        if not batches:
            return self._wait(replica)
        self._effects.append(Rest(replica, resting=False))
        self._journal.begin_step(now)
        self._watch.order(replica, len(batches))
        return Train(tuple(batches))

    def _at_once(self, replica: int, wants: int) -> int:
        """As many as it wants; towards the end of the run fewer, so that nobody is left with many while others rest."""
        left = self._total - self._budget.handed(replica)
        return max(1, min(wants, left // (2 * max(1, len(self._watch.active)))))

    @property
    def _in_step(self) -> bool:
        """Whether the end of an epoch is the same moment for all: then tests come exactly there."""
        return self._options.same_batch or self._config.replicas == 1

    def _at_barrier(self, replica: int) -> bool:
        """Whether a replica has all batches up to the next test, and others have not finished them."""
        handed = self._budget.handed(replica)
        return self._tests.is_due_at(handed) and self.counted < handed

    def _order_to_stop(self, replica: int, now: float) -> Order:
        """Replicas that share batches are first brought to the same batch; then one saves, and all leave."""
        assert self._stop_at is not None
        if self._options.same_batch and self._budget.handed(replica) < self._stop_at:
            return self._order_batches(replica, now)
        wait = self._wait(replica)
        if self._options.same_batch and self.counted < self._stop_at:
            return wait
        if not self.counted:
            self._stopped = True  # there is nothing to save
            return Stop()
        if self._ends_early and any(map(self._budget.holds, self._watch.active)):
            return wait  # the result is of all that was done
        order = MakeTest(self.counted, evaluate=True, save=True, last=True) if self._ends_early else STOPPING
        if self._wants_own(replica, order):
            return self._ask_for_own()
        return self._begin_test(replica, order) if self._may_test(replica, order) else wait

    def _wants_own(self, replica: int, order: MakeTest) -> bool:
        """Whether a replica has something of its own to hand in, for the checkpoint that is due."""
        if not (self._options.hands_in and order.save) or self._tests.under_way is not None:
            return False
        self._own = self._own or OwnStates(self.counted)
        return replica not in self._own.handed_in

    def _ask_for_own(self) -> Order:
        assert self._own is not None
        return HandIn(self._own.moment)

    def _note_own(self, replica: int, handed_in: HandedIn) -> None:
        """Of a checkpoint that is still wanted: a replica that was thought gone may come with an old one."""
        if self._own is not None and handed_in.moment == self._own.moment:
            self._own.arriving.add(replica)
            self._effects.append(WriteOwn(replica, handed_in.moment))

    def own_written(self, replica: int, moment: int) -> None:
        """What a replica handed in is on the disk: only now may a checkpoint name it."""
        if self._own is not None and moment == self._own.moment:
            self._own.arriving.discard(replica)
            self._own.handed_in.add(replica)

    def _may_test(self, replica: int, order: MakeTest) -> bool:
        """Whether it may test: one at a time.

        Only a replica that took at least half as many steps as the busiest may test: its batch norm statistics are
        trained.
        """
        if self._tests.under_way is not None:
            return False
        if self._own is not None and order.save and not self._own.complete(self._watch.active):
            return False
        return 2 * self._trained(replica) >= max(map(self._trained, self._watch.active), default=0)

    def _trained(self, replica: int) -> int:
        """Steps in a replica's batch norm statistics; all but late replicas begin with the checkpoint's."""
        before = self._past.counted if replica < self._config.replicas else 0
        return before + self._journal.scores.steps_here(replica)

    # What replicas tell

    def _note(self, replica: int, done: StepsDone, now: float) -> None:
        self._journal.note(replica, done, now)
        self._watch.note(replica, max((step.seconds for step in done.steps), default=0.0) - done.tally.wait_seconds)
        for step in done.steps:
            self._note_step(replica, step, now, applied=done.applied)

    def _note_step(self, replica: int, step: Step, now: float, *, applied: bool) -> None:
        if not math.isfinite(step.loss):
            self._diverge(f"the loss of replica {replica} became {step.loss} by batch {step.number} of {self._total}.")
            return
        before = self.counted
        self._budget.done(replica, step.number, applied=applied)
        counted = self.counted
        if applied:
            self._note_loss(step, range(before, counted))
        if counted == before:
            return
        self._effects.append(Stepped(counted, counted // self._about.steps_per_epoch))
        self._journal.add_samples(range(before, counted) if self._options.same_batch else [step.number])
        line = self._journal.counted(counted, self.active, now)
        if line is not None:
            self._effects.append(Log(line))
        if (told := self._journal.take_warning()) is not None:
            self._effects += self.warn(told)

    def _note_loss(self, step: Step, counted: range) -> None:
        """A loss is part of the means when its batch is counted; `counted`: those that are now.

        Where all share a batch, a replica's report of the next one may be heard before another's of this one.
        """
        if not self._options.same_batch:
            self._journal.add_loss(step.loss)
            return
        self._shares.setdefault(step.number, []).append(step.loss)
        for number in counted:
            for loss in self._shares.pop(number, ()):
                self._journal.add_loss(loss)

    def _diverge(self, problem: str) -> None:
        self._fail(DivergedError(problem, how_to_step_less(self._config)))

    def _settle(self, replica: int, now: float) -> None:
        """A replica takes the weights that it tests: what is counted by now is in them."""
        if self._tests.settle(replica, self._journal.how_far(self.counted, self._budget.left(), now)):
            self._effects.append(Mark(replica))

    def _end_test(self, test: UnderWay, evaluation: Evaluation | None, now: float) -> None:
        assert test.settled is not None
        replica, order, settled = test.replica, test.order, test.settled
        if evaluation is not None:
            if not math.isfinite(evaluation.loss):
                self._diverge(
                    f"the loss of the common weights became {evaluation.loss} after {settled.counted} batches."
                )
                return
            epoch = math.ceil(order.after / self._about.steps_per_epoch)
            line = self._journal.test_line(replica, evaluation, epoch, settled, now)
            self._effects += [Log(line), Mark(replica)]
            self._best = self._best.after(evaluation, epoch=epoch, step=settled.counted)
            if self._best.since == 0:
                self._effects.append(WriteBest())
        test.handed_in = True
        if not order.save:
            if evaluation is None or self._best.since:
                self._close_test()
            return
        own = {} if self._own is None else dict.fromkeys(sorted(self._own.handed_in), self._own.moment)
        how_far = replace(settled, tested=self._tests.tested_by(test), best=self._best)
        self._effects.append(WriteCheckpoint(replica, how_far, own))
        if order.last:
            assert evaluation is not None
            measured = self._journal.measured(self.counted, self._budget.repeated, self._whereabouts.weights, now)
            epochs = math.ceil(self.counted / self._about.steps_per_epoch)
            measured = replace(measured, epochs=epochs, best=self._best.test, stopped_early=self._ends_early)
            self._effects.append(WriteResult(evaluation, measured))

    def written(self) -> list[Effect]:
        """The files of the present test are on the disk."""
        self._can_resume = self._close_test().save or self._can_resume
        return self._take_effects()

    def _close_test(self) -> MakeTest:
        order = self._tests.close()
        if order.save:
            self._own = None
        self._stopped = self._stopped or order == STOPPING
        self._finished = self._finished or order.last
        ends_epoch = order.evaluate and order.after % self._about.steps_per_epoch == 0
        if ends_epoch and not self.over and self._stop_at is None and self._best.stops(self._config.patience):
            self._ends_early = True
            self._effects += self.warn(self._best.told())
            self._ask_to_stop()
        return order

    # What happens to the run, its replicas and servers

    def stop(self) -> list[Effect]:
        """The user asked for it: let one replica save, then all leave."""
        self._ask_to_stop()
        if not self._journal.started:
            self._stopped = True
        return self._take_effects()

    def _ask_to_stop(self) -> None:
        if self._stop_at is None:
            self._stop_at = self._furthest

    @property
    def _furthest(self) -> int:
        """The batch that comes next for the replica that is furthest."""
        return max(self._budget.handed(replica) for replica in range(self._config.replicas))

    def warn(self, text: str) -> list[Effect]:
        """Something that the user should know."""
        return [Log({"event": "warning", "text": text})]

    def process_ended(self, replica: int, why: str) -> list[Effect]:
        """A process of a replica ended. That the replica is lost comes as an event of its own, if it had joined."""
        if self._whereabouts.weights == "threads" and replica < self._whereabouts.servers:
            self._lose_server(replica)  # others may be waiting for it
        return [Log({"event": "ended", "replica": replica, "why": why})]

    def replaced(self, replica: int, left: int, now: float) -> list[Effect]:
        """In the place of a lost replica another is started, which will join; so many more may be."""
        line = self._journal.event_line(REPLACED, replica, self.counted, now)
        return [Log({**line, "restarts_left": left}), Told(REPLACED, replica)]

    def happened(self, what: What, who: int, now: float) -> list[Effect]:
        """A replica `joined`, was `lost`, is `frozen`, is `back` or `left`; or it is a server: `server lost`, ...

        Or a replica `gave up` waiting for another, where all need each other.
        """
        if what == "gave up":
            self._note_in_vain(who, now)
            return self._take_effects()
        of_server = what.startswith("server ")
        kind = what.removeprefix("server ")
        self._effects.append(Log(self._journal.event_line(what, who, self.counted, now)))
        if not of_server:
            suspected = who in self._watch.suspected
            self._watch.happened(kind, who, now)
            if kind in ("lost", "frozen", "left"):
                self._take_back(who)
            if kind == "lost" and not self._options.survives:
                self._lose_needed(who)
            if kind == "frozen":
                self._give_up_on_awaited(now)
            # Threads of a replica hold a part of the weights; they go on where it merely hangs.
            holds_weights = self._whereabouts.weights == "threads" and who < self._whereabouts.servers
            of_server = holds_weights and kind in ("lost", "frozen", "back") and not suspected
        if of_server and kind == "lost":
            self._lose_server(who)
        elif of_server:
            self._watch.server(who, now, silent=kind == "frozen")
        self._effects.append(Told(f"server {kind}" if of_server else kind, who))
        return self._take_effects()

    def _take_back(self, replica: int) -> None:
        """What a lost replica had to do is given to others."""
        self._budget.lose(replica)
        self._leaving.discard(replica)
        self._tests.lose(replica)

    def _lose_needed(self, replica: int) -> None:
        """A replica is lost that every step of the others waits for."""
        if not self.over:
            name = self._options.name
            self._fail(LostError(f"replica {replica} was lost, and {name} cannot go on without it.", self._go_on()))
            self._effects.append(EndServers())

    def _note_in_vain(self, replica: int, now: float) -> None:
        """A replica has waited for another as long as it does, and has ended: the one that is frozen is the lost one.

        Where another died, or does not show yet that it is frozen, that comes as an event of its own.
        """
        if replica not in self._watch.frozen_for(now):  # of one that is, another rank is
            self._watch.happened("left", replica, now)
            self._take_back(replica)
        self._in_vain = replica
        self._give_up_on_awaited(now)

    def _give_up_on_awaited(self, now: float) -> None:
        """Give up on replicas that are frozen, where another that waited for them has ended."""
        if self._in_vain is None or self.over:
            return
        for replica in self._watch.frozen_for(now):
            self._give_up_on(replica, "gives no sign of life, and others have waited for it in vain")

    def server_ended(self, number: int) -> list[Effect]:
        """A server's process ended."""
        self._lose_server(number)
        return self._take_effects()

    def _lose_server(self, number: int) -> None:
        if not self.over:
            self._fail(DiedError(f"server {number} was lost, and with it a part of the weights.", self._go_on()))

    def tick(self, now: float, heard: Mapping[int, float], waiting: Set[int]) -> list[Effect]:
        """Time passed. `heard`: when each replica last asked anything, of the conductor or of others beside it.

        `waiting`: replicas that say that they wait for others.
        """
        if self.over:
            return []
        self._tests.remind(now, self._furthest if self._options.same_batch else self.counted)
        self._give_up_on_frozen(now)
        longer: dict[int, float] = {}
        if (test := self._tests.under_way) is not None:
            batches = math.ceil(self._about.test_samples / self._config.replica_batch)
            slow = max(batches, self._config.timeout / self._options.heartbeat)
            if not self._options.asks_ahead:  # others may be waiting in a step for the replica that tests
                longer = dict.fromkeys(self._watch.active, slow)
            longer[test.replica] = math.inf if test.handed_in else slow
        if self._own is not None:
            longer |= dict.fromkeys(self._own.arriving, math.inf)
        suspect, cleared = self._watch.look(now, heard, waiting, longer)
        self._effects += [Suspect(replica, hangs=False) for replica in cleared]
        if suspect is not None:
            self._effects.append(Suspect(suspect, hangs=True))
        return self._take_effects()

    def _give_up_on_frozen(self, now: float) -> None:
        """End a run that cannot go on without a frozen replica, or of which no other is left."""
        if self.over:
            return
        frozen = self._watch.frozen_for(now)
        if self._options.survives and (self._watch.active or min(frozen.values(), default=0) <= self._config.timeout):
            return
        for replica, seconds in frozen.items():
            if seconds > self._config.timeout:
                self._give_up_on(replica, f"gave no sign of life for {self._config.timeout:g} seconds")

    def _give_up_on(self, replica: int, why: str) -> None:
        """The run ends without a frozen replica, and servers with it: others may wait there for its part."""
        self.given_up.add(replica)
        remedy = f"{self._go_on()} If it may be silent for longer, give a longer time-out (--timeout)."
        self._fail(PeerError(f"replica {replica} {why}.", remedy))
        if not self._options.survives:
            self._effects.append(EndServers())

    def _go_on(self) -> str:
        if not self._can_resume:
            return "There is no checkpoint yet: start it again."
        return f"Go on from the last checkpoint with: shoal train --resume {self._whereabouts.folder}"

    def fail(self, error: ShoalError) -> None:
        """Something went wrong outside the conductor, and the run cannot go on."""
        self._fail(error)

    def _fail(self, error: ShoalError) -> None:
        """The first error counts; but one that a replica was lost says less than any that is this process's own."""
        if self.error is None or (isinstance(self.error, LostError) and not isinstance(error, PeerError)):
            self.error = error
