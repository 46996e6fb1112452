"""What large tensors in huge pages change: a plain PyTorch step, one thread, with torch's switch off and on in turns.

    python -m benchmarks.huge_pages.bench [--rounds 3]

The switch is read when the first tensor is made, so every turn is a process of its own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

import shoal
from shoal.machine import HUGE_PAGES

CASES = {"alexnet": (224, 16), "resnet18": (64, 16)}
"""Pixels and samples."""


def main() -> None:
    """Run every case with and without, and print the table; or be one turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(step(args.case)))
        return
    print("| network | huge pages | median step s, by round | new pages per step | largest resident MiB |")
    print("|---|---|---|---|---|", flush=True)
    for case in CASES:
        found: dict[str, list[list[float]]] = {"0": [], "1": []}
        for _ in range(args.rounds):
            for switch, rows in found.items():
                command = [sys.executable, "-m", "benchmarks.huge_pages.bench", "--case", case]
                ran = subprocess.run(command, env={**os.environ, HUGE_PAGES: switch}, capture_output=True, check=True)
                rows.append(json.loads(ran.stdout))
        for switch, rows in found.items():
            seconds = ", ".join(f"{row[0]:.3f}" for row in rows)
            pages, resident = (statistics.median(row[i] for row in rows) for i in (1, 2))
            print(
                f"| {case} | {'on' if switch == '1' else 'off'} | {seconds} | {pages:,.0f} | {resident:,.0f} |",
                flush=True,
            )


def step(case: str) -> list[float]:
    """Median seconds of five steps, new pages of the last, and the largest resident size."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    pixels, batch = CASES[case]
    model = shoal.zoo.build(case, input=(3, pixels, pixels), classes=1000).train()
    x, y = torch.randn(batch, 3, pixels, pixels), torch.zeros(batch, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    times, before = [], 0
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        times.append(time.perf_counter() - start)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [statistics.median(times[2:]), used.ru_minflt - before, used.ru_maxrss / 1024]


if __name__ == "__main__":
    main()
