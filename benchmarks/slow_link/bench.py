"""Throughput of exchanges beside DDP, between two hosts with a slow link.

    python -m benchmarks.slow_link.bench --model resnet18 [--sides "local;downpour;gossip"] [--link 100mbit]
    python -m benchmarks.slow_link.bench --model alexnet

Two hosts, which are network namespaces, with one worker of one thread each. All sides take turns in one run; a turn has
whole periods of an exchange, and lasts until both replicas are done and nothing is on its way. Sides have turns of
different length: what is compared is samples per second. "ddp again" is DDP a second time: the null ratio.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.common.memory import require
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.trained import Trained, turn_of
from benchmarks.common.turns import Measured, Step, take_turns
from benchmarks.slow_link.sides import DDP, SIDES, Side, chosen, link_seconds, weight_bytes

DDP_AGAIN = "ddp again"


@dataclass(frozen=True)
class Size:
    """A network, its samples, and how long it is measured."""

    shape: tuple[int, int, int]
    batch: int
    """Samples of one replica."""
    classes: int
    rounds: int
    ddp_steps: int
    """Steps of a turn, of DDP and at least of every other side."""
    goal: float
    """Least throughput of `local` over DDP's."""


SIZES = {
    "resnet18": Size((3, 32, 32), 32, 10, rounds=7, ddp_steps=2, goal=1.7),
    "alexnet": Size((3, 224, 224), 16, 1000, rounds=3, ddp_steps=1, goal=5.0),
}
DDP_COPIES, REPLICA_COPIES, SERVER_COPIES = 4, 5, 6
"""Of the weights, that a process holds, about."""


@dataclass(frozen=True)
class Entrant:
    """What a side does in a turn, and how many steps of each replica that is."""

    turn: Step
    steps: int
    exchange: Any = None


def main() -> None:
    """Start the ranks, or be one."""
    args = _arguments()
    size = SIZES[args.model]
    sides = chosen(args.sides)
    rounds = args.rounds or size.rounds
    with torch.device("meta"):
        weights = weight_bytes(_network(args.model))
    if not is_rank():
        copies = 2 * DDP_COPIES + len(sides) * (2 * REPLICA_COPIES + SERVER_COPIES)
        require(copies * weights, "Give fewer --sides.")
        expected = _expected_seconds(size, sides, weights, args.link, rounds)
        print(f"The link alone needs about {expected / 60:.0f} minutes.", flush=True)
        start_ranks("benchmarks.slow_link.bench", sys.argv[1:], args.link)
        return
    rank = become_rank()
    entrants = _entrants(args.model, sides)
    turns = {name: entrant.turn for name, entrant in entrants.items()}
    measured = take_turns(turns, rounds=rounds, warm_up=1)
    lines = [_line(name, entrants, measured, size, weights) for name in entrants]
    if rank == 0:
        print(
            f"{args.model}, {size.shape[1]}x{size.shape[2]}, batch {size.batch} per replica, two hosts of one worker "
            f"of one thread, {args.link}, {rounds} rounds"
        )
        print("| side | samples/s | over ddp | quartiles | MB sent, received per step by host 2 | goal |")
        print("|---|---|---|---|---|---|")
        print("\n".join(lines))
        print(f"torch {torch.__version__}")
    dist.barrier()
    for entrant in entrants.values():
        if entrant.exchange is not None:
            entrant.exchange.close()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="resnet18")
    parser.add_argument("--link", default="100mbit", help="speed between the two hosts")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--sides", default="local", help=f"with semicolons between, of: {'; '.join(SIDES)}")
    return parser.parse_args()


def _network(name: str) -> nn.Module:
    return shoal.zoo.build(name, input=SIZES[name].shape, classes=SIZES[name].classes)


def _steps(side: Side, size: Size) -> int:
    """Of a turn: whole periods."""
    return side.period * ceil(size.ddp_steps / side.period)


def _expected_seconds(size: Size, sides: Mapping[str, Side], weights: int, link: str, rounds: int) -> float:
    """Time on the link of all turns, the first round included, which does not count."""
    copies = 2 * size.ddp_steps + sum(_steps(side, size) * side.link_copies for side in sides.values())
    return (rounds + 1) * link_seconds(copies * weights, link)


def _entrants(model: str, sides: Mapping[str, Side]) -> dict[str, Entrant]:
    size = SIZES[model]
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(size.batch, *size.shape), torch.randint(size.classes, (size.batch,))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return _network(model).train()

    trained = Trained(DistributedDataParallel(network()), x, y)
    ddp = Entrant(lambda: trained.steps(size.ddp_steps, trained.optimizer.step), size.ddp_steps)
    return {
        DDP: ddp,
        DDP_AGAIN: ddp,
        **{name: _exchanging(Trained(network(), x, y), side, _steps(side, size)) for name, side in sides.items()},
    }


def _exchanging(trained: Trained, side: Side, steps: int) -> Entrant:
    exchange = shoal.exchange(trained.model, trained.optimizer, side.exchange, **side.options)
    return Entrant(turn_of(lambda: trained.steps(steps, exchange.step), exchange), steps, exchange)


def _line(name: str, entrants: Mapping[str, Entrant], measured: Measured, size: Size, weights: int) -> str:
    """Of the table; a collective of both ranks."""
    entrant, base = entrants[name], entrants[DDP]
    speed = 2 * size.batch * entrant.steps / statistics.median(measured.seconds[name])
    over = [entrant.steps / base.steps / ratio for ratio in measured.ratios(name, DDP)]
    low, middle, high = statistics.quantiles(over, n=4)
    sent, received = _bytes_per_step(entrant, weights)
    verdict = f"{size.goal}: {'met' if middle >= size.goal else 'MISSED'}" if name == "local" else ""
    return (
        f"| {name} | {speed:.1f} | **{middle:.2f}** | {low:.2f} to {high:.2f} "
        f"| {sent / 1e6:.2f}, {received / 1e6:.2f} | {verdict} |"
    )


def _bytes_per_step(entrant: Entrant, weights: int) -> tuple[float, float]:
    """Sent and received by the second host, where no server is before there are two; of two ranks DDP sends a copy."""
    if entrant.exchange is None:
        return weights, weights
    tally = entrant.exchange.take_tally()
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (tally.sent_bytes / tally.steps, tally.received_bytes / tally.steps))
    sent, received = told[1]
    return sent, received


if __name__ == "__main__":
    main()
