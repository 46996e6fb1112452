"""Search time beside OptCNN's table, at 64 and at 1,024 devices, and the plan for VGG-16 beside the paper's.

    python -m benchmarks.search_time.bench [paper] [64] [1024] [vgg16] [whole]

Nothing is trained and no device is needed: speeds are a roofline of the cluster's data sheet.
"""

import argparse
import platform
import time
from math import prod
from statistics import median

import numpy as np
import torch

from shoal.capturing import capture
from shoal.cluster import Cluster
from shoal.graph import LayerGraph
from shoal.lowering.boundary import Boundary
from shoal.partition import DIMS
from shoal.planning.costs import EXPOSED, CostModel, CostTables
from shoal.planning.elimination import minimise
from shoal.planning.find import find
from shoal.planning.price import price
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.profiling.measured import Analytic
from shoal.zoo.by_name import build

PAPER = {
    "lenet5": ("0.01 s", "5.6 s"),
    "alexnet": ("0.02 s", "2.1 h"),
    "vgg16": ("0.1 s", "> 24 h"),
    "inception_v3": ("0.4 s", "> 24 h"),
}
"""Seconds of the paper's search, and of its enumeration."""
LAST_OF_BLOCK_4 = 23
"""The number of block 4's pool among VGG-16's features."""
SAMPLES = {"lenet5": (1, 28, 28), "inception_v3": (3, 299, 299)}


def graph_of(net: str, batch: int) -> LayerGraph:
    """Captured at a small batch, then as it would be at a large one."""
    shape = SAMPLES.get(net, (3, 224, 224))
    return capture(build(net).train(), torch.empty(8, *shape)).at_batch(batch)


def model_of(net: str, cluster: Cluster, batch: int) -> CostModel:
    return CostModel(graph_of(net, batch), cluster.ranks, Analytic(cluster), Boundary("tile", cluster.ranks))


def row(net: str, cluster: Cluster, *, repeats: int) -> tuple[str, CostTables]:
    """Stages, choices, seconds of tables and of one search, and how long all combinations would take."""
    model = model_of(net, cluster, 32 * cluster.ranks)
    start = time.perf_counter()
    tables = model.tables(stages_of(model.graph, model.ranks))
    built = time.perf_counter() - start
    sizes = [len(stage.choices) for stage in tables.stages]
    factors = tables.factors(EXPOSED[0])
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        minimise(sizes, factors)
        seconds.append(time.perf_counter() - start)
    text = f"| {net} | {len(sizes)} | {sum(sizes):,} | {built:.2f} s | {median(seconds):.4f} s |"
    return text, tables


def brute(tables: CostTables) -> str:
    """All combinations at the pace of some: one lookup per factor and strategy, vectorised."""
    factors = tables.factors(EXPOSED[0])
    sizes = [len(stage.choices) for stage in tables.stages]
    drawn = np.random.default_rng(0).integers(0, sizes, size=(1000, len(sizes)))
    start = time.perf_counter()
    sum(factor.costs[tuple(drawn[:, v] for v in factor.variables)] for factor in factors)
    each = (time.perf_counter() - start) / len(drawn)
    total = each * float(prod(sizes))
    return f"{total:.2g} s" if total < 1e5 else f"{total / 3.156e7:.1e} years"


def paper() -> None:
    print("| network | stages | choices | tables | search | the paper's search | all combinations | the paper's |")
    print("|---|---|---|---|---|---|---|---|")
    cluster = Cluster.load("p100-4x4").first(4)
    for net, (theirs, enumerated) in PAPER.items():
        text, tables = row(net, cluster, repeats=5)
        print(f"{text} {theirs} | {brute(tables)} | {enumerated} |", flush=True)


def vgg16() -> None:
    """Cuts per layer of the search's optimum when all sums are exposed, and of the plan that wins when played."""
    cluster = Cluster.load("p100-4x4").first(4)
    model = model_of("vgg16", cluster, 128)
    columns = {}
    for letters in (DIMS, DIMS.replace("k", "")):
        tables = model.tables(stages_of(model.graph, 4, letters=letters))
        choice = minimise([len(stage.choices) for stage in tables.stages], tables.factors(1.0)).choice
        name = "all cuts" if letters == DIMS else "without k"
        columns[f"{name}, serial sum"] = tables.cuts(choice)
        columns[f"{name}, played"] = dict(find(model, letters=letters).price.cuts)
    theirs = paper_cuts([stage.name for stage in tables.stages])
    print("| layer | the paper | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for stage in tables.stages:
        cuts = " | ".join(str(column[stage.name]) for column in columns.values())
        print(f"| {stage.name} | {theirs[stage.name]} | {cuts} |")


def paper_cuts(names: list[str]) -> dict[str, str]:
    """The paper's table, by torchvision's names; it has no row for views and the adaptive pool."""
    found = dict.fromkeys(names, "-")
    for name in names:
        part, _, number = name.partition(".")
        if part == "features":
            found[name] = "n4" if int(number) <= LAST_OF_BLOCK_4 else "h2w2"
        elif part == "classifier":
            found[name] = "c2" if number == "6" else "c4"
    return found


WHOLE = (
    *((net, "p100-4x4", 4) for net in PAPER),
    ("inception_v3", "p100-4x4", 64),
    ("resnet50", "p100-4x4", 64),
    ("vgg16", "h100-8x32", 1024),
)


def whole() -> None:
    """All of `find`, tables and simulated candidates included, in wall time and in the processor's; one simulation."""
    print("| network | devices | `find`, wall | processor | predicted step |")
    print("|---|---|---|---|---|")
    for net, preset, ranks in WHOLE:
        model = model_of(net, Cluster.load(preset).resized(ranks), 32 * ranks)
        wall, own = time.perf_counter(), time.process_time()
        found = find(model)
        wall, own = time.perf_counter() - wall, time.process_time() - own
        print(
            f"| {net} | {ranks} like `{preset}` | {wall:.2f} s | {own:.2f} s | {found.price.seconds:.4f} s |",
            flush=True,
        )
    ranks = 4096
    model = model_of("vgg16", Cluster.load("h100-8x32").resized(ranks), 32 * ranks)
    for plan in ("data", "owt"):
        wall, own = time.perf_counter(), time.process_time()
        seconds = price(model, resolve(plan, model.graph, ranks).cuts, plan).seconds
        wall, own = time.perf_counter() - wall, time.process_time() - own
        print(f"| vgg16, `{plan}` simulated | {ranks} | {wall:.2f} s | {own:.2f} s | {seconds:.4f} s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["paper", "64", "1024", "vgg16", "whole"])
    parts = parser.parse_args().parts
    torch.set_num_threads(1)
    if "paper" in parts:
        paper()
    if "64" in parts:
        print(row("inception_v3", Cluster.load("p100-4x4").resized(64), repeats=5)[0], "64 devices")
    if "1024" in parts:
        print(row("vgg16", Cluster.load("h100-8x32").resized(1024), repeats=1)[0], "1,024 devices")
    if "vgg16" in parts:
        vgg16()
    if "whole" in parts:
        whole()
    print(f"torch {torch.__version__}, {platform.platform()}")


if __name__ == "__main__":
    main()
