"""Throughput of two replicas under an exchange, beside two that exchange nothing: the ceiling.

    python -m benchmarks.exchange_speed.bench --model lenet5 [--sides untold] [--rounds 15] [--slow 3]
    python -m benchmarks.exchange_speed.bench --model resnet18 --link 1gbit
    python -m benchmarks.exchange_speed.bench --model alexnet --link 1gbit --servers 1,2,4

Two replicas of one thread. Every side has its own copy of the network and trains at least the same number of steps per
round, in whole periods of its exchange, both replicas at their own pace; a round lasts until both are done. "alone" is
one replica while the other rests: what one worker has.
`--sides untold`: every exchange as it is unless told otherwise, with the goal that it reached or missed.
`--slow 3`: the second replica takes three times as long for its steps, and takes a third of them where the
exchange lets it (asynchronous: each works until the other has done its part of the common number of steps). Exchanges
that wait for it are left out unless named by `--only`.
`--at-once 4`: sides run in groups of four, each with a ceiling of its own, where memory or ports are short.
`--floor`: DDP, and two replicas that exchange one number after every step, take turns too: what any exchange that waits
in every step has to pay.
`--before CHECKOUT`: the same exchanges of an older Shoal, such as a `git worktree`, take turns with the rest.
`--cpu`: processor time per step instead, of replicas and servers, in all their threads, and the share of the ceiling
that it comes to where every core is busy: for a machine that does other work too. Few rounds will do, of many steps
each (`--rounds 5 --steps 100`).
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.common.before import import_before
from benchmarks.common.memory import require
from benchmarks.common.processor import ProcessorTime
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.trained import Trained, turn_of
from benchmarks.common.turns import Measured, Step, take_turns
from benchmarks.exchange_speed.sides import (
    BETWEEN_HOSTS,
    ON_ONE_HOST,
    Side,
    by_servers,
    with_before,
    without_waiting,
)

SIZES = {
    "lenet5": ((1, 28, 28), 32, 10, 20),
    "resnet18": ((3, 32, 32), 32, 10, 5),
    "alexnet": ((3, 224, 224), 16, 1000, 5),
}
"""Sample, samples of one replica's batch, classes, steps per turn."""
SLOW_STEPS = 4
"""Times as many steps per turn beside a slow replica, with one of whose steps a turn ends."""
PLAIN_COPIES = 3
"""Of the weights: themselves, gradients, momentum."""
REPLICA_COPIES = 5
"""With what an exchange keeps and sends."""
SERVER_COPIES = 6
"""Weights, momentum and sum, and what arrives from two replicas."""
PROCESS_BYTES = 300_000_000
WARM_UP = 1
"""Rounds that do not count."""
CEILING, NULL, ALONE = "none", "none again", "alone"
DDP, MEETING = "ddp", "one number after every step"
HEAD = (
    "| side | steps/s | share of the ceiling | quartiles | goal | over one worker | staleness "
    "| MB each way per step |\n"
    "|---|---|---|---|---|---|---|---|"
)
HEAD_OF_CPU = (
    "| side | processor ms per step: gradients | optimizer and exchange (quartiles) | implied share of the ceiling "
    "| goal | staleness | MB each way per step |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Start the ranks, or be one."""
    args = _arguments()
    if not is_rank():
        require(_memory(args), "Give a smaller --at-once or fewer sides by --only.")
        start_ranks("benchmarks.exchange_speed.bench", sys.argv[1:], args.link)
        return
    rank = become_rank()
    sides, left_out = _chosen(args)
    bench = Bench(args)
    if rank == 0:
        print(bench.title(), flush=True)
        if left_out:
            print(f"Left out, because they wait for the slow replica: {', '.join(left_out)}.")
        print(HEAD_OF_CPU if args.cpu else HEAD, flush=True)
    names = list(sides)
    for first in range(0, len(names), args.at_once or len(names)):
        bench.run({name: sides[name] for name in names[first : first + (args.at_once or len(names))]})
    if rank == 0:
        print(f"torch {torch.__version__}")
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="lenet5")
    parser.add_argument("--link", default="loopback", help="loopback, or the speed between two hosts: 1gbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="per replica and turn")
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--without-alone", action="store_true", help="leave one worker's own speed out, to save time")
    parser.add_argument("--floor", action="store_true", help="DDP, and replicas that only meet, take turns too")
    parser.add_argument("--sides", choices=ON_ONE_HOST, default="all", help="which of those on one host")
    parser.add_argument("--servers", default="", help="sync and downpour by so many servers in their place, as 1,2,4")
    parser.add_argument("--only", default="", help="names of sides, with semicolons between; all unless given")
    parser.add_argument(
        "--at-once", type=int, default=0, help="sides that take turns with each other; all unless given"
    )
    parser.add_argument("--cpu", action="store_true", help="processor time per step instead of steps per second")
    parser.add_argument("--before", type=Path, help="another checkout, whose exchanges take turns too")
    return parser.parse_args()


def _chosen(args: argparse.Namespace) -> tuple[dict[str, Side], list[str]]:
    """The sides that take turns, and the names of those that are left out because a slow replica holds them up."""
    sides = ON_ONE_HOST[args.sides] if args.link == "loopback" else BETWEEN_HOSTS
    if args.servers:
        sides = by_servers([int(servers) for servers in args.servers.split(",")])
    left_out: list[str] = []
    if args.only:
        sides = {name: sides[name] for name in args.only.split(";")}
    elif args.slow > 1:
        sides, left_out = without_waiting(sides)
    return (with_before(sides) if args.before else dict(sides)), left_out


def _memory(args: argparse.Namespace) -> int:
    """About what all processes take together, with the ceiling's and the lone worker's networks."""
    sides = len(_chosen(args)[0])
    at_once = min(args.at_once or sides, sides)
    shape, _, classes, _ = SIZES[args.model]
    with torch.device("meta"):
        weights = shoal.zoo.build(args.model, input=shape, classes=classes).parameters()
    copies = at_once * (2 * REPLICA_COPIES + SERVER_COPIES) + 2 * 2 * PLAIN_COPIES
    return PROCESS_BYTES * (2 + at_once) + copies * sum(weight.nbytes for weight in weights)


@dataclass(frozen=True)
class Entrant:
    """A side in the race: what it does in a turn, and how many steps of each replica that is."""

    turn: Step
    steps: int
    trained: Trained
    side: Side | None = None
    exchange: Any = None


@dataclass(frozen=True)
class Spent:
    """Processor milliseconds per step, in each round: of a replica's gradients, and of all else, servers' too."""

    gradients: list[float]
    beside: list[float]

    @classmethod
    def of(cls, by_rank: list[list[tuple[float, float]]], steps: int) -> "Spent":
        """From what each rank noted of each round: seconds of all, and of its gradients."""
        gradients, beside = [], []
        for ranks in zip(*by_rank, strict=True):
            whole, part = (1000 * sum(column) / len(ranks) / steps for column in zip(*ranks, strict=True))
            gradients.append(part)
            beside.append(whole - part)
        return cls(gradients, beside)


class Bench:
    """Networks of one size, two replicas, and the settings that all sides have."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._shape, self._batch, self._classes, steps = SIZES[args.model]
        self._steps = args.steps or (steps if args.slow == 1 else SLOW_STEPS * steps)
        self._table: Any = dist.distributed_c10d._get_default_store()
        self._turns = count()
        torch.manual_seed(1 + dist.get_rank())
        self._x, self._y = torch.randn(self._batch, *self._shape), torch.randint(self._classes, (self._batch,))
        self._before = import_before(args.before) if args.before else None
        self._nothing, self._alone = self._trained(), self._trained()

    def title(self) -> str:
        """Of the table."""
        args = self._args
        return (
            f"{args.model}, batch {self._batch} per replica, 2 replicas of one thread, {args.link}, "
            f"slow {args.slow:g}, {args.rounds} rounds of {self._steps} steps per replica or the next whole period"
        )

    def run(self, sides: dict[str, Side]) -> None:
        """Let them take turns with the ceiling, and print their lines."""
        with self._entrants(sides) as entrants:
            lines = self._by_processor(entrants) if self._args.cpu else self._by_clock(entrants)
            if dist.get_rank() == 0:
                print("\n".join(lines), flush=True)
            dist.barrier()

    def _by_clock(self, entrants: dict[str, Entrant]) -> list[str]:
        measured = self._take_turns({name: entrant.turn for name, entrant in entrants.items()})
        return [self._line(name, entrants, measured) for name in entrants]

    def _by_processor(self, entrants: dict[str, Entrant]) -> list[str]:
        noted = ProcessorTime(until=dist.barrier)
        self._take_turns(
            {
                name: noted.noting(name, entrant.turn, partial(getattr, entrant.trained, "processor_seconds"))
                for name, entrant in entrants.items()
            }
        )
        by_rank: list[dict[str, list[tuple[float, float]]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, noted.seconds)
        spent = {
            name: Spent.of([own[name][WARM_UP:] for own in by_rank], entrant.steps)
            for name, entrant in entrants.items()
        }
        gradients = statistics.median([each for of in spent.values() for each in of.gradients])
        whole = {name: gradients + statistics.median(of.beside) for name, of in spent.items()}
        return [
            self._line_of_cpu(name, entrant, spent[name], whole[CEILING] / whole[name])
            for name, entrant in entrants.items()
        ]

    def _take_turns(self, sides: dict[str, Step]) -> Measured:
        return take_turns(sides, rounds=self._args.rounds, warm_up=WARM_UP)

    @contextmanager
    def _entrants(self, sides: dict[str, Side]) -> Iterator[dict[str, Entrant]]:
        nothing = self._nothing
        free = self._both(nothing, nothing.optimizer.step, self._steps, free=True)
        entrants = {CEILING: Entrant(free, self._steps, nothing), NULL: Entrant(free, self._steps, nothing)}
        if not self._args.without_alone and not self._args.cpu:
            entrants[ALONE] = Entrant(self._by_the_first, self._steps, self._alone)
        if self._args.floor:
            entrants[DDP], entrants[MEETING] = self._ddp(), self._meeting()
        for name, side in sides.items():
            entrants[name] = self._exchanging(side)
        yield entrants
        for entrant in entrants.values():
            if entrant.exchange is not None:
                entrant.exchange.close()

    def _exchanging(self, side: Side) -> Entrant:
        package: Any = self._before if side.before else shoal
        trained, steps = self._trained(), side.whole_periods(self._steps)
        exchange = package.exchange(trained.model, trained.optimizer, side.exchange, **side.options)
        both = self._both(trained, exchange.step, steps, free=not side.waits_for_all)
        return Entrant(turn_of(both, exchange), steps, trained, side, exchange)

    def _ddp(self) -> Entrant:
        trained = self._trained(DistributedDataParallel)
        return Entrant(self._both(trained, trained.optimizer.step, self._steps, free=False), self._steps, trained)

    def _meeting(self) -> Entrant:
        trained, number = self._trained(), torch.zeros(1)

        def step() -> None:
            trained.optimizer.step()
            dist.all_reduce(number)

        return Entrant(self._both(trained, step, self._steps, free=False), self._steps, trained)

    def _trained(self, wrapped: Callable[[nn.Module], nn.Module] = lambda model: model) -> Trained:
        torch.manual_seed(0)
        model = wrapped(shoal.zoo.build(self._args.model, input=self._shape, classes=self._classes).train())
        return Trained(model, self._x, self._y, slow=self._args.slow if dist.get_rank() == 1 else 1.0)

    def _by_the_first(self) -> None:
        """All steps of both replicas by the first, which is not slow."""
        if dist.get_rank() == 0:
            self._alone.steps(2 * self._steps, self._alone.optimizer.step)

    def _both(self, trained: Trained, step: Callable[[], object], steps: int, *, free: bool) -> Step:
        """Both replicas share 2 x `steps` steps: evenly where they wait for each other, else who is ready takes one."""
        name = next(self._turns)
        turns = count()

        def freely() -> None:
            key = f"turn/{name}/{next(turns)}"
            while self._table.add(key, 1) <= 2 * steps:
                trained.steps(1, step)

        return freely if free else lambda: trained.steps(steps, step)

    def _line(self, name: str, entrants: dict[str, Entrant], measured: Measured) -> str:
        entrant, seconds = entrants[name], statistics.median(measured.seconds[name])
        shares = _speed_ratios(name, CEILING, entrants, measured)
        low, middle, high = statistics.quantiles(shares, n=4)
        gain = statistics.median(_speed_ratios(name, ALONE, entrants, measured)) if ALONE in entrants else None
        return (
            f"| {name} | {2 * entrant.steps / seconds:.2f} | **{middle:.3f}** | {low:.3f} to {high:.3f} "
            f"| {_verdict(entrant.side, middle, self._args)} | {'' if gain is None else f'{gain:.2f}'} "
            f"| {_traffic(entrant.exchange)} |"
        )

    def _line_of_cpu(self, name: str, entrant: Entrant, spent: Spent, share: float) -> str:
        low, beside, high = statistics.quantiles(spent.beside, n=4)
        return (
            f"| {name} | {statistics.median(spent.gradients):.3f} | **{beside:.3f}** ({low:.3f} to {high:.3f}) "
            f"| {share:.3f} | {_verdict(entrant.side, share, self._args)} | {_traffic(entrant.exchange)} |"
        )


def _speed_ratios(name: str, base: str, entrants: dict[str, Entrant], measured: Measured) -> list[float]:
    """Steps per second over those of the base, round by round."""
    longer = entrants[name].steps / entrants[base].steps
    return [longer / ratio for ratio in measured.ratios(name, base)]


def _verdict(side: Side | None, share: float, args: argparse.Namespace) -> str:
    goal = None if side is None or args.link != "loopback" else side.goal(args.slow)
    if goal is None:
        return "none: it waits for all" if side is not None and side.waits_for_all and args.slow > 1 else ""
    return f"{goal}: {'met' if share >= goal else 'MISSED'}"


def _traffic(exchange: Any) -> str:
    """Mean staleness, and megabytes sent and received per step, of this replica."""
    if exchange is None:
        return " | "
    tally = exchange.take_tally()
    staleness = sum(updates * pushes for updates, pushes in tally.staleness.items())
    mean = staleness / max(1, tally.staleness.total())
    return f"{mean:.2f} | {tally.sent_bytes / tally.steps / 1e6:.2f}, {tally.received_bytes / tally.steps / 1e6:.2f}"


if __name__ == "__main__":
    main()
