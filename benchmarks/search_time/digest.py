"""One line of hashes per search, to hold two versions of the planner against each other, bit by bit.

    python -m benchmarks.search_time.digest [CASE ...] > new.txt    # and the same with PYTHONPATH at the other version

A case's line hashes every table, and everything that `find` says of every plan; the seconds that it took are on stderr.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.capturing import capture
from shoal.cluster import Cluster
from shoal.lowering.boundary import Boundary
from shoal.partition import Cut
from shoal.planning.costs import CostModel, CostTables
from shoal.planning.find import SearchResult, find, pinned_layers
from shoal.planning.stages import stages_of
from shoal.profiling.measured import Analytic
from shoal.zoo.by_name import build

SAMPLES = {"lenet5": (1, 28, 28), "inception_v3": (3, 299, 299), "unet": (1, 64, 64)}
"""Of one sample; the other networks' are 3 x 224 x 224."""


@dataclass(frozen=True)
class Case:
    """One search: a network on so many devices, and how the model and the search differ from the usual."""

    net: str
    preset: str
    ranks: int
    io: str = "tile"
    model: Mapping[str, Any] = field(default_factory=dict)
    find: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its arguments, as a word."""
        options = [*self.model, *self.find, *([] if self.io == "tile" else [self.io])]
        return "-".join([self.net, self.preset, str(self.ranks), *options])


CASES = (
    Case("lenet5", "p100-4x4", 4),
    Case("alexnet", "p100-4x4", 4),
    Case("vgg16", "p100-4x4", 4),
    Case("inception_v3", "p100-4x4", 4),
    Case("inception_v3", "titan-4", 3, io="share", model={"local_statistics": True}),
    Case("unet", "ethernet-1g", 5),
    Case("mobilenet_v2", "h100-8x32", 8),
    Case("alexnet", "k80-minotauro-16x4", 16, model={"optimizer_state": "cut"}),
    Case("alexnet", "titan-4", 4, model={"factors": "never"}, find={"memory": 700 << 20}),
    Case("resnet18", "p100-4x4", 16, io="share"),
    Case("vgg16", "p100-4x4", 13, find={"pins": {"classifier.*": Cut.of(c=4)}}),
    Case("resnet50", "ethernet-10g", 6, io="whole", model={"optimizer_state": "cut"}),
    Case("mobilenet_v2", "k20-8", 12, find={"memory": 4 << 30}),
    Case("resnet50", "p100-4x4", 64),
    Case("inception_v3", "p100-4x4", 64),
    Case("vgg16", "h100-8x32", 1024),
)


def model_of(case: Case) -> CostModel:
    """The network with 32 samples per device, priced by the cluster's data sheet."""
    sample = SAMPLES.get(case.net, (3, 224, 224))
    graph = capture(build(case.net).train(), torch.empty(8, *sample)).at_batch(32 * case.ranks)
    cluster = Cluster.load(case.preset).resized(case.ranks)
    return CostModel(graph, case.ranks, Analytic(cluster), Boundary(case.io, case.ranks), **case.model)  # type: ignore[arg-type]


def of_tables(tables: CostTables) -> Iterator[bytes]:
    """Every number that is searched."""
    for cost in tables.costs:
        for table in (cost.compute, cost.sums, cost.gradients, cost.update, cost.least, cost.memory):
            yield table.tobytes()
    for edge in tables.edges:
        yield repr((edge.value, edge.variables)).encode() + edge.seconds.tobytes() + edge.memory.tobytes()
    for factor in tables.forbidden:
        yield repr(factor.variables).encode() + factor.costs.tobytes()


def of_result(found: SearchResult) -> Iterator[bytes]:
    """All that is found, but for how long that took; numbers in all their digits."""
    for what in (found.plan, found.bound, dict(found.why), found.stages, found.choices):
        yield repr(what).encode()
    for price in (found.price, *found.candidates, *found.fixed):
        yield repr((price.name, price.cuts, price.ranks, price.seconds, price.compute, price.update)).encode()
        yield repr((price.exposed, price.layers, price.memory, price.bytes, price.factors)).encode()


def hashed(pieces: Iterator[bytes]) -> str:
    """The same for the same bytes."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:16]


def main() -> None:
    """Print the line of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *(case.name for case in CASES)], metavar="CASE")
    wanted = parser.parse_args().cases or [case.name for case in CASES]
    torch.set_num_threads(1)
    for case in CASES:
        if case.name in wanted:
            model, begun = model_of(case), time.process_time()
            found = find(model, **case.find)
            seconds = time.process_time() - begun
            pinned = pinned_layers(model.graph, case.find.get("pins", {}))
            tables = model.tables(stages_of(model.graph, model.ranks, pinned, per_host=model.per_host))
            print(f"{case.name}: tables {hashed(of_tables(tables))}, found {hashed(of_result(found))}", flush=True)
            print(f"{case.name}: {seconds:.2f} s of the processor, {found.price.seconds:.6g} s a step", file=sys.stderr)


if __name__ == "__main__":
    main()
