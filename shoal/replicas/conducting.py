"""The loop around the conductor: it brings questions, events and time in, and carries out what comes of them.

    replicas ──▶ coordinator's threads ──▶ Conductor, under the coordinator's lock ──▶ recorder, listener, coordinator

Files are written outside the lock, while other replicas ask.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shoal.config import TrainConfig
from shoal.errors import MessageError, RunError, ShoalError
from shoal.exchanges import ExchangeOptions, Holding
from shoal.exchanging import Event, Meeting, MeetingPlace, Member
from shoal.launching import RemoteError, tell_stage
from shoal.replicas.conductor import Conductor, Whereabouts
from shoal.replicas.effects import (
    Effect,
    EndServers,
    ForFiles,
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
)
from shoal.replicas.orders import AskTime, NextBatches, Noted, Stop, Time, order_head, read_question
from shoal.replicas.recorder import Recorder
from shoal.result import RunResult
from shoal.tracing.clocks import own_clock
from shoal.training.checkpoints.folder import Checkpoint
from shoal.training.listener import About, Listener
from shoal.training.loop import TRAINING
from shoal.transport.links import Frame

LOOKS_PER_HEARTBEAT = 4
"""How often the conductor checks whether replicas make progress."""


class Conducting:
    """A run under way: its conductor, and where its replicas meet."""

    def __init__(
        self,
        config: TrainConfig,
        options: ExchangeOptions,
        about: About,
        recorder: Recorder,
        listener: Listener,
        past: HowFar | None,
        *,
        held: Holding,
        host: str,
        store: str,
        folder: str,
        servers_here: bool | None = None,
        own: int | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._recorder, self._listener = recorder, listener
        self.checkpoint = checkpoint
        """From which replicas go on."""
        whereabouts = Whereabouts(folder, *held, own=own)
        self._conductor = Conductor(config, options, about, whereabouts, past, now=time.monotonic())
        self._place = MeetingPlace(
            options,
            config.replicas,
            held,
            host=host,
            store=store,
            timeout=config.timeout,
            servers_here=servers_here,
            answer=self._answer,
            on_event=self._on_event,
            on_error=self._on_error,
        )
        self._coordinator = self._place.coordinator
        self._changed = self._coordinator.changed
        self.stepped: float | None = None
        """Wall clock of the last step that was done, if any was."""
        self.noticed: float | None = None
        """Wall clock of when it was known that the run fails."""
        self._closing = threading.Event()
        pause = options.heartbeat / LOOKS_PER_HEARTBEAT
        self._looking = threading.Thread(target=self._look, args=(pause,), name="shoal-progress", daemon=True)
        self._looking.start()

    # What the process that started the run asks and tells

    @property
    def over(self) -> bool:
        """Whether replicas need not go on."""
        return self._conductor.over

    @property
    def goes_on(self) -> bool:
        """Whether some replica trains, or may again."""
        with self._changed:
            return self._conductor.goes_on

    @property
    def result(self) -> RunResult | None:
        """What the run did, if it is done."""
        return self._recorder.result

    @property
    def error(self) -> Exception | None:
        """Why the run failed, if it did."""
        return self._conductor.error

    @property
    def given_up(self) -> list[int]:
        """Frozen replicas that the run ends without."""
        with self._changed:
            return sorted(self._conductor.given_up)

    @property
    def meeting(self) -> Meeting:
        """Where replicas find this run."""
        return self._place.meeting

    def start_servers(self) -> None:
        """Start the server processes, if there are any."""
        self._place.start_servers(on_end=self._server_ended)

    @property
    def counted(self) -> int:
        """Batches that were trained on and counted."""
        with self._changed:
            return self._conductor.counted

    def stop(self) -> None:
        """The user asked for it: let one replica save, then all leave."""
        with self._changed:
            self._carry_out(self._conductor.stop())

    def lost(self, replica: int, why: str) -> None:
        """A replica's processes ended; its links say so too, but not why."""
        with self._changed:
            self._carry_out(self._conductor.process_ended(replica, why))
            self._coordinator.drop(replica)

    def replaced(self, replica: int, left: int) -> None:
        """In the place of a lost replica another is started; so many more may be."""
        self._recorder.note_replaced(replica)
        with self._changed:
            self._carry_out(self._conductor.replaced(replica, left, time.monotonic()))

    def warn(self, text: str) -> None:
        """Something that the user should know before it happens."""
        with self._changed:
            self._carry_out(self._conductor.warn(text))

    def wait_for_all(self, seconds: float) -> None:
        """Until every replica has left or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coordinator.active(), timeout=seconds)

    def ended(self) -> RunResult:
        """The result; or why there is none."""
        if self.result is not None:
            return self.result
        raise self._conductor.why_no_result()

    def close(self) -> None:
        """End the meeting place, with all its processes."""
        self._closing.set()
        self._looking.join()
        self._place.close()

    # What comes in

    def _answer(self, member: Member, frame: Frame) -> tuple[Mapping[str, Any], list[Any]]:
        try:
            question = read_question(frame.head)
            if isinstance(question, AskTime):
                return order_head(Time(time.perf_counter_ns(), own_clock())), []
            with self._changed:
                order, effects = self._conductor.answer(
                    member.replica, question, time.monotonic(), parts=len(frame.buffers)
                )
                for_files = self._carry_out(effects)
        except MessageError as error:  # only this replica is lost, not the run
            self.lost(member.replica, error.problem)
            return order_head(Noted()), []
        with self._failing():
            self._write(for_files, frame.buffers)
        failed = self.error is not None and isinstance(question, NextBatches)
        return order_head(Stop() if failed else order), []

    def _write(self, effects: Sequence[ForFiles], buffers: Sequence[Tensor]) -> None:
        for effect in effects:
            self._recorder.write(effect, buffers)
            if isinstance(effect, WriteOwn):
                with self._changed:
                    self._conductor.own_written(effect.replica, effect.moment)
        if any(isinstance(effect, WriteCheckpoint | WriteBest) for effect in effects):
            with self._changed:
                self._carry_out(self._conductor.written())

    def _on_event(self, event: Event) -> None:
        self._carry_out(self._conductor.happened(event.what, event.who, time.monotonic()))

    def _server_ended(self, number: int) -> None:
        with self._changed:
            self._carry_out(self._conductor.server_ended(number))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside ends the run, and nothing else: whoever asks next is told to stop."""
        try:
            yield
        except Exception as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        """An error that ends the run, or a bug of ours."""
        failure = error
        if not isinstance(failure, ShoalError):
            failure = RunError(
                f"the conductor failed: {type(error).__name__}: {error}.",
                "This is a bug: please report it with the traceback that follows.",
            )
            failure.__cause__ = RemoteError.of(error)
        with self._changed:
            self._conductor.fail(failure)
            self._note_failure()

    def _note_failure(self) -> None:
        if self.noticed is None and self._conductor.error is not None:
            self.noticed = time.time()

    def _look(self, pause: float) -> None:
        with self._failing():
            while not self._closing.wait(pause):
                with self._changed:
                    members = self._coordinator.members.values()
                    heard = {member.replica: member.heard for member in members}
                    waiting = {member.replica for member in members if member.waits}
                    self._carry_out(self._conductor.tick(time.monotonic(), heard, waiting))

    # What is to be done

    def _carry_out(self, effects: Sequence[Effect]) -> list[ForFiles]:
        """Carry out all effects except those that take long, which are returned.

        One that fails, such as a line for a full disk, ends the run, from whichever thread it came; those after it are
        left out.
        """
        self._note_failure()
        later: list[ForFiles] = []
        try:
            for effect in effects:
                match effect:
                    case Log():
                        self._recorder.log(effect.values)
                        with _listening():
                            self._listener.logged(effect.values)
                    case Mark():
                        self._recorder.mark(effect.replica)
                    case Stepped():
                        self._note_step()
                        with _listening():
                            self._listener.stepped(effect.steps, effect.epochs)
                    case Told():
                        with _listening():
                            self._listener.happened(effect.what, effect.who)
                    case Rest():
                        self._coordinator.rest(effect.replica, resting=effect.resting)
                    case Suspect():
                        self._coordinator.suspect(effect.replica, hangs=effect.hangs)
                    case EndServers():
                        self._coordinator.end_servers()
                    case _:
                        later.append(effect)
        except Exception as error:
            self._on_error(error)
            return []
        return later

    def _note_step(self) -> None:
        """Of the first one tell whoever started this process, and note it where the run goes on by itself."""
        first, self.stepped = self.stepped is None, time.time()
        if first:
            tell_stage(TRAINING)
            self._recorder.note_first_step()


@contextmanager
def _listening() -> Iterator[None]:
    """While a listener hears something: what it raises ends the run, and is told as its own."""
    try:
        yield
    except Exception as error:
        failure = RunError(
            f"the listener failed: {type(error).__name__}: {error}.", "The run ends. The listener's traceback follows."
        )
        raise failure from RemoteError.of(error)
