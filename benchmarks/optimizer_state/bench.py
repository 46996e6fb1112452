"""Optimizer state whole on every rank, and cut over them: memory of AlexNet under the plan `data`, and time by turns.

    python -m benchmarks.optimizer_state.bench                              # memory, predicted and measured
    python -m benchmarks.optimizer_state.bench --time [--link 1gbit] [--rounds 10]

AlexNet 224x224, one thread a rank. Every case of memory is a world of its own: the largest resident size of a rank
during three steps less that before the network is laid over the ranks, and the number that the cost model predicts.
"""

import argparse
import gc
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal
from benchmarks.common.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import Step, take_turns
from shoal.cluster import Cluster
from shoal.execution.laying import capture_modes, lay
from shoal.finding.auto import cost_model
from shoal.lowering.owners import OptimizerState
from shoal.planning.price import price
from shoal.planning.resolve import resolve
from shoal.profiling.measured import Analytic
from shoal.transport import Transport
from shoal.units import show_bytes

MODULE = "benchmarks.optimizer_state.bench"
PIXELS = 224
STATES: tuple[OptimizerState, ...] = ("whole", "cut")
SLOTS = {"sgd": 1, "adam": 2}
"""Tensors that an optimizer keeps of each parameter."""


def main() -> None:
    """Start every case and print the table, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--link", default="loopback", help="loopback, or the speed between two hosts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--case", nargs=2, metavar=("STATE", "OPTIMIZER"), help="one row of the table alone")
    parser.add_argument("--ranks", type=int, default=2, help="of that row")
    args = parser.parse_args()
    if is_rank():
        rank = become_rank()
        rows = time_of(args) if args.time else memory_of(args)
        if rank == 0:
            print(rows, flush=True)
        dist.destroy_process_group()
    elif args.time or args.case:
        start_ranks(MODULE, sys.argv[1:], args.link, ranks=args.ranks)
    else:
        print(f"AlexNet {PIXELS}x{PIXELS}, plan data, {args.batch} samples a rank", flush=True)
        print("| optimizer | ranks | state | predicted | measured | predicted / measured |\n|---|---|---|---|---|---|")
        for optimizer in SLOTS:
            for ranks in (2, 4):
                for state in STATES:
                    case = ["--batch", str(args.batch), "--case", state, optimizer]
                    start_ranks(MODULE, case, "loopback", ranks=ranks)


def step_of(model: shoal.ParallelModule, optimizer: str, batch: int) -> Step:
    """One step on this rank's samples."""
    x, y = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(0, 1000, (batch,))
    stepping: torch.optim.Optimizer
    if optimizer == "sgd":
        stepping = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    else:
        stepping = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        stepping.zero_grad()
        torch.autograd.backward(model(x, y))
        stepping.step()

    return step


def memory_of(args: argparse.Namespace) -> str:
    """A row of the table: three steps of one case."""
    state, optimizer = args.case
    transport = Transport()
    torch.manual_seed(0)
    net = shoal.zoo.build("alexnet", input=(3, PIXELS, PIXELS), classes=1000)
    captured = capture_modes(net, (args.batch * transport.world, 3, PIXELS, PIXELS), F.cross_entropy)
    speeds = Analytic(Cluster.load("p100-4x4").first(transport.world))
    model = cost_model(
        captured, speeds, transport.world, io="share", optimizer_slots=SLOTS[optimizer], optimizer_state=state
    )
    cuts = resolve("data", captured.graphs[True], transport.world).cuts
    predicted = price(model, cuts, "data").memory[transport.rank].total
    gc.collect()
    before = resident_bytes()
    forget_peak()
    laid = lay(captured, "data", transport, seed=0, bucket_bytes=1 << 20, optimizer_state=state)
    step = step_of(laid, optimizer, args.batch)
    for _ in range(3):
        step()
    taken = peak_bytes() - before
    rows = transport.gather_numbers([float(predicted), float(taken)])
    most = max(rows, key=lambda row: row[1])
    shown = [show_bytes(int(size)) for size in most]
    return f"| {optimizer} | {transport.world} | {state} | {' | '.join(shown)} | {most[0] / most[1]:.2f} |"


def time_of(args: argparse.Namespace) -> str:
    """Both ways by turns, in one run."""
    steps: dict[str, Step] = {}
    for state in STATES:
        torch.manual_seed(0)
        net = shoal.zoo.build("alexnet", input=(3, PIXELS, PIXELS), classes=1000)
        example = (args.batch * dist.get_world_size(), 3, PIXELS, PIXELS)
        laid = shoal.parallelize(net, example, loss=F.cross_entropy, optimizer_state=state)
        steps[state] = step_of(laid, "sgd", args.batch)
    measured = take_turns(steps, rounds=args.rounds, warm_up=2)
    return f"{args.link}, {args.rounds} rounds, {args.batch} samples a rank, sgd\n{measured.table('whole')}"


if __name__ == "__main__":
    main()
