"""Time to a test accuracy under exchanges and under DDP, between two hosts with a slow link.

    python -m benchmarks.slow_link.time_to_accuracy [--target 0.8] [--seeds 1] [--link 100mbit] [--sides "ddp;local"]

Two hosts, which are network namespaces, with one worker of one thread each; a network of two million parameters on
Fashion-MNIST. One loop for all sides: replica r takes the r-th part of every batch of the same order, the rate falls to
zero over the run (cosine), and every `--test-every` steps the common weights are tested while all wait. The clock runs
from the first step and stands still during tests; what is on its way then is waited for before. Rates are one worker's,
`--lr` and `--momentum`: DDP's are these, and an exchange has what it makes of them when nobody tells it otherwise.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.slow_link.network import WideLeNet
from benchmarks.slow_link.sides import DDP, SIDES, Side, chosen, link_seconds, weight_bytes
from shoal.exchanges import Rates, parse_exchange
from shoal.training.learning_rate import rate_at

REPLICAS = 2
TEST_BATCH = 500
UNLESS_TOLD = "ddp;allreduce;allreduce int8;allreduce topk;local;gossip;downpour"


@dataclass
class Curve:
    """What one side did on one seed."""

    seconds: list[float] = field(default_factory=list)
    """Of training until each test."""
    accuracies: list[float] = field(default_factory=list)

    def seconds_to(self, accuracy: float) -> float | None:
        """Until the first test with so much."""
        pairs = zip(self.seconds, self.accuracies, strict=True)
        return next((seconds for seconds, tested in pairs if tested >= accuracy), None)


@dataclass(frozen=True)
class Joined:
    """A network that is part of a side: how it steps, how its common weights are shown, when nothing is on its way."""

    model: nn.Module
    optimizer: torch.optim.SGD
    step: Callable[[], object]
    showing: Callable[[], AbstractContextManager[None]] = nullcontext
    rest: Callable[[], None] = lambda: None


def main() -> None:
    """Start the ranks, or be one."""
    args = _arguments()
    sides = _chosen(args.sides)
    if not is_rank():
        print(f"The link alone needs about {_expected_seconds(args, sides) / 60:.0f} minutes.", flush=True)
        start_ranks("benchmarks.slow_link.time_to_accuracy", sys.argv[1:], args.link, seconds=4 * 3600)
        return
    rank = become_rank()
    bench = Bench(args)
    if rank == 0:
        print(bench.title(), flush=True)
        print(
            f"| side | rate, momentum | seconds to {args.target} | final accuracy | samples/s |\n|---|---|---|---|---|"
        )
    for name, side in sides.items():
        curves = [bench.train(side, seed) for seed in range(args.seeds)]
        if rank == 0:
            print(bench.line(name, side, curves), flush=True)
    if rank == 0:
        print(f"torch {torch.__version__}")
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit", help="speed between the two hosts")
    parser.add_argument("--data", default="fashion-mnist", help="of 28x28 images in ten classes")
    parser.add_argument("--batch", type=int, default=256, help="over both replicas")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument(
        "--test-every", type=int, default=10, help="steps; a multiple of the exchanges' periods is best"
    )
    parser.add_argument("--test-samples", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", default=UNLESS_TOLD, help=f"with semicolons between, of: ddp; {'; '.join(SIDES)}")
    return parser.parse_args()


def _chosen(names: str) -> dict[str, Side | None]:
    """By name; None is DDP."""
    return {name: None if name == DDP else chosen(name)[name] for name in names.split(";")}


def _expected_seconds(args: argparse.Namespace, sides: dict[str, Side | None]) -> float:
    copies = sum(1.0 if side is None else side.link_copies for side in sides.values())
    return float(args.seeds * args.steps * link_seconds(copies * weight_bytes(WideLeNet()), args.link))


class Bench:
    """The data, and the settings that all sides have."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._splits = shoal.data.load(args.data)
        self._share = args.batch // REPLICAS

    def title(self) -> str:
        """Of the table."""
        args = self._args
        parameters = sum(parameter.numel() for parameter in WideLeNet().parameters())
        return (
            f"{parameters:,} parameters, {args.data}, batch {args.batch} over two hosts of one worker of one thread, "
            f"{args.link}, {args.steps} steps, a test every {args.test_every}, {args.seeds} seeds"
        )

    def train(self, side: Side | None, seed: int) -> Curve:
        """One run of a side."""
        curve, seconds = Curve(), 0.0
        order = shoal.data.BatchOrder(samples=len(self._splits.train), batch=self._args.batch, seed=seed)
        with self._joined(side, seed) as joined:
            for first in range(0, self._args.steps, self._args.test_every):
                steps = range(first, min(first + self._args.test_every, self._args.steps))
                seconds += _slowest(lambda steps=steps: self._train_on(joined, side, order, steps))  # type: ignore[misc]
                curve.seconds.append(seconds)
                curve.accuracies.append(self._tested(joined))
        return curve

    def line(self, name: str, side: Side | None, curves: list[Curve]) -> str:
        """Of the table."""
        rates = self._rates(side)
        times = [curve.seconds_to(self._args.target) for curve in curves]
        reached = ", ".join("never" if seconds is None else f"{seconds:.1f}" for seconds in times)
        final = ", ".join(f"{curve.accuracies[-1]:.4f}" for curve in curves)
        samples = self._args.batch * self._args.steps
        speed = statistics.median(samples / curve.seconds[-1] for curve in curves)
        return f"| {name} | {rates.lr:g}, {rates.momentum:g} | {reached} | {final} | {speed:,.0f} |"

    def _rates(self, side: Side | None) -> Rates:
        """What a side makes of one worker's rates."""
        given = Rates(self._args.lr, self._args.momentum)
        return given if side is None else parse_exchange(side.exchange, side.options).tuned(given, REPLICAS)

    @contextmanager
    def _joined(self, side: Side | None, seed: int) -> Iterator[Joined]:
        torch.manual_seed(seed)
        model, rates = WideLeNet().train(), self._rates(side)
        optimizer = torch.optim.SGD(model.parameters(), lr=rates.lr, momentum=rates.momentum, fused=True)
        if side is None:
            yield Joined(DistributedDataParallel(model), optimizer, optimizer.step)
            return
        with shoal.exchange(model, optimizer, side.exchange, **side.options) as exchange:
            inner: Any = exchange._exchange
            yield Joined(model, optimizer, exchange.step, inner.showing, exchange.wait_until_sent)

    def _train_on(self, joined: Joined, side: Side | None, order: shoal.data.BatchOrder, steps: range) -> None:
        """Until this replica is done with these steps, and nothing of it is on its way."""
        first = dist.get_rank() * self._share
        rates = self._rates(side)
        for step in steps:
            indices = order.indices(*divmod(step, order.steps_per_epoch))[first : first + self._share]
            x, y = self._splits.train.batch(indices)
            joined.optimizer.param_groups[0]["lr"] = self._rate_of(step, rates)
            joined.optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(joined.model(x), y))
            joined.step()
        joined.rest()

    def _rate_of(self, step: int, rates: Rates) -> float:
        """As `shoal train` has it."""
        return rate_at(step, peak=rates.lr, schedule="cosine", warmup_steps=0, total_steps=self._args.steps)

    def _tested(self, joined: Joined) -> float:
        """Accuracy of the common weights, by the first replica while the other waits."""
        right = torch.zeros(1)
        if dist.get_rank() == 0:
            with joined.showing():
                right += self._right(_plain(joined.model))
        dist.broadcast(right, 0)
        return float(right.item() / self._args.test_samples)

    def _right(self, model: nn.Module) -> int:
        model.eval()
        right = 0
        test = self._splits.test
        with torch.inference_mode():
            for first in range(0, self._args.test_samples, TEST_BATCH):
                indices = shoal.data.first_indices(len(test))[first : first + TEST_BATCH]
                x, y = test.batch(indices)
                right += int((model(x).argmax(1) == y).sum())
        model.train()
        return right


def _plain(model: nn.Module) -> nn.Module:
    """Without DDP around it, which would have the other rank take part."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _slowest(work: Callable[[], None]) -> float:
    """Seconds from when all begin until the last is done."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


if __name__ == "__main__":
    main()
