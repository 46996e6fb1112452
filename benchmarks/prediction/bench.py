"""Predicted against measured step time, and `auto` beside the fixed plans and DDP, all taking turns in one run.

    python -m benchmarks.prediction.bench --model alexnet [--ranks 1] [--link 1gbit] [--rounds 10]

The profile is measured first, by the same ranks (`--known` takes it from the cache instead); the search predicts every
fixed plan and the best it found; then all of them and DDP take turns. `auto` is what the race would choose: the fastest
of the search's optima as measured here. The machine's speed changes within minutes, so the factors by which kernels
take longer in a real step than alone are taken again among the turns: from steps of `data` in which ranks exchange
nothing. No factor is taken from the plans that are predicted.
"error" is (predicted - measured) / measured. Batch norm is `local`, as DDP's.
"""

import argparse
import platform
import statistics
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import Step, take_turns
from benchmarks.step_time.bench import ddp, step_of
from shoal.diary import now
from shoal.execution.laying import capture_modes, lay
from shoal.finding.auto import RACED, cost_model, in_step_of, measured_speeds
from shoal.finding.race import Steps
from shoal.graph import fingerprint
from shoal.planning.find import find
from shoal.planning.price import Price, price
from shoal.profiling.measured import Measured
from shoal.transport import Transport

SIZES = {
    "alexnet": (224, 32, 1000),
    "vgg16": (64, 16, 1000),
    "resnet18": (64, 32, 1000),
    "inception_v3": (107, 8, 1000),
}
"""Pixels, samples of the global batch, classes."""
PLANS = ("data", "owt", "model")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="alexnet")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="loopback", help="loopback, or the speed between two hosts: 1gbit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--known", action="store_true", help="take measurements from the cache where it has them")
    args = parser.parse_args()
    if not is_rank():
        start_ranks("benchmarks.prediction.bench", sys.argv[1:], args.link, ranks=args.ranks)
        return
    become_rank()
    pixels, batch, classes = SIZES[args.model]
    torch.manual_seed(0)
    plain = shoal.zoo.build(args.model, input=(3, pixels, pixels), classes=classes).train()
    captured = capture_modes(plain, (batch, 3, pixels, pixels), F.cross_entropy)
    transport = Transport()
    timings = measured_speeds(captured, transport, fresh=not args.known)
    bucket = transport.good_bucket_bytes()
    model = cost_model(
        captured, Measured(timings), transport.world, io="share", batch_norm="local", bucket_bytes=bucket
    )
    found = transport.gather_objects(find(model) if transport.rank == 0 else None)[0]

    prices: dict[str, Price] = {one.name: one for one in found.fixed if one.name in PLANS}
    if transport.world > 1:
        prices |= {f"auto-{number}": one for number, one in enumerate(found.candidates[:RACED], start=1)}
    share = batch // transport.world
    torch.manual_seed(1 + transport.rank)
    x, y = torch.randn(share, 3, pixels, pixels), torch.randint(0, classes, (share,))
    sides: dict[str, Step] = {"ddp": step_of(ddp(deepcopy(plain)), x, y)} if transport.world > 1 else {}
    for name, one in prices.items():
        laid = lay(captured, one.plan(name), transport, batch_norm="local", seed=0, bucket_bytes=bucket)
        sides[name] = _with_loss(laid, x, y)
    laid = lay(captured, "data", transport, batch_norm="local", seed=0, bucket_bytes=bucket, factors="never")
    steps = Steps()
    quiet = _noting(_with_loss(laid, x, y, sync=False, note=transport), transport, steps)
    measured = take_turns({**sides, "quiet": quiet}, rounds=args.rounds)
    seen = in_step_of(captured, transport, timings, [("data", steps.noted())])
    timings = replace(timings, in_step={fingerprint(captured.graphs[True]): seen})
    model = cost_model(
        captured, Measured(timings), transport.world, io="share", batch_norm="local", bucket_bytes=bucket
    )
    prices = {name: price(replace(model, factors=one.factors), one.cuts, name) for name, one in prices.items()}
    if transport.rank == 0:
        where = args.link if transport.world > 1 else "alone"
        print(f"{args.model} {pixels}x{pixels}, batch {batch}, {transport.world} ranks, {where}, {args.rounds} rounds")
        print("| plan | predicted s | measured s | error | / ddp | MB per step |\n|---|---|---|---|---|---|")
        for name in sides:
            seconds = statistics.median(measured.seconds[name])
            ratio = f"{statistics.median(measured.ratios(name, 'ddp')):.3f}" if "ddp" in sides else ""
            if name in prices:
                one = prices[name]
                error = f"{100 * (one.seconds / seconds - 1):+.1f}%"
                print(f"| {name} | {one.seconds:.4f} | {seconds:.4f} | {error} | {ratio} | {one.bytes / 1e6:.1f} |")
            else:
                print(f"| {name} | | {seconds:.4f} | | {ratio} | |")
        for name, one in prices.items():
            print(
                f"{name}: compute {one.compute:.4f}, exposed {one.exposed:.4f}, update {one.update:.4f}, "
                f"moves {sum(row.transfers for row in one.layers):.4f}, "
                f"sums {sum(row.sums for row in one.layers):.4f}, "
                f"gradients {sum(row.gradients for row in one.layers):.4f}"
            )
        links = [level.model_dump(exclude={"source"}) for level in timings.cluster.levels]
        print(f"links {links}")
        kinds = {name: shown for name, shown in seen.factors.items() if "(" not in name}
        print("times alone: " + ", ".join(f"{name} {factor:.2f}" for name, factor in sorted(kinds.items())))
        print(
            f"per layer {timings.layer_overhead * 1e6:.0f} us, per step {model.speeds.step_overhead * 1e3:.2f} ms, "
            f"update {model.speeds.update_per_byte * 1e9:.3f} ns/B, copy {timings.copy_per_byte * 1e9:.3f} ns/B, "
            f"{len(timings.kernels)} kernels, tables {found.table_seconds:.2f} s, search {found.search_seconds:.2f} s"
        )
        print(f"torch {torch.__version__}, {platform.platform()}, {timings.date}")
    dist.destroy_process_group()


def _with_loss(
    model: shoal.ParallelModule, x: torch.Tensor, y: torch.Tensor, *, sync: bool = True, note: Transport | None = None
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if sync else model.no_sync():
            torch.autograd.backward(model(x, y))
        begun = now()
        optimizer.step()
        if note is not None and note.diary is not None:
            note.diary.note("update", "", begun)

    return step


def _noting(step: Step, transport: Transport, steps: Steps, *, warm_up: int = 2) -> Step:
    """The same, every layer of it noted; not of the first steps, which make buffers and optimizer state."""
    ran = 0

    def noting() -> None:
        nonlocal ran
        ran += 1
        if ran <= warm_up:
            step()
            return
        transport.diary = steps.diary
        steps.diary.begin_step(ran)
        steps.begun[ran] = now()
        step()
        transport.diary = None

    return noting


if __name__ == "__main__":
    main()
