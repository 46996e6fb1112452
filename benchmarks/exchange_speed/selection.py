"""What it costs to select the elements of a gradient that are pushed, beside the step that made it. One thread.

    python -m benchmarks.exchange_speed.selection [--model resnet18] [--rounds 15]

A round is one step (forward, backward, optimizer) and one selection of each kind with a residual, at density 0.01,
from that step's gradient. `dasgd` selects once per n_sync steps, 4 unless told, and then from how far its weights came:
the last row.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

import shoal
from shoal.exchanging.servers.sparse import Remainder, Selection, Selector

SIZES = {"lenet5": ((1, 28, 28), 32, 10), "resnet18": ((3, 32, 32), 32, 10), "alexnet": ((3, 224, 224), 16, 1000)}
KINDS: tuple[Selection, ...] = ("sampled", "topk", "threshold")
CHANGE = "sampled, of a change"


def main() -> None:
    """Time them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="resnet18")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    shape, batch, classes = SIZES[args.model]
    torch.manual_seed(0)
    model = shoal.zoo.build(args.model, input=shape, classes=classes).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x, y = torch.randn(batch, *shape), torch.randint(classes, (batch,))
    like = [parameter.detach().view(-1) for parameter in model.parameters()]
    remainders = {kind: Remainder(Selector(kind=kind, density=0.01, threshold=1e-4), like) for kind in KINDS}
    changes = Remainder(Selector(kind="sampled", density=0.01), like)
    seconds: dict[str, list[float]] = {name: [] for name in ("step", *KINDS, CHANGE)}
    density: dict[str, float] = {}

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()

    for number in range(-2, args.rounds):
        before = [one.clone() for one in like]
        taken = {"step": _timed(step)}
        gradients = [parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None]
        for kind, remainder in remainders.items():
            begun = time.perf_counter()
            found = remainder.take(gradients)
            taken[kind] = time.perf_counter() - begun
            density[kind] = sum(one.nbytes for one in found) / sum(gradient.nbytes for gradient in gradients)
        taken[CHANGE] = _timed(partial(changes.take_change, like, before))
        if number >= 0:
            for name, value in taken.items():
                seconds[name].append(value)
    print(f"{args.model}, batch {batch}, one thread, {args.rounds} rounds")
    print("| | median ms | share of a step | at n_sync 4 | bytes / dense |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        share = statistics.median(a / b for a, b in zip(values, seconds["step"], strict=True))
        sent = f"{density[name]:.4f}" if name in density else ""
        shown = " | | " if name == "step" else f"{share:.1%} | {share / 4:.1%} | {sent}"
        print(f"| {name} | {1000 * statistics.median(values):.1f} | {shown} |")


def _timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
