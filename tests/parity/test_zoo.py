"""The zoo under every kind of plan equals one device: outputs, gradients, buffers, three optimizer steps, bytes."""

from typing import Any

import pytest

from shoal import zoo
from tests.conftest import RunOnRanks
from tests.parity.plans import randomly
from tests.parity.reference import compare_plan

NETS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "lenet5": ({"input": (1, 28, 28)}, (5, 1, 28, 28)),
    "resnet18": ({"input": (3, 37, 35)}, (4, 3, 37, 35)),
    "mobilenet_v2": ({"input": (3, 33, 35)}, (4, 3, 33, 35)),
    "alexnet": ({"input": (3, 71, 67), "hidden": 40}, (4, 3, 71, 67)),
    "unet": ({"input": (2, 32, 48), "width": 4, "depth": 3}, (4, 2, 32, 48)),
    "acoustic": ({"input": (1, 40, 61)}, (4, 1, 40, 61)),
}
PLANS = ["data", "model", "2x2", "owt", "spatial", "random-1", "random-2", "random-3"]


def build(name: str, **options: Any) -> Any:
    return zoo.build(name, options={"classes": 7, **options})


def plan_of(name: str) -> Any:
    return randomly(int(name.removeprefix("random-"))) if name.startswith("random") else name


def compare(on_ranks: RunOnRanks, world: int, net: str, plan: str, **options: Any) -> None:
    arguments, shape = NETS[net]
    on_ranks(world, compare_plan, build, {"name": net, **arguments}, shape, 7, plan_of(plan), **options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", NETS)
def test_four_ranks(on_ranks: RunOnRanks, net: str, plan: str, thorough: bool) -> None:
    steps = 3 if thorough or net in ("lenet5", "unet", "alexnet") or plan in ("model", "random-1") else 1
    compare(on_ranks, 4, net, plan, steps=steps)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("plan", ["model", "spatial", "random-4"])
def test_other_worlds(on_ranks: RunOnRanks, world: int, plan: str) -> None:
    compare(on_ranks, world, "resnet18", plan)


LARGE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "vgg16": ({"input": (3, 35, 33), "hidden": 30}, (2, 3, 35, 33)),
    "resnet50": ({"input": (3, 33, 37)}, (3, 3, 33, 37)),
}


@pytest.mark.parametrize("plan", ["model", "spatial", "random-6"])
@pytest.mark.parametrize("net", LARGE)
def test_larger_networks_on_two_ranks(on_ranks: RunOnRanks, net: str, plan: str, thorough: bool) -> None:
    arguments, shape = LARGE[net]
    steps = 3 if thorough else 1
    on_ranks(2, compare_plan, build, {"name": net, **arguments}, shape, 7, plan_of(plan), steps=steps)


@pytest.mark.parametrize("plan", PLANS)
def test_inception_with_odd_sizes(on_ranks: RunOnRanks, plan: str, thorough: bool) -> None:
    # At 79 x 77 its last maps are single pixels and a step on four of them is chaos: one device against itself,
    # its weights changed by one bit, is 2e-6 apart after three. So more steps take larger maps and a small rate.
    size = (3, 111, 107) if thorough else (3, 79, 77)
    on_ranks(4, compare_plan, build, {"name": "inception_v3", "input": size}, (4, *size), 7, plan_of(plan),
             steps=3 if thorough else 1, rate=1e-6)  # fmt: skip


@pytest.mark.parametrize("plan", ["data", "spatial", "2x2", "random-5"])
@pytest.mark.parametrize("io", ["whole", "tile"])
def test_other_ways_in_and_out(on_ranks: RunOnRanks, io: str, plan: str) -> None:
    if io == "tile" and plan == "random-5":
        pytest.skip("a random first layer may leave ranks without a box, which have no tile to pass")
    compare(on_ranks, 4, "unet", plan, io=io)


@pytest.mark.parametrize("plan", ["data", "spatial"])
def test_unequal_shares(on_ranks: RunOnRanks, plan: str) -> None:
    compare(on_ranks, 3, "lenet5", plan, shares=(1, 3, 1))
    compare(on_ranks, 2, "lenet5", plan, shares=(5, 0))


@pytest.mark.parametrize("plan", ["data", "model", "2x2", "spatial", "random-7"])
@pytest.mark.parametrize("net", ["unet", "resnet18"])
def test_recomputed(on_ranks: RunOnRanks, net: str, plan: str) -> None:
    compare(on_ranks, 4, net, plan, recompute=True, steps=3 if net == "unet" else 1)
