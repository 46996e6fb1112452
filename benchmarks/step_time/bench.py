"""Step time of Shoal's plans beside DDP and FSDP2: two ranks of one thread, taking turns in one run.

    python -m benchmarks.step_time.bench --model alexnet --plans data,owt [--link 1gbit] [--rounds 30]

Every side has its own copy of the same network, the same share of the same batch and the same fused SGD (FSDP2's
tensors have no fused one, so it takes `foreach`). "ddp again" is DDP a second time: the null ratio. Plans
marked `/local` use batch_norm="local", which is what DDP computes; those marked `/factors` and `/sums` always and never
let factors travel in the place of gradients of linear layers, which else is chosen; those marked `/gloo` sum by Gloo
also on one host; "ddp+syncbn" is DDP with a synchronised batch norm of the plain kind (one sum of two numbers per
channel each way). With `--before CHECKOUT` the same plans of an older Shoal take turns with the rest.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.common.before import import_before
from benchmarks.common.ranks import become_rank, is_rank, start_ranks
from benchmarks.common.turns import Step, take_turns
from benchmarks.step_time.sync_batch_norm import with_plain_sync
from shoal.transport.one_host import SWITCH

SIZES = {
    "alexnet": (224, 32, 1000),
    "vgg16": (64, 16, 1000),
    "resnet18": (64, 32, 1000),
    "inception_v3": (107, 8, 1000),
    "mobilenet_v2": (64, 32, 1000),
    "unet": (256, 4, 2),
}
"""Pixels, samples of the global batch, classes."""

MARKS = {"local": {"batch_norm": "local"}, "factors": {"factors": "always"}, "sums": {"factors": "never"}}
"""Options of `parallelize` by how plans are marked."""
BY_GLOO = "gloo"


def step_of(model: nn.Module, x: Tensor, y: Tensor, *, fused: bool = True) -> Step:
    """One training step as a plain loop has it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=fused, foreach=not fused)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()

    return step


def ddp(model: nn.Module) -> nn.Module:
    """As its documentation has it."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Sharded by the children that hold most of the parameters, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.modules():
        if isinstance(child, nn.Linear) and child.weight.numel() > 1_000_000:
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def sums_by_gloo() -> Iterator[dist.ProcessGroup]:
    """A group whose networks sum by Gloo, if they are laid, and called once, in here.

    Networks of one group share its connections; one with another time-out has its own.
    """
    os.environ[SWITCH] = "gloo"
    try:
        yield dist.new_group(timeout=timedelta(minutes=29))
    finally:
        del os.environ[SWITCH]


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="alexnet")
    parser.add_argument("--batch", type=int, help="samples of the global batch; what the model has unless given")
    parser.add_argument("--plans", default="data", help="such as data,owt,data/local,data/factors,data/sums")
    parser.add_argument("--others", default="ddp again,fsdp2", help="beside ddp: ddp again, fsdp2, ddp+syncbn")
    parser.add_argument("--link", default="loopback", help="loopback, or the speed between two hosts: 1gbit")
    parser.add_argument("--ranks", type=int, default=2, help="of this host; between hosts there are two")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--before", type=Path, help="another checkout, whose plans take turns too")
    args = parser.parse_args()
    if not is_rank():
        start_ranks("benchmarks.step_time.bench", sys.argv[1:], args.link, ranks=args.ranks)
        return
    become_rank()
    pixels, batch, classes = SIZES[args.model]
    batch = args.batch or batch
    torch.manual_seed(0)
    plain = shoal.zoo.build(args.model, input=(3, pixels, pixels), classes=classes).train()
    torch.manual_seed(1 + dist.get_rank())
    share = batch // dist.get_world_size()
    x, y = torch.randn(share, 3, pixels, pixels), torch.randint(0, classes, (share,))
    if args.model == "unet":  # a class for every pixel
        y = torch.randint(0, classes, (share, pixels, pixels))

    others: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": ddp,
        "ddp again": ddp,
        "fsdp2": fsdp2,
        "ddp+syncbn": lambda model: ddp(with_plain_sync(model)),
    }
    sides = {
        name: step_of(others[name](deepcopy(plain)), x, y, fused=name != "fsdp2")
        for name in ["ddp", *filter(None, args.others.split(","))]
    }
    laid = {}
    packages = {"shoal": shoal, **({"before": import_before(args.before)} if args.before else {})}
    for package, plan in product(packages, args.plans.split(",")):
        name, *marks = plan.split("/")
        options = {key: value for mark in marks if mark != BY_GLOO for key, value in MARKS[mark].items()}
        with sums_by_gloo() if BY_GLOO in marks else nullcontext() as group:
            model = packages[package].parallelize(
                deepcopy(plain), (batch, 3, pixels, pixels), name, group=group, **options
            )
            laid[f"{package} {plan}"] = model
            sides[f"{package} {plan}"] = step_of(model, x, y)
            sides[f"{package} {plan}"]()
    measured = take_turns(sides, rounds=args.rounds)
    if dist.get_rank() == 0:
        print(
            f"{args.model} {pixels}x{pixels}, batch {batch}, {dist.get_world_size()} ranks of one thread, {args.link}, "
            f"{args.rounds} rounds"
        )
        print(measured.table("ddp"))
        for side, model in laid.items():
            total = sum(sent.bytes for sent in model.predicted().values())
            print(f"{side}: {total / 1e6:.1f} MB sent per rank and step")
        print(f"torch {torch.__version__}, {platform.platform()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
