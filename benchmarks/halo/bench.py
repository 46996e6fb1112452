"""Would computing the interior of a cut convolution first, and its border when the halo has come, pay?

    python -m benchmarks.halo.bench

Two ranks of one thread hold the upper and lower half of images. For each size: a 3x3 convolution of the half with its
halo, forward, as the engine runs it; the same as interior and border put together; and the exchange of the halo rows,
alone and between convolutions (with the wait for the other rank). Hiding the exchange pays where the last column is
larger than what splitting adds. Medians over rounds, both ranks.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.ranks import is_rank, start_ranks
from shoal.transport import Transport

SIZES = [
    (1, 32, 1024, "U-Net, first maps"),
    (1, 256, 128, "U-Net, deep maps"),
    (32, 64, 16, "ResNet-18, 64x64"),
    (32, 128, 8, "ResNet-18, deeper"),
]
"""Samples, channels, pixels, where such a map is found."""


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not is_rank():
        start_ranks("benchmarks.halo.bench", sys.argv[1:], "loopback")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = Transport()
    if transport.rank == 0:
        print("| map (half of it per rank) | whole ms | split adds ms | exchange ms | exchange in a step ms |")
        print("|---|---|---|---|---|", flush=True)
    for samples, channels, pixels, name in SIZES:
        row = measure(transport, samples, channels, pixels, args.rounds)
        if transport.rank == 0:
            whole, split, alone, within = (1000 * seconds for seconds in row)
            size = f"{samples} x {channels} x {pixels} x {pixels}"
            print(
                f"| {name}: {size} | {whole:.2f} | {split - whole:+.2f} | {alone:.2f} | {within - whole:.2f} |",
                flush=True,
            )
    dist.destroy_process_group()


def measure(transport: Transport, samples: int, channels: int, pixels: int, rounds: int) -> list[float]:
    """Median seconds: whole, split, the exchange alone, and the exchange followed by the whole."""
    rows = pixels // 2
    weight = torch.randn(channels, channels, 3, 3) / channels
    tile = torch.randn(samples, channels, rows + 1, pixels)  # with the other rank's row
    edge, theirs = tile[:, :, :1].contiguous(), torch.empty(samples, channels, 1, pixels)

    def whole() -> Tensor:
        return F.conv2d(tile, weight, padding=(0, 1))

    def split() -> Tensor:
        inner = F.conv2d(tile[:, :, 1:], weight, padding=(0, 1))
        return torch.cat([F.conv2d(tile[:, :, :3], weight, padding=(0, 1)), inner], dim=2)

    def exchange() -> None:
        for work in transport.begin_moves([(1 - transport.rank, edge)], [(1 - transport.rank, theirs)], 7):
            work.wait()

    def both() -> None:
        exchange()
        whole()

    sides: list[Callable[[], object]] = [whole, split, exchange, both]
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 2):
        for side, times in zip(sides, found, strict=True):
            transport.gather_numbers([0.0])
            whole()  # so that ranks come from computing, as in a step
            start = time.perf_counter()
            side()
            taken = max(row[0] for row in transport.gather_numbers([time.perf_counter() - start]))
            if number > 1:
                times.append(taken)
    return [statistics.median(times) for times in found]


if __name__ == "__main__":
    main()
