"""Throughput of two replicas under an exchange, beside two that exchange nothing: the ceiling.

    python -m benchmarks.exchange_speed.bench --model lenet5 [--link 1gbit] [--rounds 15] [--slow 3]

Two replicas of one thread. Every side has its own copy of the network and trains the same number of steps per round,
both replicas at their own pace; a round lasts until both are done. "alone" is one replica while the other rests: what
one worker has.
`--slow 3`: the second replica takes three times as long for its steps, and takes a third of them where the
exchange lets it (asynchronous: each works until the other has done its part of the common number of steps).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import take_turns

SIZES = {
    "lenet5": ((1, 28, 28), 32, 10, 20),
    "resnet18": ((3, 32, 32), 32, 10, 5),
    "alexnet": ((3, 224, 224), 16, 1000, 5),
}
"""Sample, samples of one replica's batch, classes, steps per turn (a multiple of the period is best)."""
HERE: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "downpour": ("downpour", {}),
    "downpour n_sync 4": ("downpour", {"n_sync": 4}),
    "dasgd": ("dasgd", {}),
}
LINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "downpour, server process": ("downpour", {"servers": "processes"}),
    "downpour, server process, n_sync 5": ("downpour", {"servers": "processes", "n_sync": 5}),
    "downpour, threads, n_sync 5": ("downpour", {"servers": "threads", "n_sync": 5}),
    "dasgd, server process": ("dasgd", {"servers": "processes"}),
    "dasgd, server process, n_sync 5": ("dasgd", {"servers": "processes", "n_sync": 5}),
}


class Side:
    """A network in training, its share of steps, and how it steps."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, slow: float) -> None:
        self.model, self.x, self.y, self.slow = model, x, y, slow
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)

    def gradients(self) -> None:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self.model(self.x), self.y))
        if self.slow > 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - begun))


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="lenet5")
    parser.add_argument("--link", default="loopback", help="loopback, or the speed between two hosts: 1gbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--steps", type=int, help="per replica and turn; with --slow many, for a turn ends with the slow one"
    )
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--without-alone", action="store_true", help="leave one worker's own speed out, to save time")
    parser.add_argument("--only", default="", help="names of sides, with semicolons between; all unless given")
    args = parser.parse_args()
    if not is_rank():
        start_ranks("benchmarks.exchange_speed.bench", sys.argv[1:], args.link)
        return
    rank = become_rank()
    shape, batch, classes, steps = SIZES[args.model]
    steps = args.steps or steps
    slow = args.slow if rank == 1 else 1.0
    torch.manual_seed(1 + rank)
    x, y = torch.randn(batch, *shape), torch.randint(classes, (batch,))

    def side() -> Side:
        torch.manual_seed(0)
        return Side(shoal.zoo.build(args.model, input=shape, classes=classes).train(), x, y, slow)

    table = dist.distributed_c10d._get_default_store()
    wanted = {**(HERE if args.link == "loopback" else {"allreduce": HERE["allreduce"]}), **LINKS}
    wanted = {name: one for name, one in wanted.items() if not args.only or name in args.only.split(";")}
    nothing, alone = side(), side()
    sides = {
        "none": _both(nothing, lambda: nothing.optimizer.step(), steps, table, "none", free=True),
        "none again": _both(nothing, lambda: nothing.optimizer.step(), steps, table, "none again", free=True),
        "alone": _alone(alone, steps),
    }
    exchanges = []
    for name, (kind, options) in wanted.items():
        one = side()
        exchange = shoal.exchange(one.model, one.optimizer, kind, **options)
        exchanges.append(exchange)
        sides[name] = _both(one, exchange.step, steps, table, name, free=kind != "allreduce")
    if args.without_alone:
        del sides["alone"]
    measured = take_turns(sides, rounds=args.rounds, warm_up=1)
    tallies = {name: exchange.take_tally() for name, exchange in zip(wanted, exchanges, strict=True)}
    if rank == 0:
        print(
            f"{args.model}, batch {batch} per replica, 2 replicas of one thread, {args.link}, "
            f"slow {args.slow:g}, {args.rounds} rounds of {steps} steps per replica"
        )
        print(
            "| side | median s | share of the ceiling | quartiles | over one worker | staleness "
            "| MB each way per step |\n"
            "|---|---|---|---|---|---|---|"
        )
        for name in sides:
            ratios = [1 / ratio for ratio in measured.ratios(name, "none")]
            low, middle, high = statistics.quantiles(ratios, n=4)
            # alone takes as many steps as both together
            gain = 0.0
            if "alone" in sides:
                gain = statistics.median(1 / ratio for ratio in measured.ratios(name, "alone"))
            told = ""
            if name in tallies:
                tally = tallies[name]
                mean = sum(k * v for k, v in tally.staleness.items()) / max(1, tally.staleness.total())
                sent, received = (count / tally.steps / 1e6 for count in (tally.sent_bytes, tally.received_bytes))
                told = f"{mean:.2f} | {sent:.2f}, {received:.2f}"
            print(
                f"| {name} | {statistics.median(measured.seconds[name]):.3f} | **{middle:.3f}** "
                f"| {low:.3f} to {high:.3f} | {gain:.2f} | {told or ' | '} |"
            )
        print(f"torch {torch.__version__}")
    dist.barrier()
    for exchange in exchanges:
        exchange.close()
    dist.destroy_process_group()


def _alone(side: Side, steps: int) -> Callable[[], None]:
    """All steps of both replicas by the first, which is not slow."""

    def turn() -> None:
        if dist.get_rank() == 0:
            for _ in range(2 * steps):
                side.gradients()
                side.optimizer.step()

    return turn


def _both(
    side: Side, step: Callable[[], object], steps: int, table: object, name: str, *, free: bool
) -> Callable[[], None]:
    """Both replicas share 2 x `steps` steps: evenly in lockstep, else whoever is ready takes the next."""
    turns = iter(range(1_000_000))

    def turn() -> None:
        key = f"{name}/{next(turns)}"
        done = 0
        while (table.add(key, 1) <= 2 * steps) if free else done < steps:  # type: ignore[attr-defined]
            side.gradients()
            step()
            done += 1

    return turn


if __name__ == "__main__":
    main()
