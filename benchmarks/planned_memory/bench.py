"""Memory as predicted and as measured, and a plan found under a limit that no data-parallel step keeps to.

    python -m benchmarks.planned_memory.bench                    # the table: networks and plans, predicted and measured
    python -m benchmarks.planned_memory.bench --limit 700MiB     # AlexNet: search under the limit, run, measure

Every case is a process (or two) of its own. Measured is the largest resident size during three steps less the resident
size before the network is laid: shards, gradients, momenta, activations and temporaries. Speeds for the search are a
data sheet's.
"""

import argparse
import gc
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.ranks import is_rank, start_ranks
from shoal.cluster import Cluster
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.finding.auto import cost_model
from shoal.finding.race import time_steps
from shoal.plan import Plan
from shoal.planning.find import find
from shoal.planning.price import price
from shoal.planning.resolve import resolve
from shoal.profiling.measured import Analytic
from shoal.transport import Transport
from shoal.units import parse_quantity, show_bytes

MODULE = "benchmarks.planned_memory.bench"
CASES = [
    ("alexnet", 224, 32, "data", 1, False),
    ("alexnet", 224, 32, "owt", 2, False),
    ("vgg16", 64, 16, "data", 1, False),
    ("resnet18", 64, 32, "data", 1, False),
    ("resnet18", 64, 32, "spatial", 2, False),
    ("inception_v3", 107, 8, "data", 1, False),
    ("unet", 512, 1, "data", 1, False),
    ("unet", 512, 1, "spatial", 2, False),
    ("resnet18", 64, 32, "data", 1, True),
    ("resnet18", 64, 32, "spatial", 2, True),
    ("unet", 512, 1, "data", 1, True),
    ("unet", 512, 1, "spatial", 2, True),
]
"""Network, pixels, samples of the global batch, plan, ranks, whether the step recomputes."""


def main() -> None:
    """Start every case and print the table, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", help="find a plan for AlexNet on two ranks under so many bytes, such as 700MiB")
    parser.add_argument("--case", type=int)
    parser.add_argument("--side", choices=["data", "found"])
    args = parser.parse_args()
    if args.limit and not is_rank():
        print(f"AlexNet 224x224, batch 32, 2 ranks, at most {args.limit} on each", flush=True)
        for side in ("data", "found"):
            start_ranks(MODULE, ["--limit", args.limit, "--side", side], "loopback")
    elif args.limit:
        limited(int(parse_quantity(args.limit, "bytes")), args.side)
    elif args.case is None:
        print(
            "| network | plan | ranks | predicted | measured | predicted / measured |\n|---|---|---|---|---|---|",
            flush=True,
        )
        for number in range(len(CASES)):
            subprocess.run([sys.executable, "-m", MODULE, "--case", str(number)], check=True)
    elif CASES[args.case][4] > 1 and not is_rank():
        start_ranks(MODULE, sys.argv[1:], "loopback")
    else:
        held_against(*CASES[args.case])


def held_against(name: str, pixels: int, batch: int, plan: str, ranks: int, recompute: bool) -> None:
    """One row of the table."""
    transport, captured = _begin(name, pixels, batch, ranks)
    graph = captured.graphs[True]
    model = cost_model(captured, Analytic(Cluster.load("p100-4x4").first(ranks)), ranks)
    priced = price(model, resolve(plan, graph, ranks).cuts, plan, recompute=recompute)
    predicted = priced.memory[transport.rank].total
    measured = _measured(captured, priced.plan(plan), transport)
    rows = transport.gather_numbers([float(predicted), float(measured)])
    if transport.rank == 0:
        most = max(rows, key=lambda row: row[1])
        way = f"{plan}, recompute" if recompute else plan
        print(
            f"| {name} {pixels}x{pixels}, batch {batch} | {way} | {ranks} | {show_bytes(int(most[0]))} "
            f"| {show_bytes(int(most[1]))} | {most[0] / most[1]:.2f} |",
            flush=True,
        )


def limited(limit: int, side: str) -> None:
    """What a data-parallel step takes, or the plan that is found under the limit."""
    transport, captured = _begin("alexnet", 224, 32, 2)
    model = cost_model(captured, Analytic(Cluster.load("titan-4").first(2)), 2)
    found = find(model, memory=limit)
    price = found.price if side == "found" else next(one for one in found.fixed if one.name == side)
    plan = price.plan(side)
    measured = max(row[0] for row in transport.gather_numbers([float(_measured(captured, plan, transport))]))
    if transport.rank == 0:
        print(f"{side}: predicted peak {show_bytes(price.peak)}, measured {show_bytes(int(measured))}", flush=True)
        if side == "found":
            print({name: str(cut) for name, cut in plan.layers if "." in name})
        assert (measured < limit) == (side == "found")


def _begin(name: str, pixels: int, batch: int, ranks: int) -> tuple[Transport, Captured]:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    classes = 2 if name == "unet" else 1000
    net = shoal.zoo.build(name, input=(3, pixels, pixels), classes=classes)
    target = torch.zeros(batch, pixels, pixels, dtype=torch.int64) if name == "unet" else None
    return Transport(), capture_modes(net, (batch, 3, pixels, pixels), F.cross_entropy, target)


def _measured(captured: Captured, plan: Plan, transport: Transport) -> int:
    gc.collect()
    before = resident_bytes()
    forget_peak()
    laid = lay(captured, plan, transport, io="tile", seed=0, bucket_bytes=1 << 20)
    time_steps(laid, captured, transport)
    return peak_bytes() - before


if __name__ == "__main__":
    main()
