"""How much memory a step needs on each of two ranks, beside one: U-Net on an image cut in height.

    python -m benchmarks.memory.bench [--width 32] [--size 1024] [--recompute]

Every case is a process (or two) of its own. Its number is the largest resident size during three steps less the
resident size before the first: activations, gradients, momenta and temporaries; not the weights, not torch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shoal
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.ranks import is_rank, start_ranks
from shoal.units import show_bytes


def main() -> None:
    """Start every case and print the table, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--recompute", action="store_true", help="also with recompute")
    parser.add_argument("--case", choices=["plain", "shoal", "spatial"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case is not None and (args.case != "spatial" or is_rank()):
        rank_of_case(args)
        return
    if args.case is not None:
        start_ranks("benchmarks.memory.bench", sys.argv[1:], "loopback")
        return
    one = max(run_case(args, "plain", recompute=False))
    print(f"U-Net width {args.width}, {args.size}x{args.size}, batch 1; peak above the size before the first step")
    print("| case | per rank | / plain module on one rank |\n|---|---|---|")
    print(f"| plain module, one rank | {show_bytes(one)} | 1.00 |")
    for recompute in [False, True] if args.recompute else [False]:
        for case, name in (("shoal", "Shoal, one rank"), ("spatial", "Shoal, `spatial`, two ranks")):
            found = run_case(args, case, recompute=recompute)
            shown = ", ".join(map(show_bytes, found))
            print(f"| {name}{', recompute' if recompute else ''} | {shown} | **{max(found) / one:.2f}** |", flush=True)


def run_case(args: argparse.Namespace, case: str, *, recompute: bool) -> list[int]:
    """Bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--width", str(args.width), "--size", str(args.size), "--case", case, "--out", folder]
        options += ["--recompute"] if recompute else []
        subprocess.run([sys.executable, "-m", "benchmarks.memory.bench", *options], check=True)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def rank_of_case(args: argparse.Namespace) -> None:
    """Build, note the resident size, train three steps, note the peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = args.size
    model: nn.Module = shoal.zoo.build("unet", input=(3, size, size), classes=2, options={"width": args.width})
    x, y = torch.randn(1, 3, size, size), torch.randint(0, 2, (1, size, size))
    rank = 0
    if args.case == "spatial":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    if args.case != "plain":
        plan = "spatial" if args.case == "spatial" else "data"
        laid = shoal.parallelize(model, x, plan, io="tile", recompute=args.recompute)
        box, target = laid.input_box, laid.output_box
        assert box is not None
        assert target is not None
        x = x[tuple(slice(span.start, span.stop) for span in box)].clone()
        y = y[tuple(slice(span.start, span.stop) for span in (target[0], *target[2:]))].clone()
        model = laid
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    before = resident_bytes()
    forget_peak()
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    (args.out / f"rank{rank}.json").write_text(json.dumps(peak_bytes() - before))


if __name__ == "__main__":
    main()
