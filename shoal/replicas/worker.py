"""One replica in training: it asks the conductor for a batch, takes a step, and tells what came of it.

All ranks of a replica run this; the first of them asks, and tells the others what it was told.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.config import TrainConfig
from shoal.data import BatchOrder, Loader
from shoal.diary import now
from shoal.errors import CheckpointError, MessageError
from shoal.exchanges import ExchangeOptions
from shoal.exchanging import Exchange, Meeting, Seat, Tally, join, serve_in_threads, take_seat
from shoal.inference import Inference
from shoal.launching import Failure
from shoal.replicas.bundle import packed
from shoal.replicas.orders import (
    MOST_BATCHES,
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
    Time,
    Traced,
    Train,
    Wait,
    question_head,
    read_order,
)
from shoal.replicas.own_states import own_carried_over, own_parts, own_state_from
from shoal.replicas.recorder import COMMON
from shoal.timeline import Trace
from shoal.tracing.clocks import ahead_of
from shoal.tracing.recording import Recording
from shoal.training.checkpoints.folder import Checkpoint, file_of_rank
from shoal.training.checkpoints.job_state import Snapshot, put_in, take_snapshot
from shoal.training.checkpoints.restoring import done_before
from shoal.training.checkpoints.tensor_files import bytes_of
from shoal.training.evaluate import evaluate
from shoal.training.interrupt import StopSignal
from shoal.training.job import Job, prepare
from shoal.training.network import Network
from shoal.training.numbering import Numbering
from shoal.training.out_of_memory import out_of_memory, peak_bytes
from shoal.training.outcome import inference_of
from shoal.training.own_objects import OwnObjects
from shoal.training.step import backward
from shoal.training.weights import save_weights
from shoal.transport import Transport
from shoal.transport.agreement import agree

MOMENT_SECONDS = 0.04
"""A replica asks for as many batches at once as it trains on in this time: a message costs as much as a small step."""
LEAST_ORDERS = 4
"""In which a replica does its share of an epoch: tests come near the epoch's end, and others may be faster."""
WAIT_SECONDS = 0.01
"""Time between two questions while there is nothing to do."""


def train_replica(
    config: TrainConfig,
    meeting: Meeting,
    resumed: Checkpoint | None,
    ranks_here: int,
    own: OwnObjects,
    replica: int | None,
) -> bool:
    """The whole life of one rank of one replica. `replica` None: whatever number the conductor gives a late one.

    `resumed`: the checkpoint from which the run goes on. True if it stayed to the end of the run, False if it was asked
    to stop and left the others.
    """
    options = config.exchange_settings()
    assert options is not None
    transport = Transport()
    pids = [int(row[0]) for row in transport.gather_numbers([os.getpid()])]
    with ExitStack() as ending:
        stop = ending.enter_context(StopSignal())  # the conductor decides what to do about it
        seat = take_seat(meeting, transport, replica, pids, options.heartbeat)
        ending.enter_context(_giving_up(seat, options))
        welcome = seat.welcome
        number = welcome["replica"]
        fresh = resumed is None and replica is not None
        job = _prepare(config, options, transport, number, ranks_here, own, fresh=fresh)
        if resumed is not None:
            state = resumed.state()
            done, _ = done_before(state, config, job.loader.order.samples)
            agree(transport, lambda: put_in(resumed, state, job, batches=done.counted * config.accumulate))
            if number:  # the random state is that of the replica that saved
                torch.manual_seed(config.seed + number + done.counted)
        server = serve_in_threads(seat, number, welcome["servers"]) if welcome["kind"] == "threads" else None
        exchange = join(options, job.network.as_replica(job.optimizer, transport), seat, number)
        exchange.begin(first=not welcome["late"])
        if resumed is not None and number in own_carried_over(state, config):
            _put_own_state(resumed, number, exchange, job.network, transport)
        if seat.rank == 0 and number == 0:
            seat.ask(question_head(PlanChosen(job.network.plan.to_json())))
        slow = (
            config.slow.get("factor", 1) if config.slow.get("rank") == number * transport.world + transport.rank else 1
        )
        try:
            most = min(MOST_BATCHES, job.steps_per_epoch // (LEAST_ORDERS * config.replicas))
            recording = _recording(config, options, job)
            weigh = partial(
                weight_in_update, Numbering.of(config, job.loader.order.samples), config.replicas, options.same_batch
            )
            stayed = _Life(job, exchange, seat, transport, options, slow, stop, most, recording, number, weigh).live()
        except (RuntimeError, MemoryError) as error:
            told = out_of_memory(error, config)
            if told is None:
                raise
            raise told from error
        seat.leave()
        exchange.close()
        if server is not None:
            server.close()
    return stayed


@contextmanager
def _giving_up(seat: Seat, options: ExchangeOptions) -> Iterator[None]:
    """Where all replicas need each other, one that ends because another is silent or gone says so.

    Else it would be taken for the one that is lost, since it is the first to go.
    """
    try:
        yield
    except Exception as error:
        if not options.survives and Failure.of(error, seat.rank).kind in ("gone", "silent"):
            seat.give_up()
        raise


class _Share(BatchOrder):
    """A replica's share of each batch, where all replicas take every step together.

    Of a smaller last batch the first replicas have as much as of any other, the next one what remains, and those after
    it nothing: as few as can be take the statistics of batch norm over fewer samples than they are used to.
    """

    def __init__(self, order: BatchOrder, replica: int, replicas: int) -> None:
        whole = order.batch * replicas
        super().__init__(samples=order.samples, batch=whole, seed=order.seed, keep_last=order.keep_last)
        self._own = slice(replica * order.batch, (replica + 1) * order.batch)

    def size(self, step: int) -> int:
        return max(0, min(self._own.stop, super().size(step)) - self._own.start)

    def indices(self, epoch: int, step: int) -> Any:
        return super().indices(epoch, step)[self._own]


def weight_in_update(numbering: Numbering, replicas: int, shared: bool, number: int, own: int) -> float:
    """What the mean gradient of a replica's `own` samples of batch `number` counts beside that of a whole batch.

    By samples, so that each of an update counts alike. `shared`: where replicas take the mean of their shares of one
    batch, that is the mean of all its samples, as on one device. One replica alone takes a smaller batch as one device.
    """
    if replicas == 1:
        return 1.0
    return own * replicas / numbering.of_batch(number) if shared else own / numbering.size


def _prepare(
    config: TrainConfig,
    options: ExchangeOptions,
    transport: Transport,
    number: int,
    ranks_here: int,
    own: OwnObjects,
    *,
    fresh: bool,
) -> Job:
    """The job of one replica, as if it were alone with its share of the batch."""
    alone = config.model_copy(
        update={
            "workers": transport.world,
            "batch": config.replica_batch,
            "replicas": 1,
            "exchange": None,
            "slow": {},
            "momentum": config.rates().momentum,
        }
    )
    job = prepare(alone, transport, own, fresh=fresh, ranks_here=ranks_here)
    if number:  # weights are drawn alike everywhere, dropout's masks are not
        torch.manual_seed(config.seed + number)
    loader = job.loader
    if options.same_batch:
        loader = Loader(loader.data, _Share(loader.order, number, config.replicas), loader.augment, loader.parts)
    return replace(
        job,
        loader=loader,
        config=alone.model_copy(
            update={"threads": job.config.threads, "device": job.config.device, "data": job.config.data}
        ),
    )


def _recording(config: TrainConfig, options: ExchangeOptions, job: Job) -> Recording | None:
    """Of the steps that a replica takes itself: every batch where all share it, else about its part of them."""
    total = job.total_steps if options.same_batch else job.total_steps // config.replicas
    steps = config.traced_steps(0, max(1, total))
    return Recording(job.network.transport, steps, job.network.plain) if steps else None


class _Life:
    """Orders in, steps out."""

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        seat: Seat,
        transport: Transport,
        options: ExchangeOptions,
        slow: float,
        stop: StopSignal,
        most: int,
        recording: Recording | None,
        number: int,
        weigh: Callable[[int, int], float],
    ) -> None:
        """`most`: batches that it asks for at once; `recording`: of its steps; `number`: which replica it is.

        `weigh`: what its samples of a batch count, as `weight_in_update` says.
        """
        self._weigh = weigh
        self._recording, self._number = recording, number
        self._taken = 0
        """Steps that it took."""
        self._recorded: tuple[Trace, str | None] | None = None
        """What was recorded and is not sent yet, and what is missing in it."""
        self._job, self._exchange, self._seat, self._transport = job, exchange, seat, transport
        self._options, self._slow, self._stop, self._most = options, slow, stop, most
        self._stop_elsewhere = False
        """Whether another rank of this replica was asked to stop."""
        self._steps: list[Step] = []
        """Steps that were taken and are not part of the common weights yet."""
        self._done: StepsDone | None = None
        self._asked = False
        self._wants = 1
        """Batches that it asks for at once."""
        self._behind = False
        """Whether this replica paused, so that a gradient of its present weights would be stale."""

    def live(self) -> bool:
        """Carry out orders until told to stop (True), or to leave the others (False)."""
        while True:
            order = self._next()
            if isinstance(order, Leave | Stop):
                self._end_recording()
            self._send_trace()
            match order:
                case Train():
                    for batch in order.batches:
                        self._train(batch, last=batch is order.batches[-1])
                case MakeTest():
                    self._test(order)
                case HandIn():
                    self._hand_in(order)
                case Wait():
                    self._behind = self._options.asynchronous
                    if not self._report(self._exchange.flush()):
                        time.sleep(WAIT_SECONDS)
                case Leave():
                    self._report(self._exchange.hand_over())
                    self._tell(Leaving(self._take_done()))
                    return False
                case Stop():
                    return True
                case Noted() | Time():
                    raise MessageError("the conductor gave no order.", "This is a bug: please report it.")

    def _next(self) -> Order:
        """The next order, the same on all ranks of the replica."""
        order: Order | None = None
        diary = self._transport.diary
        begun = 0 if diary is None else now()
        if self._transport.rank == 0:
            if not self._asked:
                self._ask()
            order = read_order(self._seat.hear().head)
            self._asked = False
            if diary is not None:
                diary.note("wait", "for the conductor's order", begun)
        if self._transport.world > 1:
            orders, stops = zip(*self._transport.gather_objects((order, bool(self._stop))), strict=True)
            self._stop_elsewhere = any(stops)
            order = orders[0]
        assert order is not None
        return order

    def _ask(self) -> None:
        if self._transport.rank == 0:
            stop = bool(self._stop) or self._stop_elsewhere
            self._seat.send(question_head(NextBatches(self._take_done(), stop=stop, wants=self._wants)))
            self._asked = True

    def _tell(self, question: Question, buffers: Sequence[bytes] = ()) -> None:
        """Report something that needs no answer."""
        if self._transport.rank == 0:
            self._seat.ask(question_head(question), buffers)

    def _take_done(self) -> StepsDone | None:
        done, self._done = self._done, None
        return done

    def _train(self, batch: Batch, *, last: bool) -> None:
        """Train on a batch; before the `last` one of an order, ask for the next order, where that may come ahead."""
        job = self._job
        if last and self._options.asks_ahead:
            self._ask()
        if self._behind:  # the others trained on meanwhile, perhaps a whole warm start
            self._exchange.catch_up()
            self._behind = False
        self._taken += 1
        diary = None if self._recording is None else self._recording.begin_step(self._taken)
        begun = now()
        batches, sizes = job.batches(batch.epoch, batch.step), job.sizes(batch.step)
        if diary is not None:
            diary.note("data", "batch", begun)
        if batches:
            loss = backward(job, batches, sizes, weight=self._weigh(batch.number, sum(sizes))).item()
        else:  # others share a last batch that is too small for all
            self._exchange.replica.no_gradients()
            loss = 0.0
        if self._slow > 1:
            sleeping = now()
            time.sleep((self._slow - 1) * (sleeping - begun) / 1e9)
            if diary is not None:
                diary.note("wait", "slow on purpose", sleeping)
        stepping = now()
        applied = self._exchange.step(batch.rate)
        if job.average is not None:
            job.average.update()
        if diary is not None:
            diary.note("exchange", self._options.name, stepping)
        losses = [row[0] for row in job.network.gather([loss])]
        ended = now()
        seconds = (ended - begun) / 1e9
        if diary is not None:
            diary.note_step(begun, ended)
        self._steps.append(Step(batch.number, sum(losses), seconds))
        self._wants = self._batches_in_a_moment(seconds)
        self._report(applied)
        if self._recording is not None and self._recording.ends_with(self._taken):
            self._end_recording()

    def _end_recording(self) -> None:
        """Keep what was recorded until the conductor can be told."""
        if self._recording is not None:
            name = f"replica {self._number}"
            self._recorded = self._recording.end(name, lambda rank: f"{name}, rank {rank}")
            self._recording = None

    def _send_trace(self) -> None:
        """Send what was recorded, on the conductor's clock. Not while a question waits for its answer."""
        if self._recorded is not None:
            (trace, missing), self._recorded = self._recorded, None
            ahead = ahead_of(self._ask_time) / 1e9
            self._tell(Traced(missing), [json.dumps(trace.earlier(ahead).to_chrome()).encode()])

    def _ask_time(self) -> tuple[int, str]:
        answer = read_order(self._seat.ask(question_head(AskTime())).head)
        assert isinstance(answer, Time)
        return answer.nanoseconds, answer.clock

    def _batches_in_a_moment(self, seconds: float) -> int:
        """How many batches to ask for at once, where one takes so long.

        Always one where steps may wait for batches of others, or may be dropped: then each is reported by itself.
        """
        alone = not self._options.asks_ahead or self._options.drops
        return 1 if alone else max(1, min(self._most, int(MOMENT_SECONDS / max(seconds, 1e-6))))

    def _report(self, applied: bool | None) -> bool:
        """After a push: what became of the steps since the last one, on all ranks of the replica together."""
        if applied is None:
            return False
        tally = self._exchange.take_tally()
        speaks = bool(self._exchange.replica.names)
        own = [applied, peak_bytes(self._job.device), tally.sent_bytes, tally.received_bytes, tally.wait_seconds]
        rows = self._job.network.gather([*own, max(tally.staleness, default=0), speaks])
        applies, peaks, sent, received, waits, ages, speakers = zip(*rows, strict=True)
        # The ranks' pushes count as one push of the replica, which counts if any part of it was applied.
        counted = any(took for took, speaks in zip(applies, speakers, strict=True) if speaks) or not any(speakers)
        tally.updates, tally.dropped = int(counted), int(not counted)
        tally.sent_bytes, tally.received_bytes, tally.wait_seconds = int(sum(sent)), int(sum(received)), max(waits)
        tally.staleness = Counter({int(max(ages)): 1} if counted else {})
        # All steps, except those whose push is still under way in a thread beside compute.
        told, self._steps = self._steps[: tally.steps], self._steps[tally.steps :]
        done = StepsDone(tuple(told), bool(counted), tuple(int(peak) for peak in peaks), tally)
        if self._transport.rank == 0:  # the rank that reports to the conductor
            self._done = _together(self._done, done)
        return True

    def _test(self, order: MakeTest) -> None:
        """Test the common weights, and save them where that is due. The other replicas train on."""
        job, diary, begun = self._job, self._transport.diary, now()
        if not self._options.keeps_own:
            self._report(self._exchange.flush())
        # What is counted by now, others' work too, is in the weights that come next.
        self._tell(Settling(self._take_done()))
        tested = None
        with self._exchange.showing():
            files = _files_of(take_snapshot(job), self._transport) if order.save else {}
            with job.tested():
                if order.evaluate:
                    criterion, batch = job.own.loss_on(job.device), job.config.batch
                    tested = evaluate(job.network, job.splits.test, batch=batch, device=job.device, criterion=criterion)
                whole = job.network.whole() if order.wants_weights(tested) else None
                weights = [] if whole is None else [_bytes_of_weights(whole, inference_of(job.config, job.splits))]
            states = [packed(files)] if order.save else []
        self._tell(HasTested(order.after, tested), [*states, *weights])
        if diary is not None:
            diary.note("test", "the common weights", begun)
        self._behind = True  # the others trained on meanwhile: a gradient of the weights tested would be stale

    def _hand_in(self, order: HandIn) -> None:
        """Send what this replica has of its own, of all its ranks; first push what is common and held back."""
        if not self._options.keeps_own:
            self._report(self._exchange.flush())
        name = file_of_rank(f"replica-{self._number}", self._transport.rank)
        own = {name: bytes_of(own_parts(self._exchange, self._job.network))}
        self._tell(HandedIn(order.moment), [packed(_of_all_ranks(own, self._transport))])


def _files_of(snapshot: Snapshot, transport: Transport) -> dict[str, bytes]:
    """The files of a checkpoint, on the first rank of the replica: each rank's own parts in files of its own."""
    rank = transport.rank
    own = {file_of_rank(kind, rank): bytes_of(parts) for kind, parts in snapshot.tensors.items()}
    own[f"rank-{rank}.json"] = json.dumps(snapshot.own).encode()
    own[COMMON] = json.dumps(snapshot.common).encode()  # the same on all of them
    return _of_all_ranks(own, transport)


def _of_all_ranks(files: dict[str, bytes], transport: Transport) -> dict[str, bytes]:
    """The files of all ranks of the replica, which all have."""
    if transport.world == 1:
        return files
    return {name: content for theirs in transport.gather_objects(files) for name, content in theirs.items()}


def _put_own_state(
    checkpoint: Checkpoint, number: int, exchange: Exchange, network: Network, transport: Transport
) -> None:
    """What a replica handed in for the checkpoint from which the run goes on, under whichever plan it is laid now."""

    def put() -> None:
        saved = checkpoint.tensors(f"replica-{number}")
        try:
            exchange.put_own_state(own_state_from(saved, exchange, network))
        except ValueError as error:
            raise CheckpointError(
                f"what replica {number} had of its own does not fit these exchange options: {error}.",
                "Give --exchange-options as they were.",
            ) from None

    agree(transport, put)


def _together(first: StepsDone | None, then: StepsDone) -> StepsDone:
    """Two reports as one: the first may still wait to be sent when the push beside compute is done."""
    if first is None:
        return then
    assert first.applied == then.applied, "what is under way beside compute is never dropped"
    tally = Tally()
    tally.add(first.tally)
    tally.add(then.tally)
    return StepsDone((*first.steps, *then.steps), then.applied, then.peaks, tally)


def _bytes_of_weights(module: torch.nn.Module, inference: Inference) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # safetensors write shared memory once, but only to a file
        path = Path(folder) / "weights"
        save_weights(module, path, inference)
        return path.read_bytes()
