"""Recomputing as a choice of the search under a limit of memory, beside every combination, and in a plan's forms."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.execution.laying import lay
from shoal.finding import cache as remembered
from shoal.finding.auto import newcomers, racers
from shoal.plan import Plan, data_parallel, planned_recompute
from shoal.planning.find import SearchResult, complete, find
from shoal.planning.price import Price, price
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.traffic import total
from shoal.transport import Transport
from shoal.transport.memory import run_ranks
from tests.unit.test_costs import captured, model_of

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["chain", "bypass"]
NEAR = 1.02
"""A plan is not explored that is quicker than a lighter one by less than this."""


@cache
def every_plan(net: str) -> tuple[Price, ...]:
    """All cuts of all stages by sample and channel on two ranks, each with and without recomputing."""
    model = model_of(net, 2)
    stages = stages_of(model.graph, 2, letters="nc")
    found = []
    for choice in product(*(range(len(stage.choices)) for stage in stages)):
        chosen = zip(stages, choice, strict=True)
        cuts = {name: cut for stage, number in chosen for name, cut in stage.cuts(number).items()}
        for recompute in (False, True):
            try:
                found.append(price(model, complete(cuts, model.graph), "one of all", recompute=recompute))
            except PlanError:  # layers that share a parameter
                continue
    return tuple(found)


@cache
def found_under(net: str, limit: int) -> SearchResult | None:
    try:
        return find(model_of(net, 2), memory=limit, letters="nc")
    except PlanError:
        return None


def least(net: str, limit: int) -> float:
    return min((one.seconds for one in every_plan(net) if one.peak <= limit), default=float("inf"))


@pytest.mark.parametrize("net", SMALL)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(place=st.floats(0, 1))
def test_the_search_finds_what_is_best_of_every_combination(net: str, place: float) -> None:
    peaks = sorted({one.peak for one in every_plan(net)})
    limit = peaks[round(place * (len(peaks) - 1))]
    found = found_under(net, limit)
    assert found is not None, "a plan with exactly this peak is there"
    assert found.price.peak <= limit
    fixed = min((one.seconds for one in found.fixed if one.peak <= limit), default=float("inf"))
    assert found.price.seconds <= NEAR * least(net, limit)
    assert found.price.seconds >= min(fixed, least(net, limit)) * (1 - 1e-12)


@pytest.mark.parametrize("net", SMALL)
def test_below_the_smallest_of_every_combination_all_is_refused_with_that_size(net: str) -> None:
    smallest = min(one.peak for one in every_plan(net))
    model = model_of(net, 2)
    with pytest.raises(PlanError, match=rf"smallest found needs {smallest:,}.*Give more memory or more ranks\."):
        find(model, memory=smallest - 1, letters="nc")
    assert find(model, memory=smallest, letters="nc").price.peak == smallest


@pytest.mark.parametrize("net", SMALL)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(places=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_larger_limit_never_gives_a_slower_plan(net: str, places: tuple[float, float]) -> None:
    peaks = sorted({one.peak for one in every_plan(net)})
    span = 1.2 * (peaks[-1] - peaks[0])
    tight, loose = (found_under(net, peaks[0] + int(span * place)) for place in sorted(places))
    assert tight is not None
    assert loose is not None
    assert loose.price.seconds <= tight.price.seconds


def test_only_a_limit_makes_a_plan_recompute_and_only_where_it_is_the_quickest_way() -> None:
    net, model = "unet", model_of("unet", 2)
    free = find(model)
    assert not free.plan.recompute
    assert not any(one.recompute for one in (*free.candidates, *free.fixed))
    assert find(model, memory=free.price.peak) == free or not find(model, memory=free.price.peak).plan.recompute
    tight = find(model, memory=smallest_peak(net))
    assert tight.plan.recompute
    assert tight.without is not None
    assert tight.price.peak < tight.without.peak
    plain = find(replace(model, recompute=False), memory=free.price.peak)
    assert plain.price.seconds == free.price.seconds
    with pytest.raises(PlanError, match="or recompute"):
        find(replace(model, recompute=False), memory=tight.price.peak)


def smallest_peak(net: str) -> int:
    """What the refusal of an impossible limit names."""
    with pytest.raises(PlanError, match="and recomputes") as refused:
        find(model_of(net, 2), memory=1)
    (size,) = re.findall(r"smallest found needs ([\d,]+)", str(refused.value))
    return int(size.replace(",", ""))


def test_who_asks_for_recomputing_gets_times_and_memory_of_that() -> None:
    model = replace(model_of("residual", 2), recompute=True)
    found = find(model)
    assert found.plan.recompute
    assert all(one.recompute for one in (*found.candidates, *found.fixed))
    assert found.without is None, "nobody chose"
    plain = price(model, found.price.cuts, "kept", recompute=False)
    assert plain.seconds < found.price.seconds
    assert price(model, found.price.cuts, "again").seconds == pytest.approx(found.price.seconds)


def test_a_race_runs_plans_as_they_train_and_tells_both_ways_of_the_same_cuts_apart() -> None:
    limit = smallest_peak("unet")
    found = find(model_of("unet", 2), memory=limit)
    entrants = racers(found, limit)
    assert any(plan.recompute for plan in entrants.values())
    plain = {name: replace(plan, recompute=False) for name, plan in entrants.items()}
    assert newcomers(found, entrants, limit) == {}
    assert all(plan.recompute for plan in newcomers(found, plain, limit).values())
    assert newcomers(found, plain, limit)


# The plan file, and a network that is laid from it


def test_a_plan_that_recomputes_says_so_in_its_file_and_an_older_file_means_no(tmp_path: Path) -> None:
    plan = replace(data_parallel(2), recompute=True)
    plan.save(tmp_path / "again.json")
    assert Plan.load(tmp_path / "again.json") == plan
    assert json.loads(plan.to_json())["recompute"] is True
    assert "recompute" not in json.loads(data_parallel(2).to_json()), "as earlier versions wrote it"
    data_parallel(2).save(tmp_path / "older.json")
    assert not Plan.load(tmp_path / "older.json").recompute
    (tmp_path / "wrong.json").write_text(plan.to_json().replace("true", '"yes"'))
    with pytest.raises(PlanError, match="does not have the fields of a plan"):
        Plan.load(tmp_path / "wrong.json")
    assert plan.in_words() == "every layer by sample (n2); activations are recomputed"


@pytest.mark.parametrize("planned", [False, True])
def test_a_setting_wins_over_the_plan_and_none_leaves_it_to_that(planned: bool) -> None:
    plan = replace(data_parallel(2), recompute=planned)
    assert [planned_recompute(plan, wanted) for wanted in (None, False, True)] == [planned, False, True]
    assert not planned_recompute("data")


@pytest.mark.parametrize("wanted", [None, False, True])
def test_a_network_is_laid_as_its_plan_says_unless_told_otherwise(
    wanted: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    whole = captured("residual")
    cuts = resolve("spatial", whole.graphs[True], 2).cuts
    plan = Plan(name="mine", ranks=2, layers=tuple(cuts.items()), recompute=True)

    def laid(plan: Plan, wanted: bool | None) -> tuple[bool, int]:
        def on_rank(transport: Transport) -> tuple[bool, int]:
            model = lay(whole, plan, transport, io="whole", recompute=wanted)
            return model.plan.recompute, total(model.predicted()).bytes

        first, _ = run_ranks(2, on_rank)
        return first

    with caplog.at_level("WARNING", logger="shoal"):
        recomputes, sent = laid(plan, wanted)
    assert recomputes == (wanted is not False)
    assert ("it is laid without that" in caplog.text) == (wanted is False)
    plain, sent_once = laid(replace(plan, recompute=False), None)
    assert not plain
    assert (sent > sent_once) == recomputes, "halos travel a second time"


def test_a_remembered_winner_recomputes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    plan = replace(data_parallel(2), recompute=True)
    remembered.save_choice("key", plan, {"race": {}})
    found = remembered.load_choice("key")
    assert found is not None
    assert found[0] == plan
