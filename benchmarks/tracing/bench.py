"""What recording costs: steps of one network with and without it, taking turns in one run.

    python -m benchmarks.tracing.bench [--models lenet5,alexnet,resnet18] [--plan data] [--rounds 60]

Two ranks of one thread. The same network and optimizer take every step, so that nothing but the recording differs;
"off again" is a step without it a second time: the null ratio. "on" notes all that `shoal.trace()` notes.
"""

import argparse
import platform
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import Measured, Step, take_turns
from shoal.tracing.own_loop import OwnSteps

SIZES = {"lenet5": (1, 28, 64, 10), "alexnet": (3, 127, 16, 100), "resnet18": (3, 32, 32, 100)}
"""Channels, pixels, samples of the global batch, classes."""


def measure(name: str, plan: str, rounds: int) -> tuple[Measured, int]:
    """The turns of one network, and how many notes a recorded step has on this rank."""
    channels, pixels, batch, classes = SIZES[name]
    torch.manual_seed(0)
    network = shoal.zoo.build(name, input=(channels, pixels, pixels), classes=classes).train()
    model = shoal.parallelize(network, (batch, channels, pixels, pixels), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    share = batch // dist.get_world_size()
    x, y = torch.randn(share, channels, pixels, pixels), torch.randint(0, classes, (share,))
    recorder = OwnSteps(name)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()

    def recorded() -> None:
        recorder.begin()
        step()
        recorder.pause()

    sides: dict[str, Step] = {"off": step, "off again": step, "on": recorded}
    measured = take_turns(sides, rounds=rounds)
    return measured, len(recorder.notes.events) // (rounds + 2)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet5,alexnet,resnet18", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--plan", default="data")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    if not is_rank():
        start_ranks("benchmarks.tracing.bench", sys.argv[1:], "loopback")
        return
    become_rank()
    for name in args.models.split(","):
        measured, notes = measure(name, args.plan, args.rounds)
        if dist.get_rank() == 0:
            pixels, batch = SIZES[name][1:3]
            print(
                f"{name} {pixels}x{pixels}, batch {batch}, plan {args.plan}, {args.rounds} rounds, {notes} notes a step"
            )
            print(measured.table("off"))
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {platform.platform()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
