"""Which gradients come from factors: the choice, its price, and what a plan file says of it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.cluster import Cluster, Level
from shoal.errors import PlanError
from shoal.execution.laying import capture_modes, lay
from shoal.finding.auto import cost_model
from shoal.lowering.factors import factorable
from shoal.lowering.step_traffic import step_traffic
from shoal.lowering.tasks import Gathered
from shoal.plan import FactorsOption, Plan
from shoal.planning.costs import CostModel
from shoal.planning.price import price, tasks_of
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.profiling.in_step import Noted, taken
from shoal.profiling.measured import Analytic
from shoal.simulating.durations import Durations
from shoal.transport.memory import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(sizes: list[int], batch: int, ranks: int, bandwidth: float, factors: FactorsOption = "auto") -> CostModel:
    layers = [nn.Linear(a, b, device="meta") for a, b in pairwise(sizes)]
    captured = capture_modes(nn.Sequential(*layers), (batch, sizes[0]))
    level = Level.model_validate(
        {"name": "switch", "size": ranks, "bandwidth": f"{bandwidth}Gbit/s", "latency": "30us", "source": "made up"}
    )
    cluster = Cluster(name="hosts", device=Cluster.load("titan-4").device, levels=(level,))
    return cost_model(captured, Analytic(cluster), ranks, factors=factors)


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([64, 700, 2048]), min_size=2, max_size=4),
    each=st.sampled_from([1, 16, 400]),
    ranks=st.sampled_from([2, 4, 8]),
    bandwidth=st.sampled_from([0.1, 1.0, 100.0]),
)
def test_the_choice_is_the_cheaper_of_both_by_arithmetic(
    sizes: list[int], each: int, ranks: int, bandwidth: float
) -> None:
    model = model_of(sizes, each * ranks, ranks, bandwidth)
    tasks = tasks_of(model, resolve("data", model.graph, ranks).cuts)
    chosen = {task.states[0] for task in tasks.tasks if isinstance(task.work, Gathered)}
    per_byte, cluster = 8e-9 / bandwidth, model.speeds.cluster
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        size = inputs * outputs * 4
        summed = 2 * (ranks - 1) / ranks * size * per_byte
        gathered = cluster.levels[0].latency + (ranks - 1) * each * (inputs + outputs) * 4 * per_byte
        name = f"{number}.weight"
        product = model.ways(factorable(tasks.program, tasks.program.states)[name])
        if size < 1 << 20:
            assert name not in chosen
        else:
            assert product is not None
            assert product.gathered == pytest.approx(gathered)
            assert summed <= product.summed <= summed + 1e-3
            assert (name in chosen) == (gathered + product.product < product.summed)


def traffic_of_all(model: CostModel, cuts: Any) -> int:
    tasks = tasks_of(model, cuts)
    program, graph = tasks.program, tasks.program.graph
    found = factorable(program, program.states)
    sent = [
        step_traffic(
            program,
            rank,
            trainable=tasks.trainable,
            homes=program.states,
            itemsize=tasks.options.itemsize,
            dtypes={name: spec.dtype for name, spec in graph.states.items()},
            bucket_bytes=model.bucket_bytes,
            factors={weight: own for weight, own in found.items() if weight in tasks.options.factors},
        )
        for rank in range(model.ranks)
    ]
    return sum(one.bytes for by_label in sent for one in by_label.values())


def test_a_step_with_factors_says_nothing_of_that_layers_own_backward() -> None:
    """What is noted there is a product over the rows of all ranks, which is no tile's."""
    seen = Noted({(which, name): 1.0 for which in ("forward", "backward") for name in "01"}, 0.0, 0.0)
    backward = {}
    for factors in (("0",), "never"):
        model = model_of([64, 32, 16], 8, 2, 1.0, factors)
        tasks = tasks_of(model, resolve("data", model.graph, 2).cuts)
        found = taken(Durations(tasks, model.speeds), "float32", [seen, seen])
        backward[factors] = [piece.tile for one in found for piece in one.pieces if piece.kind.endswith("backward")]
    assert len(backward["never"]) == 2
    assert backward["0",] == backward["never"][1:]


@pytest.mark.parametrize("plan", ["data", "2x2", "model"])
def test_a_price_knows_factors(plan: str) -> None:
    """On a slow link fewer bytes are less time, whatever is hidden; what is chosen is in the plan that is found."""
    prices = {}
    for factors in ("auto", "always", "never"):
        model = model_of([2048, 2048, 1024, 10], 40, 4, 0.1, factors)
        cuts = resolve(plan, model.graph, 4).cuts
        prices[factors] = price(model, cuts, plan)
        assert prices[factors].bytes == traffic_of_all(model, cuts)
        (index,) = [number for number, stage in enumerate(stages_of(model.graph, 4)) if stage.ops[0].layer.name == "0"]
        stage = stages_of(model.graph, 4)[index]
        choice = stage.choices.index((cuts["0"],))
        cost = model.tables([stage]).costs[0]
        tasks = tasks_of(model, cuts)
        gathers = [task for task in tasks.tasks if isinstance(task.work, Gathered) and task.states == ("0.weight",)]
        both = model.ways(factorable(tasks.program, tasks.program.states)["0.weight"]) if gathers else None
        if both is not None:
            assert cost.gradients[choice] >= both.gathered
            assert cost.gradients[choice] < both.summed
    if plan == "model":  # no weight is on two ranks
        assert prices["always"].factors == ()
        assert prices["always"].seconds == prices["never"].seconds
        return
    assert prices["auto"].factors == ("0", "1")
    assert prices["always"].factors == ("0", "1", "2")
    assert prices["never"].factors == ()
    assert prices["auto"].bytes < prices["never"].bytes
    assert prices["auto"].seconds < prices["never"].seconds
    assert prices["auto"].plan("mine").factors == ("0", "1")


def test_a_plan_file_says_which(tmp_path: Path) -> None:
    torch.manual_seed(0)
    captured = capture_modes(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (4, 6))

    def laid(plan: str | Plan, factors: FactorsOption = "auto") -> Plan:
        return run_ranks(2, lambda transport: lay(captured, plan, transport, seed=0, factors=factors).plan)[0]

    named = laid("data", ("2",))
    assert named.factors == ("2",)
    named.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == named
    assert laid(named) == named
    assert laid(named, "always").factors == ("0", "2")
    assert laid(named, "never").factors == ()
    assert laid("data").factors == ()  # too small to be worth it
    for wrong, word in (("3", "matches no layer"), ("1", "is no linear layer")):
        with pytest.raises(PlanError, match=word):
            laid("data", (wrong,))
