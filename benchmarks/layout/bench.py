"""Do other ways to lay out or overwrite activations pay on this device? One thread, plain modules taking turns.

    python -m benchmarks.layout.bench [--rounds 12]

Forward and backward of each network: in the channels-last layout, and with activations out of place, each as a ratio
to the module as the zoo builds it (default layout, in place).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

CASES = {"alexnet": (224, 16), "vgg16": (64, 8), "resnet18": (64, 16), "unet": (256, 1)}
"""Pixels and samples."""


def seconds(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """One forward and backward pass."""
    model.zero_grad()
    start = time.perf_counter()
    torch.autograd.backward(F.cross_entropy(model(x), y))
    return time.perf_counter() - start


def out_of_place(model: nn.Module) -> nn.Module:
    """The same network, its activations in new memory."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def main() -> None:
    """Print one line per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print("| network | channels last | out of place |\n|---|---|---|")
    for name, (pixels, batch) in CASES.items():
        classes = 2 if name == "unet" else 1000
        plain = shoal.zoo.build(name, input=(3, pixels, pixels), classes=classes).train()
        x = torch.randn(batch, 3, pixels, pixels)
        y = torch.zeros((batch, pixels, pixels) if name == "unet" else (batch,), dtype=torch.int64)
        last: nn.Module = deepcopy(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fresh = out_of_place(deepcopy(plain))
        x_last = x.to(memory_format=torch.channels_last)
        sides: list[Callable[[], float]] = [
            partial(seconds, plain, x, y),
            partial(seconds, last, x_last, y),
            partial(seconds, fresh, x, y),
        ]
        rows = [[side() for side in sides] for _ in range(args.rounds + 2)][2:]
        ratios = [statistics.median(row[side] / row[0] for row in rows) for side in (1, 2)]
        print(f"| {name} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
