"""Memory to build one rank's half of ResNet-18 with 500,000 classes: whole and then cut, or in parts.

    python -m benchmarks.building.bench [--classes 500000]

Every row is a fresh process of one thread, one after the other. The last layer is cut by class in two, all else is
whole on the rank, as the plan `owt` has it. Peaks are resident sizes above that of the process before it builds.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial

import torch
from torch import Tensor, nn

import shoal.zoo
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from shoal.building import build
from shoal.partition import Box, cut, whole
from shoal.units import show_bytes

MODULE = "benchmarks.building.bench"
LAST = ("fc.weight", "fc.bias")
STARTS = ("torch's own", "normal_", "trunc_normal_")


def main() -> None:
    """Start the processes and print, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=500_000)
    parser.add_argument("--row", nargs=3, metavar=("START", "WAY", "RANK"), help="this process is one row")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.classes, *args.row)))
        return
    print(f"{args.classes:,} classes on 512 features, the second of two ranks")
    print("| last layer's start | way | peak | held after | seconds | same bits |\n|---|---|---|---|---|---|")
    for start in STARTS:
        sums = set()
        for way in ("whole, then cut", "in parts"):
            command = [sys.executable, "-m", MODULE, "--classes", str(args.classes), "--row", start, way, "1"]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            sums.add(row["sum"])
            same = "" if way != "in parts" else "yes" if len(sums) == 1 else "NO"
            sizes = f"{show_bytes(row['peak'])} | {show_bytes(row['held'])}"
            print(f"| {start} | {way} | {sizes} | {row['seconds']:.1f} | {same} |", flush=True)


def network(start: str, classes: int) -> nn.Module:
    """The zoo's ResNet-18, its last layer begun as one likes."""
    model = shoal.zoo.build("resnet18", input=(3, 32, 32), classes=classes)
    weight = model.get_parameter(LAST[0])
    if start != STARTS[0]:
        getattr(nn.init, start)(weight)
    return model


def boxes_of(shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, Box | None]:
    """The rank's classes."""
    return {name: (cut(shape[0], 2)[rank], *whole(shape[1:])) for name, shape in shapes.items()}


def measure(classes: int, start: str, way: str, rank: str) -> dict[str, float]:
    """One row: the peak while building, what is held then, and a number that depends on every bit of the last layer."""
    torch.set_num_threads(1)
    shapes: dict[str, tuple[int, ...]] = {LAST[0]: (classes, 512), LAST[1]: (classes,)}
    boxes = boxes_of(shapes, int(rank))
    build(partial(shoal.zoo.build, "lenet5"), {})  # what is loaded on first use
    before = resident_bytes()
    forget_peak()
    torch.manual_seed(0)
    begun = time.perf_counter()
    if way == "in parts":
        model = build(partial(network, start, classes), boxes)
    else:
        model = network(start, classes)
        for name in LAST:
            keep_rows(model.get_parameter(name), boxes[name])
    seconds = time.perf_counter() - begun
    peak, held = peak_bytes() - before, resident_bytes() - before
    check = sum(int(model.get_parameter(name).detach().view(torch.int32).sum(dtype=torch.int64)) for name in LAST)
    return {"peak": peak, "held": held, "seconds": seconds, "sum": check + int(torch.get_rng_state().sum())}


def keep_rows(parameter: Tensor, box: Box | None) -> None:
    """Cut a parameter that is there whole."""
    assert box is not None
    parameter.data = parameter.data[box[0].start : box[0].stop].clone()


if __name__ == "__main__":
    main()
