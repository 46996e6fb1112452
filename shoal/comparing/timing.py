"""Steps of all strategies timed in turns on the same ranks, so that the machine's noise meets all of them alike.

Every strategy has its own copy of the network, its optimizer and its share of the same few batches; between replicas it
exchanges as in a loop of one's own. A step is one of `samples_per_step` samples over all workers, whichever strategy.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from math import ceil

import torch

from shoal import launching
from shoal.comparing.turns import take_turns
from shoal.config import TrainConfig
from shoal.data.batch_part import Batch
from shoal.exchanges import ExchangeOptions
from shoal.launching import World, tell_stage
from shoal.machine import threads_each
from shoal.replicas.own_loop import OwnLoop
from shoal.training.device import device_of_rank, kind_of_device
from shoal.training.job import Job, prepare
from shoal.training.step import backward, set_rate, train_step
from shoal.transport import Transport
from shoal.transport.groups import neighbours
from shoal.transport.table import OwnTable

BATCHES = 4
"""Different ones that are read ahead: reading is not what is timed."""
TURN_SECONDS = 0.15
"""A turn is at least so long, or one step."""
MOST_STEPS = 32
"""Of a turn."""
STILL = 1e-6
"""Of the rate, at which steps are timed: weights stay near those of step 0."""


def can_be_timed(config: TrainConfig, workers: int) -> str | None:
    """None; or why this strategy cannot take turns with others on so many workers."""
    if config.workers not in (1, workers):
        return f"it has {config.workers} workers, and the others have {workers}"
    options = config.exchange_settings()
    if options is None:
        return None
    if options.drops:
        return f"{options.name} drops gradients that are late, so that a step is not always as many samples"
    if options.lone_batches:
        return f"its first {options.lone_batches} batches are one replica's alone"
    return "a worker is slow on purpose" if config.slow else None


def whole_periods(options: ExchangeOptions | None, steps: int) -> int:
    """At least so many steps, such that every step's part of the exchange is paid.

    >>> whole_periods(None, 3)
    3
    """
    period = int(getattr(options, "push_every", None) or getattr(options, "period", None) or 1)
    return period * ceil(steps / period)


def time_in_turns(
    configs: Mapping[str, TrainConfig], *, rounds: int, on_stage: Callable[[str, int, int], None] = lambda *_: None
) -> dict[str, list[float]]:
    """Seconds of a step in every round, by strategy; all have as many workers, or one. Starts them and ends them.

    `on_stage` hears what is done by how many of the workers.
    """
    first = max(configs.values(), key=lambda config: config.workers)
    table = OwnTable()  # for servers of exchanges, which are processes of their own
    try:
        results = launching.run(
            _time_on_rank,
            dict(configs),
            table.url,
            rounds,
            workers=first.workers,
            threads=threads_each(first.threads, first.workers),
            timeout=first.timeout,
            device=kind_of_device(first, first.workers),
            on_stage=on_stage,
        )
        return results[0]
    finally:
        table.close()


@dataclass(frozen=True)
class _Side:
    """What a strategy does in a turn of so many steps."""

    step: Callable[[], object]
    options: ExchangeOptions | None
    after: Callable[[], None] = lambda: None
    """Until nothing of the turn is on its way."""
    close: Callable[[], None] = lambda: None

    def turn(self, steps: int) -> Callable[[], None]:
        number = whole_periods(self.options, steps)

        def run() -> None:
            for _ in range(number):
                self.step()
            self.after()

        return run


def _time_on_rank(configs: Mapping[str, TrainConfig], table: str, rounds: int) -> dict[str, list[float]]:
    everyone = Transport()
    world = World(everyone.rank, everyone.world, everyone.rank, everyone.world, "", 0, "shoal", table=table)

    def tell(done: int, of: int, what: str) -> None:
        if what and done % len(configs) == 0:
            tell_stage(f"begin round {done // len(configs) + 1} of {of // len(configs)}")

    with ExitStack() as stack:
        # Groups and networks first: once exchanges are under way nobody new is let in.
        jobs = {name: _prepared(config, everyone) for name, config in configs.items()}
        sides = {}
        for name, job in jobs.items():
            sides[name] = _side(job, configs[name], world, stack)
            tell_stage(f"have prepared {name}")
        tried = take_turns({name: side.turn(1) for name, side in sides.items()}, everyone, rounds=1, warm_up=1)
        steps = {
            name: max(1, min(MOST_STEPS, ceil(TURN_SECONDS * whole_periods(sides[name].options, 1) / taken[0])))
            for name, taken in tried.items()
        }
        turns = {name: side.turn(steps[name]) for name, side in sides.items()}
        taken = take_turns(turns, everyone, rounds=rounds, warm_up=0, progress=tell)
        everyone.gather_numbers([0.0])
        for side in reversed(sides.values()):
            side.close()
        return {
            name: [one / whole_periods(sides[name].options, steps[name]) for one in seconds]
            for name, seconds in taken.items()
        }


def _prepared(config: TrainConfig, everyone: Transport) -> Job | None:
    """This rank's part of a strategy's network, and of its batches; None where it rests while one worker steps."""
    config = config.model_copy(update={"device": device_of_rank(config, everyone.world)})
    options = config.exchange_settings()
    if config.workers == 1:
        return None if everyone.rank else prepare(config, Transport(alone=True), ranks_here=everyone.world)
    if options is None:
        return prepare(config, Transport(), ranks_here=everyone.world)
    each = config.workers // config.replicas
    alone = config.model_copy(
        update={"workers": each, "batch": config.replica_batch, "replicas": 1, "exchange": None, "slow": {}}
    )
    transport = Transport(neighbours(each)) if each > 1 else Transport(alone=True)
    return prepare(alone, transport, ranks_here=everyone.world)


def _side(job: Job | None, config: TrainConfig, world: World, stack: ExitStack) -> _Side:
    if job is None:
        return _Side(lambda: None, None)
    batches = [job.batches(0, step) for step in range(min(BATCHES, job.steps_per_epoch))]
    numbers, rate, options = count(), STILL * config.lr, config.exchange_settings()

    def next_batches() -> list[Batch]:
        return batches[next(numbers) % len(batches)]

    def computed() -> None:
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)

    if options is None:
        return _Side(lambda: train_step(job, next_batches(), rate=rate), None, computed)
    set_rate(job, rate)
    loop = OwnLoop(job.network.module, job.optimizer, options.name, config.exchange_options, world)
    stack.enter_context(loop)  # after an error it is left at once

    def step() -> None:
        backward(job, next_batches())
        loop.step()

    def over() -> None:
        computed()
        loop.wait_until_sent()

    return _Side(step, options, over, loop.close)
