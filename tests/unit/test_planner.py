"""What the planner once got wrong, and must not again."""

from dataclasses import replace

import pytest
from torch import nn

from shoal.cluster import Cluster
from shoal.errors import PlanError
from shoal.finding.auto import cost_model, find_plan
from shoal.partition import Cut
from shoal.planning.costs import CostModel
from shoal.planning.find import CLOSE_CALLS, complete, find
from shoal.planning.price import price
from shoal.planning.stages import stages_of
from shoal.planning.why import close_calls, explained
from tests.unit.test_costs import Simple, captured
from tests.unit.test_transfers import cluster_of

pytestmark = pytest.mark.usefixtures("one_thread")


def on(cluster: Cluster, net: str = "lenet5") -> CostModel:
    return cost_model(captured(net), Simple(cluster), cluster.ranks)


def test_of_many_groups_only_those_of_one_host_share_its_card() -> None:
    """16 groups of 4 ranks on hosts of 4: each host has a member of 4 of them, not of 16."""
    model = on(cluster_of(4, 64, shared=True))
    assert model.grouping(Cut.parse("n4c16"), "n").sharing == (1, 4)
    assert model.grouping(Cut.parse("c16n4"), "n").sharing == (1, 1)


def test_groups_that_share_a_card_take_longer_in_the_tables() -> None:
    apart, together = (on(cluster_of(2, 4, shared=shared)) for shared in (False, True))
    cut = Cut.parse("n2c2")  # both groups of equal shards reach from one host to the other
    size = float(64 << 20)
    alone, shared = (model.gradient_sum(size, model.grouping(cut, "n")) for model in (apart, together))
    assert shared == pytest.approx(2 * alone, rel=1e-2)


def test_small_gradients_share_the_latency_of_their_bucket() -> None:
    model = on(cluster_of(4))
    group = model.grouping(Cut.parse("n4"), "n")
    bucket = model.gradient_sum(float(model.bucket_bytes), group)
    assert 64 * model.gradient_sum(model.bucket_bytes / 64, group) == pytest.approx(bucket)


@pytest.mark.parametrize("levels", [(4,), (2, 4)])
@pytest.mark.parametrize("net", ["lenet5", "residual", "inception"])
def test_no_plan_is_below_the_lower_bound(net: str, levels: tuple[int, ...]) -> None:
    found = find(on(cluster_of(*levels, shared=True), net))
    assert 0 < found.bound <= min(one.seconds for one in (*found.candidates, *found.fixed))


def test_a_device_has_no_more_memory_than_it_has() -> None:
    model = nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 2000))
    titan = Cluster.load("titan-4").first(2)
    free = find_plan(model, (8, 2000), cluster=titan)
    small = titan.model_copy(update={"device": titan.device.model_copy(update={"memory": free.price.peak - 1})})
    assert find_plan(model, (8, 2000), cluster=small).price.peak < free.price.peak
    tiny = titan.model_copy(update={"device": titan.device.model_copy(update={"memory": 1 << 20})})
    with pytest.raises(PlanError, match="needs at most 1,048,576 bytes"):
        find_plan(model, (8, 2000), cluster=tiny)


def test_an_optimizers_state_counts_and_can_be_cut_to_fit() -> None:
    """Of Adam, on devices too small for whole states: the search keeps to the limit by cutting them."""
    model = nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 2000))
    two = Cluster.load("titan-4").first(2)
    pins = {"*": "n2"}  # the plan `data`, so that no cut of a layer makes room in the place of a cut of the state
    sgd, adam = (find_plan(model, (8, 2000), cluster=two, pins=pins, optimizer_slots=slots) for slots in (1, 2))
    slot = 2 * (2000 * 2000 + 2000) * 4
    assert adam.price.peak - sgd.price.peak == slot
    cut = find_plan(model, (8, 2000), cluster=two, pins=pins, optimizer_slots=2, optimizer_state="cut")
    assert adam.price.peak - cut.price.peak == 2 * 2000 * 2000 * 4  # half of both moments; biases are too small to cut
    small = two.model_copy(update={"device": two.device.model_copy(update={"memory": cut.price.peak})})
    find_plan(model, (8, 2000), cluster=small, pins=pins, optimizer_slots=2, optimizer_state="cut")
    with pytest.raises(PlanError, match="needs at most"):
        find_plan(model, (8, 2000), cluster=small, pins=pins, optimizer_slots=2)


@pytest.mark.parametrize("net", ["lenet5", "residual"])
def test_a_limit_that_a_plan_was_found_for_can_be_met_again(net: str) -> None:
    """Down to the lightest plan of all: what a looser limit found, the limit of exactly that finds too."""
    model = on(cluster_of(4), net)
    limit = find(model).price.peak
    for _ in range(4):
        found = find(model, memory=limit)
        assert found.price.peak <= limit
        lightest = min(one.peak for one in (*found.candidates, *found.fixed))
        limit = min(found.price.peak, (found.price.peak + lightest) // 2)
        if lightest <= limit:
            assert find(model, memory=lightest).price.peak <= lightest


def test_a_thirteenth_device_makes_no_step_longer() -> None:
    cluster = cluster_of(16)
    graph = captured("lenet5").graphs[True].at_batch(48)
    steps = []
    for ranks in (12, 13):
        whole = cost_model(captured("lenet5"), Simple(cluster.first(ranks)), ranks)
        steps.append(find(replace(whole, graph=graph), letters="nc").price.seconds)
    assert steps[1] <= steps[0] * (1 + 1e-9)


@pytest.mark.parametrize("net", ["residual", "lenet5"])
def test_every_stage_of_a_plan_on_hosts_is_explained(net: str) -> None:
    model = on(cluster_of(2, 4, shared=True), net)
    stages = stages_of(model.graph, 4, per_host=2)
    turned = {
        stage.name: number
        for stage in stages
        for number, (cut, *_) in enumerate(stage.choices)
        if len(cut.degrees) > 1 and cut.degrees[-1][0] == "n"
    }
    assert turned, "cuts with their letters in the other order"
    cuts = {name: cut for stage in stages for name, cut in stage.cuts(turned.get(stage.name, 0)).items()}
    why = explained(model, complete(cuts, model.graph))
    assert [name for name, found in why.items() if found is None] == [s.name for s in stages if len(s.choices) < 2]


def test_close_calls_are_decided_by_the_played_time() -> None:
    model = on(cluster_of(2, 4, shared=True), "inception")
    found = find(model)
    tables = model.tables(stages_of(model.graph, 4, per_host=model.per_host))
    choice, foreign = tables.choice_of(found.price.cuts)
    assert not foreign
    calls = sorted(close_calls(tables, choice, 0.0), key=lambda call: call[2])[:CLOSE_CALLS]
    assert calls
    for stage, other, _ in calls:
        changed = [*choice[:stage], other, *choice[stage + 1 :]]
        cuts = complete(tables.cuts(changed), model.graph)
        assert price(model, cuts, "other").seconds >= found.price.seconds * 0.98
