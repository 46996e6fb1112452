"""One replica in training: it asks the conductor for a batch, takes a step, and tells what came of it.

All ranks of a replica run this; the first of them asks, and tells the others what it was told.
"""

import io
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

from shoal.config import TrainConfig
from shoal.data import BatchOrder, Loader
from shoal.exchanges import ExchangeOptions, Served
from shoal.exchanging import Exchange, Meeting, Seat, join, serve_in_threads
from shoal.training import checkpoint
from shoal.training.evaluate import evaluate
from shoal.training.interrupt import StopSignal
from shoal.training.job import Job, prepare
from shoal.training.memory import out_of_memory, peak_bytes
from shoal.transport import Transport

WAIT_SECONDS = 0.01
"""From one question to the next while there is nothing to do."""


def train_replica(
    config: TrainConfig, meeting: Meeting, resumed: Path | None, ranks_here: int, replica: int | None
) -> None:
    """The whole life of one rank of one replica. `replica` None: whatever number the conductor gives a late one.

    `resumed`: the checkpoint from which the run goes on.
    """
    options = config.exchange_settings()
    assert options is not None
    transport = Transport()
    pids = [int(row[0]) for row in transport.gather_numbers([os.getpid()])]
    with StopSignal() as stop:  # the conductor decides what to do about it
        seat = Seat(meeting, rank=transport.rank, replica=replica, pids=pids, heartbeat=options.heartbeat)
        welcome = _told(transport, seat)
        number = welcome["replica"]
        seat.live(number)
        job = _prepare(config, options, transport, number, ranks_here)
        if resumed is not None:
            content = checkpoint.read(resumed, config, job.device)
            checkpoint.put_in(content, job)
            if number:  # the random state is that of the replica that saved
                torch.manual_seed(config.seed + number + content["steps"])
        server = serve_in_threads(seat, number, welcome["servers"]) if welcome["kind"] == "threads" else None
        exchange = join(options, job.network.as_replica(job.optimizer, transport), seat, number)
        exchange.begin(first=not welcome["late"])
        if seat.rank == 0 and number == 0:
            seat.ask({"ask": "plan", "plan": job.network.plan.to_json()})
        slow = (
            config.slow.get("factor", 1) if config.slow.get("rank") == number * transport.world + transport.rank else 1
        )
        try:
            _Life(job, exchange, seat, transport, options, slow, stop).live()
        except (RuntimeError, MemoryError) as error:
            raise out_of_memory(error, config) or error from error
        seat.leave()
        exchange.close()
        if server is not None:
            server.close()


def _told(transport: Transport, seat: Seat) -> Mapping[str, Any]:
    found = transport.gather_objects(dict(seat.welcome) if transport.rank == 0 else None)
    return next(one for one in found if one is not None)


class _Share(BatchOrder):
    """A replica's share of each batch, where all replicas take every step together."""

    def __init__(self, order: BatchOrder, replica: int, replicas: int) -> None:
        super().__init__(samples=order.samples, batch=order.batch * replicas, seed=order.seed)
        self._own = slice(replica * order.batch, (replica + 1) * order.batch)

    def indices(self, epoch: int, step: int) -> Any:
        return super().indices(epoch, step)[self._own]


def _prepare(config: TrainConfig, options: ExchangeOptions, transport: Transport, number: int, ranks_here: int) -> Job:
    """The job of one replica, as if it were alone with its share of the batch."""
    own = config.model_copy(
        update={"workers": transport.world, "batch": config.replica_batch, "replicas": 1, "exchange": None, "slow": {}}
    )
    job = prepare(own, transport, ranks_here=ranks_here)
    if number:  # weights are drawn alike everywhere, dropout's masks are not
        torch.manual_seed(config.seed + number)
    loader = job.loader
    if options.lockstep:
        loader = Loader(loader.data, _Share(loader.order, number, config.replicas), loader.augment, loader.part)
    return replace(
        job,
        loader=loader,
        config=own.model_copy(
            update={"threads": job.config.threads, "device": job.config.device, "data": job.config.data}
        ),
    )


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
    ) -> None:
        self._job, self._exchange, self._seat, self._transport = job, exchange, seat, transport
        self._slow, self._stop = slow, stop
        self._ahead = options.name != "backup"
        """Whether to ask for the next batch before this one is done; not where a step may wait for the batches of
        other replicas."""
        self._steps: list[dict[str, Any]] = []
        """What was trained on and is not part of the common weights yet."""
        self._done: dict[str, Any] | None = None
        self._asked = False
        self._asynchronous = isinstance(options, Served)
        self._behind = False
        """Whether it waited, so that a gradient of the weights it has would be stale."""

    def live(self) -> None:
        """Until told to stop."""
        while True:
            order = self._next()
            match order["order"]:
                case "batch":
                    self._train(order)
                case "test":
                    self._test(order)
                case "wait":
                    self._behind = self._asynchronous
                    if not self._report(self._exchange.flush()):
                        time.sleep(WAIT_SECONDS)
                case "stop":
                    return

    def _next(self) -> Mapping[str, Any]:
        """The next order, the same on all ranks of the replica."""
        order: Mapping[str, Any] | None = None
        if self._transport.rank == 0:
            if not self._asked:
                self._ask()
            order = self._seat.hear().head
            self._asked = False
        if self._transport.world == 1:
            assert order is not None
            return order
        return next(one for one in self._transport.gather_objects(order) if one is not None)

    def _ask(self) -> None:
        if self._transport.rank == 0:
            self._seat.send({"ask": "next", "done": self._done, "stop": bool(self._stop)})
            self._done, self._asked = None, True

    def _train(self, order: Mapping[str, Any]) -> None:
        job = self._job
        if self._ahead:
            self._ask()
        if self._behind:  # the others trained on meanwhile, perhaps a whole warm start
            self._exchange.settle()
            self._behind = False
        begun = time.perf_counter()
        x, y = job.loader.batch(order["epoch"], order["step"])
        job.optimizer.zero_grad(set_to_none=True)
        loss = job.network.loss(x.to(job.device), y.to(job.device))
        torch.autograd.backward(loss)
        if self._slow > 1:
            time.sleep((self._slow - 1) * (time.perf_counter() - begun))
        applied = self._exchange.step(order["rate"])
        part = job.network.part_in_mean(loss, y).item()
        losses = [row[0] for row in job.network.gather([part])]
        self._steps.append({"number": order["number"], "loss": sum(losses), "seconds": time.perf_counter() - begun})
        self._report(applied)

    def _report(self, applied: bool | None) -> bool:
        """After a push: what became of the steps since the last one, on all ranks of the replica together."""
        if applied is None:
            return False
        tally = self._exchange.take_tally()
        speaks = bool(self._exchange.replica.names)
        own = [applied, peak_bytes(self._job.device), tally.sent_bytes, tally.received_bytes, tally.wait_seconds]
        rows = self._job.network.gather([*own, max(tally.staleness, default=0), speaks])
        applies, peaks, sent, received, waits, ages, speakers = zip(*rows, strict=True)
        # One push of the replica, however many of its ranks speak; it counts if any part of it was applied.
        counted = any(one for one, speaks in zip(applies, speakers, strict=True) if speaks) or not any(speakers)
        tally.updates, tally.dropped = int(counted), int(not counted)
        tally.sent_bytes, tally.received_bytes, tally.wait_seconds = int(sum(sent)), int(sum(received)), max(waits)
        tally.staleness = Counter({int(max(ages)): 1} if counted else {})
        self._done = {
            "steps": self._steps,
            "applied": counted,
            "peaks": [int(peak) for peak in peaks],
            "tally": tally.to_dict(),
        }
        self._steps = []
        return True

    def _test(self, order: Mapping[str, Any]) -> None:
        """Test the common weights, and save them where that is due. The other replicas train on."""
        job = self._job
        self._report(self._exchange.flush())
        if self._transport.rank == 0:  # what is counted by now, others' work too, is in the weights that come next
            self._seat.ask({"ask": "settling", "done": self._done})
            self._done = None
        self._exchange.settle()
        tested = None
        if order["evaluate"]:
            tested = evaluate(job.network, job.splits.test, batch=job.config.batch, device=job.device)
        state = checkpoint.state_of(job) if order["save"] else None
        whole = job.network.whole() if order["last"] else None
        if self._transport.rank == 0:
            buffers = [_bytes_of_state(state)] if state is not None else []
            if whole is not None:
                buffers.append(_bytes_of_weights(whole))
            found = None if tested is None else tested.__dict__
            head = {"ask": "tested", "found": found, "after": order["after"], "parameters": job.network.parameters}
            self._seat.ask(head, buffers)
        if not order["last"]:  # the others trained on meanwhile: a gradient of the weights tested would be stale
            self._exchange.settle()


def _bytes_of_state(state: Mapping[str, Any]) -> bytes:
    draft = io.BytesIO()
    torch.save(state, draft)
    return draft.getvalue()


def _bytes_of_weights(module: torch.nn.Module) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # safetensors writes shared tensors once, to files only
        path = Path(folder) / "weights"
        save_model(module, str(path))
        return path.read_bytes()
