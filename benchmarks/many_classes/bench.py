"""A last layer with 500,000 classes on 512 features: `owt`, the loss on cut scores, beside DDP.

    python -m benchmarks.many_classes.bench [--link 1gbit] [--rounds 5]

ResNet-18 at 32x32, batch 64 over two ranks of one thread, SGD with momentum. Three things are printed:

memory    each side alone in fresh processes: largest resident size of a rank while the network is built, in all, and
          what of it came after the network was built
bytes     what Shoal's transport counted per rank and step: the scores themselves (128 MB) never move
time      both sides taking turns between two hosts, and the factor that the bytes predict: DDP's step without any
          exchange plus its bytes at the link's speed, over the step of `owt`
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import Step, take_turns
from shoal.units import show_bytes

MODULE = "benchmarks.many_classes.bench"
BATCH, PIXELS = 64, 32
LINK_BYTES = {"1gbit": 125e6}


def main() -> None:
    """Start the ranks and print, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=500_000)
    parser.add_argument("--link", default="1gbit", help="speed between two hosts, or loopback")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["ddp", "owt"], help="this side alone, for its memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if is_rank():
        become_rank()
        memory_of(args) if args.only else time_of(args)
        dist.destroy_process_group()
    elif args.only:
        start_ranks(MODULE, sys.argv[1:], "loopback")
    else:
        print(f"{args.classes:,} classes on 512 features, ResNet-18 {PIXELS}x{PIXELS}, batch {BATCH}, 2 ranks")
        print("| side | while building | peak per rank | after building |\n|---|---|---|---|")
        for side in ("ddp", "owt"):
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    MODULE,
                    "--only",
                    side,
                    "--out",
                    folder,
                    "--classes",
                    str(args.classes),
                ]
                subprocess.run(command, check=True)
                rows = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
                peak, above, building = map(max, zip(*rows, strict=True))
            print(f"| {side} | {show_bytes(building)} | {show_bytes(peak)} | {show_bytes(above)} |", flush=True)
        start_ranks(MODULE, sys.argv[1:], args.link)


def build(classes: int) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return shoal.zoo.build("resnet18", input=(3, PIXELS, PIXELS), classes=classes).train()


def share(classes: int) -> tuple[Tensor, Tensor]:
    """This rank's samples."""
    torch.manual_seed(1 + dist.get_rank())
    rows = BATCH // dist.get_world_size()
    return torch.randn(rows, 3, PIXELS, PIXELS), torch.randint(0, classes, (rows,))


def ddp_step(model: DistributedDataParallel, x: Tensor, y: Tensor, *, exchange: bool = True) -> Step:
    """DDP as its documentation has it; without `exchange`, what it computes and no more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if exchange else model.no_sync():
            torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()

    return step


def owt(classes: int) -> shoal.ParallelModule:
    """The last layer cut by class, the loss on its cut scores."""
    example = (BATCH, 3, PIXELS, PIXELS)
    return shoal.parallelize(lambda: build(classes), example, "owt", loss=F.cross_entropy, batch_norm="local")


def owt_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """One step of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(x, y))
        optimizer.step()

    return step


def memory_of(args: argparse.Namespace) -> None:
    """Three steps of one side."""
    x, y = share(args.classes)
    forget_peak()
    if args.only == "ddp":
        step = ddp_step(DistributedDataParallel(build(args.classes)), x, y)
    else:
        step = owt_step(owt(args.classes), x, y)
    built, building = resident_bytes(), peak_bytes()
    forget_peak()
    for _ in range(3):
        step()
    row = [max(building, peak_bytes()), peak_bytes() - built, building]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{dist.get_rank()}.json").write_text(json.dumps(row))


def time_of(args: argparse.Namespace) -> None:
    """Both sides by turns, with the parts of the prediction."""
    x, y = share(args.classes)
    replica = DistributedDataParallel(build(args.classes))
    parameters = sum(p.numel() * p.element_size() for p in replica.parameters())
    laid = owt(args.classes)
    sides = {
        "ddp": ddp_step(replica, x, y),
        "ddp, no exchange": ddp_step(replica, x, y, exchange=False),
        "shoal owt": owt_step(laid, x, y),
    }
    measured = take_turns(sides, rounds=args.rounds, warm_up=1)
    before = sum(sent.bytes for sent in laid.counted.values())
    sides["shoal owt"]()
    counted = sum(sent.bytes for sent in laid.counted.values()) - before
    if dist.get_rank():
        return
    predicted = laid.predicted()
    total = sum(sent.bytes for sent in predicted.values())
    print(f"\n{args.link}, {args.rounds} rounds\n{measured.table('ddp')}")
    scores = BATCH * args.classes * 4
    print(f"\nsent per rank and step: ddp {parameters / 1e6:,.1f} MB (its gradients)")
    print(
        f"owt {counted / 1e6:,.1f} MB counted, {total / 1e6:,.1f} MB predicted; the scores are {scores / 1e6:,.0f} MB"
    )
    last = {name: sent.bytes for name, sent in predicted.items() if name.startswith(("fc", "loss"))}
    print(f"of it by the last layer and the loss: {last}")
    if args.link in LINK_BYTES:
        speed = LINK_BYTES[args.link]
        ddp, alone, ours = (statistics.median(measured.seconds[name]) for name in sides)
        sending = parameters / speed
        print(
            f"ddp: {ddp:.2f} s measured, {alone + sending:.2f} predicted ({alone:.2f} computing, {sending:.2f} sending)"
        )
        print(f"factor: {ddp / ours:.2f} measured, {(alone + sending) / ours:.2f} from the bytes")


if __name__ == "__main__":
    main()
