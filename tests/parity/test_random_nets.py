"""Random small networks under random per-layer plans equal one device, on real processes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import zoo
from shoal.partition import Cut
from shoal.plan import Plan
from tests.conftest import RunOnRanks
from tests.parity.nets import random_net
from tests.parity.plans import randomly
from tests.parity.reference import compare_plan

KINDS = (
    *("conv", "bn", "depthwise", "grouped", "residual", "branches", "max", "avg"),
    *("squeeze", "shuffle", "up", "transpose", "norm"),
)
blocks = st.tuples(
    st.sampled_from(KINDS), st.integers(1, 5), st.sampled_from([1, 2, 3, 5]), st.integers(1, 2), st.integers(1, 2)
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    chosen=st.lists(blocks, min_size=1, max_size=5).map(tuple),
    head=st.sampled_from(["mean", "dense", "pixels"]),
    shape=st.tuples(st.integers(1, 5), st.integers(7, 17), st.integers(7, 17)),
    world=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.timeout(600)
def test_random_networks(
    on_ranks: RunOnRanks, chosen: Any, head: str, shape: tuple[int, int, int], world: int, seed: int
) -> None:
    samples, height, width = shape
    arguments = {"blocks": chosen, "head": head}
    on_ranks(world, compare_plan, random_net, arguments, (samples, 2, height, width), 5, randomly(seed), io="whole")


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_with_the_optimizers_state_cut(on_ranks: RunOnRanks, seed: int) -> None:
    blocks = (("conv", 5, 3, 1, 1), ("bn", 5, 3, 1, 1), ("residual", 4, 3, 1, 1), ("grouped", 4, 3, 2, 2))
    arguments, shape = {"blocks": blocks, "head": "dense"}, (4, 2, 9, 11)
    cut = {"optimizer_state": "cut", "recompute": seed % 2 == 1}
    on_ranks(4, compare_plan, random_net, arguments, shape, 5, randomly(seed), io="whole", **cut)


def volume_net(**options: Any) -> Any:
    return zoo.build("unet", options=options)


@pytest.mark.parametrize("cut", ["d4", "d2h2", "n2d2"])
def test_3d_unet_cut_in_depth(on_ranks: RunOnRanks, cut: str) -> None:
    arguments = {"input": (1, 8, 12, 8), "classes": 3, "width": 2, "depth": 1}
    plan = Plan(name=cut, ranks=4, layers=(("*", Cut.parse(cut)),))
    on_ranks(4, compare_plan, volume_net, arguments, (2, 1, 8, 12, 8), 3, plan)


def test_acoustic_network_cut_in_time(on_ranks: RunOnRanks) -> None:
    arguments = {"input": (1, 40, 61), "classes": 7}
    on_ranks(4, compare_plan, acoustic_net, arguments, (4, 1, 40, 61), 7, in_time)


def acoustic_net(**options: Any) -> Any:
    return zoo.build("acoustic", options=options)


def in_time(captured: Any, ranks: int) -> Plan:
    """Every layer with frames by frames; the dense layers by channel."""
    graph = captured.graphs[True]
    lines = []
    for layer in graph.layers:
        shape = layer.output.shape
        wide = len(shape) == 4 and shape[3] >= ranks
        lines.append((layer.name, Cut.of(w=ranks) if wide else Cut.of(c=min(ranks, shape[1]))))
    return Plan(name="time", ranks=ranks, layers=tuple(lines))
