"""Does Shoal's loop on one worker cost anything over a bare PyTorch loop?

Both train the same network on the same batches, one epoch at a time, taking turns in one process, so that
whatever disturbs the machine disturbs both. A pair is one epoch of each; the null ratio is the bare loop
against itself.

    python benchmarks/single_worker/bench.py [--pairs 15] [--model lenet5] [--data fashion-mnist]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.progress import track
from torch.nn import functional as F

import shoal
from shoal.data import BatchOrder


def bare_epoch(args: argparse.Namespace) -> float:
    """Seconds of one epoch as anybody would write it; indices and normalisation included, set-up not."""
    splits = shoal.data.load(args.data)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = shoal.zoo.build(args.model, input=splits.train.shape, classes=splits.train.classes).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    order = BatchOrder(samples=len(splits.train), batch=args.batch, seed=0)
    order.indices(0, 0)  # draws the permutation
    start = time.perf_counter()
    for step in range(order.steps_per_epoch):
        x, y = splits.train.batch(order.indices(0, step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
    return time.perf_counter() - start


def shoal_epoch(args: argparse.Namespace) -> float:
    """Seconds of one epoch of the real thing: metrics, timing, interruption and listener included."""
    with tempfile.TemporaryDirectory() as folder:
        config = shoal.TrainConfig(
            model=args.model,
            data=args.data,
            epochs=1,
            batch=args.batch,
            lr=args.lr,
            schedule="constant",
            threads=args.threads,
            out=Path(folder) / "run",
        )
        result = shoal.train(config)
        return result.samples / result.samples_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    ratios, nulls = [], []
    bare_epoch(args), shoal_epoch(args)  # warm-up
    for _ in track(range(args.pairs), "pairs"):
        bare, ours, again = bare_epoch(args), shoal_epoch(args), bare_epoch(args)
        ratios.append(ours / statistics.mean([bare, again]))
        nulls.append(again / bare)
    for name, values in (("shoal / bare", ratios), ("bare / bare (null)", nulls)):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:20} median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
