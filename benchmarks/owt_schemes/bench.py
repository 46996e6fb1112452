"""Krizhevsky's schemes (a), (b) and (c) for linear layers: what is sent by whom, and the memory of a step.

    MALLOC_MMAP_THRESHOLD_=1048576 THP_MEM_ALLOC_ENABLE=0 python -m benchmarks.owt_schemes.bench

Every scheme runs in processes of its own. Bytes are counted by the transport in one step and compared with what the
plan predicts: the benchmark ends where they differ. Memory is the largest resident size during the steps less that
before the network is laid; predicted is what `shoal.planning.step_memory` says of the program.
"""

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shoal
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from shoal.execution.laying import capture_modes, lay
from shoal.execution.variants import Ready
from shoal.lowering.program import Fetch, Program
from shoal.planning.step_memory import Memory, lapped_memories, step_memories
from shoal.traffic import Sent, total
from shoal.training.laps import step_after_lap
from shoal.transport import Transport
from shoal.units import show_bytes

MODULE = "benchmarks.owt_schemes.bench"
SCHEMES = ("owt", "owt:b", "owt:c", "owt:b1", "owt:c1")
CLASSES = 100


def main() -> None:
    """Start every scheme and print the table, or be one rank of a scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024, help="samples of all ranks together")
    parser.add_argument("--alexnet", type=int, metavar="PIXELS", help="AlexNet, in the place of the small network")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--scheme", choices=SCHEMES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if is_rank():
        rank_of_scheme(args)
        return
    net = "one convolution" if args.alexnet is None else f"AlexNet {args.alexnet}x{args.alexnet}"
    print(f"{net} before 9,216 features, batch {args.batch} on {args.ranks} ranks")
    print("| plan | features sent per rank | by how many at once | all sent per rank | peak, measured | predicted |")
    print("|---|---|---|---|---|---|", flush=True)
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory() as folder:
            start_ranks(MODULE, [*sys.argv[1:], "--scheme", scheme, "--out", folder], "loopback", ranks=args.ranks)
            print(row(scheme, [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]), flush=True)


def row(scheme: str, found: list[dict[str, Any]]) -> str:
    """One line of the table; of memory the largest rank's."""
    largest = max(found, key=lambda one: int(one["peak"]))
    cells = [
        f"`{scheme}`",
        ", ".join(sorted({show_bytes(one["features"]) for one in found})),
        str(found[0]["senders"]),
        ", ".join(sorted({show_bytes(one["sent"]) for one in found})),
        show_bytes(largest["peak"]),
        show_bytes(largest["predicted"]),
    ]
    return f"| {' | '.join(cells)} |"


def rank_of_scheme(args: argparse.Namespace) -> None:
    """Lay, train, and write down what was sent and held."""
    rank, ranks = become_rank(), args.ranks
    torch.manual_seed(0)
    share, pixels = args.batch // ranks, args.alexnet or 48
    model = small() if args.alexnet is None else shoal.zoo.build("alexnet", input=(3, pixels, pixels), classes=CLASSES)
    x, y = torch.randn(share, 3, pixels, pixels), torch.randint(0, CLASSES, (share,))
    captured = capture_modes(model, (args.batch, *x.shape[1:]), F.cross_entropy)
    gc.collect()
    before_laid = resident_bytes()
    forget_peak()
    laid = lay(captured, args.scheme, Transport(), seed=0, bucket_bytes=1 << 20)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    if args.scheme.endswith("1"):
        laid.after_lap(lambda: step_after_lap(optimizer, ranks))
    ready = laid._passes.captured(training=True)
    first, senders = reader_of_features(ready)
    for _ in range(args.steps):
        before = total(laid.counted).bytes
        first_before = laid.counted.get(first, Sent()).bytes
        optimizer.zero_grad()
        torch.autograd.backward(laid(x, y))
        optimizer.step()
    sent, features = total(laid.counted).bytes - before, laid.counted[first].bytes - first_before
    assert sent == total(laid.predicted()).bytes
    assert features == laid.predicted()[first].bytes
    found = {
        "peak": peak_bytes() - before_laid,
        "predicted": memory_of(ready, rank).total,
        "features": features,
        "senders": senders,
        "sent": sent,
    }
    (args.out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def small() -> nn.Module:
    """As many features as AlexNet's, and little else, so that what becomes of them shows in the memory."""
    front = [nn.Conv2d(3, 64, 4, stride=4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*front, nn.Dropout(), nn.Linear(9216, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def reader_of_features(ready: Ready) -> tuple[str, int]:
    """The first linear layer, and how many ranks send at once what it reads."""
    programs = [ready.program] if ready.lapped is None else [lap.program for lap in ready.lapped.laps]
    fetches = [features_of(program) for program in programs]
    return fetches[0].label, max(len({move.src for move in fetch.moves if move.src != move.dst}) for fetch in fetches)


def features_of(program: Program) -> Fetch:
    """The instruction that brings features to the first linear layer: of its kind the one that sends most."""
    fetches = [one for one in program.instructions if isinstance(one, Fetch)]
    return max(fetches, key=lambda fetch: sum(move.elements for move in fetch.moves))


def memory_of(ready: Ready, rank: int) -> Memory:
    """What the program says of this rank."""
    program = ready.program
    itemsize = dict.fromkeys([*program.graph.specs, *program.graph.states], 4)
    if ready.lapped is None:
        return step_memories(program, [rank], itemsize)[0]
    return lapped_memories(program, ready.lapped, [rank], itemsize)[0]


if __name__ == "__main__":
    main()
