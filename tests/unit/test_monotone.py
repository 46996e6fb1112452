"""Faster links and more devices never make a step longer."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.cluster import Cluster
from shoal.errors import PlanError
from shoal.finding.auto import cost_model, find_plan
from shoal.partition import Cut
from shoal.planning.costs import CostModel
from shoal.planning.fewer import find_on_some, numbers_of_ranks
from shoal.planning.find import find
from shoal.planning.price import price
from shoal.planning.resolve import resolve
from shoal.simulating.what_if import Change
from tests.unit.test_costs import Simple, captured
from tests.unit.test_transfers import cluster_of

pytestmark = pytest.mark.usefixtures("one_thread")

NETS = ("lenet5", "residual", "inception")
ROUNDING = 1 + 1e-9


def on(cluster: Cluster, net: str, batch: int | None = None) -> CostModel:
    model = cost_model(captured(net), Simple(cluster), cluster.ranks)
    return model if batch is None else replace(model, graph=model.graph.at_batch(batch))


@settings(deadline=None, max_examples=25)
@given(
    net=st.sampled_from(NETS),
    levels=st.sampled_from([(4,), (2, 4), (2, 8)]),
    shared=st.booleans(),
    plan=st.sampled_from(["data", "model", "owt", "spatial"]),
    slow=st.floats(0.01, 100),
    more=st.floats(1, 100),
)
def test_a_plan_takes_no_longer_on_faster_links(
    net: str, levels: tuple[int, ...], shared: bool, plan: str, slow: float, more: float
) -> None:
    cluster = cluster_of(*levels, shared=shared)
    steps = []
    for factor in (slow, slow * more):
        model = on(Change(bandwidth=factor).of(cluster, cluster.ranks), net)
        steps.append(price(model, resolve(plan, model.graph, model.ranks).cuts, plan).seconds)
    assert steps[1] <= steps[0] * ROUNDING


@settings(deadline=None, max_examples=5)
@given(net=st.sampled_from(NETS), shared=st.booleans(), slow=st.floats(0.05, 20), more=st.floats(1, 20))
def test_the_plan_that_is_found_takes_no_longer_on_faster_links(
    net: str, shared: bool, slow: float, more: float
) -> None:
    cluster = cluster_of(2, 4, shared=shared)
    slower, faster = (find(on(Change(bandwidth=f).of(cluster, 4), net)).price.seconds for f in (slow, slow * more))
    assert faster <= slower * ROUNDING


@pytest.mark.parametrize("levels", [(4,), (2, 4)])
def test_a_device_more_makes_no_step_longer(levels: tuple[int, ...]) -> None:
    """3 samples go evenly over 3 ranks, not over 4."""
    cluster = cluster_of(*levels, shared=True)
    steps = [
        find_on_some(lambda ranks: on(cluster.first(ranks), "lenet5", 3), most).price.seconds for most in (1, 2, 3, 4)
    ]
    assert all(more <= fewer * ROUNDING for fewer, more in pairwise(steps)), steps


def test_numbers_of_ranks_that_are_tried_are_tried_with_more_devices_too() -> None:
    for most in range(1, 200):
        assert set(numbers_of_ranks(most)) <= set(numbers_of_ranks(most + 1))
    assert numbers_of_ranks(64)[:3] == [64, 60, 54]


def test_a_number_of_ranks_that_is_left_out_could_not_have_been_better() -> None:
    cluster = cluster_of(2, 4, shared=True)
    best = min(find(on(cluster.first(ranks), "residual")).price.seconds for ranks in range(1, 5))
    found = find_on_some(lambda ranks: on(cluster.first(ranks), "residual"), 4)
    assert found.price.seconds == best
    assert (found.offered, found.plan.ranks) == (4, found.price.ranks)


def test_a_small_network_is_planned_for_fewer_devices_than_there_are() -> None:
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    free = find_plan(small, (16, 8), cluster="ethernet-1g")
    assert free.offered == Cluster.load("ethernet-1g").ranks > free.plan.ranks
    with_all = find_plan(small, (16, 8), cluster="ethernet-1g", ranks=free.offered)
    assert with_all.offered is None
    assert free.price.seconds <= with_all.price.seconds


def test_pins_keep_as_many_ranks_as_they_need_and_what_fits_nowhere_is_refused() -> None:
    cluster = cluster_of(4)
    pinned = find_on_some(lambda ranks: on(cluster.first(ranks), "lenet5"), 4, pins={"*conv*": Cut.parse("n3")})
    assert pinned.plan.ranks >= 3
    with pytest.raises(PlanError, match="no plan on 4 ranks"):
        find_on_some(lambda ranks: on(cluster.first(ranks), "lenet5"), 4, memory=1)
